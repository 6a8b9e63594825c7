//! The memory that an engine and a client share, and the page with the engine's bell.
//!
//! Both are memfds: they have no name that could outlive their processes and need no mount. They are
//! allocated up front, where a lack of memory is an error that can be told, and sealed against
//! resizing, so touching them can't end in SIGBUS later.

use std::any::Any;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    memfd_create,
};
use rustix::io::{Errno, retry_on_intr};

use crate::bell::Bell;
use crate::meters::Meters;
use crate::ring::{Line, Ring, RingHeader};
use crate::sync::AtomicU64;

/// Changes with each change of what lies where.
pub const LAYOUT_VERSION: u32 = 1;
/// The smallest ring: room for a step's outputs, and for every header.
pub const MIN_RING_BYTES: usize = 4096;
/// The largest ring.
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
/// What a mapping has at least: the smallest page of any kernel. Arm's have up to 64 KiB, and then more
/// lies behind what was asked for, which nothing touches.
pub(crate) const PAGE_BYTES: usize = 4096;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Which end of a link this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The engine's.
    Engine,
    /// The API server's.
    Client,
}

/// Shared memory can't be made, or is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The system has no shared memory for us.
    #[error("shared memory of {bytes} bytes can't be made: {source}")]
    Unavailable {
        /// How much was asked for.
        bytes: usize,
        /// What the system says.
        source: std::io::Error,
    },
    /// What was received is not sealed, or has another size than was said.
    #[error("shared memory that was received is not what it should be: {0}")]
    Unfit(&'static str),
}

/// Memory that may not be resized, and to which `prepare` does something before it is sealed.
pub(crate) fn create_prepared<T>(
    name: &str,
    bytes: usize,
    prepare: impl FnOnce(&OwnedFd) -> std::io::Result<T>,
) -> Result<(T, OwnedFd), SegmentError> {
    let make = || -> std::io::Result<(T, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Kernels before 6.3 don't know the flag, later ones complain if it is missing.
        let fd = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create(name, flags)?,
            other => other?,
        };
        // A signal undoes what was allocated so far.
        retry_on_intr(|| fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64))?;
        let prepared = prepare(&fd)?;
        fcntl_add_seals(&fd, SEALS)?;
        Ok((prepared, fd))
    };
    make().map_err(|source| SegmentError::Unavailable { bytes, source })
}

fn create(name: &str, bytes: usize) -> Result<OwnedFd, SegmentError> {
    Ok(create_prepared(name, bytes, |_| Ok(()))?.1)
}

fn map(fd: BorrowedFd<'_>, bytes: usize) -> Result<MmapRaw, SegmentError> {
    check(fd, bytes)?;
    let options = mapping_of(bytes);
    options.map_raw(&fd).map_err(|source| SegmentError::Unavailable { bytes, source })
}

pub(crate) fn mapping_of(bytes: usize) -> MmapOptions {
    let mut options = MmapOptions::new();
    options.len(bytes).populate();
    options
}

/// Looks whether memory that was received can be used.
pub(crate) fn check(fd: BorrowedFd<'_>, bytes: usize) -> Result<(), SegmentError> {
    // The seals first: an unsealed size could change after it was looked at.
    if !fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS)) {
        return Err(SegmentError::Unfit("it is not sealed against resizing"));
    }
    let stat =
        fstat(fd).map_err(|error| SegmentError::Unavailable { bytes, source: error.into() })?;
    if u64::try_from(stat.st_size) != Ok(bytes as u64) {
        return Err(SegmentError::Unfit("its size is not the one that was said"));
    }
    Ok(())
}

/// What may lie at the beginning of a mapping: atomics alone, for which any bytes are valid, and no
/// more than a page.
pub(crate) trait OfAtomics {}

impl OfAtomics for SegmentHeader {}
impl OfAtomics for Bell {}
impl OfAtomics for Meters {}

/// What lies at the beginning of a mapping.
pub(crate) fn first<T: OfAtomics>(map: &MmapRaw) -> &T {
    const { assert!(size_of::<T>() <= PAGE_BYTES && align_of::<T>() <= PAGE_BYTES) };
    // SAFETY: the mapping is page-aligned, at least a page long, and lives as long as the reference;
    // `T` consists of atomics. One that may only be read is only handed to who only loads.
    unsafe { &*map.as_ptr().cast::<T>() }
}

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
    /// [`SegmentError::Unavailable`] if the system refuses.
    pub fn create(ring_bytes: usize) -> Result<(Self, OwnedFd), SegmentError> {
        let fd = create("sparksched-rings", Self::bytes(ring_bytes))?;
        Ok((Self::open(fd.as_fd(), ring_bytes)?, fd))
    }

    /// The memory behind a descriptor that was received.
    ///
    /// # Errors
    /// [`SegmentError::Unfit`] unless it is sealed and has the size of rings of `ring_bytes`.
    pub fn open(fd: BorrowedFd<'_>, ring_bytes: usize) -> Result<Self, SegmentError> {
        let is_sane =
            ring_bytes.is_power_of_two() && (MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes);
        if !is_sane {
            return Err(SegmentError::Unfit("its rings have an impossible size"));
        }
        Ok(Self { map: Arc::new(map(fd, Self::bytes(ring_bytes))?), ring_bytes })
    }

    /// The bytes of each ring.
    #[must_use]
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
    /// [`SegmentError::Unavailable`] if the system refuses.
    pub fn create() -> Result<(Self, OwnedFd), SegmentError> {
        let fd = create("sparksched-bell", PAGE_BYTES)?;
        Ok((Self::open(fd.as_fd())?, fd))
    }

    /// The page behind a descriptor that was received.
    ///
    /// # Errors
    /// [`SegmentError::Unfit`] unless it is sealed and a page.
    pub fn open(fd: BorrowedFd<'_>) -> Result<Self, SegmentError> {
        Ok(Self { map: map(fd, PAGE_BYTES)? })
    }

    /// The bell.
    #[must_use]
    pub fn bell(&self) -> &Bell {
        first(&self.map)
    }
}
