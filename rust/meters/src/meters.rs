//! What an engine counts and times, as it lies in a page that API servers read.
//!
//! One side writes and never reads, the other reads and never writes: nothing that an engine does
//! depends on what is here, and a reader makes numbers of whatever it finds. Each number has one
//! writer at a time and stands for itself, so all is relaxed, but for one pair: whoever sees that
//! something was counted in a histogram sees its time in the sum, too. The reader's part of that is a
//! fence: it has the page without the right to write, where only relaxed loads are defined.

use std::iter::repeat;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

use sparksched_shm::sync::AtomicU64;
use sparksched_shm::{Line, order};

/// Bounds of a histogram's buckets: two for each doubling, from a microsecond to four seconds.
pub const NUM_BOUNDS: usize = 45;
/// One more than bounds: the last bucket takes what is above all of them.
pub const NUM_BUCKETS: usize = NUM_BOUNDS + 1;
/// The first bound is 2 to this power, in nanoseconds.
const FIRST_EXPONENT: u32 = 10;

/// The most nanoseconds that bucket `index` takes: powers of two, and the middle between each two.
///
/// # Panics
/// If `index` is not below [`NUM_BOUNDS`].
pub fn bound_ns(index: usize) -> u64 {
    assert!(index < NUM_BOUNDS, "bucket {index} has no bound");
    let power = 1 << (FIRST_EXPONENT as usize + index / 2);
    if index.is_multiple_of(2) { power } else { power + power / 2 }
}

/// The first bucket whose bound is not below `ns`.
fn bucket_of(ns: u64) -> usize {
    // A bucket takes its bound, too: what is above a bound begins one later.
    let above = ns.saturating_sub(1);
    if above >> FIRST_EXPONENT == 0 {
        return 0;
    }
    let exponent = above.ilog2();
    let half = above >> (exponent - 1) & 1;
    let index = 2 * (exponent - FIRST_EXPONENT) as usize + 1 + half as usize;
    index.min(NUM_BOUNDS)
}

/// How often something took how long.
#[derive(Debug)]
#[repr(C)]
pub struct Histogram {
    sum_ns: AtomicU64,
    buckets: [AtomicU64; NUM_BUCKETS],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramReading {
    /// How often, by bucket.
    pub counts: [u64; NUM_BUCKETS],
    /// At least the time of all that was counted.
    pub sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { sum_ns: AtomicU64::new(0), buckets: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Histogram {
    /// Counts something that took `ns`.
    pub fn observe(&self, ns: u64) {
        self.sum_ns.fetch_add(ns, Relaxed);
        self.buckets[bucket_of(ns)].fetch_add(1, order::count_sample());
    }

    /// What was counted so far.
    pub fn read(&self) -> HistogramReading {
        // A fence, and no stronger loads: on memory that can't be written, as a reader has it, Rust
        // promises relaxed ones only.
        let counts = std::array::from_fn(|index| self.buckets[index].load(Relaxed));
        order::fence(order::observe_sample());
        HistogramReading { counts, sum_ns: self.sum_ns.load(Relaxed) }
    }
}

/// What goes through the rings of all clients, in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub waiting_bytes: u64,
    /// The most that has waited in one ring.
    pub high_water_bytes: u64,
    /// Bytes of messages for which a ring has no room.
    pub backlog_bytes: u64,
    /// How often the writer found no room.
    pub num_without_room: u64,
}

impl Traffic {
    /// Adds another client's.
    pub fn add(&mut self, other: Self) {
        self.waiting_bytes += other.waiting_bytes;
        self.high_water_bytes = self.high_water_bytes.max(other.high_water_bytes);
        self.backlog_bytes += other.backlog_bytes;
        self.num_without_room += other.num_without_room;
    }
}

#[derive(Debug, Default)]
#[repr(C)]
struct TrafficMeter {
    waiting_bytes: AtomicU64,
    high_water_bytes: AtomicU64,
    backlog_bytes: AtomicU64,
    num_without_room: AtomicU64,
}

impl TrafficMeter {
    fn set(&self, traffic: Traffic) {
        self.waiting_bytes.store(traffic.waiting_bytes, Relaxed);
        self.high_water_bytes.store(traffic.high_water_bytes, Relaxed);
        self.backlog_bytes.store(traffic.backlog_bytes, Relaxed);
        self.num_without_room.store(traffic.num_without_room, Relaxed);
    }

    fn read(&self) -> Traffic {
        Traffic {
            waiting_bytes: self.waiting_bytes.load(Relaxed),
            high_water_bytes: self.high_water_bytes.load(Relaxed),
            backlog_bytes: self.backlog_bytes.load(Relaxed),
            num_without_room: self.num_without_room.load(Relaxed),
        }
    }
}

/// What an engine knows of all its rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingsReading {
    /// From API servers.
    pub to_engine: Traffic,
    /// To API servers.
    pub to_client: Traffic,
    /// Waits that only their time limit has ended: see `EngineRings::num_rescues`.
    pub num_rescues: u64,
    /// Clients that went without a goodbye.
    pub num_lost: u64,
}

#[derive(Debug, Default)]
#[repr(C)]
struct RingsMeter {
    /// 1 once the engine has rings.
    is_there: AtomicU64,
    to_engine: TrafficMeter,
    to_client: TrafficMeter,
    num_rescues: AtomicU64,
    num_lost: AtomicU64,
}

/// Reasons for which requests wait that there is room for.
pub const MAX_WAIT_REASONS: usize = 16;

/// State of a [`StepMeter`] to which a scheduler reports.
const REPORTS: u64 = 1;

/// What an engine's scheduler does.
#[derive(Debug, Default)]
#[repr(C)]
pub struct StepMeter {
    /// [`REPORTS`], or anything else for no scheduler.
    state: AtomicU64,
    /// Time in `schedule()`.
    pub schedule: Histogram,
    /// Time in `update_from_output()`.
    pub update: Histogram,
    /// Time from the end of `update_from_output()` to the next `schedule()`, if there was work left.
    pub gap: Histogram,
    num_running: AtomicU64,
    num_waiting: AtomicU64,
    /// Of these, by reason.
    waiting_for: [AtomicU64; MAX_WAIT_REASONS],
    num_queue_timeouts: AtomicU64,
}

impl StepMeter {
    /// Says that a scheduler reports from now on.
    pub fn begin(&self) {
        self.state.store(REPORTS, Relaxed);
    }

