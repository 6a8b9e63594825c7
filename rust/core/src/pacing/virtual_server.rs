//! When prompts would be through without pacing.

use super::ladder::Ladder;

/// What vLLM's steps take: they hold as many tokens as are configured.
pub(super) struct FullSteps<'a> {
    pub(super) ladder: &'a Ladder,
    pub(super) decode_s: f64,
    /// Tokens of prompts that a step holds.
    pub(super) room: f64,
    /// Where nothing was seen yet.
    pub(super) unknown_s: f64,
}

impl FullSteps<'_> {
    /// What a step takes that holds so many tokens of prompts, in seconds; `attention` is each times
    /// what it attends to. Those of decodes cost what they do alone.
    pub(super) fn step_s(&self, num_tokens: f64, attention: f64) -> f64 {
        let extra_s = self.ladder.extra_s(num_tokens, attention);
        self.decode_s + extra_s.unwrap_or(self.unknown_s)
    }
}

/// Computes prompts as vLLM would: first come, first served, as many in a step as it holds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VirtualServer {
    /// When it would be through with all that have come.
    end: f64,
    /// Its last step, which those who come join while it has not begun.
    num_tokens: f64,
    attention: f64,
}

impl VirtualServer {
    /// When it would be through with all that have come.
    pub(super) fn end(&self) -> f64 {
        self.end
    }

    /// It is through by then: what is really left would be.
    pub(super) fn limit(&mut self, end: f64) {
        self.end = self.end.min(end);
    }

    /// Takes a prompt in at `now`, with tokens to be computed behind others; returns when it would
    /// be through with it.
    pub(super) fn arrive(
        &mut self,
        now: f64,
        num_missing: u32,
        num_computed: u32,
        price: &FullSteps<'_>,
    ) -> f64 {
        let mut last_s = price.step_s(self.num_tokens, self.attention);
        if self.num_tokens == 0.0 || self.end - last_s < now {
            self.end = self.end.max(now);
            (self.num_tokens, self.attention, last_s) = (0.0, 0.0, 0.0);
        }
        let (mut left, mut position) = (f64::from(num_missing), f64::from(num_computed));
        loop {
            let part = left.min(price.room - self.num_tokens);
            self.num_tokens += part;
            self.attention += part * (position + 0.5 * part);
            let step_s = price.step_s(self.num_tokens, self.attention);
            self.end += step_s - last_s;
            (left, position) = (left - part, position + part);
            if left <= 0.0 {
                return self.end;
            }
            (self.num_tokens, self.attention, last_s) = (0.0, 0.0, 0.0);
        }
    }
}
