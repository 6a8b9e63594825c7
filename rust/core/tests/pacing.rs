//! Paced prefill on simulated devices: the real scheduler, asynchronous as vLLM's loop has it, over
//! steps that take what a formula says.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "numbers of tokens and steps are small"
)]

mod common;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::{Answers, config, new_request};
use sparksched_core::{
    BlockHasher, HashAlgorithm, KvCacheGroupConfig, NewRequest, PacedStep, Pacing, PacingSettings,
    Policy, RequestIndex, RequestStatus, ScheduledOutput, Scheduler, SchedulerConfig, Speculation,
    StepKnobs, StepLoad, StopConditions,
};

/// What a step takes, in seconds.
type Device = fn(&StepLoad) -> f64;

const MS: f64 = 1e-3;

/// A mixture of experts as measured: every step with prompts reads all experts, and above 512
/// tokens the host launches kernel by kernel.
fn moe(load: &StepLoad) -> f64 {
    if load.num_prompt_tokens == 0 {
        return 5.2 * MS;
    }
    let num_tokens = f64::from(load.num_tokens);
    let attention_s = 2.5e-7 * MS * load.prompt_attention;
    if load.num_tokens <= 512 {
        return (25.0 + 0.054 * num_tokens) * MS + attention_s;
    }
    (71.0 + 0.0384 * num_tokens) * MS + attention_s
}

/// The timer of the benchmark.
fn timer(load: &StepLoad) -> f64 {
    let is_prompt = f64::from(u8::from(load.num_prompt_tokens > 0));
    (5.2 + 19.0 * is_prompt + 0.05 * f64::from(load.num_prompt_tokens)) * MS
}

/// As one H100 with gpt-oss-120b in a process of its own: the GPU is done with a prompt before the
/// host has launched all its kernels. See [`launch_s`].
fn launch_bound(load: &StepLoad) -> f64 {
    if load.num_prompt_tokens == 0 {
        return 5.2 * MS;
    }
    (20.0 + 0.052 * f64::from(load.num_tokens)) * MS + 1e-7 * MS * load.prompt_attention
}

/// As one H100 with gpt-oss-120b in a server: a small step with a prompt takes about as long as one
/// of 2,048 tokens.
fn at_a_price(load: &StepLoad) -> f64 {
    if load.num_prompt_tokens == 0 {
        return (5.0 + 0.0125 * f64::from(load.num_tokens)) * MS;
    }
    let num_tokens = f64::from(load.num_tokens);
    let base = 100.0 + 0.0195 * num_tokens + 0.0205 * (num_tokens - 2_048.0).max(0.0);
    (base + 2.3e-7 * load.prompt_attention) * MS
}

/// As another H100 with gpt-oss-120b in a server: no step that is launched kernel by kernel is
/// shorter than its launch. How long that takes varies: see [`Faults::delay_s`].
fn noisy(load: &StepLoad) -> f64 {
    let num_tokens = f64::from(load.num_tokens);
    match (load.num_prompt_tokens, load.num_tokens) {
        (0, _) => 5.4 * MS,
        (_, ..=512) => {
            (3.0 + 0.05 * num_tokens).max(16.0) * MS + 9.5e-7 * MS * load.prompt_attention
        }
        _ => {
            let gpu_s = (10.0 + 0.0195 * num_tokens) * MS + 5.5e-7 * MS * load.prompt_attention;
            gpu_s.max(72.0 * MS)
        }
    }
}

/// How long the host is busy with launching a step of [`launch_bound`], in seconds.
fn launch_s(load: &StepLoad) -> f64 {
    if load.num_prompt_tokens == 0 { 1.0 * MS } else { 110.0 * MS }
}

fn dense(load: &StepLoad) -> f64 {
    (8.0 + 0.03 * f64::from(load.num_tokens)) * MS + 2e-7 * MS * load.prompt_attention
}

/// Attention is dear.
fn steep(load: &StepLoad) -> f64 {
    if load.num_prompt_tokens == 0 {
        return 5.0 * MS;
    }
    (10.0 + 0.0195 * f64::from(load.num_tokens)) * MS + 1.2e-6 * MS * load.prompt_attention
}

fn slow_decodes(load: &StepLoad) -> f64 {
    (60.0 + 0.018 * f64::from(load.num_prompt_tokens)) * MS
}

/// As a GB10.
fn slow(load: &StepLoad) -> f64 {
    (30.0 + 0.5 * f64::from(load.num_prompt_tokens)) * MS + 1e-6 * MS * load.prompt_attention
}

/// What goes wrong on a device.
#[derive(Clone, Copy, Default)]
struct Faults {
    /// Steps vary by this part.
    jitter: f64,
    /// Steps that no graph holds take longer by so many seconds on average, and a few by much more.
    delay_s: f64,
    /// Over a minute they become slower by this part, and faster again.
    drift: f64,
    /// One step of so many stands still for 0.4 s.
    stall_every: u64,
    /// What each new number of tokens that no graph holds costs once, in seconds.
    compile_s: f64,
}

/// CUDA graphs hold so many tokens, if a world doesn't say otherwise.
const GRAPH: u32 = 512;

struct Chance(u64);

