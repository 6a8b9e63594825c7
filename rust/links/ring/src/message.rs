//! Messages in a stream of bytes: a header, the lengths of the frames, and the frames.
//!
//! A message may be larger than the ring: it then passes in pieces. The reader believes a header
//! only after its mark, its sequence number and its checksum have been verified, and takes memory
//! for a frame as its bytes arrive, not as they are announced.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64;

use crate::ring::{Consumer, Corrupt};

/// No message has more frames than this.
pub const MAX_FRAMES: usize = 65_536;
/// No message has more bytes than this, all frames together.
pub const MAX_MESSAGE_BYTES: u64 = 4 << 30;

const MARK: u32 = 0x5350_524b; // "SPRK"
const HEADER_BYTES: usize = 32;
const LENGTH_BYTES: usize = 8;
const CHECK_BYTES: usize = 8;
/// Where a header's kind lies: four bytes, of which kinds fill one.
const KIND: usize = 4;
const CHECK: Range<usize> = HEADER_BYTES - CHECK_BYTES..HEADER_BYTES;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// What kind of message it is; only sender and receiver know the kinds.
    pub kind: u8,
    /// Its contents; at least one frame.
    pub frames: Vec<Vec<u8>>,
}

/// A message that can't be sent, whatever the state of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsendable {
    #[error("a message has 1 to {MAX_FRAMES} frames, not {0}")]
    Frames(usize),
    #[error("a message has at most {MAX_MESSAGE_BYTES} bytes, not {0}")]
    Bytes(u64),
}

/// Whether frames of these lengths make a message.
pub(crate) fn check(frame_lengths: impl ExactSizeIterator<Item = usize>) -> Result<(), Unsendable> {
    let num_frames = frame_lengths.len();
    if num_frames == 0 || num_frames > MAX_FRAMES {
        return Err(Unsendable::Frames(num_frames));
    }
    let total: u64 = frame_lengths.map(|length| length as u64).sum();
    if total > MAX_MESSAGE_BYTES { Err(Unsendable::Bytes(total)) } else { Ok(()) }
}

/// How many bytes go before so many frames.
pub(crate) const fn header_bytes(num_frames: usize) -> usize {
    HEADER_BYTES + num_frames * LENGTH_BYTES
}

/// The bytes that go before the frames of a message; its `sequence` is its number in the stream.
pub(crate) fn header(
    kind: u8,
    sequence: u64,
    frame_lengths: impl ExactSizeIterator<Item = usize>,
) -> Vec<u8> {
    let num_frames = frame_lengths.len();
    let mut bytes = Vec::with_capacity(header_bytes(num_frames));
    bytes.extend_from_slice(&MARK.to_le_bytes());
    bytes.extend_from_slice(&u32::from(kind).to_le_bytes());
    bytes.extend_from_slice(&(num_frames as u64).to_le_bytes());
    bytes.extend_from_slice(&sequence.to_le_bytes());
    bytes.extend_from_slice(&[0; CHECK_BYTES]);
    for length in frame_lengths {
        bytes.extend_from_slice(&(length as u64).to_le_bytes());
    }
    // The checksum of all this, with zeros in its own place.
    let check = xxh3_64(&bytes);
    bytes[CHECK].copy_from_slice(&check.to_le_bytes());
    bytes
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
}

/// Puts messages together from what a ring delivers.
#[derive(Debug, Default)]
pub struct Reader {
    /// The sequence number of the next message.
    sequence: u64,
    /// Header and lengths, as far as they have arrived.
    head: Vec<u8>,
    /// The lengths of the frames, once the header has been verified.
    lengths: Vec<u64>,
    /// The frames that are complete, and the one that isn't.
    frames: Vec<Vec<u8>>,
    frame: Vec<u8>,
}

impl Reader {
    /// The next whole message, or `None` if it hasn't arrived yet.
    ///
    /// # Errors
    /// [`Corrupt`] if what arrives is no message. Nothing can be read after that.
    pub fn next(&mut self, ring: &mut Consumer) -> Result<Option<Message>, Corrupt> {
        if self.lengths.is_empty() && !self.read_header(ring)? {
            return Ok(None);
        }
        while self.frames.len() < self.lengths.len() {
            let length = self.lengths[self.frames.len()];
            if !fill(ring, &mut self.frame, length as usize)? {
                return Ok(None);
            }
            self.frames.push(std::mem::take(&mut self.frame));
        }
        Ok(Some(self.finish()))
    }

    /// Whether a part of a message has arrived.
    pub fn is_in_message(&self) -> bool {
        !self.head.is_empty()
    }

    fn finish(&mut self) -> Message {
        let kind = self.head[KIND];
        self.head.clear();
        self.lengths.clear();
        self.sequence += 1;
        Message { kind, frames: std::mem::take(&mut self.frames) }
    }

    fn read_header(&mut self, ring: &mut Consumer) -> Result<bool, Corrupt> {
        if !fill(ring, &mut self.head, HEADER_BYTES)? {
            return Ok(false);
        }
        let is_marked = self.head[..KIND] == MARK.to_le_bytes();
        let has_kind = self.head[KIND + 1..KIND + 4] == [0; 3];
        if !is_marked || !has_kind || u64_at(&self.head, 16) != self.sequence {
            return Err(Corrupt::Header);
        }
        let num_frames = u64_at(&self.head, 8);
        if num_frames == 0 || num_frames > MAX_FRAMES as u64 {
            return Err(Corrupt::Length);
        }
        let head_bytes = header_bytes(num_frames as usize);
        if !fill(ring, &mut self.head, head_bytes)? {
            return Ok(false);
        }
        let check = u64_at(&self.head, CHECK.start);
        self.head[CHECK].fill(0);
        if xxh3_64(&self.head) != check {
            return Err(Corrupt::Header);
        }
        self.lengths = self.head[HEADER_BYTES..]
            .chunks_exact(LENGTH_BYTES)
            .map(|length| u64_at(length, 0))
            .collect();
        let total = self.lengths.iter().try_fold(0u64, |sum, length| sum.checked_add(*length));
        if total.is_none_or(|total| total > MAX_MESSAGE_BYTES) {
            return Err(Corrupt::Length);
        }
        Ok(true)
    }
}

/// Reads until `buffer` has `length` bytes; false if they haven't all arrived.
fn fill(ring: &mut Consumer, buffer: &mut Vec<u8>, length: usize) -> Result<bool, Corrupt> {
    /// Memory is taken in steps of at most this, so that an announced length alone takes none.
    const STEP_BYTES: usize = 1 << 20;
    while buffer.len() < length {
        let start = buffer.len();
        buffer.resize(length.min(start + STEP_BYTES), 0);
        let read = ring.read(&mut buffer[start..])?;
        buffer.truncate(start + read);
        if read == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}
