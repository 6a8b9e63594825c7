//! The sizes that chunks have, and which of them is the best.
//!
//! Sizes are powers of two up to the configured budget, eight at most: kernels are compiled for
//! each. It begins in the middle, since on many devices every step with a prompt has a fixed price
//! that small ones don't earn, and goes up or down from there.

use super::step_times::PromptTimes;

/// Sizes, at most.
const NUM_SIZES: usize = 8;

/// The smallest size.
const SMALLEST: u32 = 32;

/// Where it begins, if there is nothing to go by: so many times smaller than the largest.
const FIRST_PART: u32 = 4;

/// Tokens of prompts that a chunk has at least.
const LEAST_ROOM: u32 = 16;

/// A size that computes this part of the best one's tokens a second will do: smaller ones keep
/// others waiting for less long.
const GOOD_ENOUGH: f64 = 0.9;

/// A larger size is tried if the present one takes at most this part of what is allowed.
const ROOM_TO_GROW: f64 = 0.6;

/// The same where the largest is wanted: a prompt that just misses the present one would have to wait
/// as long ones do.
const ROOM_TO_GROW_FOR_SHORT: f64 = 0.85;

/// A size is tried if it may take so many times what is allowed: what is not known may be better
/// than it seems.
const MAX_RISK: f64 = 1.3;

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
    /// What all prompts together lack.
    pub(super) num_prompt_tokens: u32,
    /// What the decodes alone would take, in seconds.
    pub(super) decode_s: f64,
    /// Tokens before the chunk.
    pub(super) context: f64,
    /// How long it may take, in seconds.
    pub(super) limit_s: f64,
    /// Nobody is kept waiting by the largest one: the smallest that is good enough is not asked for.
    pub(super) wants_largest: bool,
}

impl Query {
    fn room(&self, num_tokens: u32) -> f64 {
        f64::from(num_tokens.saturating_sub(self.num_decode_tokens))
    }

    fn attention(&self, num_tokens: u32) -> f64 {
        let room = self.room(num_tokens);
        room * (self.context + 0.5 * room)
    }
}

/// The sizes, and what is known of them.
#[derive(Clone, Debug)]
pub(super) struct Ladder {
    sizes: Vec<u32>,
    times: PromptTimes,
    /// How many times as long as expected a chunk may take, with some confidence.
    margin: f64,
    /// A size that had been too slow and is tried again.
    retried: Option<usize>,
}

impl Ladder {
    pub(super) fn new(max_tokens: u32, max_graph_tokens: u32) -> Self {
        let halved = (0..NUM_SIZES as u32).map_while(|shift| max_tokens.checked_shr(shift));
        let mut sizes: Vec<u32> = halved.take_while(|&it| it >= SMALLEST.min(max_tokens)).collect();
        sizes.reverse();
        let num_in_graphs = sizes.partition_point(|&it| it <= max_graph_tokens);
        let times = PromptTimes::new(&sizes, num_in_graphs);
        Self { sizes, times, margin: 1.05, retried: None }
    }

