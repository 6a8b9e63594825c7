//! Paced prefill: long prompts are computed in chunks that keep others waiting no longer than is
//! allowed, and between chunks come steps of decodes alone, so that prompts get their share of the
//! time. It mirrors nothing in vLLM: it chooses values that vLLM's scheduler has, [`StepKnobs`],
//! before each step, and the policy decides with them as vLLM's would.
//!
//! - A **chunk** is a step with prompts. Its size, decodes included, is from a short ladder, since
//!   kernels are compiled for each size. The best one is as large as pays within the stall that is
//!   allowed. The threshold is chosen so that all prompts together fill it: those that lack less
//!   than the threshold are computed to their end, the others get equal parts. A **tail**, what is
//!   left of a long prompt, is computed in such sizes, too, until little is left.
//! - A prompt that fits into one chunk is **short**. It comes in at once, as with vLLM: in a small
//!   step if that is known to be cheap, else with the next chunk, ahead of its time.
//! - A chunk on behalf of long prompts comes only when what it **owes** is paid: after a chunk of
//!   150 ms and with a share of 0.6, 100 ms without one.
//! - Nobody generates: vLLM's values. No prompt: vLLM's values.
//! - Prompts come faster than they are computed: the share **gives way**, and then the bound on the
//!   size of chunks. It does so by and by while the queue grows, and at once if ordinary prompts
//!   wait in it for long, since chunks may be so small that they would never be through.
//!
//! With asynchronous scheduling a step is chosen while the one before it runs, so what is owed
//! rests on predictions for steps in flight, and is put right when they come back.

mod ladder;
mod pressure;
mod step_times;

use std::collections::VecDeque;

use self::ladder::Ladder;
use self::pressure::{Pressure, Queue};
use self::step_times::DecodeTimes;
use crate::scheduler::{Demand, Prompt, Scheduler, StepLoad};
use crate::step::StepKnobs;

/// What an operator chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PacingSettings {
    /// No step with prompts is to take longer while others generate, in seconds.
    pub max_stall_s: f64,
    /// Of the time, while prompts and decodes both have work; above 0, at most 1.
    pub prefill_share: f64,
    /// Up to so many tokens a step with prompts runs as a CUDA graph; 0 without graphs.
    pub max_graph_tokens: u32,
}

/// Why a step's knobs are as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// There is no prompt: vLLM's values.
    #[default]
    Plain,
    /// Nobody generates: the whole budget.
    Alone,
    /// All prompts are short: they come in within the bound.
    Short,
    /// A chunk of long prompts is due; short ones come with it.
    Chunk,
    /// A chunk is not due, but somebody short has come.
    Join,
    /// Decodes alone.
    Decode,
    /// Smaller chunks get nobody on: vLLM's values.
    Unpaced,
    /// Before the first request: vLLM's values. What steps take is learned.
    WarmUp,
}

impl Mode {
    /// Its name in logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Alone => "alone",
            Self::Short => "short",
            Self::Chunk => "chunk",
            Self::Join => "join",
            Self::Decode => "decode",
            Self::Unpaced => "unpaced",
            Self::WarmUp => "warm-up",
        }
    }
}

/// A step that was paced, for logs and statistics.
#[derive(Clone, Copy, Debug)]
pub struct PacedStep {
    /// Steps with tokens are numbered.
    pub number: u64,
    /// Why its knobs are as they are.
    pub mode: Mode,
    /// The knobs.
    pub knobs: StepKnobs,
    /// What it holds.
    pub load: StepLoad,
    /// Prompts that ran or waited.
    pub num_prompts: usize,
    /// What was owed to those who generate before it, in seconds.
    pub owed_s: f64,
    /// The share that prompts are to get, which may have given way.
    pub share: f64,
    /// How long it was expected to take, in seconds.
    pub predicted_s: f64,
    /// How long it took, in seconds; 0 until it is back.
    pub time_s: f64,
}

