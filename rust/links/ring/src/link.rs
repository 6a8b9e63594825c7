//! One end of the memory between an engine and a client.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::Shutdown;
use rustix::thread::futex;
use sparksched_backlog::Limits;
use sparksched_meters::Traffic;

use crate::bell::{Alarm, Bell};
use crate::message::{Message, Reader};
use crate::outbox::{Outbox, SendError, Ticket};
use crate::ring::{Consumer, Corrupt, Producer};
use crate::segment::{BellPage, Segment, Side};

/// Who is at the other end.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Closed by the kernel when the process ends, and shut down by a goodbye.
    pub(crate) socket: OwnedFd,
    /// Readable once the process has ended, even if a forked child still holds the socket.
    pub(crate) pidfd: Option<OwnedFd>,
    pub(crate) pid: i32,
}

/// The longest time between two beats.
pub(crate) const MAX_BEAT_INTERVAL_MS: u64 = 1000;

/// A moment at which a watcher says that its process runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) ms: u64,
    /// How long it may take until it says so again.
    pub(crate) interval_ms: u64,
}

/// How many times this process and its ancestors have forked, as far as they have said so.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Says that this process is a forked child: the links that it has inherited are its parent's, and
/// nothing it does reaches them. To be called in the child.
pub fn note_fork() {
    FORKS.fetch_add(1, Relaxed);
}

pub(crate) fn noted_forks() -> u64 {
    FORKS.load(Relaxed)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    #[error("it closed the connection")]
    Closed,
    #[error("its process died")]
    Died,
    #[error("what it sent is damaged: {0}")]
    Corrupt(Corrupt),
    #[error("this side hung up on it")]
    HungUp,
}

#[derive(Debug)]
pub enum Event {
    Message(Message),
    /// The other process hasn't run for this long.
    Stuck(Duration),
    /// The other process, which was stuck, runs again.
    Recovered,
    /// Nothing more will come. The last event of a link.
    End(End),
}

#[derive(Debug)]
struct Inbox {
    ring: Consumer,
    reader: Reader,
    ended: bool,
    /// The most bytes that were found in the ring.
    high_water_bytes: usize,
    /// How often the other side waited for room when some was made.
    num_without_room: u64,
}

/// Wakes a thread that sleeps in [`sleep_on_futex`].
struct FutexAlarm<'a>(&'a Bell);

impl Alarm for FutexAlarm<'_> {
    fn sound(&self) {
        // Can't fail on an address that is mapped.
        let _ = futex::wake(&self.0.0, futex::Flags::empty(), 1);
    }
}

/// Wakes an engine that sleeps on its bell, from within its own process.
pub(crate) fn wake_engine(bell: &Bell) {
    bell.ring_regardless(&FutexAlarm(bell));
}

struct EventAlarm<'a>(BorrowedFd<'a>);

impl Alarm for EventAlarm<'_> {
    fn sound(&self) {
        // Fails only if the counter is full, and then it is readable already.
        let _ = rustix::io::write(self.0, &1u64.to_ne_bytes());
    }
}

/// What ended a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WokenBy {
    /// This thread has handled a signal, and its caller may have something to do about that.
    Signal,
    /// The end of the time.
    Time,
    /// The bell, or nothing at all.
    Other,
}

/// Sleeps until the bell is rung or time is up. The bell must say "asleep".
pub(crate) fn sleep_on_futex(bell: &Bell, timeout: Duration) -> WokenBy {
    let timeout = futex::Timespec::try_from(timeout).ok();
    // Returns at once if the bell was rung meanwhile.
    match futex::wait(&bell.0, futex::Flags::empty(), crate::bell::ASLEEP, timeout.as_ref()) {
        Err(Errno::INTR) => WokenBy::Signal,
        Err(Errno::TIMEDOUT) => WokenBy::Time,
        _ => WokenBy::Other,
    }
}