impl Chance {
    /// From 0 to 1.
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[derive(Clone, Debug, Default)]
struct Life {
    arrived_at: f64,
    priority: i128,
    lora_id: Option<i64>,
    prompt: Vec<i32>,
    tokens_at: Vec<f64>,
    done: bool,
}

impl Life {
    fn first_token_s(&self) -> f64 {
        self.tokens_at.first().map_or(f64::INFINITY, |at| at - self.arrived_at)
    }
}

struct InFlight {
    number: Option<u64>,
    ends_at: f64,
    scheduled: Vec<Scheduled>,
}

/// A request in a step.
struct Scheduled {
    index: RequestIndex,
    id: usize,
    num_tokens: u32,
    num_drafts: u32,
    num_sampled: usize,
}

/// Tokens that the model samples.
const SAMPLED: [i32; 8] = [1; 8];

/// A step with tokens.
struct MadeStep {
    starts_at: f64,
    load: StepLoad,
    time_s: f64,
    /// Something else has held it up.
    is_faulty: bool,
}

struct World {
    scheduler: Scheduler,
    pacing: Option<Pacing>,
    device: Device,
    faults: Faults,
    chance: Chance,
    now: f64,
    free_at: f64,
    idle_s: f64,
    in_flight: VecDeque<InFlight>,
    arrivals: VecDeque<(f64, usize, u64)>,
    lives: BTreeMap<usize, Life>,
    ids: BTreeMap<RequestIndex, usize>,
    max_graph_tokens: u32,
    compiled: BTreeSet<u32>,
    steps: Vec<MadeStep>,
    paced: Vec<PacedStep>,

    is_async: bool,
    /// How long the loop is held up by a launch; `None` if that takes no time.
    launch_s: Option<Device>,
    num_preempted: usize,
    /// Times that somebody waited, and nobody got on.
    num_wasted: usize,
    flaw: Option<Flaw>,
}

/// What is done with the knobs, so that a test shows that it can fail.
#[derive(Clone, Copy, PartialEq)]
enum Flaw {
    /// After a chunk comes the next one.
    NothingIsRepaid,
    /// What is due never comes.
    LongPromptsStarve,
    /// A chunk is as large as it can be.
    ChunksKnowNoBound,
}

fn serving() -> SchedulerConfig {
    let base = config(vec![KvCacheGroupConfig::FullAttention], None);
    SchedulerConfig {
        async_scheduling: true,
        max_num_active_reqs: 256,
        max_num_scheduled_tokens: 8_192,
        max_num_batched_tokens: 8_192,
        max_model_len: 400_000,
        block_size: 16,
        hash_block_size: 16,
        group_block_sizes: vec![16],
        num_blocks: 40_000,
        hasher: None,
        log_stats: false,
        ..base
    }
}

impl World {
    fn new(config: SchedulerConfig, device: Device, settings: Option<PacingSettings>) -> Self {
        let is_async = config.async_scheduling;
        let scheduler = Scheduler::new(config).expect("a sane configuration");
        let max_graph_tokens = settings.map_or(GRAPH, |it| it.max_graph_tokens);
        let pacing = settings.map(|it| Pacing::new(it, &scheduler));
        Self {
            scheduler,
            pacing,
            device,
            faults: Faults::default(),
            chance: Chance(0x9E37_79B9_7F4A_7C15),
            now: 0.0,
            free_at: 0.0,
            idle_s: 0.0,
            in_flight: VecDeque::new(),
            arrivals: VecDeque::new(),
            lives: BTreeMap::new(),
            ids: BTreeMap::new(),
            max_graph_tokens,
            compiled: BTreeSet::new(),
            steps: Vec::new(),
            paced: Vec::new(),
            is_async,
            launch_s: None,
            num_preempted: 0,
            num_wasted: 0,
            flaw: None,
        }
    }

    fn arrive(&mut self, at: f64, num_prompt_tokens: usize, max_tokens: u64) -> usize {
        self.arrive_with(at, vec![7; num_prompt_tokens], max_tokens)
    }

    fn arrive_with(&mut self, at: f64, prompt: Vec<i32>, max_tokens: u64) -> usize {
        let id = self.lives.len();
        let life = Life { arrived_at: at, prompt, ..Life::default() };
        self.lives.insert(id, life);
        self.arrivals.push_back((at, id, max_tokens));
        id
    }

    fn receive(&mut self) {
        self.arrivals.make_contiguous().sort_by(|one, other| one.0.total_cmp(&other.0));
        while let Some(&(at, id, max_tokens)) = self.arrivals.front() {
            if at > self.now {
                break;
            }
            self.arrivals.pop_front();
            let life = self.lives.get_mut(&id).expect("who arrives has a life");
            let tokens = std::mem::take(&mut life.prompt);
            let stop = StopConditions { max_tokens, ..StopConditions::default() };
            let request = NewRequest {
                stop,
                arrival_time: at,
                priority: life.priority,
                lora_id: life.lora_id,
                ..new_request(id, &tokens)
            };
            let index = self.scheduler.add_request(request, self.now);
            self.ids.insert(index, id);
        }
    }

    /// One round of the engine's loop.
    fn round(&mut self) -> bool {
        self.receive();
        let has_work = self.scheduler.num_unfinished_requests() > 0;
        if !has_work && self.in_flight.is_empty() {
            let Some(&(at, ..)) = self.arrivals.front() else { return false };
            self.now = self.now.max(at);
            return true;
        }
        let depth = if self.is_async { 2 } else { 1 };
        if has_work && self.in_flight.len() < depth {
            self.schedule();
            if self.in_flight.len() < depth {
                return true;
            }
        }
        self.take_result();
        true
    }