impl PacedStep {
    /// Whether it computes prompts, and is no step of decodes alone that lets one run along.
    #[must_use]
    pub fn has_prompts(&self) -> bool {
        self.load.num_prompt_tokens > 0 && self.mode != Mode::Decode
    }
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    step: PacedStep,
    /// Of the prediction, what decodes alone would take.
    decode_s: f64,
    launched_at: f64,
}

/// Steps with prompts that follow each other. While one is launched the host may be too busy to
/// look at the one before it, so only their sum is known.
#[derive(Clone, Copy, Debug, Default)]
struct Chain {
    num_steps: u32,
    num_tokens: u32,
    extra_s: f64,
    attention: f64,
    /// They are of one size.
    is_even: bool,
}

/// What is known of the time since the last report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PacingReport {
    /// Tokens of prompts in the present chunk.
    pub chunk_tokens: u32,
    /// Time of steps with prompts while others generated, in seconds, in all.
    pub prompt_s: f64,
    /// Time of all steps while prompts and decodes had work, in seconds, in all.
    pub contended_s: f64,
    /// Steps of decodes alone that were put in, in all.
    pub num_decode_steps: u64,
    /// The longest step with prompts while others generated, of the half or whole minute before the
    /// last step.
    pub longest_stall_s: f64,
}

/// Chooses the knobs of each step.
#[derive(Clone, Debug)]
pub struct Pacing {
    settings: PacingSettings,
    base: StepKnobs,
    /// A step of decodes needs so many tokens of each request.
    min_threshold: u32,
    ladder: Ladder,
    decode_times: DecodeTimes,
    demand: Demand,
    /// What is considered for a chunk: tokens that prompts lack.
    considered: Vec<u32>,
    /// Tokens that the longest one of these lacks that are short.
    longest_short: u32,
    chosen: Chosen,
    in_flight: VecDeque<InFlight>,
    chain: Chain,
    next_number: u64,
    /// When the device had, or will have, nothing else to do.
    free_at: f64,
    /// Time without chunks that those who generate are still to get, in seconds.
    owed_s: f64,
    /// Tokens of the present chunk, decodes included.
    full_size: u32,
    /// Time since a long prompt last got a chunk, in seconds.
    since_chunk_s: f64,
    /// Short ones could not be admitted though there was room in the step.
    is_admission_blocked: bool,
    /// Steps in a row that should have computed prompts and did not.
    num_fruitless: u32,
    patience: u32,
    /// The part of the time that short prompts took lately, by themselves, while others generated.
    short_part: f64,
    pressure: Pressure,
    is_warming_up: bool,
    report: PacingReport,
    stalls: Stalls,
}

/// What was chosen for the step that is being decided on.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    mode: Mode,
    knobs: StepKnobs,
    num_prompts: usize,
    admits: bool,
}

/// So many fruitless steps end in one with vLLM's values; then twice as many, up to the last.
const PATIENCE: std::ops::RangeInclusive<u32> = 4..=256;

/// A chunk leaves at least one of so many parts of it to long prompts.
const LEAST_OF_CHUNK: u32 = 4;

/// Without CUDA graphs, what is at most this part of the largest size is not made smaller.
const SMALL_PART: u32 = 16;

/// A step is expected to take at most so many times what is allowed.
const MOST_EXPECTED: f64 = 2.0;

/// What so many steps with prompts took together says something before they end.
const LONGEST_CHAIN: u32 = 8;

/// A prompt is brief beside one that lacks so many times as much.
const BRIEF: u32 = 4;

/// A late chunk comes at last after so many times its period, whatever else has come in.
const LATEST: f64 = 2.0;

/// A step that takes so many times what was expected, and what is allowed, is an outlier.
const OUTLIER: f64 = 2.0;

/// Most that is owed, in times of what a chunk within the bound makes.
const MOST_OWED: f64 = 2.0;

/// A step for somebody short pays if it takes at most this part of a chunk's time.
const CHEAP: f64 = 0.4;

/// How long the past is that counts as lately, in seconds.
const RECENT_S: f64 = 1.0;

/// How fast the bound gives way to short prompts that need more than their share.
const LENIENCY: f64 = 16.0;

