//! Paced prefill: before each step it chooses values that vLLM's scheduler has, [`StepKnobs`], so
//! that two promises are kept. It mirrors nothing in vLLM, and decides nothing: the policy decides
//! with these values as vLLM's would.
//!
//! 1. No step with prompts takes longer than the stall that is allowed while others generate,
//! 2. unless a prompt would be late. A long prompt's first token comes after at most `max_slowdown`
//!    times its time without pacing, plus one stall. An **ordinary** prompt, one that fits into a
//!    step within the stall, comes at most one stall later than without pacing.
//!
//! A [virtual server](virtual_server) computes the same prompts as vLLM would without pacing, and so
//! gives each its deadline. Before each step the calculation is made anew, from what is left to
//! compute: the **order**, ordinary prompts as they came, then long ones; the least **chunk** of the
//! [ladder], from the one within the stall upward, and with it the least **share** of the time, with
//! which all deadlines can be met. After a chunk for long prompts come steps of decodes alone, until
//! decodes have had the rest of the time, unless somebody waits for blocks or a place. vLLM serves
//! those first who run, so an **admission** lets ordinary prompts in with a token each, like decodes.
//!
//! Who comes while vLLM would be **busy** would wait with it, too, so large chunks make nobody late
//! then; who comes while it would be idle has no time. So where many ordinary prompts come, long ones
//! are computed in full steps before it is idle.
//!
//! A request that waits for KV blocks gets them sooner if the prompts that hold them end sooner. So
//! while one waits, chunks are full steps unless that makes an ordinary prompt late. While a prompt
//! runs that needs much of the cache, no steps of decodes alone follow chunks.
//!
//! Each decision is vLLM's where nobody generates, where no prompt is there, where all prompts are
//! ordinary and fit into one step, where they are ordinary and so many that small steps would keep the
//! last ones waiting, and where somebody waits for the blocks of a prompt that needs much of the cache.
//!
//! An order holds for one step and only where no request can lose its blocks in it, so that those
//! who do are vLLM's victims. Under the priority policy the order is vLLM's.
//!
//! With asynchronous scheduling a step is chosen while the one before it runs, so time is predicted
//! for steps in flight, and put right when they come back.

mod ladder;
mod report;
mod step_times;
mod virtual_server;

use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use self::ladder::Ladder;
use self::report::Reporter;
use self::step_times::DecodeTimes;
use self::virtual_server::VirtualServer;
use crate::config::StepKnobs;
use crate::promise::{LateBy, Promise};
use crate::scheduler::{Demand, Prompt, Scheduler, StepLoad, attention_of};

pub use self::report::{LatePrompt, OverStall, PacingReport};

/// What an operator chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PacingSettings {
    /// No step with prompts is to take longer while others generate, in seconds.
    pub max_stall_s: f64,
    /// A long prompt's first token is to come at most so many times as late as without pacing; at
    /// least 1.
    pub max_slowdown: f64,
    /// Up to so many tokens a step with prompts runs as a CUDA graph; 0 without graphs.
    pub max_graph_tokens: u32,
}

/// Why a step's knobs are as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// There is no prompt: vLLM's values.
    #[default]
    Plain,
    /// Nobody generates: vLLM's values.
    Alone,
    /// All prompts are ordinary, and none would be served better: vLLM's values.
    Ordinary,
    /// A chunk of prompts.
    Chunk,
    /// Decodes alone: they are owed time.
    Decode,
    /// Decodes, and a token of each ordinary prompt that waits behind a long one that runs.
    Admission,
    /// Chunks get nobody on, or somebody waits for the blocks of a prompt that needs much of the
    /// cache: vLLM's values.
    Unpaced,
    /// Before the first request: vLLM's values. What steps take is learned.
    WarmUp,
}

#[derive(Clone, Debug, Default)]
pub struct Chosen {
    pub mode: Mode,
    pub knobs: StepKnobs,
    /// The share of the time that deadlines ask for.
    pub share: f64,
    /// For whom it is larger than what the stall allows.
    pub over_stall: Option<OverStall>,
    /// It serves a long prompt: decodes are owed time after it.
    pub is_for_long: bool,
}

/// A step that was paced, for logs and statistics.
#[derive(Clone, Debug)]
pub struct PacedStep {
    /// Steps with tokens are numbered.
    pub number: u64,
    pub chosen: Chosen,
    pub load: StepLoad,
    /// Prompts that ran or waited.
    pub num_prompts: usize,
    /// How long it was expected to take, in seconds.
    pub predicted_s: f64,
    /// How long it took, in seconds; 0 until it is back.
    pub time_s: f64,
}

impl PacedStep {
    /// Whether it computes prompts, and is no step of decodes that lets some run along.
    pub fn has_prompts(&self) -> bool {
        self.load.num_prompt_tokens > 0
            && !matches!(self.chosen.mode, Mode::Decode | Mode::Admission)
    }
}

#[derive(Clone, Debug)]
struct InFlight {
    step: PacedStep,
    /// Of the prediction, what decodes alone would take.
    decode_s: f64,
    launched_at: f64,
    /// What those were promised whose prompts end with it.
    promises: Vec<Promise>,
}