    fn schedule(&mut self) {
        let knobs = match &mut self.pacing {
            Some(pacing) => pacing.choose(&mut self.scheduler),
            None => self.scheduler.config().step_knobs(false),
        };
        let knobs = self.spoilt(knobs);
        let Ok(_) = self.scheduler.schedule(knobs, self.now, &mut Answers::default());
        let load = self.scheduler.step_load();
        let number = self.pacing.as_mut().and_then(|it| it.note_step(&self.scheduler, self.now));
        self.num_preempted += self.scheduler.step().preempted.len();
        if load.num_tokens > 0 {
            self.run_on_device(load);
        }
        let is_idle = self.in_flight.iter().all(|it| it.scheduled.is_empty());
        self.num_wasted += usize::from(is_idle && load.num_tokens == 0);
        let chance = &mut self.chance;
        let scheduled = self.scheduler.step().scheduled().map(|it| {
            let num_drafts = it.num_draft_tokens;
            let num_accepted = match num_drafts {
                0 => 0,
                most => (chance.next() * f64::from(most + 1)) as usize,
            };
            let samples = !self.scheduler.request(it.index).is_prefill_chunk();
            let num_sampled = if samples { 1 + num_accepted } else { 0 };
            let (index, num_tokens) = (it.index, it.num_tokens);
            Scheduled { index, id: self.ids[&index], num_tokens, num_drafts, num_sampled }
        });
        let scheduled = scheduled.collect();
        self.in_flight.push_back(InFlight { number, ends_at: self.free_at, scheduled });
    }

    fn run_on_device(&mut self, load: StepLoad) {
        let Faults { jitter, delay_s, drift, stall_every, compile_s } = self.faults;
        let phase = self.now * std::f64::consts::TAU / 60.0;
        let mut time_s = (self.device)(&load);
        time_s *= 1.0 + jitter * (2.0 * self.chance.next() - 1.0);
        time_s *= 1.0 + drift * phase.sin();
        if load.num_tokens > self.max_graph_tokens {
            time_s -= delay_s * (1.0 - self.chance.next()).ln();
        }
        let mut fault_s = 0.0;
        if stall_every > 0 && self.chance.next() * (stall_every as f64) < 1.0 {
            fault_s += 0.4;
        }
        if load.num_tokens > self.max_graph_tokens && self.compiled.insert(load.num_tokens) {
            fault_s += compile_s;
        }
        let starts_at = self.free_at.max(self.now);
        self.idle_s += if self.steps.is_empty() { 0.0 } else { starts_at - self.free_at };
        self.free_at = starts_at + time_s + fault_s;
        if let Some(launch_s) = self.launch_s {
            // The device has kernels from the first one on, and the last ones late.
            self.now += launch_s(&load);
            self.free_at = self.free_at.max(self.now + MS);
            time_s = self.free_at - starts_at - fault_s;
        }
        self.steps.push(MadeStep { starts_at, load, time_s, is_faulty: fault_s > 0.0 });
    }

    fn spoilt(&self, knobs: StepKnobs) -> StepKnobs {
        let configured = self.scheduler.config().step_knobs(false);
        let is_chunk = knobs.max_num_scheduled_tokens < configured.max_num_scheduled_tokens;
        match self.flaw {
            Some(Flaw::NothingIsRepaid) if knobs.throttle_prefills => StepKnobs {
                max_num_scheduled_tokens: 1_024,
                long_prefill_token_threshold: 1_000,
                throttle_prefills: false,
            },
            Some(Flaw::LongPromptsStarve) => StepKnobs { throttle_prefills: true, ..configured },
            Some(Flaw::ChunksKnowNoBound) if is_chunk => configured,
            _ => knobs,
        }
    }

    fn take_result(&mut self) {
        let Some(step) = self.in_flight.pop_front() else { return };
        self.now = self.now.max(step.ends_at);
        if let (Some(pacing), Some(number)) = (&mut self.pacing, step.number) {
            let paced = pacing.note_result(number, self.now);
            self.paced.extend(paced);
        }
        let outputs = step.scheduled.iter().map(|it| {
            let is_there = self.ids.get(&it.index) == Some(&it.id);
            ScheduledOutput {
                index: is_there.then_some(it.index),
                num_scheduled_tokens: it.num_tokens,
                sampled_tokens: &SAMPLED[..it.num_sampled],
                num_draft_tokens: it.num_drafts,
                num_invalid_drafts: 0,
                is_pooled: false,
                is_void: false,
            }
        });
        let mut told = Vec::new();
        let outputs: Vec<_> = outputs.collect();
        let answers = &mut Answers::default();
        let Ok(()) = self.scheduler.update_from_output(outputs.into_iter(), answers, &mut told);
        for output in told {
            let Scheduled { index, id, .. } = step.scheduled[output.position];
            let life = self.lives.get_mut(&id).expect("who is told of lives");
            life.tokens_at.extend(std::iter::repeat_n(self.now, output.num_new_tokens));
            if output.news.is_some_and(|it| it.is_over) {
                life.done = true;
                self.ids.remove(&index);
            }
        }
        self.propose(&step.scheduled);
    }

    /// With asynchronous scheduling the drafter's tokens stay on the device.
    fn propose(&mut self, scheduled: &[Scheduled]) {
        let num_drafts = self.scheduler.config().speculation.num_spec_tokens as usize;
        if num_drafts == 0 || self.is_async {
            return;
        }
        for it in scheduled.iter().filter(|it| self.ids.get(&it.index) == Some(&it.id)) {
            self.scheduler.set_drafts(it.index, &SAMPLED[..num_drafts]);
        }
    }

    fn run_until(&mut self, at: f64) {
        while self.now < at && self.round() {}
    }
}

fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get(((values.len() as f64 * part) as usize).min(last)).copied().unwrap_or(f64::NAN)
}

