//! One PUSH socket: connects until a peer has shaken hands, and then sends for as long as it lives.
//!
//! Any thread may send. All else is done by the thread that waits in
//! [`crate::sockets::PushSockets::wait`].

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use sparksched_backlog::{Backlog, Limits};

use crate::address::Address;
use crate::protocol::{self, GREETING, Reader, Said};
use crate::waiting::{Waiting, headers};

/// How long after a connection has failed the next one is tried.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// How long after the system had no memory for a call the next one is tried.
const SHORTAGE: Duration = Duration::from_millis(10);

/// How often a peer is listened to, and how much is written of what waits, before others get a turn:
/// the engine's loop may be waiting to send.
const MAX_READS: usize = 16;
const MAX_WRITTEN_BYTES: usize = 1 << 20;

/// The most parts that one call writes.
const MAX_PARTS: usize = 64;

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It was accepted: sent, or it waits. A peer that has gone gets nothing more.
    Accepted,
    /// It was not: too much waits already.
    Full,
}

/// What happened to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Ready,
    /// It has gone, for this reason; it will not come back.
    Gone(String),
}

/// A connection, which may still be to succeed.
#[derive(Debug)]
struct Connection {
    /// Shared with the thread that sleeps until something happens to it.
    socket: Arc<OwnedFd>,
    reader: Reader,
    /// Greeting and commands that are to be written before messages.
    commands: Vec<u8>,
    /// The system had no memory for the last call: until then nothing is tried.
    pause_until: Option<Instant>,
}

#[derive(Debug)]
enum Peer {
    /// Nobody listens.
    Away {
        retry_at: Instant,
    },
    Here(Connection),
    Gone,
}

/// What is to be waited for.
#[derive(Debug)]
pub(crate) enum Wish {
    Nothing,
    Time(Instant),
    Socket(Arc<OwnedFd>, PollFlags),
}

#[derive(Debug)]
struct State {
    peer: Peer,
    backlog: Backlog<Waiting>,
    /// A message was refused, and [`Push::unblock`] has not been called since.
    is_blocked: bool,
    /// Reported as gone.
    is_closed: bool,
}

/// Ends the wait of the thread that looks after all sockets.
#[derive(Debug)]
pub(crate) struct Nudge(pub(crate) OwnedFd);

impl Nudge {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn wake(&self) {
        // Fails only if the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// A PUSH socket to one address.
#[derive(Debug)]
pub struct Push {
    address: Address,
    state: Mutex<State>,
    nudge: Arc<Nudge>,
}

impl Push {
    pub(crate) fn new(address: Address, limits: Limits, nudge: Arc<Nudge>) -> Self {
        let peer = Peer::Away { retry_at: Instant::now() };
        let backlog = Backlog::new(limits);
        let state = State { peer, backlog, is_blocked: false, is_closed: false };
        Self { address, state: Mutex::new(state), nudge }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in this crate is a bug that leaves at worst a message half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message without ever waiting. After one that was refused all are, until
    /// [`Self::unblock`]: nothing overtakes what is lost. One that is sent regardless is accepted
    /// however many wait.
    pub fn send(&self, frames: &[&[u8]], regardless: bool) -> Sent {
        let (sent, has_to_go_on) = self.accept(frames, regardless);
        if has_to_go_on {
            self.nudge.wake();
        }
        sent
    }

    fn accept(&self, frames: &[&[u8]], regardless: bool) -> (Sent, bool) {
        let mut state = self.lock();
        if state.is_closed || matches!(state.peer, Peer::Gone) {
            return (Sent::Accepted, false);
        }
        if !regardless {
            state.is_blocked |= state.backlog.is_full();
            if state.is_blocked {
                return (Sent::Full, false);
            }
        }
        let was_idle = state.backlog.is_empty();
        let mut written = 0;
        if was_idle
            && let Peer::Here(it) = &state.peer
            && it.reader.is_ready()
            && it.commands.is_empty()
        {
            match write_message(it.socket.as_fd(), frames, 0) {
                Ok((_, true)) => return (Sent::Accepted, false),
                Ok((some, false)) => written = some,
                // Found again by the thread that waits, which reports it.
                Err(_) => {}
            }
        }
        state.backlog.push(Waiting::new(frames, written, regardless));
        (Sent::Accepted, was_idle)
    }

    /// Bytes of messages that wait.
    pub fn backlog_bytes(&self) -> usize {
        self.lock().backlog.bytes()
    }

    /// Whether something waits that somebody may still take.
    pub(crate) fn is_still_sending(&self) -> bool {
        let state = self.lock();
        matches!(state.peer, Peer::Here(_)) && !state.backlog.is_empty()
    }

    /// Takes back messages of which nothing has been sent, but for those that were sent regardless:
    /// the newest first, until they have `max_bytes` or none is left.
    pub fn take_back_newest(&self, max_bytes: usize) -> Vec<Vec<Vec<u8>>> {
        let taken = self.lock().backlog.take_back_newest(max_bytes);
        taken.into_iter().map(|message| message.frames).collect()
    }

    /// Accepts messages again after one was refused.
    pub fn unblock(&self) {
        self.lock().is_blocked = false;
    }

    /// Whether its peer had come and has gone.
    pub fn is_gone(&self) -> bool {
        matches!(self.lock().peer, Peer::Gone)
    }

    /// Ends the connection. What waits is dropped.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.peer = Peer::Gone;
        state.backlog.clear();
    }

