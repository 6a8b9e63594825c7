//! When prompts would be through without pacing.

use crate::scheduler::attention_of;

/// Computes prompts as vLLM would: first come, first served, as many in a step as it holds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VirtualServer {
    /// When it would be through with all that have come.
    pub(super) end: f64,
    /// Its last step, which those who come join while it has not begun.
    num_tokens: f64,
    attention: f64,
}

impl VirtualServer {
    /// Takes a prompt in at `now`, with tokens to be computed behind others; returns when it would
    /// be through with it. A step has room for so many tokens, and takes what `step_s` says of these
    /// and what they attend to, in seconds.
    pub(super) fn arrive(
        &mut self,
        now: f64,
        (num_missing, num_computed): (u32, u32),
        room: f64,
        step_s: impl Fn(f64, f64) -> f64,
    ) -> f64 {
        let mut last_s = step_s(self.num_tokens, self.attention);
        if self.num_tokens == 0.0 || self.end - last_s < now {
            self.end = self.end.max(now);
            (self.num_tokens, self.attention, last_s) = (0.0, 0.0, 0.0);
        }
        let (mut left, mut position) = (f64::from(num_missing), f64::from(num_computed));
        loop {
            let part = left.min(room - self.num_tokens);
            self.num_tokens += part;
            self.attention += attention_of(position, part);
            let now_s = step_s(self.num_tokens, self.attention);
            self.end += now_s - last_s;
            (left, position) = (left - part, position + part);
            if left <= 0.0 {
                return self.end;
            }
            (self.num_tokens, self.attention, last_s) = (0.0, 0.0, 0.0);
        }
    }
}