    pub fn set_requests(&self, num_running: u64, num_waiting: u64) {
        self.num_running.store(num_running, Relaxed);
        self.num_waiting.store(num_waiting, Relaxed);
    }

    /// Says how many requests wait for what; reasons beyond [`MAX_WAIT_REASONS`] have no room.
    pub fn set_waits(&self, counts: &[usize]) {
        for (meter, &count) in self.waiting_for.iter().zip(counts) {
            meter.store(count as u64, Relaxed);
        }
    }

    /// Counts requests that have waited for too long.
    pub fn count_queue_timeouts(&self, count: u64) {
        self.num_queue_timeouts.fetch_add(count, Relaxed);
    }

    /// All of it, if a scheduler reports.
    pub fn read(&self) -> Option<StepsReading> {
        (self.state.load(Relaxed) == REPORTS).then(|| StepsReading {
            schedule: self.schedule.read(),
            update: self.update.read(),
            gap: self.gap.read(),
            num_running: self.num_running.load(Relaxed),
            num_waiting: self.num_waiting.load(Relaxed),
            waiting_for: std::array::from_fn(|index| self.waiting_for[index].load(Relaxed)),
            num_queue_timeouts: self.num_queue_timeouts.load(Relaxed),
        })
    }
}

/// What a scheduler has reported: see [`StepMeter`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepsReading {
    /// Time in `schedule()`.
    pub schedule: HistogramReading,
    /// Time in `update_from_output()`.
    pub update: HistogramReading,
    /// Time between the two.
    pub gap: HistogramReading,
    /// Requests that run.
    pub num_running: u64,
    pub num_waiting: u64,
    /// Of these, by reason; the writer and the reader know which.
    pub waiting_for: [u64; MAX_WAIT_REASONS],
    /// Requests that have waited for too long.
    pub num_queue_timeouts: u64,
}

/// What paced prefill says of itself; the writer and the reader know what is what.
pub type PacingReading = [f64; MAX_PACING_VALUES];

pub const MAX_PACING_VALUES: usize = 15;

/// Where paced prefill says how it stands.
#[derive(Debug, Default)]
#[repr(C)]
pub struct PacingMeter {
    /// 1 once something was said.
    is_there: AtomicU64,
    values: [AtomicU64; MAX_PACING_VALUES],
}

impl PacingMeter {
    pub fn set(&self, reading: &[f64]) {
        for (to, value) in self.values.iter().zip(reading) {
            to.store(value.to_bits(), Relaxed);
        }
        self.is_there.store(1, Relaxed);
    }

    /// All of it, if anything was said.
    pub fn read(&self) -> Option<PacingReading> {
        let value = |it: usize| f64::from_bits(self.values[it].load(Relaxed));
        (self.is_there.load(Relaxed) == 1).then(|| std::array::from_fn(value))
    }
}

/// Bytes of the longest text.
pub const MAX_TEXT_BYTES: usize = 1920;

