//! How long steps take, learned from those that have come back.
//!
//! A step of decodes alone takes what the last ones took with about as many tokens. A step with
//! prompts takes that, and more by their tokens: for each size of the ladder the last steps are kept,
//! and between two sizes the time is interpolated. What a token attends to costs as well, in
//! proportion, so the later chunks of a long prompt are known to be dearer. Sizes in CUDA graphs share
//! what is learned of that, and all others do: in a graph attention has other kernels, which may be
//! slower.
//!
//! A device that becomes slower or faster does so for all sizes, also for those that have not run
//! since. So all times share one factor, the level, and what is kept of sizes is relative to it: the
//! level follows each step, what is kept of a size only some.

/// Times of one kind that are kept.
const WINDOW: usize = 8;

/// A time so many times as long as expected says nothing of the next one: kernels were compiled,
/// or the machine stood still.
const OUTLIER: f64 = 2.5;

/// So many of these in a row are no outliers.
const MAX_OUTLIERS: u32 = 3;

/// The first step of a size teaches nothing if it takes so many times what the second takes.
const SLOW_START: f64 = 1.5;

/// A short time may be as many times as long as expected by chance, in seconds.
const JITTER_S: f64 = 0.003;

/// The last values of something.
#[derive(Clone, Copy, Debug, Default)]
struct Window<T> {
    values: [T; WINDOW],
    len: usize,
    next: usize,
    num_outliers: u32,
}

impl<T: Copy + Default> Window<T> {
    /// The mean of what `of` makes of the values, without the least and the most of four and more.
    fn middle(&self, of: impl Fn(T) -> f64) -> Option<f64> {
        let mut sorted = self.values.map(of);
        let sorted = &mut sorted[..self.len];
        sorted.sort_unstable_by(f64::total_cmp);
        let num_left_out = usize::from(self.len >= 4);
        let middle = &sorted[num_left_out..self.len - num_left_out];
        let (sum, num) = middle.iter().fold((0.0, 0.0), |(sum, num), it| (sum + it, num + 1.0));
        (num > 0.0).then(|| sum / num)
    }

    /// Takes a value unless it is an outlier, which it is not if there have been too many.
    fn push_unless(&mut self, is_outlier: bool, value: T) -> bool {
        if is_outlier && self.num_outliers < MAX_OUTLIERS {
            self.num_outliers += 1;
            return false;
        }
        if is_outlier {
            *self = Self::default();
        }
        self.values[self.next] = value;
        self.next = (self.next + 1) % WINDOW;
        self.len = (self.len + 1).min(WINDOW);
        self.num_outliers = 0;
        true
    }
}

/// Classes of numbers of tokens: four for each doubling.
const NUM_CLASSES: usize = 96;

fn class_of(num_tokens: u32) -> usize {
    let shift = (u32::BITS - num_tokens.leading_zeros()).saturating_sub(3);
    (4 * shift + (num_tokens >> shift)) as usize
}

/// How long steps of decodes alone take, by their number of tokens.
#[derive(Clone, Debug)]
pub(super) struct DecodeTimes(Box<[Window<f64>; NUM_CLASSES]>);

impl Default for DecodeTimes {
    fn default() -> Self {
        Self(Box::new([Window::default(); NUM_CLASSES]))
    }
}

impl DecodeTimes {
    pub(super) fn note(&mut self, num_tokens: u32, time_s: f64) {
        let window = &mut self.0[class_of(num_tokens)];
        let expected = window.middle(|it| it);
        let is_outlier = expected.is_some_and(|it| time_s > OUTLIER * it + JITTER_S);
        window.push_unless(is_outlier, time_s);
    }

    /// The time of such a step in seconds, by the most similar ones; 0 if there were none.
    pub(super) fn predict(&self, num_tokens: u32) -> f64 {
        let class = class_of(num_tokens);
        let nearest = (0..NUM_CLASSES)
            .flat_map(|distance| [class.checked_sub(distance), Some(class + distance)])
            .find_map(|it| self.0.get(it?)?.middle(|it| it));
        nearest.unwrap_or(0.0)
    }
}

/// What a step with prompts took, without what its decodes alone would have.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    num_tokens: f64,
    extra_s: f64,
    attention: f64,
}

/// What is known of steps of one size.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    samples: Window<Sample>,
    num_tries: u32,
    /// Means over all samples, newer ones weigh more.
    mean: Sample,
}

/// How long steps with prompts take, by the tokens of these.
#[derive(Clone, Debug, Default)]
pub(super) struct PromptTimes {
    sizes: Vec<Size>,
    /// The tokens that each holds at most.
    pub(super) most_tokens: Vec<u32>,
    /// Of each size that is known: tokens of prompts, and what these take at level 1, without what
    /// they attend to.
    points: Vec<(f64, f64)>,
    /// What all times are multiplied by.
    level: f64,
    /// So many sizes, the smallest, are held by CUDA graphs.
    num_in_graphs: usize,
    /// Of sizes without graphs, and of those in them.
    slopes: [Slope; 2],
}

/// What a token that is attended to costs. Of attention and time, within sizes: sums of squares and
/// of products of the deviations.
#[derive(Clone, Copy, Debug, Default)]
struct Slope {
    attention_squares: f64,
    attention_times: f64,
    /// As if attention had been seen to cost nothing, so that chance doesn't decide where little
    /// else was seen.
    prior_squares: f64,
}

impl Slope {
    /// Seconds for each token that a token attends to.
    fn value(&self) -> f64 {
        (self.attention_times / (self.attention_squares + self.prior_squares)).max(0.0)
    }
}

/// How far the level goes towards a step's time.
const LEVEL_STEP: f64 = 0.02;

