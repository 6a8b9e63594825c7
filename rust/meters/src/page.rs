//! The page with an engine's meters: the engine writes it, API servers of its user may read it.
//!
//! It is a memfd of its own, and not a part of a client's memory: each API server tells of all
//! clients, engines without rings have meters, too, and who may only read can't garble anything. The
//! engine says which of its descriptors it is; the kernel opens that to processes of the same user.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memmap2::MmapRaw;
use rustix::fs::{Mode, OFlags, SealFlags, fcntl_add_seals};

use sparksched_shm::{PAGE_BYTES, ShmError, check, create_prepared, first, mapping_of};

use crate::meters::{Meters, PacingReading, RingsReading, StepsReading};

#[derive(Debug)]
pub struct MeterPage {
    map: MmapRaw,
    fd: OwnedFd,
}

impl MeterPage {
    /// A new page of the engine with this name. Others can map it to read, and not to write.
    ///
    /// # Errors
    /// [`ShmError::Unavailable`] if the system refuses.
    pub fn create(id: u128) -> Result<Self, ShmError> {
        let (map, fd) = create_prepared("sparksched-meters", PAGE_BYTES, |fd| {
            let map = mapping_of(PAGE_BYTES).map_raw(fd)?;
            // Kernels before 5.1 don't know it: there, others of this user could garble the page.
            let _ = fcntl_add_seals(fd, SealFlags::FUTURE_WRITE);
            Ok(map)
        })?;
        let page = Self { map, fd };
        page.meters().set_id(id);
        Ok(page)
    }

    /// Where the engine writes.
    pub fn meters(&self) -> &Meters {
        first(&self.map)
    }
}

impl AsFd for MeterPage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The page as others have it, who can't write it.
#[derive(Debug)]
pub struct MeterReader {
    map: MmapRaw,
}

impl MeterReader {
    /// The page of the engine with the name `id`, behind descriptor `fd` of process `pid`.
    ///
    /// # Errors
    /// [`ShmError::Unavailable`] if the system doesn't hand it over, [`ShmError::Unfit`] if
    /// it is something else.
    pub fn open(pid: u32, fd: u32, id: u128) -> Result<Self, ShmError> {
        // Whatever the descriptor may be, opening it doesn't wait.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let unavailable = |source| ShmError::Unavailable { bytes: PAGE_BYTES, source };
        let file = rustix::fs::open(format!("/proc/{pid}/fd/{fd}"), flags, Mode::empty())
            .map_err(|error| unavailable(error.into()))?;
        check(file.as_fd(), PAGE_BYTES)?;
        let map = mapping_of(PAGE_BYTES).map_raw_read_only(&file).map_err(unavailable)?;
        let reader = Self { map };
        if !reader.meters().has_id(id) {
            return Err(ShmError::Unfit("it belongs to another engine"));
        }
        Ok(reader)
    }

    fn meters(&self) -> &Meters {
        first(&self.map)
    }

    /// What the scheduler reports, if it does.
    pub fn steps(&self) -> Option<StepsReading> {
        self.meters().steps().read()
    }

    /// What paced prefill does, if it is on.
    pub fn pacing(&self) -> Option<PacingReading> {
        self.meters().pacing()
    }

    /// The tenants that have requests, if requests are ordered: a line each.
    pub fn tenants(&self) -> Option<String> {
        // Somebody may be writing; nobody does so for long.
        (0..3).find_map(|_| self.meters().tenants())
    }

    /// What goes through the rings, if there are any.
    pub fn rings(&self) -> Option<RingsReading> {
        self.meters().rings()
    }
}