impl Pacing {
    /// Chooses for a scheduler of this configuration, where nothing has been learned.
    #[must_use]
    pub fn new(settings: PacingSettings, scheduler: &Scheduler) -> Self {
        let config = scheduler.config();
        let base = config.step_knobs(false);
        let max_tokens = config.max_num_scheduled_tokens.min(config.max_num_batched_tokens);
        Self {
            settings,
            base,
            min_threshold: 1 + config.speculation.num_spec_tokens,
            ladder: Ladder::new(max_tokens, settings.max_graph_tokens),
            decode_times: DecodeTimes::default(),
            demand: Demand::default(),
            considered: Vec::new(),
            longest_short: 0,
            chosen: Chosen { mode: Mode::Plain, knobs: base, num_prompts: 0, admits: false },
            in_flight: VecDeque::new(),
            chain: Chain::default(),
            next_number: 0,
            free_at: f64::NEG_INFINITY,
            owed_s: 0.0,
            full_size: 0,
            since_chunk_s: 0.0,
            is_admission_blocked: false,
            num_fruitless: 0,
            patience: *PATIENCE.start(),
            short_part: 0.0,
            pressure: Pressure::default(),
            is_warming_up: false,
            report: PacingReport::default(),
            stalls: Stalls::default(),
        }
    }

    /// Lets steps have vLLM's values, and learns what they take, until [`Self::end_warm_up`].
    pub fn begin_warm_up(&mut self) {
        self.is_warming_up = true;
    }

    /// Begins anew, with nothing but what has been learned of times.
    pub fn end_warm_up(&mut self, scheduler: &Scheduler) {
        let fresh = Self::new(self.settings, scheduler);
        let warm = std::mem::replace(self, fresh);
        self.ladder = warm.ladder;
        self.decode_times = warm.decode_times;
        self.next_number = warm.next_number;
        self.free_at = warm.free_at;
    }

    /// The sizes of chunks, decodes included.
    #[must_use]
    pub fn sizes(&self) -> &[u32] {
        self.ladder.sizes()
    }

    /// Totals so far, and the present chunk.
    #[must_use]
    pub fn report(&self) -> PacingReport {
        self.report
    }

    /// Chooses the knobs of the next step.
    pub fn choose(&mut self, scheduler: &mut Scheduler) -> StepKnobs {
        if self.is_warming_up {
            self.demand.prompts.clear();
            let knobs = self.base;
            self.chosen = Chosen { mode: Mode::WarmUp, knobs, num_prompts: 0, admits: false };
            return knobs;
        }
        if scheduler.may_have_prompts() {
            scheduler.survey(&mut self.demand);
        } else {
            self.demand.prompts.clear();
        }
        self.chosen = self.choice();
        self.chosen.knobs
    }

    fn choice(&mut self) -> Chosen {
        let knobs = self.base;
        let unpaced = |mode, num_prompts| Chosen { mode, knobs, num_prompts, admits: false };
        let num_prompts = self.demand.prompts.len();
        let num_decode_tokens = self.demand.num_decode_tokens;
        if num_prompts == 0 {
            return unpaced(Mode::Plain, 0);
        }
        let is_stuck = self.num_fruitless >= self.patience;
        if is_stuck || self.ladder.first_above(num_decode_tokens).is_none() {
            return unpaced(Mode::Unpaced, num_prompts);
        }
        let limit_s = self.settings.max_stall_s * self.pressure.leniency();
        let short_limit_s = limit_s.max(self.settings.max_stall_s * self.leniency());
        let largest = self.best_size(short_limit_s, true);
        let room = self.ladder.sizes()[largest] - num_decode_tokens;
        let has_long = self.demand.prompts.iter().any(|it| it.num_missing > room);
        if num_decode_tokens == 0 {
            self.owed_s = 0.0;
            let has_short = self.demand.prompts.iter().any(|it| it.num_missing <= room);
            if !has_long || !has_short {
                return unpaced(Mode::Alone, num_prompts);
            }
            return self.chunk(Mode::Alone, self.ladder.sizes().len() - 1, room);
        }
        if self.demand.prompts.iter().all(|it| self.is_short(it, room)) {
            return self.chunk(Mode::Short, largest, room);
        }
        let best = self.best_size(limit_s, false);
        self.full_size = self.ladder.sizes()[best];
        if self.owed_s <= 0.0 || self.is_late(best) {
            return self.chunk(Mode::Chunk, best, room);
        }
        let may_join = |it: &Prompt| it.has_blocks && self.is_short(it, room) && self.can_join(it);
        if self.is_at_most_one_ahead(best, limit_s) && self.demand.prompts.iter().any(may_join) {
            let joining = self.chunk(Mode::Join, best, room);
            if !self.is_admission_blocked || !joining.admits {
                return joining;
            }
        }
        self.decodes_alone()
    }