/// Chooses the knobs of each step.
#[derive(Clone, Debug, Default)]
pub struct Pacing {
    settings: PacingSettings,
    base: StepKnobs,
    /// A step of decodes needs so many tokens of each request.
    min_threshold: u32,
    ladder: Ladder,
    decode_times: DecodeTimes,
    virtual_server: VirtualServer,
    to_come: ToCome,
    demand: Demand,
    /// What decodes alone would take, in seconds.
    decode_s: f64,
    /// When the next step begins.
    start: f64,
    /// For the step that is being decided on.
    chosen: Chosen,
    in_flight: VecDeque<InFlight>,
    /// Steps with prompts that follow each other: tokens of these, and what they attend to. While one
    /// is launched the host may be too busy to look at the one before it, so only their sum is known.
    chain: Vec<(f64, f64)>,
    /// What these took together beyond their decodes, in seconds.
    chain_s: f64,
    next_number: u64,
    /// When the device had nothing else to do.
    free_at: f64,
    owed: Owed,
    /// When the last admission was chosen.
    admitted_at: f64,
    /// Steps in a row that should have computed prompts and did not.
    num_fruitless: u32,
    is_warming_up: bool,
    reporter: Reporter,
}

/// So many fruitless steps end in one with vLLM's values.
const PATIENCE: u32 = 4;

/// What so many steps with prompts took together says something before they end.
const LONGEST_CHAIN: usize = 8;

/// More of ordinary prompts alone than so many steps within the stall hold is left to vLLM: small
/// steps would cost the last ones more than they give.
const ORDINARY_STEPS: f64 = 1.5;

/// Deadlines are aimed at by this part earlier: what steps will take is known no better.
const EARLY: f64 = 0.05;

/// What is to come is expected to cost at most so many times what full steps cost: where the stall is
/// tight, small chunks cost several times as much, and deadlines will ask for larger ones.
const DEARER: f64 = 1.3;

/// A size that computes this part of the best one's tokens a second will do: smaller ones keep
/// others waiting for less long.
const GOOD_ENOUGH: f64 = 0.95;

/// A larger chunk that meets no deadline either has to be better by this part.
const WORTHWHILE: f64 = 0.02;

/// Ordinary prompts that take up to this part of the time come in no bursts that matter.
const FEW: f64 = 0.06;

/// Chunks are full steps if the time that more ordinary prompts are to take while vLLM would be busy,
/// times the share that long ones need, is more than this part of one.
const CROWDED: f64 = 0.5;

/// Ordinary prompts that need this part of the time to their deadlines are let in ahead of a long one.
const URGENT: f64 = 0.7;

/// While a prompt runs that needs more than this part of all blocks, no steps of decodes alone follow
/// chunks, for others may soon wait for its blocks; while they do, each decision is vLLM's.
const CROWDING: f64 = 1.0 / 3.0;

/// The least part of a chunk, and the least time in seconds, that are counted with.
const LEAST: f64 = 1e-3;

/// What prompts that are still to come will need: on average as much as lately.
#[derive(Clone, Copy, Debug, Default)]
struct ToCome {
    of_ordinary: f64,
    of_long: f64,
    at: f64,
}

impl ToCome {
    /// How long the past is that counts as lately, in seconds: long prompts are few.
    const LATELY_S: f64 = 10.0;
    const LATELY_OF_LONG_S: f64 = 30.0;
    const MOST: f64 = 0.8;
    /// A single long prompt says little of what is to come.
    const MOST_OF_ONE: f64 = 0.2;

    fn decay(&mut self, now: f64) {
        let since_s = (now - self.at).max(0.0);
        self.of_ordinary *= (-since_s / Self::LATELY_S).exp();
        self.of_long *= (-since_s / Self::LATELY_OF_LONG_S).exp();
        self.at = now;
    }

    fn arrive(&mut self, work_s: f64, is_ordinary: bool) {
        if is_ordinary {
            self.of_ordinary += work_s / Self::LATELY_S;
        } else {
            self.of_long += (work_s / Self::LATELY_OF_LONG_S).min(Self::MOST_OF_ONE);
        }
    }

    /// The part of the time that those can count on who have come.
    fn left(&self) -> f64 {
        1.0 - (self.of_ordinary + self.of_long).min(Self::MOST)
    }
}

/// What decodes are owed. Nothing is saved up: what counts is the last chunk, and the time since.
#[derive(Clone, Copy, Debug, Default)]
struct Owed {
    /// How long the last chunk for long prompts took, in seconds.
    chunk_s: f64,
    /// How long decodes have had the device since then, in seconds.
    since_s: f64,
}

impl Owed {
    fn note(&mut self, step: &PacedStep, time_s: f64) {
        let is_contended = step.load.num_decode_tokens > 0 && step.num_prompts > 0;
        if step.has_prompts() && step.chosen.is_for_long {
            (self.chunk_s, self.since_s) = (if is_contended { time_s } else { 0.0 }, 0.0);
        } else if !step.has_prompts() {
            self.since_s += time_s;
        }
    }
}

