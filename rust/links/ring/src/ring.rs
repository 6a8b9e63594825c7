//! A ring of bytes between one producer and one consumer, over any memory.
//!
//! Positions count bytes since the beginning and never wrap in practice (2^64); the byte at position
//! `p` lies at `p % capacity`. The producer owns the tail, the consumer owns the head, and neither
//! believes the other: what a position read from shared memory claims is checked before it is used.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use sparksched_shm::sync::{AtomicU32, AtomicU64, UnsafeCell};
use sparksched_shm::{Line, order};

use crate::points::reach;

/// The other side's memory claims what can't be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    /// More bytes are claimed to be readable or freed than the ring can hold.
    #[error("a ring's position is out of range")]
    Position,
    #[error("a message has a wrong mark, kind, checksum or sequence number")]
    Header,
    #[error("a message claims an impossible length")]
    Length,
}

/// The positions of a ring, as they lie in shared memory. Zeroed memory is an empty, open ring.
#[derive(Debug)]
#[repr(C)]
pub struct RingHeader {
    /// Bytes published; written by the producer alone.
    tail: Line<AtomicU64>,
    /// Bytes consumed; written by the consumer alone.
    head: Line<AtomicU64>,
    /// 1 while the producer waits for space; set by it, cleared by the consumer that wakes it. Only
    /// changed by read-modify-writes, for the reason that [`crate::bell`] gives.
    producer_waits: Line<AtomicU32>,
    /// 1 once nothing more will be published; written by the producer alone.
    closed: Line<AtomicU32>,
}

impl RingHeader {
    /// An empty ring whose positions begin at `position`.
    fn starting_at(position: u64) -> Self {
        Self {
            tail: Line(AtomicU64::new(position)),
            head: Line(AtomicU64::new(position)),
            producer_waits: Line(AtomicU32::new(0)),
            closed: Line(AtomicU32::new(0)),
        }
    }
}

/// A ring in memory that its keeper keeps alive.
#[derive(Debug)]
pub struct Ring {
    header: NonNull<RingHeader>,
    data: NonNull<UnsafeCell<u8>>,
    capacity: usize,
    /// Where its positions begin: known, and not read from memory that another process may write.
    start: u64,
    _keeper: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is reached through atomics, and through cells that the protocol gives to one
// side at a time.
unsafe impl Send for Ring {}
// SAFETY: as above; `Producer` and `Consumer` need exclusive access for what isn't atomic.
unsafe impl Sync for Ring {}

impl Ring {
    /// A ring over zeroed memory that another process may share.
    ///
    /// # Safety
    /// `header` and the `capacity` bytes from `data` must be readable and writable for as long as
    /// `keeper` lives, `header` aligned, and `capacity` a power of two. Over the life of the memory
    /// there may be one [`Producer`] and one [`Consumer`], and whoever else can write it must keep
    /// to this protocol: one that doesn't can tear the bytes that are being copied out, which is why
    /// they are believed only after that.
    ///
    /// # Panics
    /// If `capacity` is no power of two.
    #[cfg(not(feature = "loom"))]
    pub(crate) unsafe fn over(
        header: NonNull<RingHeader>,
        data: NonNull<u8>,
        capacity: usize,
        keeper: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        assert!(capacity.is_power_of_two(), "capacity {capacity} is no power of two");
        Self { header, data: data.cast(), capacity, start: 0, _keeper: keeper }
    }

    /// A ring in this process's memory, whose positions begin at `position`.
    ///
    /// # Panics
    /// If `capacity` is no power of two.
    pub fn on_heap(capacity: usize, position: u64) -> Self {
        struct Memory {
            header: RingHeader,
            data: Box<[UnsafeCell<u8>]>,
        }
        // SAFETY: whoever holds the keeper never touches the cells.
        unsafe impl Sync for Memory {}

        assert!(capacity.is_power_of_two(), "capacity {capacity} is no power of two");
        let memory = Arc::new(Memory {
            header: RingHeader::starting_at(position),
            data: (0..capacity).map(|_| UnsafeCell::new(0)).collect(),
        });
        Self {
            header: NonNull::from(&memory.header),
            data: NonNull::from(&memory.data[..]).cast(),
            capacity,
            start: position,
            _keeper: memory,
        }
    }

    /// Both ends of this ring.
    pub fn split(self) -> (Producer, Consumer) {
        let ring = Arc::new(self);
        (Producer::new(Arc::clone(&ring)), Consumer::new(ring))
    }

