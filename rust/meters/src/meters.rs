//! What an engine counts and times, as it lies in a page that API servers read.
//!
//! One side writes and never reads, the other reads and never writes: nothing that an engine does
//! depends on what is here, and a reader makes numbers of whatever it finds. Each number has one
//! writer at a time and stands for itself, so all is relaxed, but for one pair: whoever sees that
//! something was counted in a histogram sees its time in the sum, too. The reader's part of that is a
//! fence: it has the page without the right to write, where only relaxed loads are defined.

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

    fn values(self) -> [u64; 4] {
        [self.waiting_bytes, self.high_water_bytes, self.backlog_bytes, self.num_without_room]
    }

    fn of([waiting_bytes, high_water_bytes, backlog_bytes, num_without_room]: [u64; 4]) -> Self {
        Self { waiting_bytes, high_water_bytes, backlog_bytes, num_without_room }
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

/// Numbers that are there once somebody has set them.
#[derive(Debug)]
#[repr(C)]
pub struct Gauges<const N: usize> {
    /// 1 once they were set.
    is_there: AtomicU64,
    values: [AtomicU64; N],
}

impl<const N: usize> Default for Gauges<N> {
    fn default() -> Self {
        Self { is_there: AtomicU64::new(0), values: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl<const N: usize> Gauges<N> {
    pub fn set(&self, values: impl IntoIterator<Item = u64>) {
        self.values.iter().zip(values).for_each(|(to, value)| to.store(value, Relaxed));
        self.is_there.store(1, Relaxed);
    }

    /// All of them, if they were set.
    pub fn read(&self) -> Option<[u64; N]> {
        let value = |index: usize| self.values[index].load(Relaxed);
        (self.is_there.load(Relaxed) == 1).then(|| std::array::from_fn(value))
    }
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

/// Bytes of the longest text.
pub const MAX_TEXT_BYTES: usize = 1920;
const MAX_TEXT_WORDS: usize = MAX_TEXT_BYTES / size_of::<u64>();

/// As FNV-1a has it for bytes.
fn sum_of(words: &[u64]) -> u64 {
    let add = |sum: u64, word: &u64| (sum ^ word).wrapping_mul(0x100_0000_01b3);
    words.iter().fold(0xcbf2_9ce4_8422_2325, add)
}

/// All of it. Zeroed memory is an engine of which nothing is known.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Meters {
    /// Says whose this is: a reader may have got another page.
    id: [AtomicU64; 2],
    // Lines of their own: the engine's loop writes one, its watcher the other.
    steps: Line<StepMeter>,
    rings: Line<Gauges<10>>,
    pacing: Line<Gauges<MAX_PACING_VALUES>>,
    /// A text, and the sum of its words: the reader can't hold the writer up.
    tenants: Line<Gauges<{ MAX_TEXT_WORDS + 1 }>>,
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

    /// Says how paced prefill stands.
    pub fn set_pacing(&self, reading: &[f64]) {
        self.pacing.0.set(reading.iter().map(|value| value.to_bits()));
    }

    /// How paced prefill stands, if it has said so.
    pub(crate) fn pacing(&self) -> Option<PacingReading> {
        self.pacing.0.read().map(|values| values.map(f64::from_bits))
    }

    /// Tells of the tenants that have requests, a line each; what is longer than
    /// [`MAX_TEXT_BYTES`] is cut.
    pub fn set_tenants(&self, text: &str) {
        let mut words = [0; MAX_TEXT_WORDS];
        for (word, bytes) in words.iter_mut().zip(text.as_bytes().chunks(size_of::<u64>())) {
            *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
        self.tenants.0.set(words.into_iter().chain([sum_of(&words)]));
    }

    /// What was told, unless somebody writes at the moment.
    pub(crate) fn tenants(&self) -> Option<String> {
        let words = self.tenants.0.read()?;
        let (sum, words) = words.split_last()?;
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.retain(|byte| *byte != 0);
        String::from_utf8(bytes).ok().filter(|_| sum_of(words) == *sum)
    }

    /// The scheduler's part.
    pub fn steps(&self) -> &StepMeter {
        &self.steps.0
    }

    /// Says what goes through the rings.
    pub fn set_rings(&self, reading: RingsReading) {
        let RingsReading { to_engine, to_client, num_rescues, num_lost } = reading;
        let traffic = to_engine.values().into_iter().chain(to_client.values());
        self.rings.0.set(traffic.chain([num_rescues, num_lost]));
    }

    /// What goes through the rings, if there are any.
    pub fn rings(&self) -> Option<RingsReading> {
        let values = self.rings.0.read()?;
        let (to_engine, rest) = values.split_first_chunk()?;
        let (to_client, rest) = rest.split_first_chunk()?;
        let &[num_rescues, num_lost] = rest else { return None };
        let (to_engine, to_client) = (Traffic::of(*to_engine), Traffic::of(*to_client));
        Some(RingsReading { to_engine, to_client, num_rescues, num_lost })
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
        let meters = Meters::default();
        assert_eq!(meters.tenants(), None);
        for text in ["", "1 2 gold\n", &"ü".repeat(MAX_TEXT_BYTES / 2)] {
            meters.set_tenants(text);
            assert_eq!(meters.tenants().as_deref(), Some(text));
        }
        meters.tenants.0.values[3].store(7, Relaxed);
        assert_eq!(meters.tenants(), None);
    }
}