/// One end of a pair of rings.
#[derive(Debug)]
pub struct Link {
    side: Side,
    segment: Segment,
    engine_bell: Arc<BellPage>,
    client_event: OwnedFd,
    peer: Peer,
    inbox: Mutex<Inbox>,
    outbox: Mutex<Outbox>,
    notices: Mutex<VecDeque<Event>>,
    /// The watcher has seen the other side's end.
    is_peer_gone: AtomicBool,
    /// A message was refused, and what follows must not overtake it. Under the outbox's lock.
    is_blocked: AtomicBool,
    /// This side has said goodbye. Under the outbox's lock.
    is_closed: AtomicBool,
    /// This side has hung up: nothing that comes is wanted.
    is_hung_up: AtomicBool,
    /// How long the other process hasn't run; 0 unless that is too long.
    stuck_ms: AtomicU64,
    /// `FORKS` of the process that it belongs to.
    forks: u64,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in this crate is a bug that leaves at worst a message half written, which the reader
    // detects.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// One side's end of a segment. Each side makes one in the life of a segment.
    pub(crate) fn new(
        side: Side,
        segment: Segment,
        engine_bell: Arc<BellPage>,
        client_event: OwnedFd,
        peer: Peer,
        backlog: Limits,
    ) -> Self {
        let (incoming, outgoing) = match side {
            Side::Engine => (segment.to_engine(), segment.to_client()),
            Side::Client => (segment.to_client(), segment.to_engine()),
        };
        Self {
            side,
            inbox: Mutex::new(Inbox {
                ring: Consumer::new(Arc::new(incoming)),
                reader: Reader::default(),
                ended: false,
                high_water_bytes: 0,
                num_without_room: 0,
            }),
            outbox: Mutex::new(Outbox::new(Producer::new(Arc::new(outgoing)), backlog)),
            segment,
            engine_bell,
            client_event,
            peer,
            notices: Mutex::default(),
            is_peer_gone: AtomicBool::new(false),
            is_blocked: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            is_hung_up: AtomicBool::new(false),
            stuck_ms: AtomicU64::new(0),
            forks: noted_forks(),
        }
    }

    /// Whether this process has inherited the link from the one that it belongs to.
    pub(crate) fn is_inherited(&self) -> bool {
        self.forks != noted_forks()
    }

    pub fn ring_bytes(&self) -> usize {
        self.segment.ring_bytes()
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// What becomes readable when the client should look.
    pub(crate) fn client_event(&self) -> BorrowedFd<'_> {
        self.client_event.as_fd()
    }

    pub(crate) fn client_bell(&self) -> &Bell {
        self.segment.client_bell()
    }

    /// Makes this side look at its links, even if the other side died while it rang the bell.
    pub(crate) fn wake_self(&self) {
        match self.side {
            Side::Engine => wake_engine(self.engine_bell.bell()),
            Side::Client => self.client_bell().ring_regardless(&EventAlarm(self.client_event())),
        }
    }

    fn wake_peer(&self) {
        match self.side {
            Side::Engine => self.client_bell().ring(&EventAlarm(self.client_event())),
            Side::Client => {
                let bell = self.engine_bell.bell();
                bell.ring(&FutexAlarm(bell));
            }
        }
    }

    // ------------------------------------------------------------------------------------
    // Receiving
    // ------------------------------------------------------------------------------------

    /// What has happened since the last call, at most `max_messages` messages of it. Also sends what
    /// waits, if the other side has made room.
    pub fn receive(&self, max_messages: usize) -> Vec<Event> {
        if self.is_inherited() {
            return Vec::new();
        }
        let mut inbox = lock(&self.inbox);
        if inbox.ended {
            return Vec::new();
        }
        if self.is_hung_up.load(Relaxed) {
            return vec![self.end(&mut inbox, End::HungUp)];
        }
        // Read before the ring: what the other side sent before its end is then seen below.
        let is_peer_gone = self.is_peer_gone.load(Acquire);
        let is_closed = inbox.ring.is_closed();
        let mut events: Vec<_> = lock(&self.notices).drain(..).collect();
        inbox.note_depth();
        let read = self.flush().and_then(|()| inbox.read(max_messages, &mut events));
        if inbox.ring.release() {
            inbox.num_without_room += 1;
            self.wake_peer();
        }
        let end = match read {
            Err(corrupt) => Some(End::Corrupt(corrupt)),
            Ok(true) if is_closed => Some(End::Closed),
            Ok(true) if is_peer_gone => Some(End::Died),
            Ok(_) => None,
        };
        events.extend(end.map(|end| self.end(&mut inbox, end)));
        events
    }