    /// Whether a prompt fits into one chunk, and is no tail.
    fn is_short(&self, prompt: &Prompt, room: u32) -> bool {
        prompt.num_missing <= room && !self.is_tail(prompt, room)
    }

    /// Whether it is what is left of a long prompt, and not so little that a CUDA graph holds it.
    fn is_tail(&self, prompt: &Prompt, room: u32) -> bool {
        is_rest(prompt, room) && self.demand.num_decode_tokens + prompt.num_missing > self.small()
    }

    /// A step of so many tokens, or less, is not made smaller.
    fn small(&self) -> u32 {
        match self.settings.max_graph_tokens {
            0 => self.ladder.sizes()[self.ladder.sizes().len() - 1] / SMALL_PART,
            num_tokens => num_tokens,
        }
    }

    /// Whether no more is owed than one chunk within the bound makes: somebody short may bring the
    /// next one forward.
    fn is_at_most_one_ahead(&self, best: usize, limit_s: f64) -> bool {
        let share = self.share();
        let chunk_s = self.predict(best).min(limit_s);
        self.owed_s <= 1.1 * chunk_s * (1.0 - share) / share
    }

    fn can_join(&self, prompt: &Prompt) -> bool {
        prompt.is_running || !self.is_admission_blocked
    }

    /// Whether short prompts have kept a long one waiting for too long.
    fn is_late(&self, best: usize) -> bool {
        let period = self.predict(best) / self.share();
        self.since_chunk_s > LATEST * period
    }

    /// The share that prompts are to get now.
    fn share(&self) -> f64 {
        let share = self.settings.prefill_share;
        share + (1.0 - share) * self.pressure.level().min(1.0)
    }

    /// What the bound is multiplied by for short prompts: they need more time than their share.
    fn leniency(&self) -> f64 {
        let share = self.settings.prefill_share;
        let excess = (self.short_part - share) / (1.0 - share).max(0.01);
        1.0 + LENIENCY * excess.max(0.0)
    }

    fn best_size(&mut self, limit_s: f64, wants_largest: bool) -> usize {
        let demand = &self.demand;
        let decode_s = self.decode_times.predict(demand.num_decode_tokens).unwrap_or(0.0);
        // The one who waits longest decides.
        let first = demand.prompts.first();
        let context = first.map_or(0.0, |it| f64::from(it.num_computed));
        let num_missing =
            demand.prompts.iter().fold(0, |sum: u32, it| sum.saturating_add(it.num_missing));
        let query = ladder::Query {
            num_decode_tokens: demand.num_decode_tokens,
            num_prompt_tokens: num_missing,
            decode_s,
            context,
            limit_s,
            wants_largest,
        };
        self.ladder.best(&query)
    }

    /// What a chunk of a size is expected to take now, in seconds.
    fn predict(&self, size: usize) -> f64 {
        let num_decode_tokens = self.demand.num_decode_tokens;
        let decode_s = self.decode_times.predict(num_decode_tokens).unwrap_or(0.0);
        let context = self.demand.prompts.first().map_or(0.0, |it| f64::from(it.num_computed));
        let room = f64::from(self.ladder.sizes()[size].saturating_sub(num_decode_tokens));
        let extra_s = self.ladder.guess(size, room * (context + 0.5 * room));
        decode_s + extra_s.unwrap_or(self.settings.max_stall_s)
    }

