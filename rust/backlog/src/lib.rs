//! How much may wait for a reader, whether it reads from a ring or from a socket. No input or output
//! here, and no messages: those are the sender's.
#![forbid(unsafe_code)]

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
    #[must_use]
    pub const fn fixed(max_bytes: usize) -> Self {
        Self { idle_bytes: max_bytes, patience: Duration::ZERO, max_bytes }
    }
}

/// How much waits for a reader, and since when it has taken nothing.
#[derive(Debug)]
pub struct Level {
    bytes: usize,
    /// When the reader was last seen to take something, or else when the first byte had to wait.
    progress_at: Instant,
    limits: Limits,
}

impl Level {
    /// Nothing waits.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { bytes: 0, progress_at: Instant::now(), limits }
    }

    /// What waits.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// For how long the reader has taken nothing of what waits; `None` if nothing waits.
    #[must_use]
    pub fn idle_for(&self) -> Option<Duration> {
        (self.bytes > 0).then(|| self.progress_at.elapsed())
    }

    /// Whether no further message is to wait. A single one of any size may, if none does.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let Limits { idle_bytes, patience, max_bytes } = self.limits;
        self.bytes > 0
            && (self.bytes >= max_bytes
                || (self.bytes >= idle_bytes && self.progress_at.elapsed() >= patience))
    }

    /// So many more bytes wait.
    pub fn add(&mut self, bytes: usize) {
        if self.bytes == 0 {
            self.note_progress();
        }
        self.bytes += bytes;
    }

    /// So many bytes wait no more, whether they were taken or dropped.
    pub fn remove(&mut self, bytes: usize) {
        self.bytes -= bytes;
    }

    /// Nothing waits any more.
    pub fn clear(&mut self) {
        self.bytes = 0;
    }

    /// The reader has taken something.
    pub fn note_progress(&mut self) {
        self.progress_at = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_of_any_size_may_wait() {
        let mut level = Level::new(Limits::fixed(0));
        assert!(!level.is_full());
        level.add(1 << 40);
        assert!(level.is_full());
        level.remove(1 << 40);
        assert!(!level.is_full());
    }

    #[test]
    fn a_reader_that_takes_something_may_be_further_behind() {
        let patience = Duration::from_secs(3600);
        let mut patient = Level::new(Limits { idle_bytes: 10, patience, max_bytes: 100 });
        let impatient = Limits { idle_bytes: 10, patience: Duration::ZERO, max_bytes: 100 };
        let mut impatient = Level::new(impatient);
        for level in [&mut patient, &mut impatient] {
            level.add(9);
            assert!(!level.is_full());
            level.add(1);
        }
        assert!(!patient.is_full());
        assert!(impatient.is_full());
        patient.add(90);
        assert!(patient.is_full());
    }
}