impl Pacing {
    /// Chooses for a scheduler of this configuration, where nothing has been learned.
    pub fn new(settings: PacingSettings, scheduler: &Scheduler) -> Self {
        let config = scheduler.config();
        let base = config.step_knobs(false);
        let max_tokens = config.max_num_scheduled_tokens.min(config.max_num_batched_tokens);
        Self {
            settings,
            min_threshold: 1 + config.speculation.num_spec_tokens,
            ladder: Ladder::new(max_tokens, settings.max_graph_tokens),
            chosen: Chosen { knobs: base.clone(), share: 1.0, ..Chosen::default() },
            base,
            ..Self::default()
        }
    }

    /// Whether steps have vLLM's values from now on, only to learn what they take. Of what happened
    /// meanwhile nothing is reported.
    pub fn warm_up(&mut self, goes_on: bool) {
        self.is_warming_up = goes_on;
        self.reporter = Reporter::default();
    }

    /// Takes in what so many tokens of prompts add to a step, in seconds: what a warm-up finds out,
    /// where there is no device.
    pub fn learn_size(&mut self, num_tokens: u32, extra_s: f64) {
        let attention = attention_of(0.0, num_tokens.into());
        self.ladder.note(num_tokens.into(), extra_s, attention, self.settings.max_stall_s);
    }

    /// The sizes of chunks, decodes included.
    pub fn sizes(&self) -> &[u32] {
        self.ladder.sizes()
    }

    /// Totals so far, and what holds at present.
    pub fn report(&self) -> PacingReport {
        self.reporter.report
    }

    /// Chooses the knobs of the next step at `now`, in seconds.
    pub fn choose(&mut self, scheduler: &mut Scheduler, now: f64) -> StepKnobs {
        self.chosen = if self.is_warming_up {
            self.demand.prompts.clear();
            self.unpaced(Mode::WarmUp)
        } else {
            self.look(scheduler, now);
            self.choice(scheduler)
        };
        if self.chosen.mode == Mode::Admission {
            self.admitted_at = now;
        }
        self.chosen.knobs.clone()
    }

    /// Looks what is asked of the next step, and gives those their promises who have come.
    fn look(&mut self, scheduler: &mut Scheduler, now: f64) {
        self.demand.prompts.clear();
        if scheduler.may_have_prompts() {
            scheduler.survey(&mut self.demand);
        }
        if self.demand.prompts.is_empty() {
            return;
        }
        self.decode_s = self.decode_times.predict(self.demand.num_decode_tokens);
        let end_of =
            |free_at: f64, it: &InFlight| free_at.max(it.launched_at) + it.step.predicted_s;
        self.start = self.in_flight.iter().fold(self.free_at, end_of).max(now);
        self.to_come.decay(now);
        let mut prompts = std::mem::take(&mut self.demand.prompts);
        for prompt in &mut prompts {
            if let Some(promise) = prompt.promise.as_mut().filter(|_| !prompt.may_run) {
                promise.void(LateBy::Waiting);
                scheduler.set_promise(prompt.index, *promise);
            }
        }
        let is_new = |it: &Prompt| it.may_run && it.promise.is_none_or(|it| it.is_void);
        if prompts.iter().any(is_new) {
            let left = prompts.iter().filter(|it| it.may_run && !is_new(it));
            let (tokens, attention) = sum_of(left);
            let left_s = if tokens > 0.0 { self.full_work_s(tokens, attention) } else { 0.0 };
            // It is through by then: what is really left would be.
            self.virtual_server.end = self.virtual_server.end.min(self.start + left_s);
            for prompt in prompts.iter_mut().filter(|it| is_new(it)) {
                let promise = self.promise(prompt, now);
                scheduler.set_promise(prompt.index, promise);
                prompt.promise = Some(promise);
            }
        }
        self.demand.prompts = prompts;
    }

    /// Tokens of prompts that vLLM's steps hold: as many as are configured.
    fn full_room(&self) -> f64 {
        let budget = self.base.max_num_scheduled_tokens;
        budget.saturating_sub(self.demand.num_decode_tokens).max(budget.div_ceil(8)).into()
    }

    /// What a step takes that holds so many tokens of prompts, in seconds; `attention` is each times
    /// what it attends to. Those of decodes cost what they do alone.
    fn step_s(&self, num_tokens: f64, attention: f64) -> f64 {
        let extra_s = self.ladder.extra_s(num_tokens, attention);
        self.decode_s + extra_s.unwrap_or(self.settings.max_stall_s)
    }

    /// What full steps take for so many tokens, in seconds.
    fn full_work_s(&self, num_tokens: f64, attention: f64) -> f64 {
        let num_steps = (num_tokens / self.full_room()).max(1.0);
        num_steps * self.step_s(num_tokens / num_steps, attention / num_steps)
    }

