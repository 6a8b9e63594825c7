//! What an engine holds: a door for its clients, and a link to each.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use sparksched_backlog::Limits;
use sparksched_meters::{MeterPage, RingsReading};

use crate::bell::Bell;
use crate::handshake::{self, Descriptors, HandshakeError};
use crate::link::{End, Event, Link, Peer, WokenBy, lock, noted_forks, sleep_on_futex};
use crate::segment::{BellPage, MAX_RING_BYTES, MIN_RING_BYTES, Segment, Side};
use crate::watcher::Watcher;
use door::EngineDoor;

mod door;

/// How an engine talks to its clients.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// How many clients there will be; their indices are below this.
    pub num_clients: u32,
    /// Bytes of each ring, of which a client has two: a power of two.
    pub ring_bytes: usize,
    /// An outgoing message is refused while more than this waits for its client already.
    pub backlog: Limits,
    /// A client that doesn't run for this long is reported.
    pub stuck_after: Duration,
    /// The version of sparksched; clients must have the same.
    pub version: String,
}

/// What happened to an engine's links.
#[derive(Debug)]
pub enum EngineEvent {
    Attached {
        client: u32,
        pid: i32,
    },
    /// Something came that was not let in.
    Refused(String),
    Link {
        client: u32,
        event: Event,
    },
}

/// A client that is to come, or has come.
#[derive(Debug, Default)]
struct Place {
    /// Set by the first that claims to be this client, so that there is one; orders nothing.
    is_taken: AtomicBool,
    link: OnceLock<Arc<Link>>,
}

/// What the watcher thread and the engine's threads share.
#[derive(Debug)]
struct Shared {
    options: EngineOptions,
    bell: Arc<BellPage>,
    bell_fd: OwnedFd,
    /// By client index.
    places: Box<[Place]>,
    /// Arrivals that haven't been reported.
    arrivals: Mutex<Vec<EngineEvent>>,
    is_closed: AtomicBool,
    /// The next wait is over at once.
    is_interrupted: AtomicBool,
    /// Written by the thread that waits; counts, which order nothing.
    num_rescues: AtomicU64,
    num_lost: AtomicU64,
    /// Where to report what goes through the rings.
    meters: OnceLock<Arc<MeterPage>>,
}

impl Shared {
    fn report(&self, event: EngineEvent) {
        lock(&self.arrivals).push(event);
        self.wake();
    }

    fn refuse(&self, reason: &impl ToString) {
        self.report(EngineEvent::Refused(reason.to_string()));
    }

    fn wake(&self) {
        crate::link::wake_engine(self.bell.bell());
    }

    /// Reports what goes through the rings of all clients, and what did through those of former ones.
    fn report_traffic(&self) {
        let Some(page) = self.meters.get() else { return };
        let mut reading = RingsReading {
            num_rescues: self.num_rescues.load(Relaxed),
            num_lost: self.num_lost.load(Relaxed),
            ..RingsReading::default()
        };
        for (_, link) in self.links() {
            let (received, sent) = link.traffic();
            reading.to_engine.add(received);
            reading.to_client.add(sent);
        }
        page.meters().set_rings(reading);
    }

    fn links(&self) -> impl Iterator<Item = (u32, &Arc<Link>)> {
        (0..).zip(&self.places).filter_map(|(index, place)| Some((index, place.link.get()?)))
    }
}

/// Tells a client why it can't be served; the same as an error.
fn refused(peer: &Peer, reason: String) -> HandshakeError {
    handshake::refuse(peer, &reason);
    HandshakeError::Refused(reason)
}

/// What a link to a new client needs of the system.
struct Memory {
    segment: Segment,
    segment_fd: OwnedFd,
    /// What the client waits for.
    event: OwnedFd,
}

impl Shared {
    /// Hears which client a peer is, and keeps its place for it.
    fn claim(&self, peer: &Peer) -> Result<u32, HandshakeError> {
        let client = handshake::hear(peer, &self.options.version)?.client_index;
        let place = self.places.get(client as usize).ok_or_else(|| {
            let num_clients = self.options.num_clients;
            refused(peer, format!("it serves {num_clients} clients, and none with index {client}"))
        })?;
        if place.is_taken.swap(true, Relaxed) {
            return Err(refused(peer, format!("client {client} is here already")));
        }
        Ok(client)
    }

