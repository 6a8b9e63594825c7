//! A message that waits until its peer takes it.

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
}

impl sparksched_backlog::Waiting for Waiting {
    fn bytes(&self) -> usize {
        self.frames.iter().map(|frame| frame.len() + MAX_HEADER_BYTES).sum()
    }

    fn can_be_taken_back(&self) -> bool {
        self.written == 0 && !self.must_arrive
    }
}

pub(crate) fn headers<T: AsRef<[u8]>>(frames: &[T]) -> Vec<Header> {
    let last = frames.len().saturating_sub(1);
    let header = |(at, frame): (usize, &T)| frame_header(frame.as_ref().len(), at < last);
    frames.iter().enumerate().map(header).collect()
}