    /// A step with prompts, of the best size at most; `room` is what makes a prompt a short one.
    fn chunk(&mut self, mode: Mode, best: usize, room: u32) -> Chosen {
        let num_decode_tokens = self.demand.num_decode_tokens;
        let capacity = self.ladder.sizes()[best] - num_decode_tokens;
        let admits = self.consider(mode, capacity, room);
        let smaller = match mode {
            Mode::Join => self.cheap_join(best).or_else(|| self.filled(best)),
            Mode::Chunk => self.filled(best),
            Mode::Short if self.demand.prompts.iter().any(|it| is_rest(it, room)) => {
                self.filled(best)
            }
            _ => None,
        };
        let size = smaller.unwrap_or(best);
        let level = fill_level(&self.considered, self.ladder.sizes()[size] - num_decode_tokens);
        let configured = self.base.long_prefill_token_threshold;
        let threshold = level.max(self.min_threshold);
        let threshold = if level == u32::MAX { 0 } else { threshold };
        let threshold = match (threshold, configured) {
            (0, other) | (other, 0) => other,
            (one, other) => one.min(other),
        };
        let knobs = StepKnobs {
            max_num_scheduled_tokens: self.ladder.sizes()[size],
            long_prefill_token_threshold: threshold,
            throttle_prefills: false,
        };
        Chosen { mode, knobs, num_prompts: self.demand.prompts.len(), admits }
    }

    /// The smallest size in which those who come have room, if it is known to take far less than a
    /// chunk of the best one. Else they come with such a chunk, ahead of its time.
    fn cheap_join(&self, best: usize) -> Option<usize> {
        let num_decode_tokens = self.demand.num_decode_tokens;
        let longest = self.longest_short;
        let holds = |size: &usize| {
            let capacity = self.ladder.sizes()[*size].saturating_sub(num_decode_tokens);
            capacity > 0 && fill_level(&self.considered, capacity) >= longest
        };
        let size = (0..best).find(holds)?;
        let tokens = f64::from(self.ladder.sizes()[size]);
        let most_s = CHEAP * self.predict(best);
        match self.ladder.known(size, tokens * tokens) {
            Some(time_s) => (time_s <= most_s).then_some(size),
            None => self.ladder.is_stale(size).then_some(size),
        }
    }

    /// The largest size that what is considered fills, if a chunk of the best one would be left with
    /// room. Any other number of tokens may need kernels that have not been compiled.
    fn filled(&self, best: usize) -> Option<usize> {
        let num_decode_tokens = self.demand.num_decode_tokens;
        let add = |sum: u32, it: &u32| sum.saturating_add(*it);
        let num_tokens = self.considered.iter().fold(num_decode_tokens, add);
        if num_tokens <= self.small() || num_tokens >= self.ladder.sizes()[best] {
            return None;
        }
        let size = self.ladder.last_within(num_tokens)?;
        (Some(size) >= self.ladder.first_above(num_decode_tokens)).then_some(size)
    }

    /// Collects what the prompts lack that are to have a part in a chunk; returns whether some of
    /// them wait.
    ///
    /// Prompts that run are in it anyway. Of those that wait, as many as fit and are short, and those
    /// that are brief beside one that runs; long ones that wait before them have to come in as well.
    fn consider(&mut self, mode: Mode, capacity: u32, room: u32) -> bool {
        self.considered.clear();
        let (running, waiting): (Vec<&Prompt>, Vec<&Prompt>) =
            self.demand.prompts.iter().partition(|it| it.is_running);
        self.considered.extend(running.iter().map(|it| it.num_missing));
        let has_long = self.demand.prompts.iter().any(|it| !self.is_short(it, room));
        let most = if has_long { capacity - capacity / LEAST_OF_CHUNK } else { capacity };
        // Who lacks far less than the longest one that runs doesn't wait for it, either.
        let longest = self.considered.iter().max().copied().unwrap_or(0);
        let brief = if mode == Mode::Join { 0 } else { longest / BRIEF };
        let shorts = running.iter().filter(|it| self.is_short(it, room)).map(|it| it.num_missing);
        let (sum, mut longest_short) =
            shorts.fold((0, 0), |(sum, most), it| (sum + it, it.max(most)));
        let mut left = most.saturating_sub(sum);
        let mut num_considered = 0;
        for (position, prompt) in waiting.iter().enumerate() {
            if !prompt.has_blocks && !self.considered.is_empty() {
                break;
            }
            if prompt.num_missing <= room {
                let Some(rest) = left.checked_sub(prompt.num_missing) else { break };
                left = rest;
                longest_short = longest_short.max(prompt.num_missing);
                num_considered = position + 1;
            } else if prompt.num_missing <= brief {
                num_considered = position + 1;
            } else if running.is_empty() && position == 0 && mode != Mode::Join {
                num_considered = 1;
            }
        }
        let waiting = waiting.iter().take(num_considered);
        self.considered.extend(waiting.map(|it| it.num_missing));
        self.longest_short = longest_short;
        num_considered > 0
    }