    /// Lets another have the place that was kept for a client.
    fn give_back(&self, client: u32) {
        self.places[client as usize].is_taken.store(false, Relaxed);
    }

    /// Gives a client its memory.
    fn admit(&self, peer: Peer, client: u32) -> Result<Arc<Link>, HandshakeError> {
        let link = self
            .make_memory()
            // It may lack here what was there when the engine started: the client is told.
            .map_err(|error| refused(&peer, error.to_string()))
            .and_then(|memory| self.share_memory(memory, peer))
            .and_then(|link| self.place(client, link))
            .inspect_err(|_| self.give_back(client))?;
        crate::points::reach("attached");
        Ok(link)
    }

    /// Uses a link from now on, unless the engine has closed meanwhile.
    fn place(&self, client: u32, link: Link) -> Result<Arc<Link>, HandshakeError> {
        let pid = link.peer().pid;
        let mut arrivals = lock(&self.arrivals);
        // Under the lock: whoever closes the links after this finds this one among them.
        if self.is_closed.load(Relaxed) {
            return Err(HandshakeError::Refused("it has closed".to_owned()));
        }
        let place = &self.places[client as usize];
        let link = Arc::clone(place.link.get_or_init(|| Arc::new(link)));
        arrivals.push(EngineEvent::Attached { client, pid });
        drop(arrivals);
        self.wake();
        Ok(link)
    }

    fn make_memory(&self) -> Result<Memory, HandshakeError> {
        let (segment, segment_fd) = Segment::create(self.options.ring_bytes)?;
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
                HandshakeError::System { what: "an eventfd can't be made", source: error.into() }
            })?;
        Ok(Memory { segment, segment_fd, event })
    }

    fn share_memory(&self, memory: Memory, peer: Peer) -> Result<Link, HandshakeError> {
        let EngineOptions { ring_bytes, backlog, .. } = self.options;
        let Memory { segment, segment_fd, event } = memory;
        let bell = Arc::clone(&self.bell);
        let link = Link::new(Side::Engine, segment, bell, event, peer, backlog);
        let descriptors = Descriptors {
            segment: segment_fd.as_fd(),
            bell: self.bell_fd.as_fd(),
            client_event: link.client_event(),
        };
        handshake::welcome(link.peer(), ring_bytes, &descriptors)?;
        handshake::admit(link.peer())?;
        Ok(link)
    }
}