/// Streams decode, a long prompt comes, and short ones all along.
#[expect(clippy::struct_field_names, reason = "units end names")]
struct Mixed {
    stream_tokens_per_s: f64,
    gap_p99_s: f64,
    short_p50_s: f64,
    short_max_s: f64,
    long_s: f64,
}

fn mixed(world: &mut World, long_tokens: usize) -> Mixed {
    mixed_with(world, long_tokens, 100)
}

fn mixed_with(world: &mut World, long_tokens: usize, short_tokens: usize) -> Mixed {
    let start = world.now;
    let streams: Vec<_> = (0..16).map(|_| world.arrive(start, 128, 1_000_000)).collect();
    world.run_until(start + 1.0);
    let begin = world.now;
    let long = world.arrive(begin, long_tokens, 1);
    let shorts: Vec<_> =
        (1..400).map(|it| world.arrive(begin + 0.5 * f64::from(it), short_tokens, 4)).collect();
    while world.lives[&long].tokens_at.is_empty() && world.now < begin + 190.0 {
        world.round();
    }
    let end = world.now;
    world.arrivals.clear();
    let mut gaps = Vec::new();
    let mut num_tokens = 0;
    for id in &streams {
        let at = &world.lives[id].tokens_at;
        let inside = at.windows(2).filter(|it| it[1] >= begin && it[1] <= end);
        let inside: Vec<f64> = inside.map(|it| it[1] - it[0]).collect();
        num_tokens += inside.len();
        gaps.extend(inside);
    }
    let first = shorts.iter().map(|it| &world.lives[it]).filter(|it| it.arrived_at < end - 1.0);
    let mut first: Vec<f64> = first.map(Life::first_token_s).collect();
    Mixed {
        stream_tokens_per_s: num_tokens as f64 / 16.0 / (end - begin),
        gap_p99_s: quantile(&mut gaps, 0.99),
        short_p50_s: quantile(&mut first, 0.5),
        short_max_s: quantile(&mut first, 1.0),
        long_s: end - begin,
    }
}

#[expect(clippy::unnecessary_wraps, reason = "beside None, for vLLM's values")]
fn paced(max_stall_s: f64, prefill_share: f64) -> Option<PacingSettings> {
    Some(PacingSettings { max_stall_s, prefill_share, max_graph_tokens: GRAPH })
}

const USUAL: Faults =
    Faults { jitter: 0.03, delay_s: 0.0, drift: 0.1, stall_every: 500, compile_s: 2.0 };

/// A device, the length of its long prompts, and the stall that is allowed on it.
const DEVICES: [(&str, Device, usize, f64); 4] = [
    ("timer", timer, 120_000, 0.120),
    ("mixture of experts", moe, 100_000, 0.190),
    ("dense", dense, 150_000, 0.150),
    ("slow", slow, 30_000, 0.250),
];

/// Whether prompts have got their share of each two seconds, within a tenth of the time, while a
/// long one was computed beside streams.
fn share_is_kept(world: &World, share: f64, from: f64, to: f64) -> Result<(), String> {
    let (mut start, mut prompt_s, mut all_s) = (from, 0.0, 0.0);
    for step in world.steps.iter().filter(|it| it.starts_at >= from && it.starts_at < to) {
        let MadeStep { starts_at: at, load, time_s, .. } = step;
        // Before a large chunk: half a period would say little.
        if all_s >= 2.0 && load.num_prompt_tokens > 200 {
            let part = prompt_s / all_s;
            if (part - share).abs() > 0.1 {
                return Err(format!("{part:.3} of the time from {start:.1} s to {at:.1} s"));
            }
            (start, prompt_s, all_s) = (*at, 0.0, 0.0);
        }
        all_s += time_s;
        prompt_s += if load.num_prompt_tokens > 0 { *time_s } else { 0.0 };
    }
    Ok(())
}

/// Steps with prompts while others generated, those aside that something else has held up.
fn contended(world: &World) -> impl Iterator<Item = &PacedStep> {
    world.paced.iter().filter(|step| {
        // What holds up the step before is seen as this one's.
        let number = step.number as usize;
        let is_faulty =
            world.steps[number.saturating_sub(1)..=number].iter().any(|it| it.is_faulty);
        step.has_prompts() && step.load.num_decode_tokens > 0 && !is_faulty
    })
}

/// What these steps took that began later.
fn times_after(world: &World, from: f64) -> Vec<f64> {
    let late = contended(world).filter(|it| world.steps[it.number as usize].starts_at > from);
    late.map(|it| it.time_s).collect()
}

/// Whether 99 of 100 steps with prompts were within the bound, those aside that something else has
/// held up.
fn bound_is_kept(world: &World, max_stall_s: f64, from: f64) -> Result<(), String> {
    let mut times = times_after(world, from);
    assert!(times.len() > 4, "{} steps say little", times.len());
    // What a sleep or a look at the clock takes is no part of it.
    let longest = quantile(&mut times, 0.99);
    if longest > 1.05 * max_stall_s {
        return Err(format!("{longest:.3} s, not {max_stall_s:.3}"));
    }
    Ok(())
}

fn end_streams(world: &mut World) {
    let ids: Vec<_> = world.ids.keys().copied().collect();
    let answers = &mut Answers::default();
    let Ok(_) = world.scheduler.finish_requests(&ids, RequestStatus::FinishedAborted, answers);
    world.ids.clear();
    while !world.in_flight.is_empty() {
        world.take_result();
    }
}