    /// A step without prompts. Where throttling doesn't hold them back, each gets no more tokens
    /// than one that generates, and nothing is left for those that wait.
    fn decodes_alone(&self) -> Chosen {
        let mut knobs = self.base;
        if self.demand.can_throttle {
            knobs.throttle_prefills = true;
        } else {
            let threshold = self.min_threshold;
            let running = self.demand.prompts.iter().filter(|it| it.is_running);
            let num_prompt_tokens: u32 = running.map(|it| it.num_missing.min(threshold)).sum();
            let num_tokens = self.demand.num_decode_tokens + num_prompt_tokens;
            knobs.max_num_scheduled_tokens = num_tokens.min(knobs.max_num_scheduled_tokens);
            knobs.long_prefill_token_threshold = threshold;
        }
        let num_prompts = self.demand.prompts.len();
        Chosen { mode: Mode::Decode, knobs, num_prompts, admits: false }
    }

    /// Takes in what was decided with the knobs that were chosen last, at `now`, in seconds;
    /// returns the step's number, by which its result is told. A step without tokens has none.
    pub fn note_step(&mut self, scheduler: &Scheduler, now: f64) -> Option<u64> {
        let chosen = self.chosen;
        let load = if chosen.mode == Mode::Plain && scheduler.step().admitted.is_empty() {
            let num_tokens = scheduler.step().total_num_tokens;
            StepLoad { num_tokens, num_decode_tokens: num_tokens, ..StepLoad::default() }
        } else {
            scheduler.step_load()
        };
        self.note_progress(&load);
        if load.num_tokens == 0 {
            return None;
        }
        let decode_s = match load.num_decode_tokens {
            0 => 0.0,
            num_tokens => self.decode_times.predict(num_tokens).unwrap_or(0.0),
        };
        let mut step = PacedStep {
            number: self.next_number,
            mode: chosen.mode,
            knobs: chosen.knobs,
            load,
            num_prompts: chosen.num_prompts,
            owed_s: self.owed_s,
            share: self.share(),
            predicted_s: decode_s,
            time_s: 0.0,
        };
        if step.has_prompts() {
            let class = self.ladder.class_of(load.num_tokens);
            let guess = self.ladder.guess(class, load.prompt_attention);
            // What was seen may have been another's fault.
            let most_s = MOST_EXPECTED * self.settings.max_stall_s;
            step.predicted_s += guess.unwrap_or(self.settings.max_stall_s).min(most_s);
            self.ladder.note_step();
        }
        self.owe(&step, step.predicted_s);
        self.next_number += 1;
        self.in_flight.push_back(InFlight { step, decode_s, launched_at: now });
        Some(step.number)
    }

    fn note_progress(&mut self, load: &StepLoad) {
        let chosen = self.chosen;
        let wants_prompts = matches!(chosen.mode, Mode::Short | Mode::Chunk | Mode::Join);
        if load.num_prompt_tokens > 0 && wants_prompts {
            self.num_fruitless = 0;
            self.patience = *PATIENCE.start();
        } else if wants_prompts {
            self.num_fruitless += 1;
        } else if chosen.mode == Mode::Unpaced {
            self.num_fruitless = 0;
            self.patience = (2 * self.patience).min(*PATIENCE.end());
        }
        if load.num_admitted > 0 || chosen.mode == Mode::Chunk {
            self.is_admission_blocked = false;
        } else if chosen.admits {
            self.is_admission_blocked = true;
        }
    }

