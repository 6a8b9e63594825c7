//! Ring, framing and outbox against naive models, over random operations; and what a reader makes of
//! a stream that was damaged. A failure prints its smallest case and the seed.
#![cfg(not(feature = "loom"))]

use std::collections::VecDeque;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use sparksched_backlog::Limits;
use sparksched_ring::message::{MAX_FRAMES, MAX_MESSAGE_BYTES, Message, Reader};
use sparksched_ring::outbox::{Outbox, SendError};
use sparksched_ring::ring::{Consumer, Corrupt, Ring};
use xxhash_rust::xxh3::xxh3_64;

const HEADER_BYTES: usize = 32;
const LENGTH_BYTES: usize = 8;

/// Where positions begin: anywhere, and just before they overflow 32 or 64 bits.
fn start() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        any::<u64>(),
        (0..100u64).prop_map(|back| u64::MAX - back),
        (0..100u64).prop_map(|back| u64::from(u32::MAX) - back),
    ]
}

fn capacity(max_log: u32) -> impl Strategy<Value = usize> {
    (0..=max_log).prop_map(|log| 1 << log)
}

// ------------------------------------------------------------------------------------
// The ring
// ------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum RingStep {
    Write(usize),
    Publish,
    Read(usize),
    Release,
    HasSpace,
    WaitForSpace,
    Readable,
    Close,
}

fn ring_step() -> impl Strategy<Value = RingStep> {
    prop_oneof![
        4 => (0..40usize).prop_map(RingStep::Write),
        4 => Just(RingStep::Publish),
        4 => (0..40usize).prop_map(RingStep::Read),
        3 => Just(RingStep::Release),
        1 => Just(RingStep::HasSpace),
        2 => Just(RingStep::WaitForSpace),
        1 => Just(RingStep::Readable),
        1 => Just(RingStep::Close),
    ]
}

/// A ring as anyone would write it.
#[derive(Default)]
struct NaiveRing {
    written: VecDeque<u8>,
    published: VecDeque<u8>,
    num_read: usize,
    waits: bool,
    is_closed: bool,
}

impl NaiveRing {
    fn free(&self, capacity: usize) -> usize {
        capacity - self.written.len() - self.published.len() - self.num_read
    }
}

proptest! {
    #[test]
    fn a_ring_is_a_queue(
        capacity in capacity(6),
        start in start(),
        steps in vec(ring_step(), 0..200),
    ) {
        let (mut producer, mut consumer) = Ring::on_heap(capacity, start).split();
        let mut model = NaiveRing::default();
        let mut next_byte = 0u8;
        for step in steps {
            let free = model.free(capacity);
            match step {
                RingStep::Write(len) => {
                    let bytes: Vec<u8> = (0..len).map(|i| next_byte.wrapping_add(i as u8)).collect();
                    let written = producer.write(&bytes).unwrap();
                    prop_assert_eq!(written, len.min(free));
                    model.written.extend(&bytes[..written]);
                    next_byte = next_byte.wrapping_add(written as u8);
                }
                RingStep::Publish => {
                    producer.publish();
                    model.published.append(&mut model.written);
                }
                RingStep::Read(len) => {
                    let mut bytes = vec![0; len];
                    let read = consumer.read(&mut bytes).unwrap();
                    prop_assert_eq!(read, len.min(model.published.len()));
                    let expected: Vec<u8> = model.published.drain(..read).collect();
                    prop_assert_eq!(&bytes[..read], &expected[..]);
                    model.num_read += read;
                }
                RingStep::Release => {
                    let must_wake = model.num_read > 0 && model.waits;
                    prop_assert_eq!(consumer.release(), must_wake);
                    if model.num_read > 0 {
                        model.waits = false;
                    }
                    model.num_read = 0;
                }
                RingStep::HasSpace => prop_assert_eq!(producer.has_space(), Ok(free > 0)),
                RingStep::WaitForSpace => {
                    prop_assert_eq!(producer.wait_for_space(), Ok(free > 0));
                    model.waits = free == 0;
                }
                RingStep::Readable => {
                    prop_assert_eq!(consumer.readable(), Ok(model.published.len()));
                }
                RingStep::Close => {
                    producer.close();
                    model.is_closed = true;
                }
            }
            prop_assert_eq!(consumer.is_closed(), model.is_closed);
        }
    }
}

// ------------------------------------------------------------------------------------
// Framing
// ------------------------------------------------------------------------------------

fn message(max_frames: usize, max_bytes: usize) -> impl Strategy<Value = Message> {
    let frame = vec(any::<u8>(), 0..=max_bytes);
    (any::<u8>(), vec(frame, 1..=max_frames)).prop_map(|(kind, frames)| Message { kind, frames })
}

