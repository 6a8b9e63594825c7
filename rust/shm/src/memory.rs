//! Sealed memory: made, checked and mapped.
//!
//! It is a memfd, which has no name that could outlive its processes and needs no mount. It is
//! allocated up front, where a lack of memory is an error that can be told, and sealed against
//! resizing, so touching it can't end in SIGBUS later.

use std::os::fd::{BorrowedFd, OwnedFd};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    memfd_create,
};
use rustix::io::{Errno, retry_on_intr};

/// What a mapping has at least: the smallest page of any kernel. Arm's have up to 64 KiB, and then more
/// lies behind what was asked for, which nothing touches.
pub const PAGE_BYTES: usize = 4096;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Shared memory can't be made, or is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    #[error("shared memory of {bytes} bytes can't be made: {source}")]
    Unavailable { bytes: usize, source: std::io::Error },
    /// What was received is not sealed, or has another size than was said.
    #[error("shared memory that was received is not what it should be: {0}")]
    Unfit(&'static str),
}

/// Memory that may not be resized, and to which `prepare` does something before it is sealed.
///
/// # Errors
/// [`ShmError::Unavailable`] if the system refuses.
pub fn create_prepared<T>(
    name: &str,
    bytes: usize,
    prepare: impl FnOnce(&OwnedFd) -> std::io::Result<T>,
) -> Result<(T, OwnedFd), ShmError> {
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
    make().map_err(|source| ShmError::Unavailable { bytes, source })
}

/// Memory that may not be resized.
///
/// # Errors
/// [`ShmError::Unavailable`] if the system refuses.
pub fn create(name: &str, bytes: usize) -> Result<OwnedFd, ShmError> {
    Ok(create_prepared(name, bytes, |_| Ok(()))?.1)
}

/// Maps memory that was received.
///
/// # Errors
/// [`ShmError::Unfit`] unless it is sealed and has this size.
pub fn map(fd: BorrowedFd<'_>, bytes: usize) -> Result<MmapRaw, ShmError> {
    check(fd, bytes)?;
    let options = mapping_of(bytes);
    options.map_raw(&fd).map_err(|source| ShmError::Unavailable { bytes, source })
}

/// How memory of this size is mapped: all of its pages at once.
pub fn mapping_of(bytes: usize) -> MmapOptions {
    let mut options = MmapOptions::new();
    options.len(bytes).populate();
    options
}

/// Looks whether memory that was received can be used.
///
/// # Errors
/// [`ShmError::Unfit`] unless it is sealed and has this size.
pub fn check(fd: BorrowedFd<'_>, bytes: usize) -> Result<(), ShmError> {
    // The seals first: an unsealed size could change after it was looked at.
    if !fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS)) {
        return Err(ShmError::Unfit("it is not sealed against resizing"));
    }
    let stat = fstat(fd).map_err(|error| ShmError::Unavailable { bytes, source: error.into() })?;
    if u64::try_from(stat.st_size) != Ok(bytes as u64) {
        return Err(ShmError::Unfit("its size is not the one that was said"));
    }
    Ok(())
}

/// What may lie at the beginning of a mapping: atomics alone, for which any bytes are valid, and no
/// more than a page.
///
/// # Safety
/// All fields are atomics.
pub unsafe trait OfAtomics {}

/// What lies at the beginning of a mapping.
pub fn first<T: OfAtomics>(map: &MmapRaw) -> &T {
    const { assert!(size_of::<T>() <= PAGE_BYTES && align_of::<T>() <= PAGE_BYTES) };
    // SAFETY: the mapping is page-aligned, at least a page long, and lives as long as the reference;
    // `T` consists of atomics. One that may only be read is only handed to who only loads.
    unsafe { &*map.as_ptr().cast::<T>() }
}

#[cfg(test)]
mod tests {
    use rustix::fs::ftruncate;

    use super::*;

    /// Also where a page is larger than what is asked for, or ends in the middle of it.
    #[test]
    fn all_of_it_is_allocated_when_it_is_made() {
        for bytes in [PAGE_BYTES, 3 * PAGE_BYTES, (1 << 16) + PAGE_BYTES, 16 << 20] {
            let fd = create("sparksched-test", bytes).unwrap();
            let stat = fstat(&fd).unwrap();
            assert_eq!(stat.st_size.cast_unsigned(), bytes as u64);
            assert!(stat.st_blocks * 512 >= stat.st_size, "{} blocks", stat.st_blocks);
            // And nobody can take it away again.
            assert_eq!(ftruncate(&fd, 0), Err(Errno::PERM));
        }
    }
}
