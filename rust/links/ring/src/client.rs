//! What a client holds: a link to one engine.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sparksched_backlog::Limits;

use crate::handshake::{self, HandshakeError, Hello};
use crate::link::{Event, Link, lock};
use crate::segment::{BellPage, Segment, Side};
use crate::watcher::{NoDoor, Watcher};

/// How a client talks to an engine.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Which of the engine's clients this is.
    pub client_index: u32,
    /// An engine that doesn't run for this long is reported.
    pub stuck_after: Duration,
    /// The version of sparksched; the engine must have the same.
    pub version: String,
}

/// A client's end of the rings to one engine.
#[derive(Debug)]
pub struct ClientRings {
    link: Arc<Link>,
    watcher: Mutex<Watcher>,
    is_closed: AtomicBool,
}

impl ClientRings {
    /// Connects to the engine that listens under a name.
    ///
    /// # Errors
    /// [`HandshakeError`] if there is none, if it refuses, or if it is not one of ours.
    pub fn connect(name: &str, options: ClientOptions) -> Result<Self, HandshakeError> {
        let hello = Hello { client_index: options.client_index, version: options.version };
        let (peer, ring_bytes, descriptors) = handshake::connect(name, &hello)?;
        let ring_bytes = usize::try_from(ring_bytes).map_err(|_| HandshakeError::Gibberish)?;
        let segment = Segment::open(descriptors.segment.as_fd(), ring_bytes)?;
        let bell = Arc::new(BellPage::open(descriptors.bell.as_fd())?);
        let link = Arc::new(Link::new(
            Side::Client,
            segment,
            bell,
            descriptors.client_event,
            peer,
            // Whoever sends keeps what waits within bounds.
            Limits::fixed(usize::MAX),
        ));
        let watcher = Watcher::start(vec![Arc::clone(&link)], NoDoor, options.stuck_after)
            .map_err(|source| HandshakeError::System { what: "no thread to watch", source })?;
        // Last of all: whoever is admitted can't fail any more.
        handshake::confirm(link.peer())?;
        // The bell says "awake" until the first look: what has come before that rang for nobody.
        link.wake_self();
        crate::points::reach("attached");
        Ok(Self { link, watcher: Mutex::new(watcher), is_closed: AtomicBool::new(false) })
    }

    /// The link itself: sending is its business.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Becomes readable when there is something to receive, or room to send; an event loop waits
    /// for it and then calls [`Self::receive`].
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.link.client_event()
    }

    /// What has happened, until about `max_messages` messages are together. If that was all, the
    /// event descriptor becomes readable with the next event; if not, it is readable already.
    /// Also sends what waits, if there is room.
    pub fn receive(&self, max_messages: usize) -> Vec<Event> {
        /// A large message may keep coming for long: the caller's other work gets its turn, too.
        const MAX_ROUNDS: usize = 4;
        let mut count = [0; 8];
        // Empty unless a writer rang; then there is nothing to clear.
        let _ = rustix::io::read(self.event_fd(), &mut count);
        let bell = self.link.client_bell();
        let mut events = Vec::new();
        for _ in 0..MAX_ROUNDS {
            bell.wake_up();
            events.extend(self.link.receive(max_messages));
            bell.fall_asleep();
            if !self.link.has_events() {
                return events;
            }
            if events.len() >= max_messages {
                break;
            }
        }
        // The caller comes back to the rest.
        self.link.wake_self();
        events
    }

    /// Waits until the event descriptor is readable or time is up.
    pub fn wait(&self, timeout: Option<Duration>) {
        let event_fd = self.event_fd();
        let mut fds = [PollFd::from_borrowed_fd(event_fd, PollFlags::IN)];
        // One that is too long for the system is none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // An early return is the caller's loop to sort out.
        let _ = poll(&mut fds, timeout.as_ref());
    }

    /// Says goodbye, after what waits has been sent or `linger` is over. In a forked child this does
    /// nothing: the link is its parent's.
    pub fn close(&self, linger: Duration) {
        if self.link.is_inherited() || self.is_closed.swap(true, Relaxed) {
            return;
        }
        let deadline = Instant::now() + linger;
        while self.link.is_still_sending() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        lock(&self.watcher).stop();
        self.link.close();
        // For a thread of this process that waits.
        self.link.wake_self();
    }
}

impl Drop for ClientRings {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}
