//! The memory that an engine and a client share, and the page with the engine's bell.

use std::any::Any;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use memmap2::MmapRaw;
use sparksched_shm::sync::AtomicU64;
use sparksched_shm::{Line, OfAtomics, PAGE_BYTES, ShmError, create, first, map};

use crate::bell::Bell;
use crate::ring::{Ring, RingHeader};

/// Changes with each change of what lies where.
pub const LAYOUT_VERSION: u32 = 1;
/// The smallest ring: room for a step's outputs, and for every header.
pub const MIN_RING_BYTES: usize = 4096;
pub const MAX_RING_BYTES: usize = 1 << 30;

/// What begins the segment; the two rings' bytes follow, the engine's input first.
#[derive(Debug)]
#[repr(C)]
struct SegmentHeader {
    to_engine: RingHeader,
    to_client: RingHeader,
    client_bell: Line<Bell>,
    engine_beat: Line<Beat>,
    client_beat: Line<Beat>,
}

/// How a side says that it runs. Relaxed on both sides: it orders nothing.
#[derive(Debug)]
#[repr(C)]
struct Beat {
    /// When it last did: milliseconds of the monotonic clock, 0 if it never did.
    at_ms: AtomicU64,
    /// How long it may take until it does again.
    interval_ms: AtomicU64,
}

/// Where the rings' bytes begin.
const DATA_OFFSET: usize = 4096;
const _: () = assert!(size_of::<SegmentHeader>() <= DATA_OFFSET);
// What both sides rely on; a change here is a new LAYOUT_VERSION.
const _: () = assert!(
    offset_of!(SegmentHeader, to_client) == 512
        && offset_of!(SegmentHeader, client_bell) == 1024
        && offset_of!(SegmentHeader, engine_beat) == 1152
        && offset_of!(SegmentHeader, client_beat) == 1280
);
/// Which end of a link this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Engine,
    /// The API server's.
    Client,
}

// SAFETY: all fields are atomics, in lines of their own.
unsafe impl OfAtomics for SegmentHeader {}
// SAFETY: its one field is an atomic.
unsafe impl OfAtomics for Bell {}

/// The memory between one engine and one client.
#[derive(Debug)]
pub struct Segment {
    map: Arc<MmapRaw>,
    ring_bytes: usize,
}

impl Segment {
    fn bytes(ring_bytes: usize) -> usize {
        DATA_OFFSET + 2 * ring_bytes
    }

    /// New memory with two empty rings of `ring_bytes` each, and the descriptor to pass on.
    ///
    /// # Errors
    /// [`ShmError::Unavailable`] if the system refuses.
    pub fn create(ring_bytes: usize) -> Result<(Self, OwnedFd), ShmError> {
        let fd = create("sparksched-rings", Self::bytes(ring_bytes))?;
        Ok((Self::open(fd.as_fd(), ring_bytes)?, fd))
    }

    /// The memory behind a descriptor that was received.
    ///
    /// # Errors
    /// [`ShmError::Unfit`] unless it is sealed and has the size of rings of `ring_bytes`.
    pub fn open(fd: BorrowedFd<'_>, ring_bytes: usize) -> Result<Self, ShmError> {
        let is_sane =
            ring_bytes.is_power_of_two() && (MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes);
        if !is_sane {
            return Err(ShmError::Unfit("its rings have an impossible size"));
        }
        Ok(Self { map: Arc::new(map(fd, Self::bytes(ring_bytes))?), ring_bytes })
    }

    pub fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    fn header(&self) -> &SegmentHeader {
        first(&self.map)
    }

    fn ring(&self, header: &RingHeader, index: usize) -> Ring {
        let data = self.map.as_mut_ptr().wrapping_add(DATA_OFFSET + index * self.ring_bytes);
        let data = NonNull::new(data).expect("a mapping is never at zero");
        let keeper: Arc<dyn Any + Send + Sync> = self.map.clone();
        // SAFETY: header and data lie within the mapping, which the keeper keeps and which was zeroed
        // when it was made; each process makes one link of a segment, and each link the one end of each ring that is its side's.
        unsafe { Ring::over(NonNull::from(header), data, self.ring_bytes, keeper) }
    }

    /// The ring that carries messages to the engine.
    pub(crate) fn to_engine(&self) -> Ring {
        self.ring(&self.header().to_engine, 0)
    }

    /// The ring that carries messages to the client.
    pub(crate) fn to_client(&self) -> Ring {
        self.ring(&self.header().to_client, 1)
    }

    /// What wakes the client.
    pub(crate) fn client_bell(&self) -> &Bell {
        &self.header().client_bell.0
    }

    fn beat_of(&self, side: Side) -> &Beat {
        match side {
            Side::Engine => &self.header().engine_beat.0,
            Side::Client => &self.header().client_beat.0,
        }
    }

    /// Says that a side runs, and will say so again in `interval_ms`.
    pub(crate) fn beat(&self, side: Side, now_ms: u64, interval_ms: u64) {
        let beat = self.beat_of(side);
        beat.at_ms.store(now_ms, Relaxed);
        beat.interval_ms.store(interval_ms, Relaxed);
    }

    /// When a side last said that it runs, 0 if it never did, and its interval.
    pub(crate) fn last_beat(&self, side: Side) -> (u64, u64) {
        let beat = self.beat_of(side);
        (beat.at_ms.load(Relaxed), beat.interval_ms.load(Relaxed))
    }
}

/// The page with the bell that all clients of an engine ring.
#[derive(Debug)]
pub struct BellPage {
    map: MmapRaw,
}

impl BellPage {
    /// A new page, and the descriptor to pass on.
    ///
    /// # Errors
    /// [`ShmError::Unavailable`] if the system refuses.
    pub fn create() -> Result<(Self, OwnedFd), ShmError> {
        let fd = create("sparksched-bell", PAGE_BYTES)?;
        Ok((Self::open(fd.as_fd())?, fd))
    }

    /// The page behind a descriptor that was received.
    ///
    /// # Errors
    /// [`ShmError::Unfit`] unless it is sealed and a page.
    pub fn open(fd: BorrowedFd<'_>) -> Result<Self, ShmError> {
        Ok(Self { map: map(fd, PAGE_BYTES)? })
    }

    pub fn bell(&self) -> &Bell {
        first(&self.map)
    }
}
