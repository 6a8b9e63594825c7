//! Times the calls of each step, if somebody wants to know.
//!
//! It takes four looks at the clock a step. What is timed goes to the page that API servers read.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sparksched_core::{PacingReport, Scheduler, WaitCounts};
use sparksched_meters::{MAX_TEXT_BYTES, MeterPage, StepMeter};

/// There may be many tenants: they are looked at once in so long.
const TENANTS_EACH: Duration = Duration::from_secs(1);

/// Tenants that are told of by name, and bytes of it: with two counts each, they fit into the page.
const MAX_TENANTS: usize = 20;
const MAX_NAME_BYTES: usize = 48;
const _: () = assert!((MAX_TENANTS + 1) * (MAX_NAME_BYTES + "\n".len() + 2 * 21) <= MAX_TEXT_BYTES);

/// What the time of one step's call is taken with; nothing if nobody wants it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Started(Option<Instant>);

#[derive(Default)]
pub(crate) struct StepTimer {
    page: Option<Arc<MeterPage>>,
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
    /// Reports there from now on.
    pub(crate) fn report_to(&mut self, page: Arc<MeterPage>) {
        page.meters().steps().begin();
        *self = Self { page: Some(page), ..Self::default() };
    }

    fn meter(&self) -> Option<&StepMeter> {
        self.page.as_ref().map(|page| page.meters().steps())
    }

    pub(crate) fn start(&self) -> Started {
        Started(self.page.as_ref().map(|_| Instant::now()))
    }

    /// A step was scheduled, from `started` to now.
    pub(crate) fn note_schedule(&mut self, started: Started) {
        let (Some(meter), Some(began)) = (self.meter(), started.0) else { return };
        meter.schedule.observe(ns(began.elapsed()));
        if let Some(updated_at) = self.updated_at {
            meter.gap.observe(ns(began.duration_since(updated_at)));
        }
        self.updated_at = None;
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
        let (Some(meter), Some(began)) = (self.meter(), started.0) else { return };
        let now = Instant::now();
        meter.update.observe(ns(now.duration_since(began)));
        self.updated_at = Some(now);
    }

    /// A step came back, and prompts are paced.
    pub(crate) fn note_pacing(&self, report: &PacingReport) {
        if let Some(page) = &self.page {
            page.meters().set_pacing(&report.values());
        }
    }

    /// Something may have changed. An engine with nothing to do waits for requests: that is no gap.
    pub(crate) fn note_requests(&mut self, scheduler: &Scheduler) {
        let Some(page) = &self.page else { return };
        let meter = page.meters().steps();
        meter.set_requests(scheduler.running().len() as u64, scheduler.num_waiting() as u64);
        let waits = scheduler.wait_counts();
        if waits != self.waits {
            meter.set_waits(waits.by_reason());
            self.waits = waits;
        }
        if scheduler.is_ordered() && self.tenants_at.is_none_or(|at| at.elapsed() >= TENANTS_EACH) {
            set_tenants(page, scheduler.tenants().collect());
            self.tenants_at = Some(Instant::now());
        }
        if self.updated_at.is_some() && scheduler.num_unfinished_requests() <= 0 {
            self.updated_at = None;
        }
    }
}

fn ns(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Says which tenants have requests: the largest, and the others as one without a name. A line
/// each: how many of its requests were never scheduled, how many have not ended, its name.
fn set_tenants(page: &MeterPage, mut tenants: Vec<(&str, usize, usize)>) {
    if tenants.len() > MAX_TENANTS {
        tenants.select_nth_unstable_by_key(MAX_TENANTS, |&(_, _, count)| Reverse(count));
        let rest = tenants.split_off(MAX_TENANTS);
        tenants.push(("", rest.iter().map(|it| it.1).sum(), rest.iter().map(|it| it.2).sum()));
    }
    let mut text = String::new();
    for (name, num_waiting, num_unfinished) in tenants {
        let end = (0..=MAX_NAME_BYTES.min(name.len())).rev().find(|&it| name.is_char_boundary(it));
        let name = name[..end.unwrap_or(0)].replace(char::is_control, " ");
        let _ = writeln!(text, "{num_waiting} {num_unfinished} {name}");
    }
    page.meters().set_tenants(&text);
}
