//! What became of the promises, for metrics and logs.

use std::collections::VecDeque;

use super::{Mode, PacedStep};
use crate::promise::{LateBy, Promise};

/// For whom a step is larger than what the stall allows: whose deadline asks for it, or who waits for
/// blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverStall {
    /// An ordinary prompt.
    Ordinary,
    /// A long prompt.
    Long,
}

/// A prompt that came later than promised.
#[derive(Clone, Copy, Debug)]
pub struct LatePrompt {
    pub is_long: bool,
    /// How long it took to its first token, in seconds.
    pub time_s: f64,
    /// By how much that was too late, in seconds.
    pub late_s: f64,
    pub by: LateBy,
}

macro_rules! report {
    ($($(#[$what:meta])+ $name:ident,)+) => {
        /// What has happened so far, and what holds at present.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct PacingReport {
            $($(#[$what])+ pub $name: f64,)+
        }

        impl PacingReport {
            /// Names of what it holds, as metrics and Python have them.
            pub const NAMES: &[&str] = &[$(stringify!($name)),+];

            /// The values, in the order of their names.
            pub fn values(&self) -> [f64; Self::NAMES.len()] {
                [$(self.$name),+]
            }
        }
    };
}

report! {
    /// Tokens of prompts in the last step that computed some while others generated.
    chunk_tokens,
    /// Time of steps with prompts while others generated, in seconds.
    prompt_s,
    /// Time of all steps while prompts and decodes had work, in seconds.
    contended_s,
    /// Steps of decodes alone that were put in.
    num_decode_steps,
    /// The longest step with prompts while others generated, of the last minute, in seconds.
    longest_stall_s,
    /// How many times as late as without pacing long prompts of the last minute came: the median; 0
    /// without any.
    slowdown_p50,
    /// The most of these.
    slowdown_max,
    /// Prompts that came later than promised because they had lost their blocks.
    num_late_by_preemption,
    /// Because they could not come in.
    num_late_by_waiting,
    /// Because of what steps took.
    num_late_by_steps,
    /// Steps over the stall for an ordinary prompt.
    num_over_for_ordinary,
    /// Steps over the stall for a long prompt.
    num_over_for_long,
    /// Steps over the stall that were expected to be within it.
    num_over_unexpected,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Reporter {
    pub(super) report: PacingReport,
    stalls: LastMinute,
    slowdowns: LastMinute,
}

impl Reporter {
    /// A step has come back at `now`; `max_stall_s` is what is allowed.
    pub(super) fn note_step(&mut self, step: &PacedStep, now: f64, max_stall_s: f64) {
        let report = &mut self.report;
        let is_contended = step.load.num_decode_tokens > 0 && step.num_prompts > 0;
        if is_contended {
            report.contended_s += step.time_s;
            report.num_decode_steps += f64::from(step.chosen.mode == Mode::Decode);
        }
        if is_contended && step.has_prompts() {
            report.prompt_s += step.time_s;
            report.chunk_tokens = step.load.num_prompt_tokens.into();
            if step.time_s > max_stall_s {
                *match step.chosen.over_stall {
                    Some(OverStall::Ordinary) => &mut report.num_over_for_ordinary,
                    Some(OverStall::Long) => &mut report.num_over_for_long,
                    None => &mut report.num_over_unexpected,
                } += 1.0;
            }
            self.stalls.note(now, step.time_s);
        }
        report.longest_stall_s = self.stalls.most(now);
        let num_slowdowns = self.slowdowns.0.len();
        report.slowdown_max = self.slowdowns.most(now);
        if self.slowdowns.0.len() < num_slowdowns {
            report.slowdown_p50 = self.slowdowns.median();
        }
    }

    /// A prompt's first token is there at `now`, and was to be there at `deadline`.
    pub(super) fn note_prompt(
        &mut self,
        promise: &Promise,
        deadline: f64,
        now: f64,
    ) -> Option<LatePrompt> {
        let time_s = now - promise.arrived_at;
        if !promise.is_ordinary {
            let virtual_s = promise.since - promise.arrived_at + promise.virtual_s;
            self.slowdowns.note(now, time_s / virtual_s.max(1e-3));
            self.report.slowdown_p50 = self.slowdowns.median();
        }
        if now <= deadline {
            return None;
        }
        *match promise.late_by {
            LateBy::Preemption => &mut self.report.num_late_by_preemption,
            LateBy::Waiting => &mut self.report.num_late_by_waiting,
            LateBy::Steps => &mut self.report.num_late_by_steps,
        } += 1.0;
        let (is_long, by) = (!promise.is_ordinary, promise.late_by);
        Some(LatePrompt { is_long, time_s, late_s: now - deadline, by })
    }
}

/// Values of the last minute, none below 0; of many at a time, the largest.
#[derive(Clone, Debug, Default)]
struct LastMinute(VecDeque<(f64, f64)>);

impl LastMinute {
    const PERIOD_S: f64 = 60.0;
    /// Two values within this time are one.
    const GRAIN_S: f64 = 0.25;

    fn note(&mut self, now: f64, value: f64) {
        match self.0.back_mut() {
            Some((at, most)) if now - *at < Self::GRAIN_S => *most = most.max(value),
            _ => self.0.push_back((now, value)),
        }
    }

    fn most(&mut self, now: f64) -> f64 {
        while self.0.front().is_some_and(|(at, _)| now - at > Self::PERIOD_S) {
            self.0.pop_front();
        }
        self.0.iter().fold(0.0, |most, (_, value)| most.max(*value))
    }

    fn median(&self) -> f64 {
        let mut values: Vec<f64> = self.0.iter().map(|(_, value)| *value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    }
}
