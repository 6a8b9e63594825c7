//! The clock of paced prefill, or a simulation's in its place: when steps were decided on and came
//! back, and a log of them.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::time::Instant;

use pyo3::prelude::*;
use sparksched_core::{PacedStep, Pacing, PacingReport, PacingSettings, Scheduler, StepKnobs};

/// Steps whose outputs may be lost: so many are remembered.
const MAX_IN_FLIGHT: usize = 64;

/// Chooses the knobs of each step, and measures how long it takes.
pub(crate) struct Pacer {
    pacing: Pacing,
    epoch: Instant,
    /// In the place of the clock, in seconds: a simulation's time.
    simulated_s: Option<f64>,
    /// The `SchedulerOutput` of each step that has not come back, and its number.
    in_flight: VecDeque<(Py<PyAny>, u64)>,
    log: Option<BufWriter<File>>,
}

impl Pacer {
    /// Paces a scheduler; `log` is the path of a file that is written anew.
    pub(crate) fn new(
        settings: PacingSettings,
        log: Option<&str>,
        scheduler: &Scheduler,
    ) -> PyResult<Self> {
        let log = log.map(File::create).transpose()?.map(BufWriter::new);
        let pacing = Pacing::new(settings, scheduler);
        let epoch = Instant::now();
        Ok(Self { pacing, epoch, simulated_s: None, in_flight: VecDeque::new(), log })
    }

    /// From now on it is this time, in seconds, until another is set.
    pub(crate) fn set_time(&mut self, seconds: f64) {
        self.simulated_s = Some(seconds);
    }

    fn now(&self) -> f64 {
        self.simulated_s.unwrap_or_else(|| self.epoch.elapsed().as_secs_f64())
    }

    /// Begins or ends the time before the first request.
    pub(crate) fn warm_up(&mut self, goes_on: bool, scheduler: &Scheduler) {
        if goes_on {
            self.pacing.begin_warm_up();
        } else {
            self.pacing.end_warm_up(scheduler);
        }
    }

    pub(crate) fn choose(&mut self, scheduler: &mut Scheduler) -> StepKnobs {
        self.pacing.choose(scheduler)
    }

    /// The scheduler has decided on a step.
    pub(crate) fn note_step(&mut self, scheduler: &Scheduler) -> Option<u64> {
        let now = self.now();
        self.pacing.note_step(scheduler, now)
    }

    /// The step's result will come with this `SchedulerOutput`.
    pub(crate) fn await_result(&mut self, number: u64, scheduler_output: &Bound<'_, PyAny>) {
        if self.in_flight.len() == MAX_IN_FLIGHT {
            self.in_flight.pop_front();
        }
        self.in_flight.push_back((scheduler_output.clone().unbind(), number));
    }

    /// A result is there.
    pub(crate) fn note_result(&mut self, scheduler_output: &Bound<'_, PyAny>) {
        let is_it = |(one, _): &(Py<PyAny>, u64)| one.is(scheduler_output);
        let Some(position) = self.in_flight.iter().position(is_it) else { return };
        self.in_flight.drain(..position);
        let Some((_, number)) = self.in_flight.pop_front() else { return };
        let now = self.now();
        let step = self.pacing.note_result(number, now);
        if let Some(step) = step.filter(|it| it.num_prompts > 0 || it.has_prompts()) {
            self.write(&step, now);
        }
    }

    pub(crate) fn report(&self) -> PacingReport {
        self.pacing.report()
    }

    pub(crate) fn sizes(&self) -> &[u32] {
        self.pacing.sizes()
    }

    /// A log that can't be written ends; it is no reason to stop.
    fn write(&mut self, step: &PacedStep, now: f64) {
        let Some(log) = &mut self.log else { return };
        if write_line(log, step, now).is_err() {
            self.log = None;
        }
    }
}

fn write_line(log: &mut impl Write, step: &PacedStep, now: f64) -> std::io::Result<()> {
    let PacedStep { number, mode, knobs, load, num_prompts, owed_s, share, predicted_s, time_s } =
        *step;
    let ms = |seconds: f64| 1e3 * seconds;
    writeln!(
        log,
        "{{\"step\": {number}, \"end_s\": {now:.6}, \"mode\": \"{}\", \"budget\": {}, \
         \"threshold\": {}, \"throttled\": {}, \"tokens\": {}, \"prompt_tokens\": {}, \
         \"decode_tokens\": {}, \"admitted\": {}, \"prompts\": {num_prompts}, \
         \"owed_ms\": {:.2}, \"share\": {share:.3}, \"predicted_ms\": {:.2}, \"ms\": {:.2}}}",
        mode.name(),
        knobs.max_num_scheduled_tokens,
        knobs.long_prefill_token_threshold,
        knobs.throttle_prefills,
        load.num_tokens,
        load.num_prompt_tokens,
        load.num_decode_tokens,
        load.num_admitted,
        ms(owed_s),
        ms(predicted_s),
        ms(time_s),
    )?;
    // Seldom enough: somebody may be reading along.
    if step.number.is_multiple_of(32) { log.flush() } else { Ok(()) }
}