    fn promise(&mut self, prompt: &Prompt, now: f64) -> Promise {
        let (tokens, attention) = sum_of([prompt]);
        let mut server = self.virtual_server;
        let what = (prompt.num_missing, prompt.num_computed);
        let end = server.arrive(now, what, self.full_room(), |it, of| self.step_s(it, of));
        self.virtual_server = server;
        let first = Promise {
            arrived_at: now,
            since: now,
            virtual_s: end - now,
            num_tokens: tokens,
            attention,
            work_s: self.full_work_s(tokens, attention),
            is_ordinary: self.is_within_stall(tokens, attention),
            is_void: false,
            late_by: LateBy::Steps,
        };
        if let Some(Promise { arrived_at, is_ordinary, late_by, .. }) = prompt.promise {
            return Promise { arrived_at, is_ordinary, late_by, ..first };
        }
        let own_chunk_s = |size| self.chunk_s(size, attention_of(0.0, self.room(size)));
        let chunks_s = self.work_s(prompt, self.within_bound(own_chunk_s));
        self.to_come.arrive(chunks_s.min(DEARER * first.work_s), first.is_ordinary);
        first
    }

    /// Whether a step with so many tokens of prompts stays within the stall.
    fn is_within_stall(&self, num_tokens: f64, attention: f64) -> bool {
        let step_s = self.step_s(num_tokens, attention);
        num_tokens <= self.full_room() && step_s <= self.settings.max_stall_s
    }

    /// When a prompt is to be through, at the speed that is known by now.
    fn deadline(&self, promise: &Promise) -> f64 {
        let times = if promise.is_ordinary { 1.0 } else { self.settings.max_slowdown };
        let work_s = self.full_work_s(promise.num_tokens, promise.attention);
        let virtual_s = promise.virtual_s * work_s / promise.work_s.max(LEAST);
        promise.since + times * virtual_s + self.settings.max_stall_s
    }

    /// Of the sizes that stay within the stall, the smallest that is nearly as fast as the best; the
    /// smallest of all if none does.
    fn within_bound(&self, time_s: impl Fn(usize) -> f64) -> usize {
        let largest = self.ladder.largest();
        let first = self.ladder.first_above(self.demand.num_decode_tokens).unwrap_or(largest);
        let times = (first..=largest).map(|size| (size, time_s(size)));
        let fits = |it: &(usize, f64)| self.ladder.fits(it.1, self.settings.max_stall_s);
        let fitting: Vec<(usize, f64)> = times.filter(fits).collect();
        let speed = |&(size, time_s): &(usize, f64)| self.room(size) / time_s;
        let best = fitting.iter().map(speed).fold(0.0, f64::max);
        let good = fitting.iter().find(|it| speed(it) >= GOOD_ENOUGH * best);
        good.map_or(first, |&(size, _)| size)
    }

    /// What a chunk of a size takes, in seconds.
    fn chunk_s(&self, size: usize, attention: f64) -> f64 {
        self.step_s(self.room(size), attention)
    }

    /// Tokens of prompts in a chunk of a size.
    fn capacity(&self, size: usize) -> u32 {
        self.ladder.sizes()[size].saturating_sub(self.demand.num_decode_tokens).max(1)
    }

    /// The same, as a number to calculate with.
    fn room(&self, size: usize) -> f64 {
        self.capacity(size).into()
    }

    /// What is left of a prompt, in seconds of chunks of a size.
    fn work_s(&self, prompt: &Prompt, size: usize) -> f64 {
        let (tokens, attention) = sum_of([prompt]);
        let num_chunks = tokens / self.room(size);
        num_chunks * self.chunk_s(size, attention / num_chunks)
    }

    /// vLLM's values, in its order.
    fn unpaced(&self, mode: Mode) -> Chosen {
        Chosen { mode, knobs: self.base.clone(), share: 1.0, ..Chosen::default() }
    }

    fn choice(&mut self, scheduler: &Scheduler) -> Chosen {
        let prompts = &self.demand.prompts;
        let num_decode_tokens = self.demand.num_decode_tokens;
        if prompts.is_empty() {
            return self.unpaced(Mode::Plain);
        }
        if num_decode_tokens == 0 {
            self.owed = Owed::default();
            return self.unpaced(Mode::Alone);
        }
        let is_stuck = self.num_fruitless >= PATIENCE;
        if is_stuck || self.ladder.first_above(num_decode_tokens).is_none() {
            return self.unpaced(Mode::Unpaced);
        }
        let for_waiting = self.for_who_lacks_blocks();
        let is_crowding = self.demand.largest_part > CROWDING;
        if is_crowding && for_waiting.is_some() {
            return Chosen { over_stall: for_waiting, ..self.unpaced(Mode::Unpaced) };
        }
        if let Some(chosen) = self.left_to_vllm() {
            return chosen;
        }
        let left_s: Vec<f64> = prompts.iter().map(|it| self.time_left_s(it)).collect();
        let order = self.order(&left_s);
        let sizes = 0..=self.ladder.largest();
        let chunks: Vec<_> = sizes.map(|size| self.chunk_in_order(&order, size)).collect();
        let (size, (of_ordinary, of_long), over_stall) =
            self.least_chunk(&order, &left_s, &chunks, for_waiting);
        let share = of_ordinary.max(of_long);
        let (chunk_s, part_of_long) = chunks[size];
        if of_ordinary > URGENT
            && chunk_s * part_of_long > self.decode_s
            && let Some(chosen) = self.admission(scheduler, &order)
        {
            return Chosen { share, ..chosen };
        }
        let is_blocked = prompts.iter().any(|it| !it.may_run);
        let mut owed = self.owed;
        self.in_flight.iter().for_each(|it| owed.note(&it.step, it.step.predicted_s));
        let owed_s = owed.chunk_s * (1.0 - share) / share.max(1e-6) - owed.since_s;
        let is_in_hurry =
            is_blocked || is_crowding || order.iter().any(|&it| is_ordinary(&prompts[it]));
        if !is_in_hurry && owed_s > 0.0 && share < 1.0 {
            return Chosen { share, ..self.decodes_alone() };
        }
        Chosen { share, over_stall, ..self.chunk(scheduler, &order, size) }
    }

