//! What an engine holds: a door for its clients, and a link to each.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::bell::Bell;
use crate::handshake::{self, Descriptors, HandshakeError};
use crate::link::{Event, Link, sleep_on_futex};
use crate::segment::{BellPage, MAX_RING_BYTES, MIN_RING_BYTES, Segment, Side};
use crate::watcher::{Door, Watcher};

/// How an engine talks to its clients.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// How many clients there will be; their indices are below this.
    pub num_clients: u32,
    /// Bytes of each ring, of which a client has two: a power of two.
    pub ring_bytes: usize,
    /// An outgoing message is refused while this much waits for its client already.
    pub max_backlog_bytes: usize,
    /// A client that doesn't run for this long is reported.
    pub stuck_after: Duration,
    /// The version of sparksched; clients must have the same.
    pub version: String,
}

/// What happened to an engine's links.
#[derive(Debug)]
pub enum EngineEvent {
    /// A client has come.
    Attached {
        /// Its index.
        client: u32,
        /// Its process.
        pid: i32,
    },
    /// Something came that was not let in.
    Refused(String),
    /// Something happened on a client's link.
    Link {
        /// The client's index.
        client: u32,
        /// What happened.
        event: Event,
    },
}

/// What the watcher thread and the engine's threads share.
#[derive(Debug)]
struct Shared {
    options: EngineOptions,
    bell: Arc<BellPage>,
    bell_fd: OwnedFd,
    /// By client index.
    links: Box<[OnceLock<Arc<Link>>]>,
    /// Arrivals that haven't been reported.
    arrivals: Mutex<Vec<EngineEvent>>,
    is_closed: AtomicBool,
}

impl Shared {
    fn report(&self, event: EngineEvent) {
        self.arrivals.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(event);
        self.wake();
    }

    fn wake(&self) {
        crate::link::wake_engine(self.bell.bell());
    }

    fn links(&self) -> impl Iterator<Item = (u32, &Arc<Link>)> {
        (0..).zip(self.links.iter()).filter_map(|(index, link)| Some((index, link.get()?)))
    }
}

/// Lets clients in.
struct EngineDoor {
    listener: OwnedFd,
    shared: Arc<Shared>,
}

impl EngineDoor {
    fn try_admit(&self) -> Result<Arc<Link>, HandshakeError> {
        let options = &self.shared.options;
        let (peer, hello) = handshake::accept(self.listener.as_fd(), &options.version)?;
        let Some(place) = self.shared.links.get(hello.client_index as usize) else {
            let reason = format!(
                "it serves {} clients, and none with index {}",
                options.num_clients, hello.client_index
            );
            handshake::refuse(&peer, &reason);
            return Err(HandshakeError::Refused(reason));
        };
        if place.get().is_some() {
            let reason = format!("client {} is here already", hello.client_index);
            handshake::refuse(&peer, &reason);
            return Err(HandshakeError::Refused(reason));
        }
        let (segment, segment_fd) = Segment::create(options.ring_bytes)?;
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
                HandshakeError::System { what: "an eventfd can't be made", source: error.into() }
            })?;
        let descriptors = Descriptors {
            segment: segment_fd.as_fd(),
            bell: self.shared.bell_fd.as_fd(),
            client_event: event.as_fd(),
        };
        handshake::welcome(&peer, options.ring_bytes, &descriptors)?;
        let pid = peer.pid;
        let bell = Arc::clone(&self.shared.bell);
        let link = Link::new(Side::Engine, segment, bell, event, peer, options.max_backlog_bytes);
        let link = Arc::clone(place.get_or_init(|| Arc::new(link)));
        self.shared.report(EngineEvent::Attached { client: hello.client_index, pid });
        crate::points::reach("attached");
        Ok(link)
    }
}

impl Door for EngineDoor {
    fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn admit(&mut self) -> Option<Arc<Link>> {
        match self.try_admit() {
            Ok(link) => Some(link),
            Err(error) => {
                self.shared.report(EngineEvent::Refused(error.to_string()));
                None
            }
        }
    }
}

/// An engine's end of the rings to all its clients.
#[derive(Debug)]
pub struct EngineRings {
    shared: Arc<Shared>,
    watcher: Mutex<Watcher>,
    name: String,
}