#[test]
fn the_goals_are_reached_on_a_timer() {
    let mut world = World::new(serving(), timer, paced(0.120, 0.5));
    for _ in 0..2 {
        let it = mixed(&mut world, 60_000);
        assert!(it.stream_tokens_per_s >= 90.0, "{} tokens/s", it.stream_tokens_per_s);
        assert!(it.gap_p99_s <= 0.130, "{} s between tokens", it.gap_p99_s);
        assert!(it.short_p50_s <= 0.200, "{} s to a short one's token", it.short_p50_s);
        assert!(it.short_max_s <= 0.400, "{} s to a short one's token", it.short_max_s);
        assert!(it.long_s <= 10.0, "{} s to the long one's", it.long_s);
        end_streams(&mut world);
    }
    // What it is better than.
    let stock = mixed(&mut World::new(serving(), timer, None), 60_000);
    assert!(stock.stream_tokens_per_s < 5.0 && stock.short_p50_s > 1.0 && stock.long_s < 4.0);
}

#[test]
fn the_goals_are_reached_where_the_host_limits() {
    let mut world = World::new(serving(), launch_bound, paced(0.180, 0.5));
    world.launch_s = Some(launch_s);
    world.faults = Faults { jitter: 0.05, ..Faults::default() };
    for _ in 0..3 {
        let it = mixed(&mut world, 100_000);
        assert!(it.stream_tokens_per_s >= 80.0, "{} tokens/s", it.stream_tokens_per_s);
        assert!(it.gap_p99_s <= 0.200, "{} s between tokens", it.gap_p99_s);
        assert!(it.short_p50_s <= 0.250, "{} s to a short one's token", it.short_p50_s);
        assert!(it.short_max_s <= 0.500, "{} s to a short one's token", it.short_max_s);
        assert!(it.long_s <= 16.0, "{} s to the long one's", it.long_s);
        end_streams(&mut world);
    }
}

/// Some steps take twice as long as others of their size. That is no reason to give up a size for
/// one that computes half as many tokens a second.
#[test]
fn the_goals_are_reached_where_times_vary() {
    let stock = mixed(&mut noisy_world(0, None), 100_000);
    let mut long_s = Vec::new();
    let mut short_max_s = Vec::new();
    for seed in 1..=60 {
        let mut world = noisy_world(seed, paced(0.200, 0.5));
        warm_up(&mut world);
        for _ in 0..3 {
            let it = mixed(&mut world, 100_000);
            assert!(it.stream_tokens_per_s >= 80.0, "{seed}: {} tokens/s", it.stream_tokens_per_s);
            assert!(it.gap_p99_s <= 0.200, "{seed}: {} s between tokens", it.gap_p99_s);
            assert!(it.short_p50_s <= 0.250, "{seed}: {} s to a short one's", it.short_p50_s);
            short_max_s.push(it.short_max_s);
            long_s.push(it.long_s / stock.long_s);
            end_streams(&mut world);
        }
    }
    let (usual, late) = (quantile(&mut long_s, 0.5), quantile(&mut long_s, 0.9));
    assert!(usual <= 3.0 && late <= 3.5, "the long one took {usual} times vLLM's, {late} at times");
    let short_max_s = quantile(&mut short_max_s, 0.9);
    assert!(short_max_s <= 0.500, "{short_max_s} s to a short one's token");
}

fn noisy_world(seed: u64, settings: Option<PacingSettings>) -> World {
    let mut world = World::new(serving(), noisy, settings);
    world.chance = Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    world.faults = Faults { jitter: 0.01, delay_s: 0.03, ..Faults::default() };
    world
}

/// A world in which a long prompt is computed beside streams, once it is known what steps take.
fn after_a_long_prompt(
    device: Device,
    long_tokens: usize,
    settings: (f64, f64),
    flaw: Option<Flaw>,
) -> (World, f64, f64) {
    let mut world = World::new(serving(), device, paced(settings.0, settings.1));
    world.faults = USUAL;
    mixed(&mut world, long_tokens);
    end_streams(&mut world);
    world.flaw = flaw;
    let start = world.now;
    mixed(&mut world, long_tokens);
    let end = world.now;
    (world, start + 1.5, end)
}

/// A prompt's end may be of any length. It is computed in sizes that have run, so that nobody waits
/// for a compiler.
#[test]
fn the_tail_of_a_long_prompt_compiles_nothing() {
    let cases = [(8_192, 512, 100), (2_048, 512, 100), (16_384, 512, 100), (8_192, 128, 20)];
    for (max_tokens, max_graph_tokens, short_tokens) in cases {
        let config = SchedulerConfig {
            max_num_scheduled_tokens: max_tokens,
            max_num_batched_tokens: max_tokens,
            ..serving()
        };
        let settings = paced(0.190, 0.5).map(|it| PacingSettings { max_graph_tokens, ..it });
        let mut world = World::new(config, moe, settings);
        warm_up(&mut world);
        world.faults = Faults { compile_s: 2.0, ..Faults::default() };
        for long_tokens in (50_000..52_000).step_by(157) {
            let start = world.now;
            mixed_with(&mut world, long_tokens, short_tokens);
            let mut steps = world.steps.iter().filter(|it| it.starts_at >= start);
            let compiled = steps.find(|it| it.is_faulty).map(|it| it.load);
            let what = format!("{max_tokens}, {max_graph_tokens}, {long_tokens} tokens");
            assert_eq!(compiled, None, "{what}");
            end_streams(&mut world);
        }
    }
}

