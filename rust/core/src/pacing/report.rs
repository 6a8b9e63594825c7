//! What became of the promises, for metrics and logs.

use std::collections::VecDeque;

use super::PacedStep;
use crate::promise::{LateBy, Promise};

/// For whose deadline a step is larger than what the stall allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverStall {
    /// An ordinary prompt's.
    ForOrdinary,
    /// A long prompt's.
    ForLong,
}

impl OverStall {
    /// Its name in logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ForOrdinary => "ordinary",
            Self::ForLong => "long",
        }
    }
}

/// A prompt that came later than promised.
#[derive(Clone, Copy, Debug)]
pub struct LatePrompt {
    /// Whether it is a long one.
    pub is_long: bool,
    /// How long it took to its first token, in seconds.
    pub time_s: f64,
    /// By how much that was too late, in seconds.
    pub late_s: f64,
    /// Why.
    pub by: LateBy,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PacingReport {
    /// Tokens of prompts in the last step that computed some while others generated.
    pub chunk_tokens: u32,
    /// Time of steps with prompts while others generated, in seconds.
    pub prompt_s: f64,
    /// Time of all steps while prompts and decodes had work, in seconds.
    pub contended_s: f64,
    /// Steps of decodes alone that were put in.
    pub num_decode_steps: u64,
    /// Prompts that came later than promised because they had lost their blocks.
    pub num_late_by_preemption: u64,
    /// Because they could not come in.
    pub num_late_by_waiting: u64,
    /// Because of what steps took.
    pub num_late_by_steps: u64,
    /// Steps over the stall for an ordinary prompt's deadline.
    pub num_over_for_ordinary: u64,
    /// Steps over the stall for a long prompt's deadline.
    pub num_over_for_long: u64,
    /// Steps over the stall that were expected to be within it.
    pub num_over_unexpected: u64,
    /// The longest step with prompts while others generated, of the last minute, in seconds.
    pub longest_stall_s: f64,
    /// How many times as late as without pacing long prompts of the last minute came: the median; 0
    /// without any.
    pub slowdown_p50: f64,
    /// The most of these.
    pub slowdown_max: f64,
}

impl PacingReport {
    /// Names of what it holds, as metrics and Python have them.
    pub const NAMES: [&str; 13] = [
        "chunk_tokens",
        "prompt_s",
        "contended_s",
        "num_decode_steps",
        "longest_stall_s",
        "slowdown_p50",
        "slowdown_max",
        "num_late_by_preemption",
        "num_late_by_waiting",
        "num_late_by_steps",
        "num_over_for_ordinary",
        "num_over_for_long",
        "num_over_unexpected",
    ];

    /// The values, in the order of their names.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts of steps and prompts are small")]
    pub fn values(&self) -> [f64; Self::NAMES.len()] {
        [
            self.chunk_tokens.into(),
            self.prompt_s,
            self.contended_s,
            self.num_decode_steps as f64,
            self.longest_stall_s,
            self.slowdown_p50,
            self.slowdown_max,
            self.num_late_by_preemption as f64,
            self.num_late_by_waiting as f64,
            self.num_late_by_steps as f64,
            self.num_over_for_ordinary as f64,
            self.num_over_for_long as f64,
            self.num_over_unexpected as f64,
        ]
    }
}

/// Sums up what has happened.
#[derive(Clone, Debug, Default)]
pub(super) struct Reporter {
    report: PacingReport,
    stalls: LastMinute,
    slowdowns: LastMinute,
}

impl Reporter {
    pub(super) fn report(&self) -> PacingReport {
        self.report
    }

    /// A step has come back at `now`; `max_stall_s` is what is allowed.
    pub(super) fn note_step(&mut self, step: &PacedStep, now: f64, max_stall_s: f64) {
        let report = &mut self.report;
        let has_decodes = step.load.num_decode_tokens > 0;
        if has_decodes && step.num_prompts > 0 {
            report.contended_s += step.time_s;
            if step.has_prompts() {
                report.prompt_s += step.time_s;
                report.chunk_tokens = step.load.num_prompt_tokens;
            } else {
                report.num_decode_steps += u64::from(step.is_of_decodes_alone());
            }
        }
        if has_decodes && step.has_prompts() {
            if step.time_s > max_stall_s {
                *match step.over_stall {
                    Some(OverStall::ForOrdinary) => &mut report.num_over_for_ordinary,
                    Some(OverStall::ForLong) => &mut report.num_over_for_long,
                    None => &mut report.num_over_unexpected,
                } += 1;
            }
            self.stalls.note(now, step.time_s);
        }
        report.longest_stall_s = self.stalls.most(now);
        report.slowdown_max = self.slowdowns.most(now);
        if report.slowdown_max == 0.0 {
            report.slowdown_p50 = 0.0;
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
            self.report.slowdown_p50 = self.slowdowns.median(now);
        }
        if now <= deadline {
            return None;
        }
        *match promise.late_by {
            LateBy::Preemption => &mut self.report.num_late_by_preemption,
            LateBy::Waiting => &mut self.report.num_late_by_waiting,
            LateBy::Steps => &mut self.report.num_late_by_steps,
        } += 1;
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

    fn median(&mut self, now: f64) -> f64 {
        self.most(now);
        let mut values: Vec<f64> = self.0.iter().map(|(_, value)| *value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    }
}
