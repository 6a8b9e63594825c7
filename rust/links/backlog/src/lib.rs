//! Messages that wait for a reader, within limits, whether it reads from a ring or from a socket. No
//! input or output here: that is the sender's.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How much may wait for a reader: one that reads slowly is given more than one that doesn't.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes for a reader that has taken nothing for `patience`.
    pub idle_bytes: usize,
    /// How long a reader may take nothing.
    pub patience: Duration,
    /// Bytes for any reader.
    pub max_bytes: usize,
}

impl Limits {
    /// The same for all readers.
    pub const fn fixed(max_bytes: usize) -> Self {
        Self { idle_bytes: max_bytes, patience: Duration::ZERO, max_bytes }
    }
}

/// A message, as far as its place in a backlog is concerned.
pub trait Waiting {
    /// What it takes: a message of many empty frames takes memory, too. Always the same.
    fn bytes(&self) -> usize;

    /// Whether nothing of it has been sent yet, and it may be lost.
    fn can_be_taken_back(&self) -> bool;
}

/// Messages in their order, of which the first may have been sent in part.
#[derive(Debug)]
pub struct Backlog<T> {
    waiting: VecDeque<T>,
    bytes: usize,
    /// When the reader was last seen to take something, or else when the first byte had to wait.
    progress_at: Instant,
    limits: Limits,
}

impl<T: Waiting> Backlog<T> {
    pub fn new(limits: Limits) -> Self {
        Self { waiting: VecDeque::new(), bytes: 0, progress_at: Instant::now(), limits }
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// For how long the reader has taken nothing of what waits; `None` if nothing waits.
    pub fn idle_for(&self) -> Option<Duration> {
        (!self.is_empty()).then(|| self.progress_at.elapsed())
    }

    /// Whether no further message is to wait. A single one of any size may, if none does.
    pub fn is_full(&self) -> bool {
        let Limits { idle_bytes, patience, max_bytes } = self.limits;
        !self.is_empty()
            && (self.bytes >= max_bytes
                || (self.bytes >= idle_bytes && self.progress_at.elapsed() >= patience))
    }

    /// The reader has taken something.
    pub fn note_progress(&mut self) {
        self.progress_at = Instant::now();
    }

    /// Has a message wait, however many do.
    pub fn push(&mut self, message: T) {
        if self.is_empty() {
            self.note_progress();
        }
        self.bytes += message.bytes();
        self.waiting.push_back(message);
    }

    /// The message that is to be sent next.
    pub fn first(&self) -> Option<&T> {
        self.waiting.front()
    }

    /// The same, to be sent.
    pub fn first_mut(&mut self) -> Option<&mut T> {
        self.waiting.front_mut()
    }

    /// The first message has been sent.
    pub fn pop_first(&mut self) {
        self.bytes -= self.waiting.pop_front().map_or(0, |message| message.bytes());
    }

    /// Takes back the last message, whatever was sent of it.
    pub fn pop_last(&mut self) {
        self.bytes -= self.waiting.pop_back().map_or(0, |message| message.bytes());
    }

    /// Takes back what can be: the newest first, until they have `max_bytes` or none is left. What
    /// stays is what came before, so that the reader misses nothing in the middle.
    pub fn take_back_newest(&mut self, max_bytes: usize) -> Vec<T> {
        let (mut taken, mut kept, mut taken_bytes) = (Vec::new(), Vec::new(), 0);
        while taken_bytes < max_bytes {
            let Some(message) = self.waiting.pop_back() else { break };
            if message.can_be_taken_back() {
                taken_bytes += message.bytes();
                taken.push(message);
            } else {
                kept.push(message);
            }
        }
        self.waiting.extend(kept.into_iter().rev());
        self.bytes -= taken_bytes;
        taken
    }

    /// Drops all: nobody is left to read it.
    pub fn clear(&mut self) {
        self.waiting = VecDeque::new();
        self.bytes = 0;
    }
}