    fn end(&self, inbox: &mut Inbox, end: End) -> Event {
        inbox.ended = true;
        self.is_peer_gone.store(true, Release);
        // A gigabyte may wait, and whoever made the link keeps it.
        lock(&self.outbox).forget();
        self.shut_down();
        Event::End(end)
    }

    /// How many bytes have come that [`Self::receive`] would copy.
    pub fn readable_bytes(&self) -> usize {
        // A ring that can't be read has nothing to copy.
        lock(&self.inbox).ring.readable().unwrap_or(0)
    }

    /// Whether [`Self::receive`] would do anything.
    pub fn has_events(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        // A ring that can't be read has to be reported.
        !self.is_inherited()
            && !inbox.ended
            && (inbox.ring.readable() != Ok(0)
                || inbox.ring.is_closed()
                || self.is_hung_up.load(Relaxed)
                || self.is_peer_gone.load(Relaxed)
                || !lock(&self.notices).is_empty()
                || lock(&self.outbox).can_go_on())
    }

    // ------------------------------------------------------------------------------------
    // Sending
    // ------------------------------------------------------------------------------------

    /// Sends a message, or keeps it until the ring has room. After one that was refused for want of
    /// room all are, until [`Self::unblock`]: nothing overtakes what has been lost. What is sent
    /// `regardless` is never refused for that.
    ///
    /// # Errors
    /// [`SendError`]; nothing was sent then.
    pub fn send(&self, kind: u8, frames: &[&[u8]], regardless: bool) -> Result<Ticket, SendError> {
        if self.is_inherited() {
            return Err(SendError::Gone);
        }
        let mut outbox = lock(&self.outbox);
        // Under the lock: nothing is kept after the end has made the outbox forget all.
        if self.is_gone() || self.is_closed.load(Relaxed) {
            return Err(SendError::Gone);
        }
        let sent = match (regardless, self.is_blocked.load(Relaxed)) {
            (true, _) => outbox.send_regardless(kind, frames),
            (false, true) => Err(SendError::Full),
            (false, false) => outbox.send(kind, frames),
        };
        if sent == Err(SendError::Full) {
            self.is_blocked.store(true, Relaxed);
        }
        outbox.note_depth();
        drop(outbox);
        self.wake_peer();
        sent
    }

    /// Accepts messages again after one was refused for want of room.
    pub fn unblock(&self) {
        let _outbox = lock(&self.outbox);
        self.is_blocked.store(false, Relaxed);
    }

    /// Sends what was kept, as far as there is room.
    ///
    /// # Errors
    /// [`Corrupt::Position`] if the ring is broken.
    pub fn flush(&self) -> Result<(), Corrupt> {
        let mut outbox = lock(&self.outbox);
        if outbox.is_empty() {
            return Ok(());
        }
        outbox.flush()?;
        drop(outbox);
        self.wake_peer();
        Ok(())
    }

    /// Sends what was kept, as far as there is room; whether some is left that can still be sent.
    pub(crate) fn is_still_sending(&self) -> bool {
        !self.is_gone() && self.flush().is_ok() && self.backlog_bytes() > 0
    }

    /// All messages with lower tickets are in the ring, or were taken back.
    pub fn sent_before(&self) -> Ticket {
        lock(&self.outbox).sent_before()
    }

    /// Bytes of messages that are kept because the ring is full.
    pub fn backlog_bytes(&self) -> usize {
        lock(&self.outbox).waiting_bytes()
    }

    /// For how long nothing of what waits has found room in the ring; `None` if nothing waits.
    pub fn without_room_for(&self) -> Option<Duration> {
        lock(&self.outbox).without_room_for()
    }

    /// Takes back messages of which nothing is in the ring yet, but for those that were sent
    /// regardless: the newest first, until they have `max_bytes` or none is left.
    pub fn take_back_newest(&self, max_bytes: usize) -> Vec<Message> {
        lock(&self.outbox).take_back_newest(max_bytes)
    }

