//! The sizes that chunks have, and what each takes.
//!
//! Sizes are the configured budget and its halves, and three quarters of the largest, ten at most:
//! kernels are compiled for each.

use super::step_times::PromptTimes;

const NUM_SIZES: usize = 10;

/// Of these, so many are between a size and its half.
const NUM_BETWEEN: usize = 3;

const SMALLEST: u32 = 32;

/// Tokens of prompts that a chunk has at least.
const LEAST_ROOM: u32 = 16;

/// A step teaches something about a size if it has this part of its tokens.
const NEARLY: f64 = 0.9;

/// How sure a chunk is to be within the bound.
const CONFIDENCE: f64 = 0.99;

/// How many times as long as expected a chunk may take at most, to fit.
const MARGIN: std::ops::RangeInclusive<f64> = 1.03..=1.5;

/// How much a chunk that was too long adds to that.
const MARGIN_STEP: f64 = 0.05;

/// The sizes, and what is known of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Ladder {
    sizes: Vec<u32>,
    times: PromptTimes,
    /// How many times as long as expected a chunk may take, with some confidence.
    margin: f64,
}

impl Ladder {
    pub(super) fn new(max_tokens: u32, max_graph_tokens: u32) -> Self {
        let halved = (0..u32::BITS).map(|shift| max_tokens >> shift);
        let between = halved.clone().take(NUM_BETWEEN).map(|it| it / 4 * 3);
        let mut sizes: Vec<u32> =
            halved.chain(between).filter(|&it| it >= SMALLEST.min(max_tokens)).collect();
        sizes.sort_unstable();
        sizes.drain(..sizes.len().saturating_sub(NUM_SIZES));
        let num_in_graphs = sizes.partition_point(|&it| it <= max_graph_tokens);
        let times = PromptTimes::new(&sizes, num_in_graphs);
        Self { sizes, times, margin: 1.05 }
    }

    pub(super) fn sizes(&self) -> &[u32] {
        &self.sizes
    }

    pub(super) fn largest(&self) -> usize {
        self.sizes.len() - 1
    }

    /// The first size that has room for prompts beside so many tokens of decodes.
    pub(super) fn first_above(&self, num_decode_tokens: u32) -> Option<usize> {
        let least = if num_decode_tokens == 0 { 1 } else { num_decode_tokens + LEAST_ROOM };
        self.sizes.iter().position(|&it| it >= least)
    }

    /// The smallest size that holds so many tokens.
    fn class_of(&self, num_tokens: u32) -> usize {
        self.sizes.partition_point(|&it| it < num_tokens).min(self.largest())
    }

    /// Whether a step with so many tokens says what its class takes. Others say what the next
    /// smaller one takes at most.
    fn teaches(&self, num_tokens: u32) -> bool {
        f64::from(num_tokens) >= NEARLY * f64::from(self.sizes[self.class_of(num_tokens)])
    }

    /// What a size takes beyond its decodes, in seconds; if that was not seen, by the next larger or
    /// smaller one that was, as if its tokens were all that cost. `None` if nothing was seen.
    pub(super) fn extra_s(&self, size: usize, attention: f64) -> Option<f64> {
        let larger = (size..self.sizes.len()).find_map(|it| self.times.predict(it, attention));
        let smaller = |it: usize| {
            let times = f64::from(self.sizes[size]) / f64::from(self.sizes[it]);
            self.times.predict(it, attention).map(|extra_s| times * extra_s)
        };
        larger.or_else(|| (0..size).rev().find_map(smaller))
    }

    /// What a step of any number of tokens takes beyond its decodes, in seconds.
    pub(super) fn extra_of(&self, num_tokens: f64, attention: f64) -> Option<f64> {
        let holds_less = |&it: &u32| f64::from(it) < num_tokens;
        let size = self.sizes.partition_point(holds_less).min(self.largest());
        let above = self.extra_s(size, attention)?;
        let Some(below) = size.checked_sub(1) else { return Some(above) };
        let (least, most) = (f64::from(self.sizes[below]), f64::from(self.sizes[size]));
        let part = ((num_tokens - least) / (most - least)).clamp(0.0, 1.0);
        let below = self.extra_s(below, attention)?;
        Some(below + part * (above - below))
    }

    /// Whether a chunk that is expected to take so long stays within the bound.
    pub(super) fn fits(&self, time_s: f64, limit_s: f64) -> bool {
        time_s * self.margin <= limit_s
    }

    /// Comes to rest where steps are within the bound with that confidence. One that was too long
    /// counts if a larger margin would have kept it out: if it was expected to fit, and barely.
    fn move_margin(&mut self, expected_s: f64, is_too_long: bool, limit_s: f64) {
        let (least, most) = (*MARGIN.start(), *MARGIN.end());
        if !is_too_long {
            self.margin = (self.margin - MARGIN_STEP * (1.0 - CONFIDENCE)).max(least);
        } else if (expected_s..most * expected_s).contains(&limit_s) {
            self.margin = (self.margin + MARGIN_STEP * CONFIDENCE).min(most);
        }
    }

    /// Learns what a step of so many tokens took beyond its decodes; `limit_s` is without these,
    /// too.
    pub(super) fn note(&mut self, num_tokens: u32, extra_s: f64, attention: f64, limit_s: f64) {
        let mut size = self.class_of(num_tokens);
        let mut expected_s = self.times.predict(size, attention);
        if !self.teaches(num_tokens) {
            let Some(smaller) = size.checked_sub(1) else { return };
            size = smaller;
            expected_s = self.times.predict(size, attention);
            if expected_s.is_some_and(|it| it <= extra_s) {
                return;
            }
        }
        let counts = self.times.note(size, extra_s, attention);
        let is_exact = self.sizes[size] == num_tokens;
        if let (true, true, Some(expected_s)) = (counts, is_exact, expected_s) {
            self.move_margin(expected_s, extra_s > limit_s, limit_s);
        }
    }
}