    /// Counts `time_s` of a step in what is owed. Nothing is saved up: what is owed is never below
    /// nothing, and never more than what one chunk makes.
    fn owe(&mut self, step: &PacedStep, time_s: f64) {
        let share = step.share;
        let ratio = (1.0 - share) / share;
        let limit_s = self.settings.max_stall_s * self.pressure.leniency() * ratio;
        let is_contended = step.load.num_decode_tokens > 0;
        self.owed_s += match step.has_prompts() {
            true if is_contended => time_s * ratio,
            true => 0.0,
            false => -time_s,
        };
        self.owed_s = self.owed_s.clamp(0.0, MOST_OWED * limit_s);
        let is_small =
            step.mode == Mode::Join && step.knobs.max_num_scheduled_tokens < self.full_size;
        if step.has_prompts() && !is_small {
            self.since_chunk_s = 0.0;
        } else if step.num_prompts > 0 {
            self.since_chunk_s = (self.since_chunk_s + time_s).max(0.0);
        } else {
            self.since_chunk_s = 0.0;
        }
    }

    /// Takes in that a step has come back at `now`, in seconds; returns what it was. Steps before it
    /// that did not come back are lost.
    pub fn note_result(&mut self, number: u64, now: f64) -> Option<PacedStep> {
        let position = self.in_flight.iter().position(|it| it.step.number == number)?;
        let lost = self.in_flight.drain(..position).count();
        let InFlight { mut step, decode_s, launched_at } = self.in_flight.pop_front()?;
        let started_at = if lost > 0 { launched_at } else { self.free_at.max(launched_at) };
        let mut time_s = (now - started_at).max(0.0);
        // While a chunk is launched the host may be too busy to look at the step before it.
        let hides = self.in_flight.front().is_some_and(|next| next.step.has_prompts());
        let is_late = !step.has_prompts() && hides && time_s > 1.5 * step.predicted_s;
        if is_late && step.predicted_s > 0.0 {
            time_s = step.predicted_s;
        }
        self.free_at = started_at + time_s;
        step.time_s = time_s;
        if !is_late {
            self.learn(&step, decode_s);
        }
        // What something else has held up is nobody's fault.
        let is_outlier = time_s > OUTLIER * step.predicted_s.max(self.settings.max_stall_s);
        let counted_s = if is_outlier { step.predicted_s } else { time_s };
        self.owe(&step, counted_s - step.predicted_s);
        self.sum_up(&step);
        let is_stall = step.load.num_decode_tokens > 0 && step.has_prompts();
        self.report.longest_stall_s = self.stalls.note(now, if is_stall { time_s } else { 0.0 });
        Some(step)
    }

    fn learn(&mut self, step: &PacedStep, decode_s: f64) {
        if !step.has_prompts() {
            self.decode_times.note(step.load.num_decode_tokens, step.time_s);
            return;
        }
        let StepLoad { num_tokens, prompt_attention, .. } = step.load;
        let size = self.ladder.class_of(num_tokens);
        // Other sizes run then, too, and most of them wait for a compiler.
        if step.mode == Mode::WarmUp && num_tokens != self.ladder.sizes()[size] {
            return;
        }
        let chain = &mut self.chain;
        chain.is_even = chain.num_steps == 0
            || (chain.is_even && self.ladder.class_of(chain.num_tokens) == size);
        chain.num_steps += 1;
        chain.num_tokens = num_tokens;
        chain.extra_s += step.time_s - decode_s;
        chain.attention += prompt_attention;
        let goes_on = self.in_flight.front().is_some_and(|next| next.step.has_prompts());
        if goes_on && chain.num_steps < LONGEST_CHAIN {
            return;
        }
        let Chain { num_steps, extra_s, attention, is_even, .. } = std::mem::take(chain);
        let number = f64::from(num_steps);
        let extra_s = (extra_s / number).max(0.0);
        let limit_s = self.settings.max_stall_s * self.pressure.leniency();
        // Of several one may have been held up, and nobody knows which.
        if num_steps == 1 || (is_even && extra_s < MOST_EXPECTED * limit_s) {
            self.ladder.note(num_tokens, extra_s, attention / number, limit_s - decode_s);
        }
    }

