//! The sending side of a ring: messages go into the ring, and wait here if it has no room.

use std::time::Duration;

use sparksched_backlog::{self as backlog, Backlog, Limits};
use sparksched_meters::Traffic;

use crate::message::{self, Message, Unsendable};
use crate::points::reach;
use crate::ring::{Corrupt, Producer};

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("the ring is full, and so is the backlog behind it")]
    Full,
    /// It could not be sent through an empty ring either.
    #[error(transparent)]
    Unsendable(#[from] Unsendable),
    #[error("the other side is gone")]
    Gone,
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
}

/// Names a message among those of its outbox. Later messages have higher tickets.
pub type Ticket = u64;

/// A message of which something is still to be written.
#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    kind: u8,
    /// Header and lengths: made when writing begins, because a message that is taken back before
    /// leaves no gap in the sequence.
    header: Vec<u8>,
    frames: Vec<Vec<u8>>,
    /// How many bytes of header and frames have been written.
    written: usize,
    /// It was sent regardless of what waits.
    must_arrive: bool,
}

impl Waiting {
    fn is_begun(&self) -> bool {
        !self.header.is_empty()
    }
}

impl backlog::Waiting for Waiting {
    /// Its size in the ring.
    fn bytes(&self) -> usize {
        message::header_bytes(self.frames.len()) + self.frames.iter().map(Vec::len).sum::<usize>()
    }

    fn can_be_taken_back(&self) -> bool {
        !self.is_begun() && !self.must_arrive
    }
}

/// A producer with a backlog.
#[derive(Debug)]
pub struct Outbox {
    ring: Producer,
    waiting: Backlog<Waiting>,
    next_ticket: Ticket,
    /// The first of those that were dropped because nobody is left to read them.
    first_forgotten: Option<Ticket>,
    next_sequence: u64,
    is_closed: bool,
    /// The most bytes that were seen in the ring after a message was sent.
    high_water_bytes: usize,
    /// Messages that found no room in the ring, or only for a part of them.
    num_without_room: u64,
}

impl Outbox {
    /// An outbox that accepts messages while less waits than the limits allow. A single message of
    /// any size is accepted while none waits.
    pub fn new(ring: Producer, limits: Limits) -> Self {
        Self {
            ring,
            waiting: Backlog::new(limits),
            next_ticket: 0,
            first_forgotten: None,
            next_sequence: 0,
            is_closed: false,
            high_water_bytes: 0,
            num_without_room: 0,
        }
    }

    /// Sends a message: into the ring as far as there is room, and the rest as room appears.
    /// The reader has to be woken after this.
    ///
    /// # Errors
    /// [`SendError`]; the message was not accepted then, not even in part.
    pub fn send(&mut self, kind: u8, frames: &[&[u8]]) -> Result<Ticket, SendError> {
        if self.waiting.is_full() {
            // Perhaps the reader has caught up since the last look.
            self.flush()?;
            if self.waiting.is_full() {
                return Err(SendError::Full);
            }
        }
        self.accept(kind, frames, false)
    }

    /// As [`Self::send`], but accepts the message however many wait, and keeps it until it is sent.
    ///
    /// # Errors
    /// [`SendError`], but never [`SendError::Full`].
    pub fn send_regardless(&mut self, kind: u8, frames: &[&[u8]]) -> Result<Ticket, SendError> {
        self.accept(kind, frames, true)
    }

    fn accept(
        &mut self,
        kind: u8,
        frames: &[&[u8]],
        must_arrive: bool,
    ) -> Result<Ticket, SendError> {
        message::check(frames.iter().map(|frame| frame.len()))?;
        let ticket = self.next_ticket;
        if self.is_closed {
            // As if it had been kept until the close: the reader expects nothing any more.
        } else if self.waiting.is_empty() {
            let header =
                message::header(kind, self.next_sequence, frames.iter().map(|frame| frame.len()));
            self.next_sequence += 1;
            let parts = std::iter::once(&header[..]).chain(frames.iter().copied());
            let (written, is_whole) = write_parts(&mut self.ring, parts)?;
            self.ring.publish();
            if !is_whole {
                let frames = owned(frames);
                self.keep(Waiting { ticket, kind, header, frames, written, must_arrive });
                reach("half-written");
                self.flush_or_forget()?;
            }
        } else {
            let (header, frames) = (Vec::new(), owned(frames));
            self.keep(Waiting { ticket, kind, header, frames, written: 0, must_arrive });
            self.flush_or_forget()?;
        }
        self.next_ticket += 1;
        Ok(ticket)
    }

    /// Flushes; if the ring turns out to be broken, the last message was not accepted.
    fn flush_or_forget(&mut self) -> Result<(), Corrupt> {
        self.flush().inspect_err(|_| self.waiting.pop_last())
    }

