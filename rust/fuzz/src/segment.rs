//! Two ends of one segment, and somebody who writes to its memory what he likes: whatever lies there,
//! no end panics or goes on after its end, and until then what is received is what was sent.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use arbitrary::Arbitrary;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sparksched_backlog::Limits;
use sparksched_ring::fuzzing;
use sparksched_ring::link::{Event, Link};
use sparksched_ring::message::{MAX_FRAMES, Message};
use sparksched_ring::segment::{Segment, Side};

const RING_BYTES: usize = 4096;
const MAX_BACKLOG_BYTES: usize = 3 * RING_BYTES;
/// Words of the header: of positions, flags, bells and beats.
const NUM_FIELDS: u64 = 12;
/// Fields lie in lines of their own.
const LINE_BYTES: u64 = 128;
const DATA: u64 = 4096;

/// What is written to memory.
#[derive(Arbitrary, Debug)]
enum Value {
    Any(u64),
    Small(u8),
    AroundTheRing(i8),
    /// What it was, and a little more or less.
    Moved(i16),
}

#[derive(Arbitrary, Debug)]
enum Act {
    Send { frame_lengths: Vec<u16>, regardless: bool },
    SendOne(u16),
    Unblock,
    Receive(u8),
    Look,
    Flush,
    TakeBack(u8),
    Beat { now_ms: u64, interval_ms: u64, since_ms: u64, stuck_after_ms: u16 },
    NoteGone,
    HangUp,
    Close,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Engine(Act),
    Client(Act),
    WriteField { field: u8, value: Value },
    WriteBytes { ring: bool, offset: u16, bytes: Vec<u8> },
}

/// What the two ends and somebody else do in turn.
#[derive(Arbitrary, Debug)]
pub struct Input(Vec<Step>);

/// One end, and what is still to come of what it has sent.
struct End {
    link: Link,
    sent: VecDeque<Message>,
    num_sent: u8,
    num_tickets: u64,
    has_ended: bool,
}

impl End {
    fn new(side: Side, memory: &OwnedFd, socket: OwnedFd) -> Self {
        let segment = Segment::open(memory.as_fd(), RING_BYTES).unwrap();
        let backlog = Limits::fixed(MAX_BACKLOG_BYTES);
        let link = fuzzing::link(side, segment, socket, backlog);
        Self { link, sent: VecDeque::new(), num_sent: 0, num_tickets: 0, has_ended: false }
    }

    fn message(&self, lengths: &[u16]) -> Message {
        let frame = |length: &u16| vec![self.num_sent; usize::from(*length)];
        Message { kind: self.num_sent, frames: lengths.iter().map(frame).collect() }
    }

    fn send(&mut self, lengths: &[u16], regardless: bool) {
        let message = self.message(lengths);
        let frames: Vec<_> = message.frames.iter().map(Vec::as_slice).collect();
        if let Ok(ticket) = self.link.send(message.kind, &frames, regardless) {
            assert_eq!(ticket, self.num_tickets);
            self.num_tickets += 1;
            self.sent.push_back(message);
            self.num_sent = self.num_sent.wrapping_add(1);
        }
    }

    /// The newest messages up to so many bytes.
    fn take_back(&mut self, which: u8) {
        for message in self.link.take_back_newest(16 * usize::from(which)) {
            let position = self.sent.iter().rposition(|sent| *sent == message);
            self.sent.remove(position.expect("sent, and not received"));
        }
    }

    fn look(&self) {
        self.link.has_events();
        assert!(self.link.readable_bytes() <= RING_BYTES);
        assert!(self.link.sent_before() <= self.num_tickets);
        // Where something was forgotten, nothing waits, and not all was sent.
        let is_idle = self.link.sent_before() == self.num_tickets;
        assert!(!is_idle || self.link.backlog_bytes() == 0);
        assert_eq!(self.link.without_room_for().is_some(), self.link.backlog_bytes() > 0);
    }

    fn receive(&mut self, other: &mut Self, max_messages: usize, is_sound: bool) {
        let events = self.link.receive(max_messages);
        assert!(!self.has_ended || events.is_empty(), "after its end: {events:?}");
        for event in events {
            assert!(!self.has_ended, "{event:?} after its end");
            match event {
                Event::Message(message) if is_sound => {
                    assert_eq!(Some(message), other.sent.pop_front());
                }
                Event::Message(message) => {
                    assert!((1..=MAX_FRAMES).contains(&message.frames.len()));
                }
                Event::End(end) => {
                    assert!(!is_sound || !matches!(end, sparksched_ring::link::End::Corrupt(_)));
                    self.has_ended = true;
                }
                Event::Stuck(_) | Event::Recovered => {}
            }
        }
    }

    fn act(&mut self, act: &Act, other: &mut Self, is_sound: bool) {
        match act {
            Act::Send { frame_lengths, regardless } => self.send(frame_lengths, *regardless),
            Act::SendOne(length) => self.send(&[*length], false),
            Act::Unblock => self.link.unblock(),
            Act::Receive(max) => self.receive(other, usize::from(*max), is_sound),
            Act::Look => self.look(),
            Act::Flush => {
                let flushed = self.link.flush();
                assert!(!is_sound || flushed.is_ok(), "{flushed:?}");
            }
            Act::TakeBack(which) => self.take_back(*which),
            Act::Beat { now_ms, interval_ms, since_ms, stuck_after_ms } => {
                let stuck_after_ms = (*stuck_after_ms).into();
                fuzzing::beat(&self.link, *now_ms, *interval_ms, *since_ms, stuck_after_ms);
            }
            Act::NoteGone => fuzzing::note_gone(&self.link),
            Act::HangUp => self.link.hang_up(),
            Act::Close => self.link.close(),
        }
    }
}

fn write_field(memory: &OwnedFd, field: u8, value: &Value) {
    let offset = LINE_BYTES * (u64::from(field) % NUM_FIELDS);
    let mut bytes = [0; 8];
    rustix::io::pread(memory, &mut bytes, offset).unwrap();
    let value = match value {
        Value::Any(value) => *value,
        Value::Small(value) => (*value).into(),
        Value::AroundTheRing(beside) => (RING_BYTES as u64).wrapping_add_signed((*beside).into()),
        Value::Moved(by) => u64::from_le_bytes(bytes).wrapping_add_signed((*by).into()),
    };
    rustix::io::pwrite(memory, &value.to_le_bytes(), offset).unwrap();
}

/// Plays the steps.
pub fn check(Input(steps): &Input) {
    let (_, memory) = Segment::create(RING_BYTES).unwrap();
    let flags = SocketFlags::CLOEXEC;
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let mut engine = End::new(Side::Engine, &memory, one);
    let mut client = End::new(Side::Client, &memory, other);
    let mut is_sound = true;
    for step in steps {
        match step {
            Step::Engine(act) => engine.act(act, &mut client, is_sound),
            Step::Client(act) => client.act(act, &mut engine, is_sound),
            Step::WriteField { field, value } => {
                is_sound = false;
                write_field(&memory, *field, value);
            }
            Step::WriteBytes { ring, offset, bytes } => {
                is_sound = false;
                let offset = u64::from(*offset) % RING_BYTES as u64;
                let ring = DATA + RING_BYTES as u64 * u64::from(*ring);
                let len = bytes.len().min(RING_BYTES - offset as usize);
                rustix::io::pwrite(&memory, &bytes[..len], ring + offset).unwrap();
            }
        }
    }
}
