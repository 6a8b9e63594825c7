//! The sizes that chunks have, and which of them is the best.
//!
//! Sizes are powers of two and the halves between them, up to the configured budget. Few of them
//! are ever used: it goes up from a small one, by doubling while that is safe, and stays at the best.

use super::step_times::PromptTimes;

/// The smallest size.
const SMALLEST: u32 = 64;

/// Where it begins, if there is nothing to go by.
const FIRST: u32 = 256;

/// Tokens of prompts that a chunk has at least.
const LEAST_ROOM: u32 = 16;

/// A size that computes this part of the best one's tokens a second will do: smaller ones keep
/// others waiting for less long.
const GOOD_ENOUGH: f64 = 0.9;

/// A larger size is tried if the present one takes at most this part of what is allowed.
const ROOM_TO_GROW: f64 = 0.85;

/// The next but one is tried if the present one takes at most this part.
const ROOM_TO_DOUBLE: f64 = 0.5;

/// A size is tried if it may take so many times what is allowed: what is not known may be better
/// than it seems.
const MAX_RISK: f64 = 1.3;

/// A step teaches something about a size if it has this part of its tokens.
const NEARLY: f64 = 0.9;

/// How sure a chunk is to be within the bound.
const CONFIDENCE: f64 = 0.99;

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
    pub(super) fn new(max_tokens: u32) -> Self {
        let doubled = (0..u32::BITS - SMALLEST.ilog2()).map(|shift| SMALLEST << shift);
        let sizes = doubled.flat_map(|it| [it, it + it / 2]).take_while(|&it| it < max_tokens);
        let sizes: Vec<u32> = sizes.chain([max_tokens]).collect();
        let times = PromptTimes::new(sizes.len());
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

    /// The smallest size that holds so many tokens.
    pub(super) fn class_of(&self, num_tokens: u32) -> usize {
        self.sizes.partition_point(|&it| it < num_tokens).min(self.sizes.len() - 1)
    }

    /// Whether a step with so many tokens says what its class takes. Others say what the next
    /// smaller one takes at most.
    fn teaches(&self, num_tokens: u32) -> bool {
        f64::from(num_tokens) >= NEARLY * f64::from(self.sizes[self.class_of(num_tokens)])
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
            let least = FIRST.max(query.num_decode_tokens + query.num_decode_tokens / 2);
            return self.class_of(least).max(first);
        };
        let is_far_too_slow =
            self.time(smallest, query).is_some_and(|time_s| time_s > 2.0 * query.limit_s);
        smallest.saturating_sub(if is_far_too_slow { 2 } else { 1 }).max(first)
    }

    /// A larger size of which too little is known, or what is known is old.
    fn worth_a_try(&mut self, fitting: usize, query: &Query) -> Option<usize> {
        let time_s = self.time(fitting, query)?;
        let part = time_s / query.limit_s;
        let is_open = |it: usize| {
            it < self.sizes.len()
                && (query.wants_largest
                    || query.room(self.sizes[it]) <= f64::from(query.num_prompt_tokens))
                && (self.time(it, query).is_none() || self.times.is_stale(it))
        };
        let has_room = [(2, ROOM_TO_DOUBLE), (1, ROOM_TO_GROW)];
        let (steps, _) =
            has_room.into_iter().find(|&(steps, most)| part <= most && is_open(fitting + steps))?;
        let larger = fitting + steps;
        let lower = (0..fitting).rev().find_map(|it| Some((it, self.time(it, query)?)));
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

    /// Learns what a step of so many tokens took beyond its decodes.
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
            // Moves so that it comes to rest where chunks are below it with that confidence.
            let step =
                if extra_s > self.margin * expected_s { CONFIDENCE } else { CONFIDENCE - 1.0 };
            self.margin = (self.margin + 0.02 * step).clamp(1.03, 1.5);
        }
        if self.retried == Some(size) {
            self.retried = None;
            self.times.note_retry(size, extra_s > limit_s);
        }
    }
}