fn slices(message: &Message) -> Vec<&[u8]> {
    message.frames.iter().map(Vec::as_slice).collect()
}

proptest! {
    #[test]
    fn messages_come_out_as_they_went_in(
        capacity in capacity(12),
        start in start(),
        messages in vec(message(6, 300), 0..12),
        turns in vec(0..3u8, 1..40),
    ) {
        let (producer, mut consumer) = Ring::on_heap(capacity, start).split();
        let mut outbox = Outbox::new(producer, Limits::fixed(usize::MAX));
        let mut reader = Reader::default();
        let mut unsent = messages.iter();
        let mut received = Vec::new();
        let num_bytes: usize = messages
            .iter()
            .map(encoded_len)
            .sum();
        // The turns repeat until all has come; each round of them moves a byte at least.
        let rounds = (num_bytes + messages.len() + 2) * 2;
        let all = turns.iter().copied().chain([0, 1, 2]).cycle().take(rounds * (turns.len() + 3));
        for turn in all {
            match turn {
                0 => {
                    if let Some(message) = unsent.next() {
                        outbox.send_regardless(message.kind, &slices(message)).unwrap();
                    }
                }
                1 => outbox.flush().unwrap(),
                _ => {
                    while let Some(message) = reader.next(&mut consumer).unwrap() {
                        received.push(message);
                    }
                    consumer.release();
                }
            }
            if received.len() == messages.len() {
                break;
            }
        }
        prop_assert_eq!(received, messages);
        prop_assert!(outbox.is_empty() && outbox.waiting_bytes() == 0);
        prop_assert!(!reader.is_in_message());
        prop_assert_eq!(consumer.readable(), Ok(0));
    }
}

fn encoded_len(message: &Message) -> usize {
    let payload: usize = message.frames.iter().map(Vec::len).sum();
    HEADER_BYTES + LENGTH_BYTES * message.frames.len() + payload
}

#[test]
fn impossible_messages_are_refused_and_leave_no_trace() {
    let (producer, mut consumer) = Ring::on_heap(1 << 20, 0).split();
    let mut outbox = Outbox::new(producer, Limits::fixed(0));
    assert!(matches!(outbox.send(0, &[]), Err(SendError::Unsendable(_))));
    let too_many: Vec<&[u8]> = vec![b""; MAX_FRAMES + 1];
    assert!(matches!(outbox.send(0, &too_many), Err(SendError::Unsendable(_))));
    // The same memory as often as it takes: more bytes than a message has, and few in this process.
    let part = vec![0; 1 << 26];
    let too_large: Vec<&[u8]> = vec![&part; (MAX_MESSAGE_BYTES >> 26) as usize + 1];
    assert!(matches!(outbox.send(0, &too_large), Err(SendError::Unsendable(_))));
    let most: Vec<&[u8]> = vec![b""; MAX_FRAMES];
    assert_eq!(outbox.send(0, &most), Ok(0));
    let message = Reader::default().next(&mut consumer).unwrap().unwrap();
    assert_eq!(message.frames.len(), MAX_FRAMES);
}

// ------------------------------------------------------------------------------------
// The outbox
// ------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum OutboxStep {
    Send { regardless: bool, message: Message },
    Flush,
    TakeBackNewest { max_bytes: usize },
    Receive(usize),
}

fn outbox_step() -> impl Strategy<Value = OutboxStep> {
    prop_oneof![
        4 => (any::<bool>(), message(3, 60))
            .prop_map(|(regardless, message)| OutboxStep::Send { regardless, message }),
        2 => Just(OutboxStep::Flush),
        1 => (0..300usize).prop_map(|max_bytes| OutboxStep::TakeBackNewest { max_bytes }),
        3 => (0..5usize).prop_map(OutboxStep::Receive),
    ]
}

struct NaiveWaiting {
    ticket: u64,
    message: Message,
    unwritten: usize,
    is_begun: bool,
    must_arrive: bool,
}

/// An outbox that counts bytes instead of writing them.
struct NaiveOutbox {
    waiting: VecDeque<NaiveWaiting>,
    free: usize,
    next_ticket: u64,
    /// What the reader is to get, in this order.
    expected: VecDeque<Message>,
}

impl NaiveOutbox {
    fn flush(&mut self) {
        while let Some(first) = self.waiting.front_mut() {
            first.is_begun = true;
            let written = first.unwritten.min(self.free);
            first.unwritten -= written;
            self.free -= written;
            if first.unwritten > 0 {
                return;
            }
            self.expected.extend(self.waiting.pop_front().map(|waiting| waiting.message));
        }
    }

    fn waiting_bytes(&self) -> usize {
        self.waiting.iter().map(|waiting| encoded_len(&waiting.message)).sum()
    }

