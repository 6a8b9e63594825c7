//! Messages that wait until their peer takes them, within limits.

use std::collections::VecDeque;

use sparksched_backlog::{Level, Limits};

use crate::protocol::{Header, MAX_HEADER_BYTES, frame_header};

/// Bytes to be written one after the other, of which some may have been.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) frames: Vec<Vec<u8>>,
    pub(crate) written: usize,
    must_arrive: bool,
}

impl Waiting {
    pub(crate) fn new(frames: &[&[u8]], written: usize, must_arrive: bool) -> Self {
        let frames = frames.iter().map(|frame| frame.to_vec()).collect();
        Self { frames, written, must_arrive }
    }

    /// What it takes: a message of many empty frames takes memory, too.
    fn bytes(&self) -> usize {
        self.frames.iter().map(|frame| frame.len() + MAX_HEADER_BYTES).sum()
    }
}

/// The headers of a message's frames.
pub(crate) fn headers<T: AsRef<[u8]>>(frames: &[T]) -> Vec<Header> {
    let last = frames.len().saturating_sub(1);
    let header = |(at, frame): (usize, &T)| frame_header(frame.as_ref().len(), at < last);
    frames.iter().enumerate().map(header).collect()
}

/// Messages in their order, the first of which may have been written in part.
#[derive(Debug)]
pub(crate) struct Backlog {
    waiting: VecDeque<Waiting>,
    level: Level,
}

impl Backlog {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { waiting: VecDeque::new(), level: Level::new(limits) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.level.bytes()
    }

    /// Whether no further message is to wait.
    pub(crate) fn is_full(&self) -> bool {
        self.level.is_full()
    }

    pub(crate) fn push(&mut self, message: Waiting) {
        self.level.add(message.bytes());
        self.waiting.push_back(message);
    }

    pub(crate) fn note_progress(&mut self) {
        self.level.note_progress();
    }

    pub(crate) fn first_mut(&mut self) -> Option<&mut Waiting> {
        self.waiting.front_mut()
    }

    /// Whether the peer has a part of a message whose rest is here.
    pub(crate) fn is_begun(&self) -> bool {
        self.waiting.front().is_some_and(|first| first.written > 0)
    }

    pub(crate) fn pop_first(&mut self) {
        if let Some(first) = self.waiting.pop_front() {
            self.level.remove(first.bytes());
        }
    }

    /// Takes back messages of which nothing has been written, but for those that must arrive: the
    /// newest first, until they have `max_bytes` or none is left.
    pub(crate) fn take_back_newest(&mut self, max_bytes: usize) -> Vec<Vec<Vec<u8>>> {
        let (mut taken, mut kept, mut taken_bytes) = (Vec::new(), Vec::new(), 0);
        while taken_bytes < max_bytes {
            let Some(message) = self.waiting.pop_back() else { break };
            if message.written > 0 || message.must_arrive {
                kept.push(message);
            } else {
                taken_bytes += message.bytes();
                taken.push(message.frames);
            }
        }
        self.waiting.extend(kept.into_iter().rev());
        self.level.remove(taken_bytes);
        taken
    }

    /// Drops all: nobody is left to read it.
    pub(crate) fn clear(&mut self) {
        self.waiting = VecDeque::new();
        self.level.clear();
    }
}
