//! How a reader sleeps and how a writer wakes it, without a system call unless it does sleep.
//!
//! The reader says "asleep", looks once more, and only then waits. The writer publishes, then looks
//! whether the reader is asleep. The fences between the two steps on either side make sure that at
//! least one of them sees the other. Several writers may share a bell; one of them wakes the reader.
//!
//! Every change of the bell is a read-modify-write. The protocol would do with stores by the reader,
//! but loom then takes a writer's older change for a newer one, and sees deadlocks that can't be.

use std::sync::atomic::Ordering::Relaxed;

use sparksched_shm::order;
use sparksched_shm::sync::AtomicU32;

use crate::points::reach;

/// The reader is awake and will look again before it sleeps.
pub(crate) const AWAKE: u32 = 0;
/// The reader sleeps, or is about to.
pub(crate) const ASLEEP: u32 = 1;

/// What makes a sleeping reader run.
pub trait Alarm {
    /// Wakes the reader.
    fn sound(&self);
}

/// Whether a reader sleeps, as it lies in shared memory. Zeroed memory is an awake reader.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Bell(pub(crate) AtomicU32);

impl Bell {
    /// Wakes the reader if it sleeps. To be called after publishing.
    pub fn ring(&self, alarm: &impl Alarm) {
        order::fence(order::before_ringing());
        if self.0.load(Relaxed) == ASLEEP
            && self.0.compare_exchange(ASLEEP, AWAKE, Relaxed, Relaxed).is_ok()
        {
            reach("ringing");
            alarm.sound();
            reach("rung");
        }
    }

    /// Wakes the reader, also if another writer has said that it would and then died or was stopped
    /// before it did: the bell says "awake" then, and the reader sleeps. For the reader's own
    /// process, which is told of such writers; it makes a system call each time.
    pub fn ring_regardless(&self, alarm: &impl Alarm) {
        order::fence(order::before_ringing());
        self.0.swap(AWAKE, Relaxed);
        alarm.sound();
    }

    /// Says that the reader is about to sleep. It must look at all its rings after this, and call
    /// [`Self::wake_up`] instead of sleeping if it finds something.
    pub fn fall_asleep(&self) {
        self.0.swap(ASLEEP, Relaxed);
        order::fence(order::before_sleep());
        reach("asleep");
    }

    /// Whether the reader sleeps, for the models' futex: it compares before it waits.
    #[cfg(feature = "loom")]
    pub fn is_asleep(&self) -> bool {
        self.0.load(Relaxed) == ASLEEP
    }

    /// Says that the reader is awake.
    pub fn wake_up(&self) {
        self.0.swap(AWAKE, Relaxed);
    }
}
