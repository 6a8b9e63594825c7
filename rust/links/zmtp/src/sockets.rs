//! All PUSH sockets of an engine, and the wait for what happens to them.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sparksched_backlog::Limits;

use crate::address::Address;
use crate::push::{Event, Nudge, Push, Wish};

/// PUSH sockets by client index, for those clients that listen on this host.
#[derive(Debug)]
pub struct PushSockets {
    sockets: Box<[Option<Push>]>,
    nudge: Arc<Nudge>,
    is_closed: AtomicBool,
}

impl PushSockets {
    /// Sockets to these addresses; they connect in [`Self::wait`].
    ///
    /// # Errors
    /// If the system has no more descriptors.
    pub fn new(addresses: Vec<String>, limits: Limits) -> std::io::Result<Self> {
        let nudge = Arc::new(Nudge::new()?);
        let socket =
            |text: String| Some(Push::new(Address::local(&text)?, limits, Arc::clone(&nudge)));
        Ok(Self {
            sockets: addresses.into_iter().map(socket).collect(),
            nudge: Arc::clone(&nudge),
            is_closed: AtomicBool::new(false),
        })
    }

    /// The socket to a client, if it is on this host.
    pub fn socket(&self, client: u32) -> Option<&Push> {
        self.sockets.get(client as usize)?.as_ref()
    }

    /// Whether there are clients on this host, and all of them have gone.
    pub fn is_deserted(&self) -> bool {
        self.sockets.iter().all(|socket| socket.as_ref().is_some_and(Push::is_gone))
    }

    /// Sends what waits, and waits itself until something happens. Empty after [`Self::close`].
    ///
    /// One thread at a time may wait here.
    pub fn wait(&self) -> Vec<(u32, Event)> {
        while !self.is_closed.load(Relaxed) {
            let sockets = (0..).zip(&self.sockets);
            let events: Vec<_> = sockets
                .filter_map(|(client, socket)| Some((client, socket.as_ref()?.go_on()?)))
                .collect();
            if !events.is_empty() {
                return events;
            }
            self.sleep();
        }
        Vec::new()
    }

    /// Closes all sockets, after what waits has been sent or `linger` is over. Somebody has to be
    /// waiting in [`Self::wait`] meanwhile.
    pub fn close(&self, linger: Duration) {
        let deadline = Instant::now() + linger;
        while self.sockets.iter().flatten().any(Push::is_still_sending) && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Ordered by the system calls on the eventfd.
        self.is_closed.store(true, Relaxed);
        self.sockets.iter().flatten().for_each(Push::close);
        self.nudge.wake();
    }

    /// Sleeps until a socket has something to do, something new waits, or a connection is to be
    /// tried again.
    fn sleep(&self) {
        let (mut held, mut retry_at) = (Vec::new(), None);
        for socket in self.sockets.iter().flatten() {
            match socket.wish() {
                Wish::Nothing => {}
                Wish::Time(time) => {
                    retry_at = Some(retry_at.map_or(time, |it: Instant| it.min(time)));
                }
                // Held, because it may be closed while this sleeps.
                Wish::Socket(socket, flags) => held.push((socket, flags)),
            }
        }
        let mut fds = vec![PollFd::new(&self.nudge.0, PollFlags::IN)];
        fds.extend(held.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd.as_fd(), *flags)));
        let left = retry_at.map(|time| time.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // The system lacks memory at this moment, which the next round mends.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
        let _ = rustix::io::read(&self.nudge.0, &mut [0; 8]);
    }
}