/// A text, which makes sense as a whole only. What is behind it is zero.
///
/// The reader can't hold the writer up: so a sum over all bytes goes with them, and a reader that
/// finds another one looks again.
#[derive(Debug)]
#[repr(C)]
pub struct TextMeter {
    sum: AtomicU64,
    bytes: [AtomicU8; MAX_TEXT_BYTES],
}

impl Default for TextMeter {
    fn default() -> Self {
        Self { sum: AtomicU64::new(0), bytes: std::array::from_fn(|_| AtomicU8::new(0)) }
    }
}

impl TextMeter {
    /// Says it; what is longer than [`MAX_TEXT_BYTES`] is cut.
    pub fn set(&self, text: &str) {
        let bytes: Vec<u8> = text.bytes().chain(repeat(0)).take(MAX_TEXT_BYTES).collect();
        self.bytes.iter().zip(&bytes).for_each(|(to, byte)| to.store(*byte, Relaxed));
        self.sum.store(sum_of(&bytes), Relaxed);
    }

    /// It, if something was said and nobody writes at the moment.
    pub fn read(&self) -> Option<String> {
        let mut bytes: Vec<u8> = self.bytes.iter().map(|byte| byte.load(Relaxed)).collect();
        let is_whole = sum_of(&bytes) == self.sum.load(Relaxed);
        bytes.retain(|byte| *byte != 0);
        String::from_utf8(bytes).ok().filter(|_| is_whole)
    }
}

/// FNV-1a.
fn sum_of(bytes: &[u8]) -> u64 {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, add)
}

/// All of it. Zeroed memory is an engine of which nothing is known.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Meters {
    /// Says whose this is: a reader may have got another page.
    id: [AtomicU64; 2],
    // Lines of their own: the engine's loop writes one, its watcher the other.
    steps: Line<StepMeter>,
    rings: Line<RingsMeter>,
    pacing: Line<PacingMeter>,
    tenants: Line<TextMeter>,
}

impl Meters {
    /// Names the engine.
    pub(crate) fn set_id(&self, id: u128) {
        let [low, high] = halves(id);
        self.id[0].store(low, Relaxed);
        self.id[1].store(high, Relaxed);
    }

    /// Whether this is the engine's that has this name.
    pub(crate) fn has_id(&self, id: u128) -> bool {
        halves(id) == [self.id[0].load(Relaxed), self.id[1].load(Relaxed)]
    }

    /// Paced prefill's part.
    pub fn pacing(&self) -> &PacingMeter {
        &self.pacing.0
    }

    /// The tenants that have requests, if requests are ordered: a line each.
    pub fn tenants(&self) -> &TextMeter {
        &self.tenants.0
    }

    /// The scheduler's part.
    pub fn steps(&self) -> &StepMeter {
        &self.steps.0
    }

    /// Says what goes through the rings.
    pub fn set_rings(&self, reading: RingsReading) {
        let meter = &self.rings.0;
        meter.to_engine.set(reading.to_engine);
        meter.to_client.set(reading.to_client);
        meter.num_rescues.store(reading.num_rescues, Relaxed);
        meter.num_lost.store(reading.num_lost, Relaxed);
        meter.is_there.store(1, Relaxed);
    }

    /// What goes through the rings, if there are any.
    pub fn rings(&self) -> Option<RingsReading> {
        let meter = &self.rings.0;
        (meter.is_there.load(Relaxed) == 1).then(|| RingsReading {
            to_engine: meter.to_engine.read(),
            to_client: meter.to_client.read(),
            num_rescues: meter.num_rescues.load(Relaxed),
            num_lost: meter.num_lost.load(Relaxed),
        })
    }
}

// SAFETY: all fields are atomics.
#[cfg(not(feature = "loom"))]
unsafe impl sparksched_shm::OfAtomics for Meters {}

fn halves(id: u128) -> [u64; 2] {
    [id as u64, (id >> 64) as u64]
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_takes_what_is_up_to_its_bound() {
        for index in 0..NUM_BOUNDS {
            let bound = bound_ns(index);
            assert_eq!(bucket_of(bound), index, "{bound}");
            assert_eq!(bucket_of(bound + 1), index + 1, "{bound}");
        }
        assert_eq!(bucket_of(0), 0);
        assert_eq!(bucket_of(u64::MAX), NUM_BOUNDS);
        assert_eq!((bound_ns(0), bound_ns(1), bound_ns(NUM_BOUNDS - 1)), (1024, 1536, 1 << 32));
    }

    #[test]
    fn a_text_is_read_whole_or_not_at_all() {
        let meter = TextMeter::default();
        assert_eq!(meter.read(), None);
        for text in ["", "1 2 gold\n", &"ü".repeat(MAX_TEXT_BYTES / 2)] {
            meter.set(text);
            assert_eq!(meter.read().as_deref(), Some(text));
        }
        meter.bytes[3].store(7, Relaxed);
        assert_eq!(meter.read(), None);
    }
}
