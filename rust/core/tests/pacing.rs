//! Paced prefill on simulated devices: the real scheduler, asynchronous as vLLM's loop has it, over
//! steps that take what a formula says.

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::{Answers, config, new_request};
use sparksched_core::{
    KvCacheGroupConfig, NewRequest, PacedStep, Pacing, PacingSettings, RequestIndex,
    ScheduledOutput, Scheduler, SchedulerConfig, StepLoad, StopConditions,
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

fn dense(load: &StepLoad) -> f64 {
    (8.0 + 0.03 * f64::from(load.num_tokens)) * MS + 2e-7 * MS * load.prompt_attention
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
    /// Over a minute they become slower by this part, and faster again.
    drift: f64,
    /// One step of so many stands still for 0.4 s.
    stall_every: u64,
    /// What each new number of tokens above 512 costs once, in seconds.
    compile_s: f64,
}

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
    num_prompt_tokens: usize,
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
    /// Of each request: its place, its id, tokens, and whether it samples.
    scheduled: Vec<(RequestIndex, usize, u32, bool)>,
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
    compiled: std::collections::BTreeSet<u32>,
    steps: Vec<(f64, StepLoad, f64)>,
    paced: Vec<PacedStep>,
    is_async: bool,
    num_preempted: usize,
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
            compiled: std::collections::BTreeSet::new(),
            steps: Vec::new(),
            paced: Vec::new(),
            is_async,
            num_preempted: 0,
        }
    }

    fn arrive(&mut self, at: f64, num_prompt_tokens: usize, max_tokens: u64) -> usize {
        let id = self.lives.len();
        let life = Life { arrived_at: at, num_prompt_tokens, ..Life::default() };
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
            let tokens = vec![7; self.lives[&id].num_prompt_tokens];
            let stop = StopConditions { max_tokens, ..StopConditions::default() };
            let arrival_time = at;
            let request = NewRequest { stop, arrival_time, ..new_request(id, &tokens) };
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
        let Ok(_) = self.scheduler.schedule(knobs, self.now, &mut Answers::default());
        let load = self.scheduler.step_load();
        let number = self.pacing.as_mut().and_then(|it| it.note_step(&self.scheduler, self.now));
        self.num_preempted += self.scheduler.step().preempted.len();
        let mut time_s = if load.num_tokens == 0 { 0.0 } else { (self.device)(&load) };
        if load.num_tokens > 0 {
            time_s *= 1.0 + self.faults.jitter * (2.0 * self.chance.next() - 1.0);
            time_s *= 1.0 + self.faults.drift * (self.now * std::f64::consts::TAU / 60.0).sin();
            if self.faults.stall_every > 0
                && self.chance.next() * (self.faults.stall_every as f64) < 1.0
            {
                time_s += 0.4;
            }
            if load.num_tokens > 512 && self.compiled.insert(load.num_tokens) {
                time_s += self.faults.compile_s;
            }
        }
        let starts_at = self.free_at.max(self.now);
        self.idle_s += if self.steps.is_empty() { 0.0 } else { starts_at - self.free_at };
        self.free_at = starts_at + time_s;
        self.steps.push((starts_at, load, time_s));
        let scheduled = self.scheduler.step().scheduled().map(|it| {
            let samples = !self.scheduler.request(it.index).is_prefill_chunk();
            (it.index, self.ids[&it.index], it.num_tokens, samples)
        });
        let scheduled = scheduled.collect();
        self.in_flight.push_back(InFlight { number, ends_at: self.free_at, scheduled });
    }

    fn take_result(&mut self) {
        let Some(step) = self.in_flight.pop_front() else { return };
        self.now = self.now.max(step.ends_at);
        if let (Some(pacing), Some(number)) = (&mut self.pacing, step.number) {
            let paced = pacing.note_result(number, self.now);
            self.paced.extend(paced);
        }
        let outputs = step.scheduled.iter().map(|&(index, id, num_tokens, samples)| {
            let is_there = self.ids.get(&index) == Some(&id);
            ScheduledOutput {
                index: is_there.then_some(index),
                num_scheduled_tokens: num_tokens,
                sampled_tokens: if samples { &[1] } else { &[] },
                num_draft_tokens: 0,
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
            let (index, id, ..) = step.scheduled[output.position];
            let life = self.lives.get_mut(&id).expect("who is told of lives");
            life.tokens_at.extend(std::iter::repeat_n(self.now, output.num_new_tokens));
            if output.news.is_some_and(|it| it.is_over) {
                life.done = true;
                self.ids.remove(&index);
            }
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
struct Mixed {
    stream_tokens_per_s: f64,
    gap_p99_s: f64,
    short_p50_s: f64,
    short_max_s: f64,
    long_s: f64,
}

fn mixed(world: &mut World, long_tokens: usize) -> Mixed {
    let start = world.now;
    let streams: Vec<_> = (0..16).map(|_| world.arrive(start, 128, 1_000_000)).collect();
    world.run_until(start + 1.0);
    let begin = world.now;
    let long = world.arrive(begin, long_tokens, 1);
    let shorts: Vec<_> =
        (1..400).map(|it| world.arrive(begin + 0.5 * f64::from(it), 100, 4)).collect();
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

#[test]
fn explore() {
    let devices: [(&str, Device, usize, f64); 4] = [
        ("timer", timer, 60_000, 0.1),
        ("moe", moe, 100_000, 0.15),
        ("dense", dense, 100_000, 0.15),
        ("slow", slow, 30_000, 0.25),
    ];
    for (name, device, long, stall) in devices {
        for share in [0.0, 0.5, 0.6] {
            let settings = (share > 0.0)
                .then_some(PacingSettings { max_stall_s: stall, prefill_share: share });
            for faults in [
                Faults::default(),
                Faults { jitter: 0.05, drift: 0.1, stall_every: 1000, compile_s: 2.0 },
            ] {
                let mut world = World::new(serving(), device, settings);
                world.faults = faults;
                for round in 0..2 {
                    let it = mixed(&mut world, long);
                    println!(
                        "{name} share {share} faults {} round {round}: {:.0} tok/s p99 {:.0} ms short {:.0}/{:.0} ms long {:.1} s idle {:.3}",
                        faults.jitter,
                        it.stream_tokens_per_s,
                        it.gap_p99_s * 1e3,
                        it.short_p50_s * 1e3,
                        it.short_max_s * 1e3,
                        it.long_s,
                        world.idle_s
                    );
                    if std::env::var("TRACE").is_ok() {
                        for p in &world.paced {
                            if p.num_prompts > 0 && p.has_prompts() {
                                println!(
                                    "   {} {} tot {} prompt {} pred {:.1} took {:.1} owed {:.1}",
                                    p.number,
                                    p.mode.name(),
                                    p.load.num_tokens,
                                    p.load.num_prompt_tokens,
                                    p.predicted_s * 1e3,
                                    p.time_s * 1e3,
                                    p.owed_s * 1e3
                                );
                            }
                        }
                    }
                    world.paced.clear();
                    // streams end
                    let ids: Vec<_> = world.ids.keys().copied().collect();
                    let Ok(_) = world.scheduler.finish_requests(
                        &ids,
                        sparksched_core::RequestStatus::FinishedAborted,
                        &mut Answers::default(),
                    );
                    world.ids.clear();
                    world.in_flight.clear();
                }
            }
        }
    }
}

#[test]
fn explore_poisson() {
    for (name, device) in [("moe", moe as Device), ("dense", dense as Device)] {
        // best rate: saturate
        let mut world = World::new(serving(), device, None);
        for _ in 0..600 {
            world.arrive(0.0, 1024, 128);
        }
        world.run_until(1e9);
        let best = 600.0 / world.now;
        println!("{name} best {best:.2} req/s");
        for part in [0.5, 0.8, 0.95] {
            for stall in [0.0, 0.15, 0.2, 0.3] {
                let settings = (stall > 0.0)
                    .then_some(PacingSettings { max_stall_s: stall, prefill_share: 0.5 });
                let mut world = World::new(serving(), device, settings);
                let mut chance = Chance(12345);
                let mut at = 0.0;
                let n = 1500;
                for _ in 0..n {
                    at += -(1.0 - chance.next()).ln() / (best * part);
                    world.arrive(at, 1024, 128);
                }
                world.run_until(1e9);
                let mut first: Vec<f64> = world.lives.values().map(Life::first_token_s).collect();
                let mut gaps: Vec<f64> = world
                    .lives
                    .values()
                    .flat_map(|it| it.tokens_at.windows(2).map(|w| w[1] - w[0]).collect::<Vec<_>>())
                    .collect();
                let pm = world
                    .paced
                    .iter()
                    .filter(|p| p.mode.name() != "short" && p.mode.name() != "plain")
                    .count();
                println!(
                    "{name} part {part} stall {stall}: thr {:.3} req/s ttft p50 {:.0} p99 {:.0} ms  gap p50 {:.1} p99 {:.0}, others {pm} of {}",
                    f64::from(n) / world.now,
                    quantile(&mut first, 0.5) * 1e3,
                    quantile(&mut first, 0.99) * 1e3,
                    quantile(&mut gaps, 0.5) * 1e3,
                    quantile(&mut gaps, 0.99) * 1e3,
                    world.paced.len()
                );
            }
        }
    }
}