    fn header(&self) -> &RingHeader {
        // SAFETY: valid for as long as the keeper, which `self` holds; its fields are atomics.
        unsafe { self.header.as_ref() }
    }

    /// The length of the part of `len` bytes from `position` that lies before the memory's end.
    fn before_wrap(&self, position: u64, len: usize) -> (usize, usize) {
        let offset = position as usize & (self.capacity - 1);
        (offset, len.min(self.capacity - offset))
    }

    /// Copies `source` to `position` and on.
    ///
    /// # Safety
    /// The bytes must be free: consumed, and not handed out to another writer.
    unsafe fn copy_in(&self, position: u64, source: &[u8]) {
        let (offset, first) = self.before_wrap(position, source.len());
        // SAFETY: both parts lie within the capacity, and the caller owns the bytes.
        unsafe {
            store(self.data.add(offset), &source[..first]);
            store(self.data, &source[first..]);
        }
    }

    /// Copies the bytes at `position` and on to `target`.
    ///
    /// # Safety
    /// The bytes must be published and not yet released.
    unsafe fn copy_out(&self, position: u64, target: &mut [u8]) {
        let (offset, first) = self.before_wrap(position, target.len());
        let (first, rest) = target.split_at_mut(first);
        // SAFETY: both parts lie within the capacity; who keeps to the protocol writes no published
        // bytes.
        unsafe {
            load(self.data.add(offset), first);
            load(self.data, rest);
        }
    }
}

#[cfg(not(feature = "loom"))]
unsafe fn store(cells: NonNull<UnsafeCell<u8>>, source: &[u8]) {
    // SAFETY: the caller vouches for the cells; they don't overlap this process's own memory.
    unsafe { cells.cast::<u8>().as_ptr().copy_from_nonoverlapping(source.as_ptr(), source.len()) }
}

#[cfg(not(feature = "loom"))]
unsafe fn load(cells: NonNull<UnsafeCell<u8>>, target: &mut [u8]) {
    // SAFETY: the caller vouches for the cells; they don't overlap this process's own memory.
    unsafe { cells.cast::<u8>().as_ptr().copy_to_nonoverlapping(target.as_mut_ptr(), target.len()) }
}

#[cfg(feature = "loom")]
unsafe fn store(cells: NonNull<UnsafeCell<u8>>, source: &[u8]) {
    for (i, byte) in source.iter().enumerate() {
        // SAFETY: the caller vouches for the cells; loom checks that nobody else is in them.
        unsafe { cells.add(i).as_ref().with_mut(|cell| *cell = *byte) }
    }
}

#[cfg(feature = "loom")]
unsafe fn load(cells: NonNull<UnsafeCell<u8>>, target: &mut [u8]) {
    for (i, byte) in target.iter_mut().enumerate() {
        // SAFETY: the caller vouches for the cells; loom checks that nobody writes them.
        *byte = unsafe { cells.add(i).as_ref().with(|cell| *cell) };
    }
}

#[derive(Debug)]
pub struct Producer {
    ring: Arc<Ring>,
    /// Where the next byte goes; ahead of what is published while a message is being written.
    tail: u64,
    published: u64,
    /// The head as last seen: never beyond the real one.
    head: u64,
}

impl Producer {
    /// The end that writes; there may be one for each ring.
    pub(crate) fn new(ring: Arc<Ring>) -> Self {
        let start = ring.start;
        Self { ring, tail: start, published: start, head: start }
    }

    fn free(&self) -> usize {
        self.ring.capacity - self.tail.wrapping_sub(self.head) as usize
    }

    fn look_for_space(&mut self) -> Result<(), Corrupt> {
        let head = self.ring.header().head.0.load(order::observe_head());
        // The head lies between where it was and what has been published.
        if head.wrapping_sub(self.head) > self.published.wrapping_sub(self.head) {
            return Err(Corrupt::Position);
        }
        self.head = head;
        Ok(())
    }

    /// Whether there is space for a byte at least.
    ///
    /// # Errors
    /// [`Corrupt::Position`] if the consumer claims to have read what was never published.
    pub fn has_space(&mut self) -> Result<bool, Corrupt> {
        self.look_for_space()?;
        Ok(self.free() > 0)
    }

    /// How many bytes the consumer has still to read; rather too many than too few, unless that is
    /// more than `most`.
    ///
    /// # Errors
    /// [`Corrupt::Position`] if the consumer claims to have read what was never published.
    pub fn depth_beyond(&mut self, most: usize) -> Result<usize, Corrupt> {
        // To look at the head costs a cache line that the consumer is writing.
        if self.published.wrapping_sub(self.head) as usize > most {
            self.look_for_space()?;
        }
        Ok(self.published.wrapping_sub(self.head) as usize)
    }