    /// What has come through this link, and what was sent. Nothing waits once a side is gone.
    pub(crate) fn traffic(&self) -> (Traffic, Traffic) {
        // One lock after the other: whoever sends may hold the outbox for long, and nobody's receiving
        // is to wait for that.
        let mut received = lock(&self.inbox).traffic();
        let mut sent = lock(&self.outbox).traffic();
        if self.is_gone() {
            received.waiting_bytes = 0;
            sent.waiting_bytes = 0;
        }
        (received, sent)
    }

    // ------------------------------------------------------------------------------------
    // Life and death
    // ------------------------------------------------------------------------------------

    /// Notes that the other side is gone; the watcher's.
    pub(crate) fn note_gone(&self) {
        // Whoever falls asleep after this sees it, by the bell's fences; and whoever sees it sees all
        // that the other side has sent.
        self.is_peer_gone.store(true, Release);
        self.wake_self();
    }

    /// Whether the other side is gone, or has said that it goes.
    pub fn is_gone(&self) -> bool {
        self.is_peer_gone.load(Relaxed)
    }

    /// How long the other process hasn't run, if that is longer than it may be.
    pub fn stuck_for(&self) -> Option<Duration> {
        let stuck_ms = self.stuck_ms.load(Relaxed);
        (stuck_ms > 0).then(|| Duration::from_millis(stuck_ms))
    }

    /// Says that this side runs, and notes for how long the other hasn't; the watcher's.
    pub(crate) fn beat(&self, now: Now, since_ms: u64, stuck_after_ms: u64) {
        let Now { ms: now_ms, interval_ms } = now;
        self.segment.beat(self.side, now_ms, interval_ms);
        let other = match self.side {
            Side::Engine => Side::Client,
            Side::Client => Side::Engine,
        };
        let (last_ms, others_interval_ms) = self.segment.last_beat(other);
        let silent_ms = now_ms - last_ms.clamp(since_ms.min(now_ms), now_ms);
        // A side that beats slowly, by its own settings, is not stuck between two beats.
        let limit_ms = stuck_after_ms.max(4 * others_interval_ms.min(MAX_BEAT_INTERVAL_MS));
        let stuck_ms = if silent_ms >= limit_ms { silent_ms.max(1) } else { 0 };
        let was_stuck = self.stuck_ms.swap(stuck_ms, Relaxed) > 0;
        let notice = match (was_stuck, stuck_ms > 0) {
            (false, true) => Event::Stuck(Duration::from_millis(stuck_ms)),
            (true, false) => Event::Recovered,
            _ => return,
        };
        lock(&self.notices).push_back(notice);
        self.wake_self();
    }

    /// Ends the link: nothing more is read, [`End::HungUp`] is the next event, and the last.
    pub fn hang_up(&self) {
        // Seen by whoever wakes up, by the bell's fences.
        self.is_hung_up.store(true, Relaxed);
        self.close();
        self.wake_self();
    }

    /// Says goodbye. Messages that are kept are dropped, those in the ring can still be read. What is
    /// sent after this is refused.
    pub fn close(&self) {
        if self.is_inherited() {
            return;
        }
        let mut outbox = lock(&self.outbox);
        outbox.close();
        self.is_closed.store(true, Relaxed);
        drop(outbox);
        self.wake_peer();
        self.shut_down();
    }

    /// Lets the other side's watcher know, also if forked children hold the socket.
    fn shut_down(&self) {
        // Fails if the other side was faster.
        let _ = rustix::net::shutdown(&self.peer.socket, Shutdown::Both);
    }
}

impl Inbox {
    /// How many bytes are in the ring; none if it can't be read, which the next read finds.
    fn note_depth(&mut self) -> usize {
        let depth = self.ring.readable().unwrap_or(0);
        self.high_water_bytes = self.high_water_bytes.max(depth);
        depth
    }

    fn traffic(&mut self) -> Traffic {
        Traffic {
            waiting_bytes: self.note_depth() as u64,
            high_water_bytes: self.high_water_bytes as u64,
            backlog_bytes: 0,
            num_without_room: self.num_without_room,
        }
    }

    /// Reads whole messages; true if none is left.
    fn read(&mut self, max_messages: usize, events: &mut Vec<Event>) -> Result<bool, Corrupt> {
        for _ in 0..max_messages {
            match self.reader.next(&mut self.ring)? {
                Some(message) => events.push(Event::Message(message)),
                None => return Ok(true),
            }
        }
        Ok(false)
    }
}