/// So is what is left at last, where it could be computed at once with a short prompt.
#[test]
fn a_short_prompt_beside_the_last_of_a_long_one_compiles_nothing() {
    let mut lengths: Vec<f64> = Vec::new();
    for turn in 0..200 {
        let mut world = World::new(serving(), moe, paced(0.190, 0.5));
        warm_up(&mut world);
        world.faults = Faults { compile_s: 2.0, ..Faults::default() };
        let start = world.now;
        (0..16).for_each(|_| _ = world.arrive(start, 16, 1_000_000));
        world.run_until(start + 1.0);
        let long = world.arrive(start + 1.0, 10_560, 1);
        if let Some(long_s) = lengths.first() {
            let early_s = 0.002 * f64::from(turn);
            world.arrive(start + 1.0 + long_s - early_s, 300, 1);
        }
        while world.lives[&long].tokens_at.is_empty() || world.ids.len() > 16 {
            world.round();
        }
        lengths.push(world.lives[&long].first_token_s());
        let compiled = world.steps.iter().find(|it| it.starts_at >= start && it.is_faulty);
        assert!(compiled.is_none(), "{turn}: {:?}", compiled.map(|it| it.load));
    }
}

/// A short prompt comes in beside the end of a long one as beside its middle.
#[test]
fn a_short_prompt_does_not_wait_for_a_tail() {
    for (share, short_tokens, longest_s) in [(0.2, 100, 0.4), (0.5, 600, 0.4), (0.5, 1_024, 0.7)] {
        let mut world = World::new(serving(), moe, paced(0.190, share));
        warm_up(&mut world);
        for long_tokens in (50_000..52_000).step_by(157) {
            let it = mixed_with(&mut world, long_tokens, short_tokens);
            let what = format!("{share}, {short_tokens}, {long_tokens} tokens");
            assert!(it.short_max_s <= longest_s, "{what}: {} s", it.short_max_s);
            end_streams(&mut world);
        }
    }
}

#[test]
fn prompts_get_their_share_and_nobody_waits_longer_than_allowed() {
    for (name, device, long_tokens, max_stall_s) in DEVICES {
        // The short ones alone take a fifth of the time of the slow device: less would be broken.
        for share in [0.5, 0.6] {
            let (world, start, end) =
                after_a_long_prompt(device, long_tokens, (max_stall_s, share), None);
            let kept = share_is_kept(&world, share, start, end);
            assert!(kept.is_ok(), "{name}, share {share}: {kept:?}");
            let kept = bound_is_kept(&world, max_stall_s, start);
            assert!(kept.is_ok(), "{name}, share {share}: {kept:?}");
            assert!(world.idle_s < 1e-6, "{name}: the device was idle for {} s", world.idle_s);
        }
    }
}

/// Many tokens a step are no reason to learn later what attention costs.
#[test]
fn the_bound_is_kept_with_a_large_budget() {
    let config = SchedulerConfig {
        max_num_scheduled_tokens: 32_768,
        max_num_batched_tokens: 32_768,
        ..serving()
    };
    for seed in 1..=6 {
        let mut world = World::new(config.clone(), steep, paced(0.150, 0.5));
        world.chance = Chance(seed);
        world.faults = Faults { jitter: 0.02, ..Faults::default() };
        warm_up(&mut world);
        let start = world.now;
        for _ in 0..3 {
            mixed(&mut world, 100_000);
            end_streams(&mut world);
        }
        let kept = bound_is_kept(&world, 0.150, start);
        assert!(kept.is_ok(), "{seed}: {kept:?}");
    }
}

/// What decodes take is a part of the bound, and of what was too long.
#[test]
fn the_bound_is_kept_where_decodes_take_much_of_it() {
    let (max_stall_s, jitter) = (0.150, 0.15);
    let mut world = World::new(serving(), slow_decodes, paced(max_stall_s, 0.5));
    world.faults = Faults { jitter, ..Faults::default() };
    warm_up(&mut world);
    let start = world.now;
    world.arrive(start, 128, 1_000_000);
    world.run_until(start + 1.0);
    world.arrive(world.now, 390_000, 1);
    world.run_until(start + 120.0);
    let times = times_after(&world, start + 5.0);
    let num_too_long = times.iter().filter(|it| **it > max_stall_s).count();
    assert!(times.len() > 50 * num_too_long, "{num_too_long} of {}", times.len());
}

#[test]
fn the_tests_notice_a_share_that_is_not_repaid_and_a_chunk_without_bound() {
    let spoilt = |flaw| after_a_long_prompt(moe, 300_000, (0.19, 0.5), Some(flaw));
    let (world, start, end) = spoilt(Flaw::NothingIsRepaid);
    assert!(share_is_kept(&world, 0.5, start, end).is_err());
    let (world, start, _) = spoilt(Flaw::ChunksKnowNoBound);
    assert!(bound_is_kept(&world, 0.19, start).is_err());
}

/// Requests of all lengths come and go, in a cache that may be too small for them.
fn random_lives(seed: u64) -> (World, PacingSettings) {
    let mut chance = Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut pick = |below: u64| (chance.next() * below as f64) as u64;
    let (_, device, _, max_stall_s) = DEVICES[pick(4) as usize];
    let has_drafts = pick(4) == 0;
    let config = SchedulerConfig {
        async_scheduling: pick(2) == 0,
        policy: if pick(2) == 0 { Policy::Fcfs } else { Policy::Priority },
        num_blocks: 2_000 + 400 * pick(20) as u32,
        max_num_active_reqs: 4 + pick(60) as usize,
        reserve_full_isl: pick(2) == 0,
        speculation: Speculation {
            num_spec_tokens: if has_drafts { 3 } else { 0 },
            ..Speculation::default()
        },
        ..serving()
    };
    let prefill_share = 0.2 + 0.1 * pick(7) as f64;
    let settings = PacingSettings { max_stall_s, prefill_share, max_graph_tokens: GRAPH };
    let mut world = World::new(config, device, Some(settings));
    world.faults = USUAL;
    let mut at = 0.0;
    for _ in 0..40 {
        at += 0.01 * pick(100) as f64;
        let num_prompt_tokens = match pick(4) {
            0 => 2_000 + pick(28_000),
            _ => 10 + pick(1_500),
        };
        let id = world.arrive(at, num_prompt_tokens as usize, 1 + pick(200));
        world.lives.get_mut(&id).expect("it has just come").priority = pick(3).into();
    }
    world.run_until(at + 600.0);
    (world, settings)
}