    /// For whom steps are full while somebody waits for blocks beside prompts that run: the sooner
    /// these are through, the sooner others come in.
    fn for_who_lacks_blocks(&self) -> Option<OverStall> {
        let (last, before) = self.demand.prompts.split_last()?;
        if !self.demand.lacks_blocks || !before.iter().any(|it| it.is_running) {
            return None;
        }
        let (tokens, attention) = sum_of([last]);
        let is_ordinary = self.is_within_stall(tokens, attention);
        Some(if is_ordinary { OverStall::Ordinary } else { OverStall::Long })
    }

    /// vLLM's values, if all who can be computed are ordinary, and a step within the stall holds all
    /// prompts, or far more wait.
    fn left_to_vllm(&self) -> Option<Chosen> {
        let prompts = &self.demand.prompts;
        if !prompts.iter().all(|it| is_ordinary(it) || !it.may_run) {
            return None;
        }
        // Those who can't come in now may when their turn is.
        let (tokens, attention) = sum_of(prompts);
        let fits = |part: f64| self.is_within_stall(tokens / part, attention / part);
        let over_stall = (!fits(1.0)).then_some(OverStall::Ordinary);
        let is_left = over_stall.is_none() || !fits(ORDINARY_STEPS);
        is_left.then(|| Chosen { over_stall, ..self.unpaced(Mode::Ordinary) })
    }

    /// The prompts that can be computed, in the order in which they should be: ordinary ones as they
    /// came, then long ones, least left first. If one would be late so, as [`shortest_first`] says.
    fn order(&self, left_s: &[f64]) -> Vec<usize> {
        let prompts = &self.demand.prompts;
        let candidates = (0..prompts.len()).filter(|&it| prompts[it].may_run);
        let (mut order, mut long): (Vec<usize>, Vec<usize>) =
            candidates.partition(|&it| is_ordinary(&prompts[it]));
        // Whoever is in it: the dearest decides.
        let computed = prompts.iter().filter(|it| it.may_run).map(|it| it.num_computed);
        let context = f64::from(computed.max().unwrap_or(0));
        let dearest_s = |size| self.chunk_s(size, attention_of(context, self.room(size)));
        let size = self.within_bound(dearest_s);
        let work: Vec<f64> = prompts.iter().map(|it| self.work_s(it, size)).collect();
        let left_s: Vec<f64> = left_s.iter().map(|it| self.to_come.left() * it).collect();
        long.sort_by(|&one, &other| work[one].total_cmp(&work[other]));
        let mut sum_s: f64 = order.iter().map(|&it| work[it]).sum();
        let is_safe = |it: &usize| {
            sum_s += work[*it];
            sum_s <= left_s[*it]
        };
        let are_safe = long.iter().all(is_safe);
        order.append(&mut long);
        if are_safe {
            return order;
        }
        let largest = self.ladder.largest();
        let work: Vec<f64> = prompts.iter().map(|it| self.work_s(it, largest)).collect();
        shortest_first(order, &work, &left_s)
    }

    /// The time to a prompt's deadline.
    fn time_left_s(&self, prompt: &Prompt) -> f64 {
        let Some(promise) = &prompt.promise else { return f64::INFINITY };
        let deadline = self.deadline(promise);
        deadline - EARLY * (deadline - promise.since) - self.start
    }

    /// The smallest chunk, from the one within the bound upward, with which all deadlines can be
    /// met, or else the one with which they are missed least, ordinary ones above all. Ordinary ones that
    /// come during a large one while vLLM would be idle would be late, so then the reserve for them
    /// enlarges no chunk. A full step if somebody waits for blocks, or if many ordinary ones are to come
    /// while vLLM would be busy, unless one that is there comes late by it. Then the shares of the time
    /// that both kinds need, and for whom it exceeds the bound.
    fn least_chunk(
        &self,
        order: &[usize],
        left_s: &[f64],
        chunks: &[(f64, f64)],
        for_waiting: Option<OverStall>,
    ) -> (usize, (f64, f64), Option<OverStall>) {
        let to_come = (self.to_come.of_ordinary - FEW).max(0.0);
        let (busy_s, reserve) = (self.virtual_server.end - self.start, 1.0 / self.to_come.left());
        let counted = if to_come > 0.0 && busy_s <= 0.0 { 1.0 } else { reserve };
        let needed = |size: usize| {
            let (of_ordinary, of_long) = self.needed_shares(order, left_s, size, chunks[size]);
            (of_ordinary, of_long * counted)
        };
        let bounded = self.within_bound(|size| chunks[size].0);
        let (mut best, (mut ordinary, mut long)) = (bounded, needed(bounded));
        let largest = self.ladder.largest();
        let mut reason = if ordinary > 1.0 { OverStall::Ordinary } else { OverStall::Long };
        for size in bounded + 1..=largest {
            if ordinary.max(long) <= 1.0 {
                break;
            }
            let (of_ordinary, of_long) = needed(size);
            let is_better = |new: f64, old: f64| new.max(1.0) < (1.0 - WORTHWHILE) * old.max(1.0);
            let is_worse = is_better(ordinary, of_ordinary);
            if is_better(of_ordinary, ordinary) || (!is_worse && is_better(of_long, long)) {
                (best, ordinary, long) = (size, of_ordinary, of_long);
            }
        }
        let is_crowded = long * to_come * busy_s > CROWDED * chunks[largest].0;
        if (is_crowded || for_waiting.is_some()) && needed(largest).0 <= 1.0 {
            (best, reason) = (largest, for_waiting.unwrap_or(reason));
        }
        (best, (ordinary, long / counted * reserve), (best > bounded).then_some(reason))
    }