    pub(crate) fn wish(&self) -> Wish {
        let state = self.lock();
        match &state.peer {
            Peer::Gone => Wish::Nothing,
            Peer::Away { retry_at: time }
            | Peer::Here(Connection { pause_until: Some(time), .. }) => Wish::Time(*time),
            Peer::Here(it) => {
                let may_send = it.reader.is_ready() && !state.backlog.is_empty();
                let wants_to_write = !it.commands.is_empty() || may_send;
                let writing = if wants_to_write { PollFlags::OUT } else { PollFlags::empty() };
                Wish::Socket(Arc::clone(&it.socket), PollFlags::IN | writing)
            }
        }
    }

    /// Connects, reads and writes as far as that is possible now.
    pub(crate) fn go_on(&self) -> Option<Event> {
        let mut state = self.lock();
        let State { peer, backlog, .. } = &mut *state;
        if let Peer::Away { retry_at } = peer {
            if Instant::now() < *retry_at {
                return None;
            }
            *peer = match self.address.connect() {
                Ok(socket) => Peer::Here(Connection::new(socket)),
                Err(_) => Peer::Away { retry_at: Instant::now() + RETRY_AFTER },
            };
        }
        let Peer::Here(connection) = peer else { return None };
        if connection.pause_until.is_some_and(|time| Instant::now() < time) {
            return None;
        }
        connection.pause_until = None;
        let was_ready = connection.reader.is_ready();
        match connection.go_on(backlog) {
            Err(Failure::System(Errno::NOBUFS | Errno::NOMEM)) => {
                connection.pause_until = Some(Instant::now() + SHORTAGE);
                None
            }
            Ok(()) if connection.reader.is_ready() && !was_ready => Some(Event::Ready),
            Ok(()) => None,
            // A front end that is about to listen, or one that ended while it came up.
            Err(Failure::Ended | Failure::System(_)) if !connection.reader.is_ready() => {
                *peer = Peer::Away { retry_at: Instant::now() + RETRY_AFTER };
                None
            }
            // What it has of a message can't be completed over another connection.
            Err(failure) => {
                *peer = Peer::Gone;
                backlog.clear();
                Some(Event::Gone(failure.to_string()))
            }
        }
    }
}

/// Why a connection is of no use.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("it has closed the connection")]
    Ended,
    #[error("{}", std::io::Error::from(*.0))]
    System(#[from] Errno),
    #[error(transparent)]
    Protocol(#[from] protocol::ProtocolError),
}

impl Connection {
    fn new(socket: OwnedFd) -> Self {
        let mut commands = GREETING.to_vec();
        commands.extend(protocol::ready());
        let reader = Reader::default();
        Self { socket: Arc::new(socket), reader, commands, pause_until: None }
    }

    fn go_on(&mut self, backlog: &mut Backlog<Waiting>) -> Result<(), Failure> {
        // The other's last words first: writing fails once it has gone, and doesn't say why.
        self.read()?;
        // In the midst of a message no command can follow.
        let is_begun = backlog.first().is_some_and(|first| first.written > 0);
        if !is_begun {
            self.write_commands()?;
        }
        if self.reader.is_ready() && (self.commands.is_empty() || is_begun) {
            self.write_backlog(backlog)?;
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), Failure> {
        let mut buffer = [0; 512];
        for _ in 0..MAX_READS {
            match recv(&*self.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Failure::Ended),
                Ok((len, _)) => {
                    let commands = &mut self.commands;
                    self.reader.read(&buffer[..len], |said| {
                        // One answer is enough for all that were asked for meanwhile.
                        if let Said::Ping(context) = said
                            && commands.is_empty()
                        {
                            *commands = protocol::pong(&context);
                        }
                    })?;
                }
                // Not connected yet.
                Err(Errno::AGAIN | Errno::NOTCONN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write_commands(&mut self) -> Result<(), Failure> {
        while !self.commands.is_empty() {
            match write(self.socket.as_fd(), &[IoSlice::new(&self.commands)])? {
                0 => break,
                written => drop(self.commands.drain(..written)),
            }
        }
        Ok(())
    }

    fn write_backlog(&self, backlog: &mut Backlog<Waiting>) -> Result<(), Failure> {
        let mut total = 0;
        while total < MAX_WRITTEN_BYTES
            && let Some(message) = backlog.first_mut()
        {
            let (written, is_whole) =
                write_message(self.socket.as_fd(), &message.frames, message.written)?;
            message.written += written;
            total += written;
            if written > 0 {
                backlog.note_progress();
            }
            if !is_whole {
                break;
            }
            backlog.pop_first();
            if !self.commands.is_empty() {
                break;
            }
        }
        Ok(())
    }
}

/// Writes a message but for its first `skip` bytes, headers included; returns how many bytes were
/// written, and whether none is left.
///
/// # Errors
/// If nothing was written. An error behind some bytes is left to the next call: the peer has those
/// bytes, so they count.
fn write_message<T: AsRef<[u8]>>(
    socket: BorrowedFd<'_>,
    frames: &[T],
    skip: usize,
) -> Result<(usize, bool), Errno> {
    let headers = headers(frames);
    let parts: Vec<&[u8]> = headers
        .iter()
        .zip(frames)
        .flat_map(|(header, frame)| [header.as_bytes(), frame.as_ref()])
        .collect();
    let total: usize = parts.iter().map(|part| part.len()).sum();
    let mut at = skip;
    while at < total {
        match write(socket, &slices_from(&parts, at)) {
            Ok(0) => break,
            Ok(written) => at += written,
            Err(error) if at == skip => return Err(error),
            Err(_) => break,
        }
    }
    Ok((at - skip, at == total))
}

/// As much as one call writes of some parts without their first `skip` bytes.
fn slices_from<'a>(parts: &[&'a [u8]], mut skip: usize) -> Vec<IoSlice<'a>> {
    let rest = parts.iter().filter_map(|part| {
        let skipped = skip.min(part.len());
        skip -= skipped;
        (skipped < part.len()).then(|| IoSlice::new(&part[skipped..]))
    });
    rest.take(MAX_PARTS).collect()
}

/// Writes what there is room for, which may be nothing.
fn write(socket: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> Result<usize, Errno> {
    #[cfg(test)]
    tests::planted_error()?;
    loop {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags) {
            Err(Errno::AGAIN | Errno::NOTCONN) => return Ok(0),
            Err(Errno::INTR) => {}
            written => return written,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    thread_local! {
        /// Calls of this thread that still succeed, and the error of the one after them.
        static PLANTED: Cell<Option<(u32, Errno)>> = const { Cell::new(None) };
    }

    pub(super) fn planted_error() -> Result<(), Errno> {
        match PLANTED.take() {
            None => Ok(()),
            Some((0, error)) => Err(error),
            Some((left, error)) => {
                PLANTED.set(Some((left - 1, error)));
                Ok(())
            }
        }
    }

    /// A socket and its peer, which have shaken hands.
    fn connected(name: &str) -> (Push, UnixStream) {
        let path = std::env::temp_dir().join(format!("sparksched-{name}-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let nudge = Arc::new(Nudge::new().unwrap());
        let push = Push::new(Address::Unix(path.clone()), Limits::fixed(1 << 20), nudge);
        assert_eq!(push.go_on(), None);
        let (mut peer, _) = listener.accept().unwrap();
        std::fs::remove_file(path).unwrap();
        peer.write_all(&GREETING).unwrap();
        peer.write_all(b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PULL").unwrap();
        assert_eq!(push.go_on(), Some(Event::Ready));
        let mut said = vec![0; GREETING.len() + protocol::ready().len()];
        peer.read_exact(&mut said).unwrap();
        (push, peer)
    }

    /// So many frames that a message takes two calls.
    fn long_message() -> Vec<Vec<u8>> {
        (0..MAX_PARTS as u8).map(|number| vec![number; 5]).collect()
    }

    fn send(push: &Push, message: &[Vec<u8>]) -> Sent {
        let frames: Vec<&[u8]> = message.iter().map(Vec::as_slice).collect();
        push.send(&frames, false)
    }

    fn encoded(message: &[Vec<u8>]) -> Vec<u8> {
        let frames = headers(message).into_iter().zip(message);
        frames.flat_map(|(header, frame)| [header.as_bytes(), frame].concat()).collect()
    }

    fn assert_arrives(peer: &mut UnixStream, message: &[Vec<u8>]) {
        let expected = encoded(message);
        let mut bytes = vec![0; expected.len()];
        peer.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, expected);
    }

    #[test]
    fn after_an_error_in_the_middle_the_rest_of_the_message_follows() {
        let (push, mut peer) = connected("rest");
        let message = long_message();
        // In the sender's own call, and in that of the thread that goes on.
        for calls_before in [1, 2] {
            PLANTED.set(Some((calls_before, Errno::NOBUFS)));
            assert_eq!(send(&push, &message), Sent::Accepted);
            assert_eq!(send(&push, &message), Sent::Accepted);
            while push.is_still_sending() {
                assert_eq!(push.go_on(), None);
            }
            assert_arrives(&mut peer, &message);
            assert_arrives(&mut peer, &message);
        }
        peer.set_nonblocking(true).unwrap();
        assert!(peer.read(&mut [0]).is_err(), "more than was sent");
    }

    #[test]
    fn what_lacks_memory_is_tried_again() {
        let (push, mut peer) = connected("memory");
        let message = long_message();
        // The sender's own call, and the next one.
        for error in [Errno::NOBUFS, Errno::NOMEM] {
            PLANTED.set(Some((0, error)));
            assert_eq!(send(&push, &message), Sent::Accepted);
            PLANTED.set(Some((0, error)));
            assert_eq!(push.go_on(), None);
            assert!(matches!(push.wish(), Wish::Time(_)), "it waits without a break");
            while push.is_still_sending() {
                assert_eq!(push.go_on(), None);
            }
            assert_arrives(&mut peer, &message);
        }
    }

    #[test]
    fn another_error_ends_the_peer() {
        let (push, mut peer) = connected("end");
        PLANTED.set(Some((1, Errno::PIPE)));
        assert_eq!(send(&push, &long_message()), Sent::Accepted);
        PLANTED.set(Some((0, Errno::PIPE)));
        assert!(matches!(push.go_on(), Some(Event::Gone(_))));
        assert_eq!((push.is_gone(), push.backlog_bytes()), (true, 0));
        let mut bytes = Vec::new();
        peer.read_to_end(&mut bytes).unwrap();
        assert!(encoded(&long_message()).starts_with(&bytes), "bytes that nobody sent");
    }
}