fn num_starving(world: &World) -> usize {
    world.lives.values().filter(|it| !it.done).count()
}

#[test]
fn everybody_gets_on_whatever_comes() {
    let (mut num_preempted, mut num_steps, mut num_too_long) = (0, 0, 0);
    for seed in 0..80 {
        let (world, settings) = random_lives(seed);
        assert_eq!(num_starving(&world), 0, "seed {seed}");
        assert_eq!(world.num_wasted, 0, "seed {seed}");
        // Where prompts come faster than they are computed, share and bound give way.
        let bound = contended(&world).filter(|it| it.share < settings.prefill_share + 1e-9);
        for step in bound {
            num_steps += 1;
            num_too_long += usize::from(step.time_s > 1.05 * settings.max_stall_s);
        }
        num_preempted += world.num_preempted;
        world.scheduler.check_invariants();
    }
    assert!(num_preempted > 20, "{num_preempted} preemptions say little");
    assert!(num_steps > 5_000, "{num_steps} steps say little");
    assert!(100 * num_too_long <= num_steps, "{num_too_long} of {num_steps} took too long");
}

#[test]
fn the_tests_notice_a_prompt_that_starves() {
    let mut world = World::new(serving(), moe, paced(0.15, 0.5));
    world.flaw = Some(Flaw::LongPromptsStarve);
    world.arrive(0.0, 100, 100_000);
    let long = world.arrive(1.0, 50_000, 1);
    world.run_until(120.0);
    assert!(world.lives[&long].tokens_at.is_empty());
}

/// Requests a second, and the median and 99th percentile of first tokens, where requests come at
/// random; `is_warm` if each size has run before, as in a server.
fn ordinary(
    device: Device,
    settings: Option<PacingSettings>,
    rate: f64,
    is_warm: bool,
    num_cached: usize,
) -> (f64, f64, f64) {
    const NUM_REQUESTS: i32 = 1_000;
    let hasher = BlockHasher::new(HashAlgorithm::Xxhash, 16, b"none");
    let mut world = World::new(SchedulerConfig { hasher, ..serving() }, device, settings);
    if is_warm {
        warm_up(&mut world);
    }
    let beginning = vec![8; num_cached];
    if num_cached > 0 {
        let first = world.arrive_with(world.now, beginning.clone(), 1);
        while !world.lives[&first].done {
            world.round();
        }
    }
    let start = world.now;
    let mut chance = Chance(12_345);
    let mut at = start;
    let come: Vec<_> = (0..NUM_REQUESTS)
        .map(|number| {
            at -= (1.0 - chance.next()).ln() / rate;
            let own = (0..1_024).map(|it| 10 + (13 * number + it) % 50_000);
            world.arrive_with(at, beginning.iter().copied().chain(own).collect(), 128)
        })
        .collect();
    world.run_until(f64::MAX);
    let mut first: Vec<f64> = come.iter().map(|it| world.lives[it].first_token_s()).collect();
    let served = f64::from(NUM_REQUESTS) / (world.now - start);
    (served, quantile(&mut first, 0.5), quantile(&mut first, 0.99))
}

/// Each size runs five times beside requests that decode, and then numbers of tokens that have to be
/// compiled.
fn warm_up(world: &mut World) {
    const NUM_STREAMS: usize = 16;
    const NUM_RUNS: usize = 5;
    let Some(pacing) = &mut world.pacing else { return };
    pacing.begin_warm_up();
    let sizes = pacing.sizes().to_vec();
    let start = world.now;
    for _ in 0..NUM_STREAMS {
        world.arrive(start, 16, 100_000);
    }
    world.run_until(start + 0.5);
    let faults =
        std::mem::replace(&mut world.faults, Faults { compile_s: 1.0, ..Faults::default() });
    let others = (1_855..2_048).step_by(32);
    for num_tokens in sizes.into_iter().flat_map(|size| [size; NUM_RUNS]).chain(others) {
        let prompt = world.arrive(world.now, num_tokens as usize - NUM_STREAMS, 1);
        while !world.lives[&prompt].done {
            world.round();
        }
    }
    end_streams(world);
    world.faults = faults;
    if let Some(pacing) = &mut world.pacing {
        pacing.end_warm_up(&world.scheduler);
    }
}

/// At an ordinary load, where prompts fit into a chunk, it costs next to nothing.
#[test]
fn an_ordinary_load_does_not_lose() {
    let loads = [
        ("dense", dense as Device, 20.0, 0.15),
        ("dense", dense, 23.7, 0.15),
        ("at a price", at_a_price, 9.0, 0.18),
        ("at a price", at_a_price, 14.4, 0.18),
    ];
    for (name, device, rate, max_stall_s) in loads {
        let stock = ordinary(device, None, rate, true, 0);
        let ours = ordinary(device, paced(max_stall_s, 0.5), rate, true, 0);
        assert!(ours.0 > 0.97 * stock.0, "{name}: {ours:?} requests/s, not {stock:?}");
        assert!(ours.1 < 1.1 * stock.1, "{name}: {ours:?} to the first token, not {stock:?}");
        assert!(ours.2 < 1.1 * stock.2, "{name}: {ours:?} to the first token, not {stock:?}");
    }
}