    /// The share of the time with which the deadlines of ordinary prompts, and those of long ones,
    /// can be met by chunks of a size, if nobody else comes.
    fn needed_shares(
        &self,
        order: &[usize],
        left_s: &[f64],
        size: usize,
        (step_s, part_of_long): (f64, f64),
    ) -> (f64, f64) {
        let (mut sum_s, mut of_ordinary, mut of_long) = (0.0, 0.0_f64, 0.0_f64);
        for &position in order {
            let prompt = &self.demand.prompts[position];
            sum_s += self.work_s(prompt, size);
            let left_s = left_s[position];
            if is_ordinary(prompt) {
                // They are through at the end of a step, not before.
                let end_s = (sum_s / (1.0 - part_of_long).max(LEAST)).max(step_s);
                of_ordinary = of_ordinary.max(end_s / left_s.max(LEAST));
            } else {
                of_long = of_long.max(sum_s / left_s.max(LEAST));
            }
        }
        (of_ordinary, of_long)
    }

    /// What a chunk takes that serves prompts in this order, in seconds, and the part of it that long
    /// ones have because they run: vLLM looks at them before those who wait.
    fn chunk_in_order(&self, order: &[usize], size: usize) -> (f64, f64) {
        let capacity = self.capacity(size);
        let level = self.level(order, capacity);
        let (mut left, mut attention, mut of_long) = (capacity, 0.0, 0);
        for prompt in self.as_vllm_looks(order) {
            let part = prompt.num_missing.min(level).min(left);
            left -= part;
            attention += attention_of(prompt.num_computed.into(), part.into());
            if level < u32::MAX && prompt.is_running && !is_ordinary(prompt) {
                of_long += part;
            }
        }
        (self.chunk_s(size, attention), f64::from(of_long) / f64::from(capacity))
    }

    /// A step of decodes that lets ordinary prompts in, so that they go before a long one that runs. Of
    /// those with the same next block one does: the others find it computed. Not twice in a row for the
    /// same, for some may not come in, and not with recurrent states: the first token would look like
    /// a decode.
    fn admission(&self, scheduler: &Scheduler, order: &[usize]) -> Option<Chosen> {
        let mut begun = BTreeSet::new();
        let candidates = self.as_vllm_looks(order).filter(|it| it.is_running || is_ordinary(it));
        let parts = candidates.filter(|it| {
            let position = it.num_computed / scheduler.config().hash_block_size;
            let block = scheduler.request(it.index).block_hashes.get(position as usize);
            let is_first = block.is_none_or(|it| begun.insert(it.0));
            it.is_running || is_first
        });
        let parts: Vec<&Prompt> = parts.collect();
        let num_tokens: u32 = parts.iter().map(|it| it.num_missing.min(self.min_threshold)).sum();
        let mut chosen = self.unpaced(Mode::Admission);
        let knobs = &mut chosen.knobs;
        let num_tokens = self.demand.num_decode_tokens + num_tokens;
        knobs.max_num_scheduled_tokens = num_tokens.min(knobs.max_num_scheduled_tokens);
        knobs.long_prefill_token_threshold = self.threshold(self.min_threshold);
        knobs.order = parts.iter().map(|it| it.index).collect();
        let has_come = |it: &Prompt| it.promise.is_some_and(|it| it.arrived_at > self.admitted_at);
        let is_again = self.chosen.mode == Mode::Admission;
        let lets_in = parts.iter().any(|it| !it.is_running && (!is_again || has_come(it)));
        let has_states = scheduler.config().groups.iter().any(|it| it.is_state());
        (lets_in && !has_states && scheduler.can_be_reordered(num_tokens)).then_some(chosen)
    }

    /// A step of prompts in this order, of this size at most.
    fn chunk(&self, scheduler: &Scheduler, order: &[usize], size: usize) -> Chosen {
        let prompts = &self.demand.prompts;
        let is_for_long = !order.iter().all(|&it| is_ordinary(&prompts[it]));
        let capacity = self.capacity(size);
        let mut knobs = self.base.clone();
        knobs.max_num_scheduled_tokens = self.ladder.sizes()[size];
        let can_order = scheduler.can_be_reordered(knobs.max_num_scheduled_tokens);
        let level = if can_order {
            knobs.order = self.as_vllm_looks(order).map(|it| it.index).collect();
            self.level(order, capacity)
        } else {
            fill_level(self.lacking(order, capacity), capacity)
        };
        knobs.long_prefill_token_threshold = self.threshold(level);
        Chosen { mode: Mode::Chunk, knobs, is_for_long, share: 0.0, over_stall: None }
    }

