//! Streams of messages, some of them wrong in a field or damaged, in pieces of any size through a ring
//! of any size: the reader gets the messages that a naive reader finds in the whole stream, and stops
//! for the same reason.

use arbitrary::Arbitrary;
use sparksched_ring::message::{MAX_FRAMES, MAX_MESSAGE_BYTES, Message, Reader};
use sparksched_ring::ring::{Corrupt, Ring};
use xxhash_rust::xxh3::xxh3_64;

const MARK: u32 = 0x5350_524b;
const HEADER_BYTES: usize = 32;
const LENGTH_BYTES: usize = 8;
const NUM_FRAMES: usize = 8;
const SEQUENCE: usize = 16;
const CHECK: usize = 24;

/// A message as its sender makes it, but for the fields that are given.
#[derive(Arbitrary, Debug)]
struct Draft {
    mark: Option<u32>,
    kind: u8,
    wide_kind: Option<u32>,
    num_frames: Option<u64>,
    sequence: Option<u64>,
    check: Option<u64>,
    wrong_length: Option<(u8, u64)>,
    frames: Vec<Vec<u8>>,
    /// As many empty frames follow.
    num_empty_frames: Option<u8>,
}

#[derive(Arbitrary, Debug)]
enum Part {
    Message(Draft),
    Bytes(Vec<u8>),
}

/// A stream, a ring, and how it is written there.
#[derive(Arbitrary, Debug)]
pub struct Input {
    log_capacity: u8,
    start: u64,
    /// Sizes of the pieces in which the stream is written, over and over.
    pieces: Vec<u16>,
    parts: Vec<Part>,
    /// Where bits are flipped.
    damage: Option<(u16, u8)>,
}

impl Draft {
    fn write(&self, sequence: u64, stream: &mut Vec<u8>) {
        let num_empty_frames = usize::from(self.num_empty_frames.unwrap_or(0));
        let mut lengths: Vec<u64> = self.frames.iter().map(|frame| frame.len() as u64).collect();
        lengths.resize(lengths.len() + num_empty_frames, 0);
        let mut head = Vec::new();
        head.extend(self.mark.unwrap_or(MARK).to_le_bytes());
        head.extend(self.wide_kind.unwrap_or(self.kind.into()).to_le_bytes());
        head.extend(self.num_frames.unwrap_or(lengths.len() as u64).to_le_bytes());
        head.extend(self.sequence.unwrap_or(sequence).to_le_bytes());
        head.extend([0; 8]);
        if let Some((position, length)) = self.wrong_length {
            let num_lengths = lengths.len().max(1);
            if let Some(wrong) = lengths.get_mut(usize::from(position) % num_lengths) {
                *wrong = length;
            }
        }
        head.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
        let check = self.check.unwrap_or_else(|| xxh3_64(&head));
        head[CHECK..HEADER_BYTES].copy_from_slice(&check.to_le_bytes());
        stream.extend(head);
        stream.extend(self.frames.iter().flatten());
    }
}

impl Input {
    fn stream(&self) -> Vec<u8> {
        let mut stream = Vec::new();
        let mut sequence = 0;
        for part in &self.parts {
            match part {
                Part::Message(draft) => {
                    draft.write(sequence, &mut stream);
                    sequence += 1;
                }
                Part::Bytes(bytes) => stream.extend(bytes),
            }
        }
        if let Some((position, bits)) = self.damage {
            let len = stream.len().max(1);
            if let Some(byte) = stream.get_mut(usize::from(position) % len) {
                *byte ^= bits;
            }
        }
        stream
    }
}

fn number(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

/// The message that a stream begins with and what follows it; `None` if some of it is missing.
fn first_message(stream: &[u8], sequence: u64) -> Result<Option<(Message, &[u8])>, Corrupt> {
    let Some(header) = stream.get(..HEADER_BYTES) else { return Ok(None) };
    let is_marked = header.starts_with(&MARK.to_le_bytes());
    if !is_marked || header[5..8] != [0; 3] || number(header, SEQUENCE) != sequence {
        return Err(Corrupt::Header);
    }
    let num_frames = number(header, NUM_FRAMES);
    if !(1..=MAX_FRAMES as u64).contains(&num_frames) {
        return Err(Corrupt::Length);
    }
    let head_len = HEADER_BYTES + LENGTH_BYTES * num_frames as usize;
    let Some((head, mut rest)) = stream.split_at_checked(head_len) else { return Ok(None) };
    let unchecked = [&head[..CHECK], &[0; 8], &head[HEADER_BYTES..]].concat();
    if xxh3_64(&unchecked) != number(head, CHECK) {
        return Err(Corrupt::Header);
    }
    let lengths = head[HEADER_BYTES..].as_chunks().0.iter().copied().map(u64::from_le_bytes);
    if lengths.clone().map(u128::from).sum::<u128>() > MAX_MESSAGE_BYTES.into() {
        return Err(Corrupt::Length);
    }
    let mut frames = Vec::new();
    for length in lengths {
        let Some((frame, behind)) = rest.split_at_checked(length as usize) else { return Ok(None) };
        frames.push(frame.to_vec());
        rest = behind;
    }
    Ok(Some((Message { kind: header[4], frames }, rest)))
}

/// Reads the stream from the ring.
pub fn check(input: &Input) {
    let stream = input.stream();
    let capacity = 1 << (input.log_capacity % 13);
    let (mut producer, mut consumer) = Ring::on_heap(capacity, input.start).split();
    let mut reader = Reader::default();
    let (mut unwritten, mut unread, mut sequence) = (&stream[..], &stream[..], 0);
    let pieces = input.pieces.iter().map(|len| usize::from(*len).max(1)).chain([capacity]);
    for piece in pieces.collect::<Vec<_>>().into_iter().cycle() {
        let piece = piece.min(unwritten.len());
        let written = producer.write(&unwritten[..piece]).unwrap();
        producer.publish();
        unwritten = &unwritten[written..];
        let arrived = &unread[..unread.len() - unwritten.len()];
        loop {
            let arrived = &arrived[arrived.len() - (unread.len() - unwritten.len())..];
            match (reader.next(&mut consumer), first_message(arrived, sequence)) {
                (Ok(Some(message)), Ok(Some((expected, rest)))) => {
                    assert_eq!(message, expected);
                    unread = &unread[arrived.len() - rest.len()..];
                    sequence += 1;
                }
                (Ok(None), Ok(None)) => break,
                (Err(error), Err(expected)) => {
                    assert_eq!(error, expected);
                    return;
                }
                (found, expected) => panic!("{found:?} instead of {expected:?}"),
            }
        }
        consumer.release();
        if unwritten.is_empty() {
            assert_eq!(reader.is_in_message(), !unread.is_empty());
            return;
        }
    }
}