    fn sum_up(&mut self, step: &PacedStep) {
        let is_contended = step.load.num_decode_tokens > 0 && step.num_prompts > 0;
        if is_contended {
            self.report.contended_s += step.time_s;
            if step.has_prompts() {
                self.report.prompt_s += step.time_s;
                self.report.chunk_tokens = step.load.num_prompt_tokens;
            } else {
                self.report.num_decode_steps += u64::from(step.mode == Mode::Decode);
            }
        }
        if step.load.num_decode_tokens > 0 {
            let target = f64::from(u8::from(step.has_prompts() && step.mode == Mode::Short));
            let weight = 1.0 - (-step.time_s / RECENT_S).exp();
            self.short_part += weight * (target - self.short_part);
        }
        self.pressure.note(step, self.queue());
    }

    /// The prompts that time would help: not those that wait for blocks.
    fn queue(&self) -> Queue {
        let mut queue = Queue::default();
        for prompt in self.demand.prompts.iter().filter(|it| it.has_blocks) {
            let missing = f64::from(prompt.num_missing);
            queue.num_prompts += 1;
            queue.tokens += missing;
            if !prompt.is_running && prompt.num_missing <= self.base.max_num_scheduled_tokens {
                queue.ordinary_tokens += missing;
            }
        }
        queue
    }
}

/// The longest stall of this half minute and of the one before.
#[derive(Clone, Copy, Debug, Default)]
struct Stalls {
    began_at: f64,
    before_s: f64,
    longest_s: f64,
}

impl Stalls {
    const PERIOD_S: f64 = 30.0;

    /// Takes in a stall that ended at `now`; returns the longest one.
    fn note(&mut self, now: f64, stall_s: f64) -> f64 {
        let since_s = now - self.began_at;
        if since_s >= Self::PERIOD_S {
            let before_s = if since_s < 2.0 * Self::PERIOD_S { self.longest_s } else { 0.0 };
            *self = Self { began_at: now, before_s, longest_s: 0.0 };
        }
        self.longest_s = self.longest_s.max(stall_s);
        self.longest_s.max(self.before_s)
    }
}

/// Whether it is what is left of a long prompt, and fits into one chunk. One whose beginning was
/// cached is as long as the rest.
fn is_rest(prompt: &Prompt, room: u32) -> bool {
    let num_computed = prompt.num_computed.saturating_sub(prompt.num_cached);
    let was_long = num_computed + prompt.num_missing > room;
    was_long && prompt.num_missing <= room
}

/// The number of tokens that each of some prompts may have if all together are to have `capacity`:
/// those that lack less leave the rest to the others. The largest number if they fit as they are.
fn fill_level(lacking: &[u32], capacity: u32) -> u32 {
    let sum = lacking.iter().fold(0, |sum: u32, &it| sum.saturating_add(it));
    if sum <= capacity {
        return u32::MAX;
    }
    let mut sorted = lacking.to_vec();
    sorted.sort_unstable();
    let mut left = capacity;
    let mut num_left = sorted.len() as u32;
    for lacks in sorted {
        if lacks > left / num_left {
            break;
        }
        left -= lacks;
        num_left -= 1;
    }
    left / num_left.max(1)
}

#[cfg(test)]
mod tests {
    use super::fill_level;

    #[test]
    fn a_chunk_is_filled_by_those_who_lack_little_and_equal_parts_of_the_others() {
        assert_eq!(fill_level(&[], 100), u32::MAX);
        assert_eq!(fill_level(&[60, 40], 100), u32::MAX);
        assert_eq!(fill_level(&[1_000], 100), 100);
        assert_eq!(fill_level(&[1_000, 20], 100), 80);
        assert_eq!(fill_level(&[1_000, 20, 2_000], 100), 40);
        assert_eq!(fill_level(&[90, 90], 100), 50);
    }
}
