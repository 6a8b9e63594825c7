//! The sizes that chunks have, and what each takes.
//!
//! Sizes are the configured budget and its halves, and three quarters of the largest, ten at most:
//! kernels are compiled for each. Where nothing is known it begins in the middle, since on many devices every step with a
//! prompt has a fixed price that small ones don't earn, and goes up or down from there.

use super::step_times::PromptTimes;

/// Sizes, at most.
const NUM_SIZES: usize = 10;

/// Of these, so many are between a size and its half.
const NUM_BETWEEN: usize = 3;

/// The smallest size.
const SMALLEST: u32 = 32;

/// Where it begins, if there is nothing to go by: so many times smaller than the largest.
const FIRST_PART: u32 = 4;

/// Tokens of prompts that a chunk has at least.
const LEAST_ROOM: u32 = 16;

/// A size that computes this part of the best one's tokens a second will do: smaller ones keep
/// others waiting for less long.
const GOOD_ENOUGH: f64 = 0.95;

/// A larger size that was never seen is tried if the present one takes at most this part of what is
/// allowed.
const ROOM_TO_GROW: f64 = 0.6;

/// A step teaches something about a size if it has this part of its tokens.
const NEARLY: f64 = 0.9;

/// How sure a chunk is to be within the bound.
const CONFIDENCE: f64 = 0.99;

/// How many times as long as expected a chunk may take at most, to fit.
const MARGIN: std::ops::RangeInclusive<f64> = 1.03..=1.5;

/// How much a chunk that was too long adds to that.
const MARGIN_STEP: f64 = 0.05;

/// What a chunk is asked for, and under which circumstances.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query {
    pub(super) num_decode_tokens: u32,
    /// What the decodes alone would take, in seconds.
    pub(super) decode_s: f64,
    /// Tokens before the chunk.
    pub(super) context: f64,
    /// How long it may take, in seconds.
    pub(super) limit_s: f64,
}

/// The sizes, and what is known of them.
#[derive(Clone, Debug)]
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

    /// The last size that so many tokens fill.
    pub(super) fn last_within(&self, num_tokens: u32) -> Option<usize> {
        self.sizes.partition_point(|&it| it <= num_tokens).checked_sub(1)
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

    /// What a size takes beyond its decodes, in seconds; if that was not seen, by the next larger
    /// or smaller one that was. `None` if nothing was seen.
    pub(super) fn extra_s(&self, size: usize, attention: f64) -> Option<f64> {
        let larger = (size..self.sizes.len()).find_map(|it| self.times.predict(it, attention));
        let smaller = || (0..size).rev().find_map(|it| self.times.predict(it, attention));
        larger.or_else(smaller)
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

    /// The size of a chunk within the bound; the largest if none has room.
    pub(super) fn within_bound(&self, query: &Query) -> usize {
        let first = self.first_above(query.num_decode_tokens).unwrap_or(self.largest());
        let Some(fitting) = (first..self.sizes.len()).rev().find(|&it| self.fits(it, query)) else {
            return self.smaller(first, query);
        };
        let is_unknown = fitting < self.largest() && self.time(fitting + 1, query).is_none();
        let has_room = self.time(fitting, query) <= Some(ROOM_TO_GROW * query.limit_s);
        if is_unknown && has_room { fitting + 1 } else { self.most_efficient(first, query) }
    }

    fn time(&self, size: usize, query: &Query) -> Option<f64> {
        if !self.times.is_known(size, query.limit_s) {
            return None;
        }
        let room = f64::from(self.sizes[size].saturating_sub(query.num_decode_tokens));
        let attention = room * (query.context + 0.5 * room);
        Some(query.decode_s + self.extra_s(size, attention)?)
    }

    fn fits(&self, size: usize, query: &Query) -> bool {
        self.time(size, query).is_some_and(|time_s| time_s * self.margin <= query.limit_s)
    }

    /// Where nothing is known to fit: the next smaller than the smallest that is known.
    fn smaller(&self, first: usize, query: &Query) -> usize {
        let known = (first..self.sizes.len()).find(|&it| self.time(it, query).is_some());
        let Some(smallest) = known else {
            let middle = self.sizes[self.largest()] / FIRST_PART;
            let least = middle.max(query.num_decode_tokens + query.num_decode_tokens / 2);
            return self.class_of(least).max(first);
        };
        smallest.saturating_sub(1).max(first)
    }

    /// Of the sizes that fit, the smallest that is nearly as good as the best.
    fn most_efficient(&self, first: usize, query: &Query) -> usize {
        let speed = |size: usize| {
            let time_s = self.time(size, query).filter(|_| self.fits(size, query))?;
            Some(f64::from(self.sizes[size].saturating_sub(query.num_decode_tokens)) / time_s)
        };
        let mut sizes = first..self.sizes.len();
        let best = sizes.clone().filter_map(speed).fold(0.0, f64::max);
        sizes.find(|&it| speed(it).is_some_and(|it| it >= GOOD_ENOUGH * best)).unwrap_or(first)
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

#[cfg(test)]
mod tests {
    use super::{Ladder, MARGIN};

    const LIMIT_S: f64 = 0.2;

    /// A ladder whose largest size has taken these times, one after the other.
    fn after(num_times: usize, times_s: &[f64]) -> Ladder {
        let mut ladder = Ladder::new(8_192, 512);
        for time_s in times_s.iter().cycle().take(num_times) {
            ladder.note(8_192, *time_s, 0.0, LIMIT_S);
        }
        ladder
    }

    #[test]
    fn only_steps_that_barely_fit_raise_the_margin() {
        let first = Ladder::new(8_192, 512).margin;
        assert!(after(200, &[0.15, 0.15, 0.15, 0.15, 0.25]).margin > first + 0.3);
        // Far below the bound times may vary, and whoever doesn't fit needs no margin.
        assert!(after(200, &[0.06, 0.06, 0.06, 0.06, 0.12]).margin <= first);
        assert!(after(200, &[0.25, 0.25, 0.25, 0.25, 0.35]).margin <= first);
    }

    #[test]
    fn steps_of_any_size_that_are_in_time_lower_the_margin() {
        let mut ladder = after(200, &[0.15, 0.15, 0.15, 0.15, 0.25]);
        for _ in 0..1_000 {
            ladder.note(1_024, 0.05, 0.0, LIMIT_S);
        }
        assert!((ladder.margin - MARGIN.start()).abs() < 1e-9, "{}", ladder.margin);
    }
}