/// A prompt whose beginning is cached is as long as its rest, also once it runs.
#[test]
fn an_ordinary_load_whose_beginnings_are_cached_does_not_lose() {
    for rate in [20.0, 23.7] {
        let stock = ordinary(dense, None, rate, true, 8_000);
        let ours = ordinary(dense, paced(0.15, 0.5), rate, true, 8_000);
        assert!(ours.0 > 0.97 * stock.0, "{ours:?} requests/s, not {stock:?}");
        assert!(ours.1 < 1.1 * stock.1, "{ours:?} to the first token, not {stock:?}");
        assert!(ours.2 < 1.1 * stock.2, "{ours:?} to the first token, not {stock:?}");
    }
}

/// Where the bound allows no chunk that is worth its price, or nothing is known of larger ones, an
/// ordinary load makes it give way. Else few tokens at a time would never get through the queue.
#[test]
fn a_bound_that_is_too_narrow_costs_an_ordinary_load_no_throughput() {
    for rate in [9.0, 14.4] {
        let stock = ordinary(at_a_price, None, rate, true, 0);
        for (max_stall_s, is_warm) in [(0.12, true), (0.12, false), (0.18, false)] {
            let ours = ordinary(at_a_price, paced(max_stall_s, 0.5), rate, is_warm, 0);
            let what = format!("{max_stall_s} s, {is_warm}, {rate}/s: {ours:?}, not {stock:?}");
            assert!(ours.0 > 0.97 * stock.0, "{what}");
            assert!(ours.1 < 2.0 * stock.1, "{what}");
        }
    }
}

/// Where nobody generates, or nobody has a prompt, vLLM's values are chosen.
#[test]
fn alone_all_is_as_with_vllm() {
    let first_token = |settings| {
        let mut world = World::new(serving(), moe, settings);
        let long = world.arrive(0.0, 100_000, 50);
        world.run_until(f64::MAX);
        (world.lives[&long].first_token_s(), world.steps.len(), world.now)
    };
    assert_eq!(first_token(None), first_token(paced(0.15, 0.5)));
}

/// Where chunks have to be so small that hardly any prompt fits into one, those that are much
/// shorter than a long one don't wait for it.
#[test]
fn a_prompt_of_a_few_chunks_does_not_wait_for_one_of_many() {
    let mut world = World::new(serving(), slow, paced(0.100, 0.5));
    world.arrive(0.0, 100, 100_000);
    world.run_until(2.0);
    let long = world.arrive(world.now, 30_000, 1);
    world.run_until(20.0);
    let brief = world.arrive(world.now, 600, 1);
    world.run_until(40.0);
    assert!(world.lives[&long].tokens_at.is_empty(), "it is being computed");
    assert!(world.lives[&brief].first_token_s() < 5.0, "{:?}", world.lives[&brief]);
}

/// What is left to compute of a prompt whose beginning is cached may be short, and then it does not
/// wait until a chunk is due.
#[test]
fn a_prompt_whose_beginning_is_cached_is_a_short_one() {
    let hasher = BlockHasher::new(HashAlgorithm::Xxhash, 16, b"none");
    let config = SchedulerConfig { hasher, ..serving() };
    let mut world = World::new(config, moe, paced(0.15, 0.2));
    let first = world.arrive(0.0, 30_000, 1);
    world.run_until(f64::MAX);
    assert!(world.lives[&first].done);
    let start = world.now;
    world.arrive(start, 100, 100_000);
    world.run_until(start + 1.0);
    let long = world.arrive_with(world.now, vec![8; 90_000], 1);
    world.run_until(start + 3.0);
    let again = world.arrive(world.now, 30_016, 1);
    world.run_until(start + 6.0);
    assert!(world.lives[&long].tokens_at.is_empty(), "it is being computed");
    assert!(world.lives[&again].first_token_s() < 0.4, "{:?}", world.lives[&again]);
}

/// A prompt that is held back keeps its adapter. One with another adapter, whose prompt is cached, is
/// let in beside it by a release that counts the adapters of those alone that a step computes.
#[test]
fn no_more_adapters_run_than_there_is_room_for() {
    let hasher = BlockHasher::new(HashAlgorithm::Xxhash, 16, b"none");
    let config = SchedulerConfig { hasher, max_loras: Some(1), ..serving() };
    let mut world = World::new(config, moe, paced(0.15, 0.5));
    let brief = vec![9; 65];
    let first = world.arrive_with(0.0, brief.clone(), 1);
    world.lives.get_mut(&first).expect("it has just come").lora_id = Some(2);
    world.run_until(f64::MAX);
    let start = world.now;
    world.arrive(start, 100, 100_000);
    let long = world.arrive(start + 1.0, 50_000, 1);
    world.lives.get_mut(&long).expect("it has just come").lora_id = Some(1);
    for turn in 0..40 {
        let again = world.arrive_with(start + 1.5 + 0.05 * f64::from(turn), brief.clone(), 1);
        world.lives.get_mut(&again).expect("it has just come").lora_id = Some(2);
    }
    let mut num_together = 0;
    while world.now < start + 5.0 {
        world.round();
        let running = world.scheduler.running();
        let adapters: BTreeSet<_> =
            running.iter().filter_map(|&it| world.scheduler.request(it).lora_id()).collect();
        num_together = num_together.max(adapters.len());
    }
    assert!(world.lives[&long].tokens_at.is_empty(), "it is being computed");
    assert_eq!(num_together, 1);
}