    /// Copies as much of `bytes` as there is space for, without publishing it; returns how much.
    ///
    /// # Errors
    /// [`Corrupt::Position`] if the consumer claims to have read what was never published.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Corrupt> {
        if self.free() < bytes.len() {
            self.look_for_space()?;
        }
        let len = bytes.len().min(self.free());
        // SAFETY: `free()` bytes from the tail have been consumed, and this is the one producer.
        unsafe { self.ring.copy_in(self.tail, &bytes[..len]) };
        self.tail = self.tail.wrapping_add(len as u64);
        Ok(len)
    }

    /// Lets the consumer see what was written.
    pub fn publish(&mut self) {
        if self.tail != self.published {
            reach("written");
            self.ring.header().tail.0.store(self.tail, order::publish_tail());
            self.published = self.tail;
            reach("published");
        }
    }

    /// Asks the consumer to say when there is space; true if there is some already.
    ///
    /// # Errors
    /// [`Corrupt::Position`] if the consumer claims to have read what was never published.
    pub fn wait_for_space(&mut self) -> Result<bool, Corrupt> {
        let waits = &self.ring.header().producer_waits.0;
        waits.swap(1, Relaxed);
        order::fence(order::before_waiting());
        reach("waiting-for-space");
        let found = self.has_space()?;
        if found {
            self.ring.header().producer_waits.0.swap(0, Relaxed);
        }
        Ok(found)
    }

    /// Says that nothing more will be published. What is not published yet never will be.
    pub fn close(&mut self) {
        reach("closing");
        self.ring.header().closed.0.store(1, order::publish_close());
    }
}

#[derive(Debug)]
pub struct Consumer {
    ring: Arc<Ring>,
    /// Where the next byte is read; ahead of what is released while a message is being read.
    head: u64,
    released: u64,
    /// The tail as last seen: never beyond the real one.
    tail: u64,
}

impl Consumer {
    /// The end that reads; there may be one for each ring.
    pub(crate) fn new(ring: Arc<Ring>) -> Self {
        let start = ring.start;
        Self { ring, head: start, released: start, tail: start }
    }

    /// How many bytes can be read now.
    ///
    /// # Errors
    /// [`Corrupt::Position`] if the producer claims to have published more than the ring holds.
    pub fn readable(&mut self) -> Result<usize, Corrupt> {
        let tail = self.ring.header().tail.0.load(order::observe_tail());
        // The tail never goes back, and never passes what has been released by a whole ring.
        if tail.wrapping_sub(self.released) > self.ring.capacity as u64
            || tail.wrapping_sub(self.released) < self.tail.wrapping_sub(self.released)
        {
            return Err(Corrupt::Position);
        }
        self.tail = tail;
        Ok(tail.wrapping_sub(self.head) as usize)
    }

    /// Copies out as many bytes as `target` takes and the ring has; returns how many.
    ///
    /// # Errors
    /// [`Corrupt::Position`] if the producer claims to have published more than the ring holds.
    pub fn read(&mut self, target: &mut [u8]) -> Result<usize, Corrupt> {
        let mut len = self.tail.wrapping_sub(self.head) as usize;
        if len < target.len() {
            len = self.readable()?;
        }
        let len = len.min(target.len());
        // SAFETY: the bytes up to the tail are published, and this is the one consumer.
        unsafe { self.ring.copy_out(self.head, &mut target[..len]) };
        self.head = self.head.wrapping_add(len as u64);
        Ok(len)
    }

    /// Gives the space of what was read back to the producer. True if it waits for that: it then
    /// has to be woken.
    pub fn release(&mut self) -> bool {
        if self.head == self.released {
            return false;
        }
        reach("read");
        let header = self.ring.header();
        header.head.0.store(self.head, order::release_head());
        self.released = self.head;
        reach("released");
        order::fence(order::before_space_check());
        let waits = &header.producer_waits.0;
        waits.load(Relaxed) == 1 && waits.compare_exchange(1, 0, Relaxed, Relaxed).is_ok()
    }

    /// Whether the producer has said that nothing more comes. What was published before may still
    /// have to be read: ask [`Self::readable`] after this.
    pub fn is_closed(&self) -> bool {
        self.ring.header().closed.0.load(order::observe_close()) == 1
    }
}