    fn take_back_newest(&mut self, max_bytes: usize) -> Vec<Message> {
        let (mut taken, mut taken_bytes) = (Vec::new(), 0);
        for at in (0..self.waiting.len()).rev() {
            let waiting = &self.waiting[at];
            if taken_bytes < max_bytes && !waiting.is_begun && !waiting.must_arrive {
                taken_bytes += encoded_len(&waiting.message);
                taken.extend(self.waiting.remove(at).map(|waiting| waiting.message));
            }
        }
        taken
    }

    fn is_full(&self, max_bytes: usize) -> bool {
        !self.waiting.is_empty() && self.waiting_bytes() >= max_bytes
    }
}

proptest! {
    #[test]
    fn an_outbox_keeps_what_the_ring_does_not_take(
        capacity in capacity(9),
        start in start(),
        max_bytes in 0..500usize,
        steps in vec(outbox_step(), 0..80),
    ) {
        let (producer, mut consumer) = Ring::on_heap(capacity, start).split();
        let mut outbox = Outbox::new(producer, Limits::fixed(max_bytes));
        let mut reader = Reader::default();
        let mut model = NaiveOutbox {
            waiting: VecDeque::new(),
            free: capacity,
            next_ticket: 0,
            expected: VecDeque::new(),
        };
        for step in steps {
            match step {
                OutboxStep::Send { regardless, message } => {
                    let sent = if regardless {
                        outbox.send_regardless(message.kind, &slices(&message))
                    } else {
                        outbox.send(message.kind, &slices(&message))
                    };
                    if !regardless && model.is_full(max_bytes) {
                        model.flush();
                    }
                    if !regardless && model.is_full(max_bytes) {
                        prop_assert_eq!(sent, Err(SendError::Full));
                    } else {
                        prop_assert_eq!(sent, Ok(model.next_ticket));
                        let unwritten = encoded_len(&message);
                        let ticket = model.next_ticket;
                        let waiting = NaiveWaiting {
                            ticket,
                            message,
                            unwritten,
                            is_begun: false,
                            must_arrive: regardless,
                        };
                        model.waiting.push_back(waiting);
                        model.next_ticket += 1;
                        model.flush();
                    }
                }
                OutboxStep::Flush => {
                    outbox.flush().unwrap();
                    model.flush();
                }
                OutboxStep::TakeBackNewest { max_bytes } => {
                    let expected = model.take_back_newest(max_bytes);
                    prop_assert_eq!(outbox.take_back_newest(max_bytes), expected);
                }
                OutboxStep::Receive(count) => {
                    for _ in 0..count {
                        let Some(message) = reader.next(&mut consumer).unwrap() else { break };
                        prop_assert_eq!(Some(message), model.expected.pop_front());
                    }
                    consumer.release();
                    // What of the ring is read and released is all that isn't readable.
                    model.free = capacity - consumer.readable().unwrap();
                }
            }
            prop_assert_eq!(outbox.waiting_bytes(), model.waiting_bytes());
            prop_assert_eq!(outbox.is_empty(), model.waiting.is_empty());
            prop_assert_eq!(outbox.without_room_for().is_some(), !model.waiting.is_empty());
            let sent_before = model.waiting.front().map_or(model.next_ticket, |first| first.ticket);
            prop_assert_eq!(outbox.sent_before(), sent_before);
            prop_assert_eq!(outbox.can_go_on(), !model.waiting.is_empty() && model.free > 0);
        }
    }
}

/// Has a reader take a little and make room.
fn take_a_little(consumer: &mut Consumer) {
    assert_eq!(consumer.read(&mut [0; 8]), Ok(8));
    consumer.release();
}

#[test]
fn a_reader_that_reads_slowly_is_given_more_but_not_without_end() {
    let (producer, mut consumer) = Ring::on_heap(64, 0).split();
    let patience = Duration::from_secs(3600);
    let limits = Limits { idle_bytes: 100, patience, max_bytes: 1000 };
    let mut outbox = Outbox::new(producer, limits);
    let message = [7; 200];
    while outbox.waiting_bytes() < limits.max_bytes {
        assert!(outbox.send(0, &[&message]).is_ok(), "{} bytes wait", outbox.waiting_bytes());
        take_a_little(&mut consumer);
    }
    assert_eq!(outbox.send(0, &[&message]), Err(SendError::Full));
}