    /// What those lack who run, or whose turn it is if all are served in this order, in tokens.
    fn lacking(&self, order: &[usize], mut capacity: u32) -> Vec<u32> {
        let takes_part = |it: &&Prompt| {
            let has_turn = capacity > 0;
            capacity = capacity.saturating_sub(it.num_missing);
            has_turn || it.is_running
        };
        let prompts = order.iter().map(|&it| &self.demand.prompts[it]);
        prompts.filter(takes_part).map(|it| it.num_missing).collect()
    }

    /// The tokens that each prompt may have in a step: no limit if those who wait get as much behind
    /// all who run as they would in their order. vLLM looks at those who run first.
    fn level(&self, order: &[usize], capacity: u32) -> u32 {
        let of_waiting = |prompts: &mut dyn Iterator<Item = &Prompt>| {
            let (_, num_tokens) = prompts.fold((capacity, 0), |(left, sum), it| {
                let part = it.num_missing.min(left);
                (left - part, sum + if it.is_running { 0 } else { part })
            });
            num_tokens
        };
        let in_order = of_waiting(&mut order.iter().map(|&it| &self.demand.prompts[it]));
        if of_waiting(&mut self.as_vllm_looks(order)) >= in_order {
            return u32::MAX;
        }
        fill_level(self.lacking(order, capacity), capacity)
    }

    /// Prompts in the order in which vLLM looks at them: first those who run.
    fn as_vllm_looks(&self, order: &[usize]) -> impl Iterator<Item = &Prompt> {
        let those = |is_running: bool| {
            let prompts = order.iter().map(|&it| &self.demand.prompts[it]);
            prompts.filter(move |it| it.is_running == is_running)
        };
        those(true).chain(those(false))
    }

    /// The threshold of a step, given what each prompt may have and what is configured.
    fn threshold(&self, level: u32) -> u32 {
        let threshold = if level == u32::MAX { 0 } else { level.max(self.min_threshold) };
        match (threshold, self.base.long_prefill_token_threshold) {
            (0, other) | (other, 0) => other,
            (one, other) => one.min(other),
        }
    }

    /// A step without prompts. Where throttling doesn't hold those who run back, each gets no more
    /// tokens than one that generates.
    fn decodes_alone(&self) -> Chosen {
        let mut knobs = self.base.clone();
        let num_decode_tokens = self.demand.num_decode_tokens;
        if self.demand.can_throttle {
            knobs.throttle_prefills = true;
        } else {
            let threshold = self.min_threshold;
            let running = self.demand.prompts.iter().filter(|it| it.is_running);
            let num_prompt_tokens: u32 = running.map(|it| it.num_missing.min(threshold)).sum();
            let num_tokens = num_decode_tokens + num_prompt_tokens;
            knobs.max_num_scheduled_tokens = num_tokens.min(knobs.max_num_scheduled_tokens);
            knobs.long_prefill_token_threshold = threshold;
        }
        Chosen { knobs, ..self.unpaced(Mode::Decode) }
    }

    /// Takes in what was decided with the knobs that were chosen last, at `now`, in seconds;
    /// returns the step's number, by which its result is told. A step without tokens has none.
    pub fn note_step(&mut self, scheduler: &mut Scheduler, now: f64) -> Option<u64> {
        let load = if self.chosen.mode == Mode::Plain && scheduler.step().admitted.is_empty() {
            let num_tokens = scheduler.step().total_num_tokens;
            StepLoad { num_tokens, num_decode_tokens: num_tokens, ..StepLoad::default() }
        } else {
            scheduler.step_load()
        };
        if load.num_prompt_tokens > 0 || self.chosen.mode == Mode::Unpaced {
            self.num_fruitless = 0;
        } else if self.chosen.mode == Mode::Chunk {
            self.num_fruitless += 1;
        }
        if load.num_tokens == 0 {
            return None;
        }
        let mut promises = Vec::new();
        if self.chosen.mode != Mode::Plain {
            scheduler.take_promises(&mut promises);
        }
        let decode_s = match load.num_decode_tokens {
            0 => 0.0,
            num_tokens => self.decode_times.predict(num_tokens),
        };
        let mut step = PacedStep {
            number: self.next_number,
            chosen: self.chosen.clone(),
            load,
            num_prompts: self.demand.prompts.len(),
            predicted_s: decode_s,
            time_s: 0.0,
        };
        if step.has_prompts() {
            let guess = self.ladder.extra_s(load.num_prompt_tokens.into(), load.prompt_attention);
            step.predicted_s += guess.unwrap_or(self.settings.max_stall_s);
        }
        self.next_number += 1;
        let number = step.number;
        self.in_flight.push_back(InFlight { step, decode_s, launched_at: now, promises });
        Some(number)
    }

