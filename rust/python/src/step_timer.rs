//! Times the calls of each step, if somebody wants to know.
//!
//! It takes four looks at the clock a step. What is timed goes to a [`StepSink`]: the page that API
//! servers read, on platforms that have it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sparksched_core::{PacingReport, Scheduler, WaitCounts};

/// There may be many tenants: they are looked at once in so long.
const TENANTS_EACH: Duration = Duration::from_secs(1);

/// Where times and counts go.
pub(crate) trait StepSink: Send + Sync {
    /// `schedule()` has taken so long.
    fn scheduled(&self, time: Duration);
    /// `update_from_output()` has taken so long.
    fn updated(&self, time: Duration);
    /// So long after an update, with work left, came the next `schedule()`.
    fn waited(&self, time: Duration);
    /// So many requests run and wait.
    fn set_requests(&self, num_running: usize, num_waiting: usize);
    /// So many wait for what.
    fn set_waits(&self, counts: &WaitCounts);
    /// These tenants have requests: how many were never scheduled, and how many have not ended.
    fn set_tenants(&self, tenants: Vec<(&str, usize, usize)>);
    /// So paced prefill stands.
    fn set_pacing(&self, report: &PacingReport);
}

/// What the time of one step's call is taken with; nothing if nobody wants it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Started(Option<Instant>);

#[derive(Default)]
pub(crate) struct StepTimer {
    sink: Option<Arc<dyn StepSink>>,
    /// What was reported last.
    waits: WaitCounts,
    /// When tenants were reported last.
    tenants_at: Option<Instant>,
    /// When the last update ended, if it left work and no step was scheduled since.
    updated_at: Option<Instant>,
    /// When the step that is being decided in several calls began.
    deciding_since: Started,
}

impl StepTimer {
    /// Reports to this sink from now on.
    pub(crate) fn report_to(&mut self, sink: Arc<dyn StepSink>) {
        *self = Self { sink: Some(sink), ..Self::default() };
    }

    pub(crate) fn start(&self) -> Started {
        Started(self.sink.as_ref().map(|_| Instant::now()))
    }

    /// A step was scheduled, from `started` to now.
    pub(crate) fn note_schedule(&mut self, started: Started) {
        let (Some(sink), Some(began)) = (&self.sink, started.0) else { return };
        sink.scheduled(began.elapsed());
        if let Some(updated_at) = self.updated_at.take() {
            sink.waited(began.duration_since(updated_at));
        }
    }

    /// The first of the calls that decide on a step together begins.
    pub(crate) fn begin_decision(&mut self) {
        self.deciding_since = self.start();
    }

    /// The last of them ends: what happened between them counts, too.
    pub(crate) fn end_decision(&mut self) {
        let started = std::mem::take(&mut self.deciding_since);
        self.note_schedule(started);
    }

    /// A step's outcome was taken in, from `started` to now.
    pub(crate) fn note_update(&mut self, started: Started) {
        let (Some(sink), Some(began)) = (&self.sink, started.0) else { return };
        let now = Instant::now();
        sink.updated(now.duration_since(began));
        self.updated_at = Some(now);
    }

    /// A step came back, and prompts are paced.
    pub(crate) fn note_pacing(&self, report: &PacingReport) {
        if let Some(sink) = &self.sink {
            sink.set_pacing(report);
        }
    }

    /// Something may have changed. An engine with nothing to do waits for requests: that is no gap.
    pub(crate) fn note_requests(&mut self, scheduler: &Scheduler) {
        let Some(sink) = &self.sink else { return };
        sink.set_requests(scheduler.running().len(), scheduler.num_waiting());
        let waits = scheduler.wait_counts();
        if waits != self.waits {
            sink.set_waits(&waits);
            self.waits = waits;
        }
        if scheduler.is_ordered() && self.tenants_at.is_none_or(|at| at.elapsed() >= TENANTS_EACH) {
            sink.set_tenants(scheduler.tenants().collect());
            self.tenants_at = Some(Instant::now());
        }
        if self.updated_at.is_some() && scheduler.num_unfinished_requests() <= 0 {
            self.updated_at = None;
        }
    }
}
