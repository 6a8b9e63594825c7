//! The clock of paced prefill, or a simulation's in its place: when steps were decided on and came
//! back, and a log of them.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Error, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};
use sparksched_core::{
    LatePrompt, PacedStep, Pacing, PacingReport, PacingSettings, Scheduler, StepKnobs,
};

/// Steps whose outputs may be lost: so many are remembered.
const MAX_IN_FLIGHT: usize = 64;

/// Chooses the knobs of each step, and measures how long it takes.
pub(crate) struct Pacer {
    pub(crate) pacing: Pacing,
    epoch: Instant,
    /// In the place of the clock, in seconds: a simulation's time.
    simulated_s: Option<f64>,
    /// The `SchedulerOutput` of each step that has not come back, and its number.
    in_flight: VecDeque<(Py<PyAny>, u64)>,
    log: Option<Log>,
}

impl Pacer {
    /// Paces a scheduler; `log` is the path of a new file.
    pub(crate) fn new(
        settings: PacingSettings,
        log: Option<&str>,
        scheduler: &Scheduler,
    ) -> PyResult<Self> {
        let log = log.map(Log::create).transpose()?;
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

    pub(crate) fn choose(&mut self, scheduler: &mut Scheduler) -> StepKnobs {
        let now = self.now();
        self.pacing.choose(scheduler, now)
    }

    /// The scheduler has decided on a step.
    pub(crate) fn note_step(&mut self, scheduler: &mut Scheduler) -> Option<u64> {
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
        let Some((step, late)) = self.pacing.note_result(number, now) else { return };
        if step.num_prompts > 0 || step.has_prompts() {
            self.write(&step, &late, now);
        }
    }

    /// A log that can't be written ends, as does one that is full; it is no reason to stop.
    fn write(&mut self, step: &PacedStep, late: &[LatePrompt], now: f64) {
        let Some(log) = &mut self.log else { return };
        let mut lines = Vec::new();
        let written = write_step(&mut lines, step, now)
            .and_then(|()| late.iter().try_for_each(|it| write_late(&mut lines, it, step.number)))
            // Seldom enough: somebody may be reading along.
            .and_then(|()| log.append(&lines, step.number.is_multiple_of(32)));
        if written.is_err() {
            self.log = None;
        }
    }
}

/// A file that nobody else's takes the place of, up to a size.
struct Log {
    file: BufWriter<File>,
    room: usize,
}

impl Log {
    const MAX_BYTES: usize = 256 << 20;

    fn create(path: &str) -> PyResult<Self> {
        // No link is followed, and no file is overwritten.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let fault = |it: Error| {
            PyRuntimeError::new_err(format!("SPARKSCHED_PACING_LOG: {path} can't be created: {it}"))
        };
        Ok(Self { file: BufWriter::new(file.map_err(fault)?), room: Self::MAX_BYTES })
    }

    fn append(&mut self, lines: &[u8], flushes: bool) -> std::io::Result<()> {
        self.room = self.room.checked_sub(lines.len()).ok_or(std::io::ErrorKind::FileTooLarge)?;
        self.file.write_all(lines)?;
        if flushes { self.file.flush() } else { Ok(()) }
    }
}

/// What pacing says of itself, by name.
pub(crate) fn named<'py>(py: Python<'py>, values: &[f64]) -> PyResult<Bound<'py, PyDict>> {
    PacingReport::NAMES.iter().zip(values).into_py_dict(py)
}

fn write_step(log: &mut impl Write, step: &PacedStep, now: f64) -> std::io::Result<()> {
    let chosen = &step.chosen;
    let ms = |seconds: f64| 1e3 * seconds;
    writeln!(
        log,
        "{{\"step\": {}, \"end_s\": {now:.6}, \"mode\": \"{}\", \"budget\": {}, \"threshold\": {}, \
         \"ordered\": {}, \"tokens\": {}, \"prompt_tokens\": {}, \"decode_tokens\": {}, \
         \"admitted\": {}, \"prompts\": {}, \"share\": {:.3}, \"over_stall_for\": \"{}\", \
         \"predicted_ms\": {:.2}, \"ms\": {:.2}}}",
        step.number,
        format!("{:?}", chosen.mode).to_lowercase(),
        chosen.knobs.max_num_scheduled_tokens,
        chosen.knobs.long_prefill_token_threshold,
        chosen.knobs.order.len(),
        step.load.num_tokens,
        step.load.num_prompt_tokens,
        step.load.num_decode_tokens,
        step.load.num_admitted,
        step.num_prompts,
        chosen.share,
        chosen.over_stall.map_or(String::new(), |it| format!("{it:?}").to_lowercase()),
        ms(step.predicted_s),
        ms(step.time_s),
    )
}

fn write_late(log: &mut impl Write, late: &LatePrompt, step: u64) -> std::io::Result<()> {
    writeln!(
        log,
        "{{\"late\": \"{}\", \"by\": \"{}\", \"step\": {step}, \"first_token_ms\": {:.0}, \
         \"late_ms\": {:.0}}}",
        if late.is_long { "long" } else { "ordinary" },
        format!("{:?}", late.by).to_lowercase(),
        1e3 * late.time_s,
        1e3 * late.late_s,
    )
}