#[test]
fn a_reader_that_takes_nothing_for_a_while_is_given_no_more_until_it_does() {
    let (producer, mut consumer) = Ring::on_heap(64, 0).split();
    let patience = Duration::from_millis(500);
    let limits = Limits { idle_bytes: 100, patience, max_bytes: 1000 };
    let mut outbox = Outbox::new(producer, limits);
    let message = [7; 200];
    outbox.send(0, &[&message]).unwrap();
    std::thread::sleep(patience);
    // To try in vain is no progress.
    outbox.flush().unwrap();
    assert_eq!(outbox.send(0, &[&message]), Err(SendError::Full));
    // Too late again if this test stands still in between; what it takes brings nothing below the limit.
    let is_given_more = (0..10).any(|_| {
        take_a_little(&mut consumer);
        assert!(outbox.waiting_bytes() > limits.idle_bytes);
        outbox.send(0, &[&message]).is_ok()
    });
    assert!(is_given_more);
}

#[test]
fn nothing_is_sent_after_a_close() {
    let (producer, mut consumer) = Ring::on_heap(64, 0).split();
    let mut outbox = Outbox::new(producer, Limits::fixed(1000));
    outbox.send(0, &[&[1; 100]]).unwrap();
    outbox.close();
    assert_eq!(consumer.readable(), Ok(64));
    let mut reader = Reader::default();
    assert_eq!(reader.next(&mut consumer), Ok(None));
    consumer.release();
    // It would be taken for the rest of the message that was cut off.
    let _ = outbox.send(0, &[&[2; 100]]);
    outbox.flush().unwrap();
    assert_eq!((consumer.readable(), consumer.is_closed()), (Ok(0), true));
    assert_eq!((outbox.is_empty(), outbox.waiting_bytes()), (true, 0));
}

/// What the consumer has read is looked up only if the depth could otherwise be more than the most
/// so far: that is what keeps the mark of the highest depth cheap and right.
#[test]
fn the_depth_of_a_ring_is_looked_up_if_it_may_be_the_highest() {
    let (mut producer, mut consumer) = Ring::on_heap(16, u64::MAX - 4).split();
    assert_eq!(producer.write(&[1; 6]), Ok(6));
    producer.publish();
    assert_eq!(consumer.read(&mut [0; 4]), Ok(4));
    consumer.release();
    assert_eq!(producer.depth_beyond(6), Ok(6), "not more than the most: not looked up");
    assert_eq!(producer.depth_beyond(5), Ok(2));
}

// ------------------------------------------------------------------------------------
// Damage
// ------------------------------------------------------------------------------------

/// The bytes of messages in the ring.
fn encoded(messages: &[Message]) -> Vec<u8> {
    let (producer, mut consumer) = Ring::on_heap(1 << 16, 0).split();
    let mut outbox = Outbox::new(producer, Limits::fixed(usize::MAX));
    for message in messages {
        outbox.send(message.kind, &slices(message)).unwrap();
    }
    let mut bytes = vec![0; consumer.readable().unwrap()];
    assert_eq!(consumer.read(&mut bytes), Ok(bytes.len()));
    assert!(outbox.is_empty());
    bytes
}

/// What a reader gets from bytes that come through a small ring, and how it ends.
fn decoded(bytes: &[u8], capacity: usize) -> (Vec<Message>, Result<(), Corrupt>) {
    let (mut producer, mut consumer) = Ring::on_heap(capacity, u64::MAX - 7).split();
    let mut reader = Reader::default();
    let mut messages = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        rest = &rest[producer.write(rest).unwrap()..];
        producer.publish();
        loop {
            match reader.next(&mut consumer) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(corrupt) => return (messages, Err(corrupt)),
            }
        }
        consumer.release();
    }
    (messages, Ok(()))
}

/// A header with a right checksum, whatever it claims.
fn header(kind: u32, num_frames: u64, sequence: u64, lengths: &[u64]) -> Vec<u8> {
    let mut bytes = 0x5350_524b_u32.to_le_bytes().to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend(num_frames.to_le_bytes());
    bytes.extend(sequence.to_le_bytes());
    bytes.extend([0; 8]);
    bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    let check = xxh3_64(&bytes);
    bytes[24..32].copy_from_slice(&check.to_le_bytes());
    bytes
}

/// The most memory that this process has mapped so far, in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPeak")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn lengths_are_checked_before_they_cost_anything() {
    // The header of this test is the one that is sent.
    assert_eq!(
        header(0, 1, 0, &[3]),
        encoded(&[Message { kind: 0, frames: vec![vec![0; 3]] }])[..40]
    );

    let most = MAX_MESSAGE_BYTES;
    // As much as a message may have, announced and not sent. The tests beside this one take little.
    let before = peak_kib();
    assert_eq!(decoded(&header(0, 1, 0, &[most]), 64), (vec![], Ok(())));
    assert_eq!(decoded(&header(0, MAX_FRAMES as u64, 0, &[0]), 64), (vec![], Ok(())));
    let taken = peak_kib() - before;
    assert!(taken < 512 << 10, "an announcement of {most} bytes took {taken} KiB");
}