impl EngineRings {
    /// Listens for clients under a name that is new in the system.
    ///
    /// # Errors
    /// [`HandshakeError`] if the system has no shared memory, sockets or threads for it, which is
    /// found out here rather than when the first client comes.
    ///
    /// # Panics
    /// If `ring_bytes` is no power of two or out of range.
    pub fn listen(name: &str, options: EngineOptions) -> Result<Self, HandshakeError> {
        let ring_bytes = options.ring_bytes;
        assert!(
            ring_bytes.is_power_of_two() && (MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes),
            "rings of {ring_bytes} bytes"
        );
        // Made to see that it can be made, and dropped.
        drop(Segment::create(ring_bytes)?);
        let (bell, bell_fd) = BellPage::create()?;
        let listener = handshake::listen(name)?;
        let links = (0..options.num_clients).map(|_| OnceLock::new()).collect();
        let stuck_after = options.stuck_after;
        let shared = Arc::new(Shared {
            options,
            bell: Arc::new(bell),
            bell_fd,
            links,
            arrivals: Mutex::default(),
            is_closed: AtomicBool::new(false),
        });
        let door = EngineDoor { listener, shared: Arc::clone(&shared) };
        let watcher = Watcher::start(Vec::new(), Some(Box::new(door)), stuck_after)
            .map_err(|source| HandshakeError::System { what: "no thread to watch", source })?;
        Ok(Self { shared, watcher: Mutex::new(watcher), name: name.to_owned() })
    }

    /// The name under which clients find this engine.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The link to a client that has come.
    #[must_use]
    pub fn link(&self, client: u32) -> Option<&Arc<Link>> {
        self.shared.links.get(client as usize)?.get()
    }

    /// Waits until something happens or time is up, and returns all that has happened. Also sends
    /// what waits for a client that has made room. Empty if time is up or [`Self::close`] was called.
    pub fn receive(&self, timeout: Option<Duration>) -> Vec<EngineEvent> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let bell: &Bell = self.shared.bell.bell();
        loop {
            let events = self.collect();
            if !events.is_empty() {
                return events;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) || self.is_closed() {
                return events;
            }
            bell.fall_asleep();
            if !self.has_events() && !self.is_closed() {
                sleep_on_futex(bell, left);
            }
            bell.wake_up();
        }
    }

    /// Makes a thread that waits in [`Self::receive`] look again.
    pub fn wake(&self) {
        self.shared.wake();
    }

    /// Whether [`Self::close`] was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed.load(Relaxed)
    }

    /// Whether each client that there will be has come, and has gone.
    #[must_use]
    pub fn is_deserted(&self) -> bool {
        self.shared.links.iter().all(|link| link.get().is_some_and(|link| link.is_gone()))
    }

    fn collect(&self) -> Vec<EngineEvent> {
        /// Of each client in turn, so that none starves the others.
        const MAX_MESSAGES: usize = 64;
        let mut events = std::mem::take(
            &mut *self.shared.arrivals.lock().unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        for (client, link) in self.shared.links() {
            let received = link.receive(MAX_MESSAGES);
            events.extend(received.into_iter().map(|event| EngineEvent::Link { client, event }));
        }
        events
    }

    fn has_events(&self) -> bool {
        let arrivals = self.shared.arrivals.lock();
        !arrivals.unwrap_or_else(std::sync::PoisonError::into_inner).is_empty()
            || self.shared.links().any(|(_, link)| link.has_events())
    }

    /// Says goodbye to all clients, after what waits for them has been sent or `linger` is over.
    pub fn close(&self, linger: Duration) {
        let deadline = Instant::now() + linger;
        let is_waiting = |link: &Link| {
            !link.is_gone()
                && link.backlog_bytes() > 0
                && link.flush().is_ok()
                && link.backlog_bytes() > 0
        };
        while self.shared.links().any(|(_, link)| is_waiting(link)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.watcher.lock().unwrap_or_else(std::sync::PoisonError::into_inner).stop();
        for (_, link) in self.shared.links() {
            link.close();
        }
        // Ordered by the bell's fences: whoever falls asleep after this sees it.
        self.shared.is_closed.store(true, Relaxed);
        self.wake();
    }
}
