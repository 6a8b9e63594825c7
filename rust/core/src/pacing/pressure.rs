//! Prompts that come faster than they are computed, and how share and bound give way to them.

use super::PacedStep;

/// Prompts that have not been computed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queue {
    pub(super) num_prompts: u32,
    pub(super) tokens: f64,
    /// Of those that wait, and that a step with vLLM's values would compute at once.
    pub(super) ordinary_tokens: f64,
}

/// How far share and bound give way because prompts come faster than they are computed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pressure {
    level: f64,
    window_s: f64,
    /// Tokens of prompts that were computed in it.
    tokens: f64,
    last_backlog: f64,
}

impl Pressure {
    /// How often it is judged, in seconds of steps.
    const WINDOW_S: f64 = 1.0;
    /// What a queue that grows adds in a window, and one that does not takes away.
    const STEP: f64 = 0.25;
    /// What a queue adds that will not be through for long, whether it grows or not.
    const LEAP: f64 = 1.0;
    const MAX: f64 = 4.0;
    /// At the pace of a window, ordinary prompts are to be through after so long.
    const LONGEST_WAIT_S: f64 = 1.0;

    /// Takes in a step that has come back, and what is left in the queue.
    pub(super) fn note(&mut self, step: &PacedStep, queue: Queue) {
        self.window_s += step.time_s;
        self.tokens += f64::from(step.load.num_prompt_tokens);
        if self.window_s < Self::WINDOW_S {
            return;
        }
        let in_time = Self::LONGEST_WAIT_S * self.tokens / self.window_s;
        let change = if queue.num_prompts < 2 {
            -Self::STEP
        } else if queue.ordinary_tokens > in_time {
            Self::LEAP
        } else if queue.tokens > self.last_backlog {
            Self::STEP
        } else {
            -Self::STEP
        };
        let level = (self.level + change).clamp(0.0, Self::MAX);
        *self = Self { level, last_backlog: queue.tokens, ..Self::default() };
    }

    /// How far they give way now: up to 1 the share, above that the bound.
    pub(super) fn level(&self) -> f64 {
        self.level
    }

    /// What the bound is multiplied by: it doubles for each level above the first.
    pub(super) fn leniency(&self) -> f64 {
        (self.level - 1.0).max(0.0).exp2()
    }
}
