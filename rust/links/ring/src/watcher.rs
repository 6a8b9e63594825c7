//! The thread that learns when the other side has died or doesn't run.
//!
//! It sleeps in `poll`. A peer's socket hangs up when it says goodbye or ends, its pidfd becomes
//! readable when it ends while a forked child still holds the socket. Once in a while it says that
//! this process runs, and looks when each peer last said so.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::link::{Link, MAX_BEAT_INTERVAL_MS, Now, lock, noted_forks};

/// Where new links come from while the watcher runs.
pub(crate) trait Door: Send {
    /// What becomes readable when there is something to answer.
    fn knocks(&self) -> impl Iterator<Item = BorrowedFd<'_>>;
    /// Answers what there is to answer, without waiting for anybody, at least once in each interval;
    /// links may come through the mailbox later.
    fn answer(&mut self, mailbox: &Arc<Mailbox>);
}

/// The door of those that have none.
pub(crate) struct NoDoor;

impl Door for NoDoor {
    fn knocks(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::empty()
    }

    fn answer(&mut self, _: &Arc<Mailbox>) {}
}

/// How other threads tell the watcher something.
#[derive(Debug)]
pub(crate) struct Mailbox {
    /// Readable when there is something in the mailbox.
    nudge: OwnedFd,
    /// None once nobody watches any more.
    links: Mutex<Option<Vec<Arc<Link>>>>,
    stop: AtomicBool,
}

impl Mailbox {
    fn new() -> std::io::Result<Self> {
        let nudge = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let links = Mutex::new(Some(Vec::new()));
        Ok(Self { nudge, links, stop: AtomicBool::new(false) })
    }

    /// Has a link watched from now on.
    pub(crate) fn deliver(&self, link: Arc<Link>) {
        match lock(&self.links).as_mut() {
            Some(links) => links.push(link),
            None => link.hang_up(),
        }
        self.nudge();
    }

    fn nudge(&self) {
        // Fails only if the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.nudge, &1u64.to_ne_bytes());
    }

    fn empty(&self) -> Vec<Arc<Link>> {
        let _ = rustix::io::read(&self.nudge, &mut [0; 8]);
        let mut links = lock(&self.links);
        links.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Hangs up on what is in the mailbox, and on what comes later.
    fn refuse(&self) {
        let links = lock(&self.links).take();
        links.into_iter().flatten().for_each(|link| link.hang_up());
    }
}

struct Watched {
    link: Arc<Link>,
    since_ms: u64,
}

/// A running watcher thread. It ends with [`Watcher::stop`].
#[derive(Debug)]
pub(crate) struct Watcher {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
    /// The forks that had been noted when the thread started: a forked child has this value but not
    /// the thread.
    forks: u64,
}

/// Milliseconds of the clock that all processes of a host share.
pub(crate) fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

impl Watcher {
    /// Watches `links`, and those that come through `door`.
    ///
    /// # Errors
    /// If the system has no more descriptors or threads.
    pub(crate) fn start(
        links: Vec<Arc<Link>>,
        door: impl Door + 'static,
        stuck_after: Duration,
    ) -> std::io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new()?);
        let since_ms = now_ms();
        let watched = links.into_iter().map(|link| Watched { link, since_ms }).collect();
        let round = Round { mailbox: Arc::clone(&mailbox), watched, door, stuck_after };
        let thread = std::thread::Builder::new()
            .name("sparksched-watch".to_owned())
            .spawn(move || round.watch())?;
        Ok(Self { mailbox, thread: Some(thread), forks: noted_forks() })
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.forks != noted_forks() {
            // The thread is the parent's; waiting for it here would never end.
            std::mem::forget(thread);
            return;
        }
        // Ordered by the system calls on the eventfd.
        self.mailbox.stop.store(true, Relaxed);
        self.mailbox.nudge();
        // It catches its panics.
        let _ = thread.join();
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Round<D> {
    mailbox: Arc<Mailbox>,
    watched: Vec<Watched>,
    door: D,
    stuck_after: Duration,
}

impl<D: Door> Round<D> {
    /// Watches until it is stopped. After a panic, which is a bug, nobody would learn of a death
    /// any more: then the links end at once, and what is in flight on them fails.
    fn watch(mut self) {
        let watched = catch_unwind(AssertUnwindSafe(|| self.repeat()));
        if watched.is_err() {
            self.mailbox.refuse();
            self.watched.iter().for_each(|it| it.link.hang_up());
        }
    }

    fn repeat(&mut self) {
        let interval = Duration::from_millis(MAX_BEAT_INTERVAL_MS).min(self.stuck_after / 4);
        let mut last_round_ms = now_ms();
        loop {
            let gone = self.wait(interval);
            crate::points::reach(crate::points::WATCHING);
            let new_links = self.mailbox.empty();
            if self.mailbox.stop.load(Relaxed) {
                return;
            }
            let now_ms = now_ms();
            // If this process itself didn't run, the others' silence means nothing yet.
            let was_late = Duration::from_millis(now_ms - last_round_ms) > 2 * interval;
            last_round_ms = now_ms;
            for index in gone.into_iter().rev() {
                self.watched.swap_remove(index).link.note_gone();
            }
            let since_ms = now_ms;
            self.watched.extend(new_links.into_iter().map(|link| Watched { link, since_ms }));
            self.door.answer(&self.mailbox);
            for watched in &mut self.watched {
                if was_late {
                    watched.since_ms = now_ms;
                }
                let stuck_after_ms = self.stuck_after.as_millis() as u64;
                let now = Now { ms: now_ms, interval_ms: interval.as_millis() as u64 };
                watched.link.beat(now, watched.since_ms, stuck_after_ms);
            }
        }
    }

    /// Sleeps until something happens; returns the links whose peers are gone, in ascending order.
    fn wait(&self, interval: Duration) -> Vec<usize> {
        let mut fds = vec![PollFd::new(&self.mailbox.nudge, PollFlags::IN)];
        let mut owners = Vec::new();
        for (index, watched) in self.watched.iter().enumerate() {
            let peer = watched.link.peer();
            fds.push(PollFd::from_borrowed_fd(peer.socket.as_fd(), PollFlags::RDHUP));
            owners.push(index);
            if let Some(pidfd) = &peer.pidfd {
                fds.push(PollFd::new(pidfd, PollFlags::IN));
                owners.push(index);
            }
        }
        fds.extend(self.door.knocks().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        match poll(&mut fds, Timespec::try_from(interval).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // The system lacks memory at this moment: nothing is known, which the next round mends.
            Err(_) => {
                std::thread::sleep(interval);
                return Vec::new();
            }
        }
        let mut gone: Vec<usize> = owners
            .iter()
            .zip(&fds[1..])
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|(index, _)| *index)
            .collect();
        gone.dedup();
        gone
    }
}