    pub(super) fn sizes(&self) -> &[u32] {
        &self.sizes
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
    pub(super) fn class_of(&self, num_tokens: u32) -> usize {
        self.sizes.partition_point(|&it| it < num_tokens).min(self.sizes.len() - 1)
    }

    /// Whether a step with so many tokens says what its class takes. Others say what the next
    /// smaller one takes at most.
    fn teaches(&self, num_tokens: u32) -> bool {
        f64::from(num_tokens) >= NEARLY * f64::from(self.sizes[self.class_of(num_tokens)])
    }

    /// What a size is known to take beyond its decodes, in seconds; `None` if it is not.
    pub(super) fn known(&self, size: usize, attention: f64) -> Option<f64> {
        let is_known = self.times.is_known(size, 0.0);
        if is_known { self.times.predict(size, attention) } else { None }
    }

    /// Whether a size was not made for long.
    pub(super) fn is_stale(&self, size: usize) -> bool {
        self.times.is_stale(size)
    }

    /// What a size takes beyond its decodes, in seconds; if that was not seen, by the next larger
    /// or smaller one that was. `None` if nothing was seen.
    pub(super) fn guess(&self, size: usize, attention: f64) -> Option<f64> {
        let larger = (size..self.sizes.len()).find_map(|it| self.times.predict(it, attention));
        larger.or_else(|| {
            (0..size).rev().find_map(|it| {
                let times = f64::from(self.sizes[size]) / f64::from(self.sizes[it]);
                self.times.predict(it, attention).map(|extra_s| times * extra_s)
            })
        })
    }

    /// The size of a chunk, which must have room.
    ///
    /// # Panics
    /// If no size has.
    pub(super) fn best(&mut self, query: &Query) -> usize {
        let first = self.first_above(query.num_decode_tokens).expect("a size with room");
        let Some(fitting) = self.largest_that_fits(first, query) else {
            return self.smaller(first, query);
        };
        if let Some(larger) = self.worth_a_try(fitting, query) {
            return larger;
        }
        if query.wants_largest { fitting } else { self.most_efficient(first, query) }
    }

    fn time(&self, size: usize, query: &Query) -> Option<f64> {
        if !self.times.is_known(size, MAX_RISK * query.limit_s) {
            return None;
        }
        let extra_s = self.times.predict(size, query.attention(self.sizes[size]))?;
        Some(query.decode_s + extra_s)
    }

    fn fits(&self, size: usize, query: &Query) -> bool {
        self.time(size, query).is_some_and(|time_s| time_s * self.margin <= query.limit_s)
    }

    fn largest_that_fits(&self, first: usize, query: &Query) -> Option<usize> {
        (first..self.sizes.len()).rev().find(|&it| self.fits(it, query))
    }

    /// Where nothing is known to fit: the next smaller than the smallest that is known.
    fn smaller(&self, first: usize, query: &Query) -> usize {
        let sizes = first..self.sizes.len();
        let Some(smallest) = sizes.clone().find(|&it| self.time(it, query).is_some()) else {
            let middle = self.sizes[self.sizes.len() - 1] / FIRST_PART;
            let least = middle.max(query.num_decode_tokens + query.num_decode_tokens / 2);
            return self.class_of(least).max(first);
        };
        let excess = self.time(smallest, query).map_or(0.0, |time_s| time_s / query.limit_s);
        let steps = if excess > 2.5 { 2 } else { 1 };
        smallest.saturating_sub(steps).max(first)
    }

    /// A larger size of which too little is known, or what is known is old.
    fn worth_a_try(&mut self, fitting: usize, query: &Query) -> Option<usize> {
        let time_s = self.time(fitting, query)?;
        let larger = fitting + 1;
        let can_be_filled = query.wants_largest
            || query.room(*self.sizes.get(larger)?) <= f64::from(query.num_prompt_tokens);
        let is_open = || {
            let is_unknown = self.time(larger, query).is_none();
            is_unknown || (!query.wants_largest && self.times.is_stale(larger))
        };
        if larger == self.sizes.len() || !can_be_filled || !is_open() {
            return None;
        }
        let lower = (0..fitting).rev().find_map(|it| Some((it, self.time(it, query)?)));
        let most = match (query.wants_largest, lower) {
            // What a token more costs is known, and tells more than a part of the bound.
            (true, Some(_)) => 1.0,
            (true, None) => ROOM_TO_GROW_FOR_SHORT,
            (false, _) => ROOM_TO_GROW,
        };
        if time_s > most * query.limit_s {
            return None;
        }
        let slope = lower.map_or(0.0, |(it, lower_s)| {
            (time_s - lower_s).max(0.0) / f64::from(self.sizes[fitting] - self.sizes[it])
        });
        let expected_s = time_s + slope * f64::from(self.sizes[larger] - self.sizes[fitting]);
        if expected_s > MAX_RISK * query.limit_s {
            return None;
        }
        self.retried = self.time(larger, query).is_some().then_some(larger);
        Some(larger)
    }

    /// Of the sizes that fit, the smallest that is nearly as good as the best.
    fn most_efficient(&self, first: usize, query: &Query) -> usize {
        let speed = |size: usize| {
            let time_s = self.time(size, query).filter(|_| self.fits(size, query))?;
            Some(query.room(self.sizes[size]) / time_s)
        };
        let sizes = first..self.sizes.len();
        let best = sizes.clone().filter_map(speed).fold(0.0, f64::max);
        let mut sizes = sizes;
        sizes
            .find(|&it| speed(it).is_some_and(|it| it >= GOOD_ENOUGH * best))
            .expect("one that fits")
    }

    /// A step with prompts was made, of whatever size.
    pub(super) fn note_step(&mut self) {
        self.times.note_step();
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
        let is_too_long = extra_s > limit_s;
        if let (true, true, Some(expected_s)) = (counts, is_exact, expected_s) {
            self.move_margin(expected_s, is_too_long, limit_s);
        }
        if self.retried == Some(size) {
            self.retried = None;
            self.times.note_retry(size, is_too_long);
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
        assert!(after(40, &[0.15, 0.15, 0.15, 0.25]).margin > first + 0.3);
        // Far below the bound times may vary, and whoever doesn't fit needs no margin.
        assert!(after(40, &[0.06, 0.06, 0.06, 0.12]).margin <= first);
        assert!(after(40, &[0.1, 0.1, 0.1, 0.1, 0.21]).margin <= first);
        assert!(after(40, &[0.25, 0.25, 0.25, 0.35]).margin <= first);
    }

    #[test]
    fn steps_of_any_size_that_are_in_time_lower_the_margin() {
        let mut ladder = after(40, &[0.15, 0.15, 0.15, 0.25]);
        for _ in 0..1_000 {
            ladder.note(1_024, 0.05, 0.0, LIMIT_S);
        }
        assert!((ladder.margin - MARGIN.start()).abs() < 1e-9, "{}", ladder.margin);
    }

    #[test]
    fn the_largest_size_of_a_graph_is_in_it() {
        let mut ladder = Ladder::new(8_192, 512);
        for turn in 0..20 {
            let attention = 1e8 * f64::from(turn);
            ladder.note(512, 0.01 + 1e-9 * attention, attention, LIMIT_S);
            ladder.note(1_024, 0.1, attention, LIMIT_S);
        }
        let other = ladder.guess(ladder.class_of(1_024), 3e9).expect("it was seen");
        assert!(other < 0.11, "{other} s");
    }
}