/// An engine's end of the rings to all its clients.
#[derive(Debug)]
pub struct EngineRings {
    shared: Arc<Shared>,
    watcher: Mutex<Watcher>,
    name: String,
    /// The forks that had been noted when it was made.
    forks: u64,
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
        let places = (0..options.num_clients).map(|_| Place::default()).collect();
        let stuck_after = options.stuck_after;
        let shared = Arc::new(Shared {
            options,
            bell: Arc::new(bell),
            bell_fd,
            places,
            arrivals: Mutex::default(),
            is_closed: AtomicBool::new(false),
            is_interrupted: AtomicBool::new(false),
            num_rescues: AtomicU64::new(0),
            num_lost: AtomicU64::new(0),
            meters: OnceLock::new(),
        });
        let door = EngineDoor::new(listener, Arc::clone(&shared));
        let watcher = Watcher::start(Vec::new(), door, stuck_after)
            .map_err(|source| HandshakeError::System { what: "no thread to watch", source })?;
        Ok(Self {
            shared,
            watcher: Mutex::new(watcher),
            name: name.to_owned(),
            forks: noted_forks(),
        })
    }

    /// How often a wait without a time limit found something to receive that nobody had rung for
    /// within a second: a client was stopped or died before it could. Otherwise a wake-up was lost.
    pub fn num_rescues(&self) -> u64 {
        self.shared.num_rescues.load(Relaxed)
    }

    /// Reports what goes through the rings to this page from now on, about once a second. The first
    /// page that is given counts.
    pub fn report_to(&self, page: Arc<MeterPage>) {
        let _ = self.shared.meters.set(page);
        self.shared.report_traffic();
    }

    /// The name under which clients find this engine.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The link to a client that has come.
    pub fn link(&self, client: u32) -> Option<&Arc<Link>> {
        self.shared.places.get(client as usize)?.link.get()
    }

    /// Waits until something happens or time is up, and returns all that has happened. Also sends
    /// what waits for a client that has made room. Empty if time is up, if a signal or
    /// [`Self::interrupt`] ended the wait, or if [`Self::close`] was called.
    ///
    /// One thread at a time may wait here.
    pub fn receive(&self, timeout: Option<Duration>) -> Vec<EngineEvent> {
        /// A client that is stopped after it has said that it rings, and before it does, must not
        /// keep the messages of other clients from this engine for longer.
        const MAX_SLEEP: Duration = Duration::from_secs(1);
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let bell: &Bell = self.shared.bell.bell();
        loop {
            let events = self.collect();
            if !events.is_empty() {
                return events;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO)
                || self.is_closed()
                || self.shared.is_interrupted.swap(false, Relaxed)
            {
                return events;
            }
            bell.fall_asleep();
            let mut woken_by = WokenBy::Other;
            if !self.has_events() && !self.is_closed() && !self.is_interrupted() {
                let sleep = left.unwrap_or(MAX_SLEEP).min(MAX_SLEEP);
                woken_by = sleep_on_futex(bell, sleep);
                if woken_by == WokenBy::Time && sleep == MAX_SLEEP && self.has_events() {
                    self.shared.num_rescues.fetch_add(1, Relaxed);
                }
            }
            bell.wake_up();
            if woken_by == WokenBy::Signal {
                return events;
            }
        }
    }

    fn is_interrupted(&self) -> bool {
        self.shared.is_interrupted.load(Relaxed)
    }

    fn is_inherited(&self) -> bool {
        self.forks != noted_forks()
    }

    /// Ends the wait of a thread in [`Self::receive`], or else the next one.
    pub fn interrupt(&self) {
        // Seen by whoever wakes up or falls asleep after this, by the bell's fences.
        self.shared.is_interrupted.store(true, Relaxed);
        self.shared.wake();
    }

    pub fn is_closed(&self) -> bool {
        self.shared.is_closed.load(Relaxed)
    }

    /// Whether each client that there will be has come, and has gone.
    pub fn is_deserted(&self) -> bool {
        self.shared.places.iter().all(|place| place.link.get().is_some_and(|link| link.is_gone()))
    }

    fn collect(&self) -> Vec<EngineEvent> {
        /// Of each client in turn, so that none starves the others.
        const MAX_MESSAGES: usize = 64;
        let mut events = std::mem::take(&mut *lock(&self.shared.arrivals));
        for (client, link) in self.shared.links() {
            let received = link.receive(MAX_MESSAGES);
            if matches!(received.last(), Some(Event::End(end)) if *end != End::Closed) {
                self.shared.num_lost.fetch_add(1, Relaxed);
            }
            events.extend(received.into_iter().map(|event| EngineEvent::Link { client, event }));
        }
        events
    }

    fn has_events(&self) -> bool {
        !lock(&self.shared.arrivals).is_empty()
            || self.shared.links().any(|(_, link)| link.has_events())
    }

    /// Says goodbye to all clients, after what waits for them has been sent or `linger` is over.
    /// In a forked child this does nothing: the links are its parent's.
    pub fn close(&self, linger: Duration) {
        if self.is_inherited() {
            return;
        }
        {
            // Under the lock: no link comes after this that isn't closed below.
            let _arrivals = lock(&self.shared.arrivals);
            if self.shared.is_closed.swap(true, Relaxed) {
                return;
            }
        }
        let deadline = Instant::now() + linger;
        while self.shared.links().any(|(_, link)| link.is_still_sending())
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        lock(&self.watcher).stop();
        for (_, link) in self.shared.links() {
            link.close();
        }
        // Whoever falls asleep after this sees that it is closed, by the bell's fences.
        self.shared.wake();
    }
}

impl Drop for EngineRings {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}