/// One time is at most so many times as long as expected for it, or as short.
const MOST_OF_LEVEL: f64 = 1.5;

/// What is kept of a size that is known follows one of so many steps: else it would take from the
/// level what is true for all sizes.
const EVERY: u32 = 4;

/// What of a mean stays when a new value comes.
const MEMORY: f64 = 0.9;

/// A deviation of the attention of so many tokens to so many is enough to believe half of what was
/// seen.
const MAX_PRIOR_TOKENS: u32 = 8_192;

/// What of a slope stays.
const SLOPE_MEMORY: f64 = 0.99;

impl PromptTimes {
    /// For steps of these sizes, in ascending order, of which CUDA graphs hold the first ones.
    pub(super) fn new(sizes: Vec<u32>, num_in_graphs: usize) -> Self {
        let slope_of = |sizes: &[u32]| {
            let largest = sizes.last().map_or(1, |&it| it.clamp(1, MAX_PRIOR_TOKENS));
            Slope { prior_squares: f64::from(largest).powi(4), ..Slope::default() }
        };
        Self {
            sizes: vec![Size::default(); sizes.len()],
            points: Vec::new(),
            level: 1.0,
            num_in_graphs,
            slopes: [slope_of(&sizes), slope_of(&sizes[..num_in_graphs])],
            most_tokens: sizes,
        }
    }

    /// Which slope is a size's.
    fn kind(&self, size: usize) -> usize {
        usize::from(size < self.num_in_graphs)
    }

    fn slope(&self, size: usize) -> f64 {
        self.slopes[self.kind(size)].value()
    }

    /// The smallest size that holds so many tokens of prompts.
    fn size_of(&self, num_tokens: f64) -> usize {
        let size = self.most_tokens.partition_point(|&it| f64::from(it) < num_tokens);
        size.min(self.sizes.len() - 1)
    }

    /// Learns what a step with so many tokens of prompts took beyond its decodes; returns what it was
    /// expected to take, `None` if it is an outlier or the first one.
    pub(super) fn note(&mut self, num_tokens: f64, extra_s: f64, attention: f64) -> Option<f64> {
        let size = self.size_of(num_tokens);
        let expected = self.predict(num_tokens, attention);
        let known = &mut self.sizes[size];
        known.num_tries += 1;
        let is_known = known.samples.len == WINDOW;
        let is_outlier =
            known.samples.len >= 2 && expected.is_some_and(|it| extra_s > OUTLIER * it + JITTER_S);
        if let Some(expected) = expected.filter(|it| known.samples.len >= 2 && *it > 0.0) {
            let times = (extra_s / expected).clamp(MOST_OF_LEVEL.recip(), MOST_OF_LEVEL);
            self.level *= times.powf(LEVEL_STEP);
        }
        let sample = Sample { num_tokens, extra_s: extra_s / self.level, attention };
        if known.num_tries == 2 && expected.is_some_and(|it| it > SLOW_START * extra_s) {
            // The first one waited for a compiler.
            known.samples = Window::default();
        }
        let is_kept = is_outlier || !is_known || known.num_tries.is_multiple_of(EVERY);
        if is_kept && !known.samples.push_unless(is_outlier, sample) {
            return None;
        }
        self.learn_slope(size, sample);
        let points = (0..self.sizes.len()).filter_map(|size| {
            let (slope, samples) = (self.slope(size), &self.sizes[size].samples);
            let rest_s = samples.middle(|it| it.extra_s - slope * it.attention)?;
            Some((samples.middle(|it| it.num_tokens)?, rest_s))
        });
        self.points = points.collect();
        expected
    }

    fn learn_slope(&mut self, size: usize, sample: Sample) {
        let known = &mut self.sizes[size];
        if known.samples.len == 1 {
            known.mean = sample;
            return;
        }
        let by_attention = sample.attention - known.mean.attention;
        let by_time = sample.extra_s - known.mean.extra_s;
        known.mean.attention += (1.0 - MEMORY) * by_attention;
        known.mean.extra_s += (1.0 - MEMORY) * by_time;
        let kind = self.kind(size);
        let slope = &mut self.slopes[kind];
        slope.attention_squares =
            SLOPE_MEMORY * slope.attention_squares + by_attention * by_attention;
        slope.attention_times = SLOPE_MEMORY * slope.attention_times + by_attention * by_time;
    }

    /// What a step with so many tokens of prompts takes beyond its decodes, in seconds. More than were
    /// seen take as if tokens were all that cost. `None` if nothing was seen.
    pub(super) fn predict(&self, num_tokens: f64, attention: f64) -> Option<f64> {
        let above = self.points.partition_point(|it| it.0 <= num_tokens);
        let below = above.checked_sub(1).map(|it| self.points[it]);
        let rest_s = match (below, self.points.get(above)) {
            (Some((fewer, least_s)), Some((more, most_s))) => {
                least_s + (num_tokens - fewer) / (more - fewer) * (most_s - least_s)
            }
            (Some((fewer, least_s)), None) => least_s * num_tokens / fewer,
            (None, above) => above?.1,
        };
        let slope = self.slope(self.size_of(num_tokens));
        Some(self.level * (rest_s + slope * attention).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::DecodeTimes;

    #[test]
    fn decodes_take_what_the_most_similar_number_took() {
        let mut times = DecodeTimes::default();
        let predict = |times: &DecodeTimes| [5, 15].map(|it| times.predict(it).to_bits());
        assert_eq!(predict(&times), [0.0, 0.0].map(f64::to_bits));
        times.note(16, 0.01);
        assert_eq!(predict(&times), [0.01, 0.01].map(f64::to_bits));
        times.note(4, 0.005);
        assert_eq!(predict(&times), [0.005, 0.01].map(f64::to_bits));
    }
}