    /// Takes in that a step has come back at `now`, in seconds; returns what it was, and who came
    /// later with it than promised. Steps before it that did not come back are lost.
    pub fn note_result(&mut self, number: u64, now: f64) -> Option<(PacedStep, Vec<LatePrompt>)> {
        let position = self.in_flight.iter().position(|it| it.step.number == number)?;
        let lost = self.in_flight.drain(..position).count();
        let InFlight { mut step, decode_s, launched_at, promises } = self.in_flight.pop_front()?;
        let started_at = if lost > 0 { launched_at } else { self.free_at.max(launched_at) };
        let mut time_s = (now - started_at).max(0.0);
        // While a chunk is launched the host may be too busy to look at the step before it.
        let chunk_follows = self.in_flight.front().is_some_and(|next| next.step.has_prompts());
        let is_late = !step.has_prompts() && chunk_follows && time_s > 1.5 * step.predicted_s;
        if is_late && step.predicted_s > 0.0 {
            time_s = step.predicted_s;
        }
        self.free_at = started_at + time_s;
        step.time_s = time_s;
        if !is_late {
            self.learn(&step, decode_s, chunk_follows);
        }
        self.owed.note(&step, time_s);
        self.reporter.note_step(&step, now, self.settings.max_stall_s);
        let late = promises.iter().filter_map(|promise| {
            let deadline = self.deadline(promise);
            self.reporter.note_prompt(promise, deadline, now)
        });
        Some((step, late.collect()))
    }

    fn learn(&mut self, step: &PacedStep, decode_s: f64, chunk_follows: bool) {
        if !step.has_prompts() {
            if step.load.num_prompt_tokens == 0 {
                self.decode_times.note(step.load.num_decode_tokens, step.time_s);
            }
            return;
        }
        let StepLoad { num_tokens, num_prompt_tokens, prompt_attention, .. } = step.load;
        // Other sizes run then, too, and most of them wait for a compiler.
        if step.chosen.mode == Mode::WarmUp && !self.ladder.sizes().contains(&num_tokens) {
            return;
        }
        self.chain.push((num_prompt_tokens.into(), prompt_attention));
        self.chain_s += step.time_s - decode_s;
        // While warming up the host has nothing else to do.
        let goes_on = chunk_follows && step.chosen.mode != Mode::WarmUp;
        if goes_on && self.chain.len() < LONGEST_CHAIN {
            return;
        }
        let limit_s = self.settings.max_stall_s - decode_s;
        // Each gets the part of the sum that it was expected to have.
        let expected = self.chain.iter().map(|&(num_tokens, attention)| {
            self.ladder.extra_s(num_tokens, attention).unwrap_or(limit_s)
        });
        let expected: Vec<f64> = expected.collect();
        let times = std::mem::take(&mut self.chain_s) / expected.iter().sum::<f64>();
        for ((num_tokens, attention), expected_s) in self.chain.drain(..).zip(expected) {
            self.ladder.note(num_tokens, (times * expected_s).max(0.0), attention, limit_s);
        }
    }
}

fn is_ordinary(prompt: &Prompt) -> bool {
    prompt.promise.is_some_and(|it| it.is_ordinary)
}

/// From the last place to the first, each is the longest of those whose deadline is not before it
/// (Smith, 1956): of all orders that meet the deadlines, the one with the least mean wait. Where none
/// can wait so long, the one with the latest deadline.
fn shortest_first(mut prompts: Vec<usize>, work_s: &[f64], left_s: &[f64]) -> Vec<usize> {
    prompts.sort_by(|&one, &other| left_s[one].total_cmp(&left_s[other]));
    let mut sum_s: f64 = prompts.iter().map(|&it| work_s[it]).sum();
    let mut order = Vec::with_capacity(prompts.len());
    let mut can_wait = BinaryHeap::new();
    loop {
        while let Some(it) = prompts.pop_if(|it| left_s[*it] >= sum_s) {
            can_wait.push((work_s[it].to_bits(), it));
        }
        let Some(it) = can_wait.pop().map(|(_, it)| it).or_else(|| prompts.pop()) else { break };
        sum_s -= work_s[it];
        order.push(it);
    }
    order.reverse();
    order
}

/// What some prompts lack, in tokens, and the same, each times what it attends to.
fn sum_of<'a>(prompts: impl IntoIterator<Item = &'a Prompt>) -> (f64, f64) {
    prompts.into_iter().fold((0.0, 0.0), |(tokens, attention), it| {
        let num_missing = f64::from(it.num_missing);
        (tokens + num_missing, attention + attention_of(it.num_computed.into(), num_missing))
    })
}

/// The number of tokens that each of some prompts may have if all together are to have `capacity`:
/// those that lack less leave the rest to the others. The largest number if they fit as they are.
fn fill_level(mut lacking: Vec<u32>, capacity: u32) -> u32 {
    lacking.sort_unstable();
    let (mut left, mut num_left) = (capacity, lacking.len() as u32);
    for lacks in lacking {
        let level = left / num_left;
        if lacks > level {
            return level;
        }
        left -= lacks;
        num_left -= 1;
    }
    u32::MAX
}