    fn keep(&mut self, message: Waiting) {
        self.num_without_room += 1;
        self.waiting.push(message);
    }

    /// Writes as much of the backlog as there is room for. If some stays, the reader will ask for it
    /// once it has made room. The reader has to be woken after this.
    ///
    /// # Errors
    /// [`Corrupt::Position`] if the ring is broken.
    pub fn flush(&mut self) -> Result<(), Corrupt> {
        while let Some(message) = self.waiting.first_mut() {
            if !message.is_begun() {
                let lengths = message.frames.iter().map(Vec::len);
                message.header = message::header(message.kind, self.next_sequence, lengths);
                self.next_sequence += 1;
            }
            let parts = std::iter::once(&message.header).chain(&message.frames).map(Vec::as_slice);
            let unwritten = Unwritten { parts, skip: message.written };
            let (written, is_whole) = write_parts(&mut self.ring, unwritten)?;
            message.written += written;
            if written > 0 {
                self.waiting.note_progress();
            }
            if is_whole {
                self.waiting.pop_first();
                continue;
            }
            self.ring.publish();
            if !self.ring.wait_for_space()? {
                return Ok(());
            }
        }
        self.ring.publish();
        Ok(())
    }

    /// All messages with lower tickets are in the ring, or were taken back.
    pub fn sent_before(&self) -> Ticket {
        let waiting = self.waiting.first().map(|message| message.ticket);
        self.first_forgotten.or(waiting).unwrap_or(self.next_ticket)
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether something waits for which there may be room now.
    pub fn can_go_on(&mut self) -> bool {
        // A broken ring is found by the flush that follows.
        !self.waiting.is_empty() && self.ring.has_space() != Ok(false)
    }

    /// How many bytes of messages are here that are not wholly in the ring; with their headers, so
    /// that it is 0 only if nothing waits.
    pub fn waiting_bytes(&self) -> usize {
        self.waiting.bytes()
    }

    /// For how long nothing of what waits has found room; `None` if nothing waits.
    pub fn without_room_for(&self) -> Option<Duration> {
        self.waiting.idle_for()
    }

    /// Looks how much is in the ring; to be called after sending.
    pub(crate) fn note_depth(&mut self) {
        // A broken ring is found by the next write.
        let depth = self.ring.depth_beyond(self.high_water_bytes).unwrap_or(0);
        self.high_water_bytes = self.high_water_bytes.max(depth);
    }

    /// What has gone this way, and what waits.
    pub(crate) fn traffic(&mut self) -> Traffic {
        let waiting_bytes = self.ring.depth_beyond(0).unwrap_or(0);
        Traffic {
            waiting_bytes: waiting_bytes as u64,
            high_water_bytes: self.high_water_bytes.max(waiting_bytes) as u64,
            backlog_bytes: self.waiting.bytes() as u64,
            num_without_room: self.num_without_room,
        }
    }

    /// Takes back messages of which nothing has been written yet, but for those that were sent
    /// regardless: see [`Backlog::take_back_newest`].
    pub fn take_back_newest(&mut self, max_bytes: usize) -> Vec<Message> {
        let taken = self.waiting.take_back_newest(max_bytes).into_iter();
        taken.map(|Waiting { kind, frames, .. }| Message { kind, frames }).collect()
    }

    /// Drops all that waits: nobody is left to read it.
    pub fn forget(&mut self) {
        let first = self.waiting.first().map(|message| message.ticket);
        self.first_forgotten = self.first_forgotten.or(first);
        self.waiting.clear();
    }

    /// Says that no message will follow. What still waits is dropped, and so is what is sent after
    /// this; the reader has to be woken.
    pub fn close(&mut self) {
        self.is_closed = true;
        self.ring.close();
        self.forget();
    }
}

fn owned(frames: &[&[u8]]) -> Vec<Vec<u8>> {
    frames.iter().map(|frame| frame.to_vec()).collect()
}

/// Writes parts until one doesn't fit; returns how many bytes were written, and whether all were.
fn write_parts<'a>(
    ring: &mut Producer,
    parts: impl Iterator<Item = &'a [u8]>,
) -> Result<(usize, bool), Corrupt> {
    let mut written = 0;
    for part in parts {
        let len = ring.write(part)?;
        written += len;
        if len < part.len() {
            return Ok((written, false));
        }
    }
    Ok((written, true))
}

/// Parts without their first `skip` bytes.
struct Unwritten<I> {
    parts: I,
    skip: usize,
}

impl<'a, I: Iterator<Item = &'a [u8]>> Iterator for Unwritten<I> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let part = self.parts.next()?;
        let skipped = self.skip.min(part.len());
        self.skip -= skipped;
        Some(&part[skipped..])
    }
}
