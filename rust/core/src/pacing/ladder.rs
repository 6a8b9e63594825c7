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

/// How sure a chunk is to be within the bound.
const CONFIDENCE: f64 = 0.99;

/// How many times as long as expected a chunk may take at most, to fit.
const MARGIN: std::ops::RangeInclusive<f64> = 1.03..=1.5;

/// How much a chunk that was too long adds to that.
const MARGIN_STEP: f64 = 0.05;

/// The sizes, and what is known of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Ladder {
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
        Self { times: PromptTimes::new(sizes, num_in_graphs), margin: 1.05 }
    }

    pub(super) fn sizes(&self) -> &[u32] {
        &self.times.most_tokens
    }

    pub(super) fn largest(&self) -> usize {
        self.sizes().len() - 1
    }

    /// The first size that has room for prompts beside so many tokens of decodes.
    pub(super) fn first_above(&self, num_decode_tokens: u32) -> Option<usize> {
        let least = if num_decode_tokens == 0 { 1 } else { num_decode_tokens + LEAST_ROOM };
        self.sizes().iter().position(|&it| it >= least)
    }

    /// What a step with so many tokens of prompts takes beyond its decodes, in seconds; `None` if
    /// nothing was seen.
    pub(super) fn extra_s(&self, num_tokens: f64, attention: f64) -> Option<f64> {
        self.times.predict(num_tokens, attention)
    }

    /// Whether a chunk that is expected to take so long stays within the bound.
    pub(super) fn fits(&self, time_s: f64, limit_s: f64) -> bool {
        time_s * self.margin <= limit_s
    }

    /// Learns what a step with so many tokens of prompts took beyond its decodes; `limit_s` is
    /// without these, too. The margin comes to rest where steps are within the bound with that
    /// confidence. One that was too long counts if a larger margin would have kept it out: if it was
    /// expected to fit, and barely.
    pub(super) fn note(&mut self, num_tokens: f64, extra_s: f64, attention: f64, limit_s: f64) {
        let Some(expected_s) = self.times.note(num_tokens, extra_s, attention) else { return };
        let (least, most) = (*MARGIN.start(), *MARGIN.end());
        if extra_s <= limit_s {
            self.margin = (self.margin - MARGIN_STEP * (1.0 - CONFIDENCE)).max(least);
        } else if (expected_s..most * expected_s).contains(&limit_s) {
            self.margin = (self.margin + MARGIN_STEP * CONFIDENCE).min(most);
        }
    }
}
