//! Paced prefill in pairs: the same life, device and seed once as vLLM would have it and once paced,
//! through the real scheduler, asynchronous as vLLM's loop has it, over steps that take what a
//! formula says.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "numbers of tokens and steps are small"
)]

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::{Answers, config, new_request};
use sparksched_core::{
    BlockHasher, HashAlgorithm, KvCacheGroupConfig, NewRequest, PacedStep, Pacing, PacingSettings,
    Policy, RequestIndex, RequestStatus, ScheduledOutput, Scheduler, SchedulerConfig, StepLoad,
    StopConditions,
};

const MS: f64 = 1e-3;

/// What a step takes: that of its decodes, and with prompts in it a fixed price, a token's, and that
/// of a token that attends to so many others.
#[derive(Clone, Copy, Debug)]
struct Device {
    name: &'static str,
    decode_ms: f64,
    fixed_ms: f64,
    token_ms: f64,
    attention_ms: f64,
    /// Steps vary by this part.
    jitter: f64,
    /// So many times slower than when it was learned what steps take.
    slower: f64,
    /// Tokens of a step.
    budget: u32,
}

const DENSE: Device = Device {
    name: "dense",
    decode_ms: 8.0,
    fixed_ms: 0.0,
    token_ms: 0.03,
    attention_ms: 2e-7,
    jitter: 0.0,
    slower: 1.0,
    budget: 8_192,
};
const MOE: Device = Device {
    name: "mixture of experts",
    decode_ms: 5.2,
    fixed_ms: 19.0,
    token_ms: 0.05,
    attention_ms: 1e-6,
    ..DENSE
};
const TIMER: Device = Device { name: "timer", attention_ms: 0.0, ..MOE };
const STEEP: Device = Device {
    name: "steep",
    decode_ms: 5.0,
    fixed_ms: 5.0,
    token_ms: 0.0195,
    attention_ms: 1.2e-6,
    ..DENSE
};
const SLOW: Device = Device {
    name: "slow",
    decode_ms: 30.0,
    token_ms: 0.5,
    attention_ms: 1e-6,
    budget: 2_048,
    ..DENSE
};
const JITTERY: Device = Device { name: "jittery", jitter: 0.15, ..MOE };

impl Device {
    /// A prompt's one token costs what a decode's does.
    fn step_s(&self, load: &StepLoad, is_even: bool) -> f64 {
        let decode_ms = self.decode_ms + 0.02 * f64::from(load.num_decode_tokens);
        let prompt_ms = if load.num_prompt_tokens > 0 && !is_even {
            self.fixed_ms
                + self.token_ms * f64::from(load.num_prompt_tokens)
                + self.attention_ms * load.prompt_attention
        } else {
            0.0
        };
        (decode_ms + prompt_ms) * self.slower * MS
    }

    /// What a prompt costs in full steps, in seconds.
    fn work_s(&self, tokens: f64, cached: f64) -> f64 {
        let steps = tokens / f64::from(self.budget);
        let own = self.token_ms * tokens + self.attention_ms * tokens * (cached + tokens / 2.0);
        ((self.decode_ms + self.fixed_ms) * steps + own) * MS
    }
}

struct Chance(u64);

impl Chance {
    fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// From 0 to 1.
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, least: usize, most: usize) -> usize {
        least + (self.next() * (most - least) as f64) as usize
    }
}

/// A request that comes: when, what of its prompt others have, too, and how much it generates.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    at: f64,
    prefix: usize,
    own: usize,
    out: u64,
    priority: i128,
}

impl Arrival {
    fn new(at: f64, own: usize, out: u64) -> Self {
        Self { at, prefix: 0, own, out, priority: 0 }
    }
}

/// What becomes of a request.
#[derive(Clone, Debug, Default)]
struct Life {
    arrived_at: f64,
    tokens_at: Vec<f64>,
    is_over: bool,
}

impl Life {
    fn first_s(&self) -> f64 {
        self.tokens_at.first().map_or(f64::INFINITY, |at| at - self.arrived_at)
    }
}

struct InFlight {
    number: Option<u64>,
    ends_at: f64,
    /// Who has how many tokens in it, and whether one is sampled.
    scheduled: Vec<(RequestIndex, usize, u32, bool)>,
}

struct World {
    scheduler: Scheduler,
    pacing: Option<Pacing>,
    device: Device,
    chance: Chance,
    /// When the life began.
    start: f64,
    now: f64,
    free_at: f64,
    in_flight: VecDeque<InFlight>,
    arrivals: VecDeque<(usize, Arrival)>,
    lives: Vec<Life>,
    ids: BTreeMap<RequestIndex, usize>,
    steps: Vec<PacedStep>,
    ends: Vec<f64>,
    late: Vec<sparksched_core::LatePrompt>,
    num_preempted: usize,
    num_preempted_in_order: usize,
}

/// Tokens that the model samples.
const SAMPLED: [i32; 1] = [1];

fn serving(device: &Device, num_blocks: u32) -> SchedulerConfig {
    let base = config(vec![KvCacheGroupConfig::FullAttention], None);
    SchedulerConfig {
        async_scheduling: true,
        max_num_active_reqs: 256,
        max_num_scheduled_tokens: device.budget,
        max_num_batched_tokens: device.budget,
        max_model_len: 400_000,
        block_size: 16,
        hash_block_size: 16,
        group_block_sizes: vec![16],
        num_blocks,
        hasher: BlockHasher::new(HashAlgorithm::Xxhash, 16, b"none"),
        log_stats: false,
        ..base
    }
}

impl World {
    fn new(config: SchedulerConfig, device: Device, settings: Option<PacingSettings>) -> Self {
        let scheduler = Scheduler::new(config).expect("a sane configuration");
        let pacing = settings.map(|it| Pacing::new(it, &scheduler));
        let mut world = Self {
            scheduler,
            pacing,
            device: Device { slower: 1.0, jitter: 0.0, ..device },
            chance: Chance::new(7),
            start: 0.0,
            now: 0.0,
            free_at: 0.0,
            in_flight: VecDeque::new(),
            arrivals: VecDeque::new(),
            lives: Vec::new(),
            ids: BTreeMap::new(),
            steps: Vec::new(),
            ends: Vec::new(),
            late: Vec::new(),
            num_preempted: 0,
            num_preempted_in_order: 0,
        };
        world.warm_up();
        world.device = device;
        world
    }

    /// Each size runs five times beside requests that decode.
    fn warm_up(&mut self) {
        const NUM_STREAMS: usize = 16;
        let Some(pacing) = &mut self.pacing else { return };
        pacing.begin_warm_up();
        let sizes = pacing.sizes().to_vec();
        for _ in 0..NUM_STREAMS {
            self.arrive(Arrival::new(0.0, 16, 100_000));
        }
        self.run_until(0.5);
        for size in sizes.into_iter().flat_map(|size| [size; 5]) {
            let own = size as usize - NUM_STREAMS;
            let prompt = self.arrive(Arrival::new(self.now, own.max(2), 1));
            while !self.lives[prompt].is_over {
                self.round();
            }
        }
        let ids: Vec<_> = self.ids.keys().copied().collect();
        let answers = &mut Answers::default();
        let Ok(_) = self.scheduler.finish_requests(&ids, RequestStatus::FinishedAborted, answers);
        self.ids.clear();
        while !self.in_flight.is_empty() {
            self.take_result();
        }
        self.scheduler.reset_prefix_cache();
        let pacing = self.pacing.as_mut().expect("it is warming up");
        pacing.end_warm_up(&self.scheduler);
        self.lives.clear();
        self.steps.clear();
        self.ends.clear();
        self.late.clear();
        self.start = self.now;
    }

    fn arrive(&mut self, arrival: Arrival) -> usize {
        let id = self.lives.len();
        let arrival = Arrival { at: self.start + arrival.at, ..arrival };
        self.lives.push(Life { arrived_at: arrival.at, ..Life::default() });
        self.arrivals.push_back((id, arrival));
        id
    }

    fn receive(&mut self) {
        while let Some((id, arrival)) = self.arrivals.front().copied() {
            if arrival.at > self.now {
                break;
            }
            self.arrivals.pop_front();
            let Arrival { at, prefix, own, out, priority } = arrival;
            let own = (0..own as i32).map(|it| 10 + (it + 7 * id as i32) % 50_000);
            let mut tokens = vec![8; prefix];
            tokens.extend(own);
            if prefix == 0 {
                tokens[0] = 60_000 + id as i32;
            }
            let stop = StopConditions { max_tokens: out, ..StopConditions::default() };
            let arrival_time = at;
            let request =
                NewRequest { stop, arrival_time, priority, ..new_request(id, &tokens) };
            let index = self.scheduler.add_request(request, self.now);
            self.ids.insert(index, id);
        }
    }

    /// One round of the engine's loop.
    fn round(&mut self) -> bool {
        self.receive();
        let has_work = self.scheduler.num_unfinished_requests() > 0;
        if !has_work && self.in_flight.is_empty() {
            let Some((_, arrival)) = self.arrivals.front() else { return false };
            self.now = self.now.max(arrival.at);
            return true;
        }
        if has_work && self.in_flight.len() < 2 {
            self.schedule();
            if self.in_flight.len() < 2 {
                return true;
            }
        }
        self.take_result();
        true
    }

    fn schedule(&mut self) {
        let knobs = match &mut self.pacing {
            Some(pacing) => pacing.choose(&mut self.scheduler, self.now),
            None => self.scheduler.config().step_knobs(false),
        };
        let Ok(_) = self.scheduler.schedule(&knobs, self.now, &mut Answers::default());
        let load = self.scheduler.step_load();
        let number =
            self.pacing.as_mut().and_then(|it| it.note_step(&mut self.scheduler, self.now));
        let num_preempted = self.scheduler.step().preempted.len();
        self.num_preempted += num_preempted;
        self.num_preempted_in_order += if knobs.order.is_empty() { 0 } else { num_preempted };
        if load.num_tokens > 0 {
            let is_even = self.scheduler.step().scheduled().all(|it| it.num_tokens == 1);
            let jitter = 1.0 + self.device.jitter * (2.0 * self.chance.next() - 1.0);
            self.free_at = self.free_at.max(self.now) + jitter * self.device.step_s(&load, is_even);
        }
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
            let (paced, late) = pacing.note_result(number, self.now).expect("it was made");
            self.steps.push(paced);
            self.late.extend(late);
            self.ends.push(self.now);
        }
        let outputs = step.scheduled.iter().map(|&(index, id, num_scheduled_tokens, samples)| {
            let is_there = self.ids.get(&index) == Some(&id);
            ScheduledOutput {
                index: is_there.then_some(index),
                num_scheduled_tokens,
                sampled_tokens: &SAMPLED[..usize::from(samples)],
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
            let life = &mut self.lives[id];
            life.tokens_at.extend(std::iter::repeat_n(self.now, output.num_new_tokens));
            if output.news.is_some_and(|it| it.is_over) {
                life.is_over = true;
                self.ids.remove(&index);
            }
        }
    }

    fn run_until(&mut self, at: f64) {
        while self.now < at && self.round() {}
    }
}

fn quantile(mut values: Vec<f64>, part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get(((values.len() as f64 * part) as usize).min(last)).copied().unwrap_or(f64::NAN)
}

const STALL_S: f64 = 0.2;
const SLOWDOWN: f64 = 2.5;

/// A load, what it runs on, and what it is served with.
#[derive(Clone)]
struct Case {
    name: String,
    device: Device,
    num_streams: usize,
    arrivals: Vec<Arrival>,
    num_blocks: u32,
    stall_s: f64,
}

impl Case {
    fn new(name: &str, device: Device, num_streams: usize, arrivals: Vec<Arrival>) -> Self {
        let mut arrivals = arrivals;
        arrivals.sort_by(|one, other| one.at.total_cmp(&other.at));
        let name = name.to_owned();
        Self { name, device, num_streams, arrivals, num_blocks: 60_000, stall_s: STALL_S }
    }

    fn run(&self, is_paced: bool) -> World {
        let settings = PacingSettings {
            max_stall_s: self.stall_s,
            max_slowdown: SLOWDOWN,
            max_graph_tokens: 512,
        };
        let config = serving(&self.device, self.num_blocks);
        let mut world = World::new(config, self.device, is_paced.then_some(settings));
        for _ in 0..self.num_streams {
            world.arrive(Arrival::new(0.0, 64, 1_000_000));
        }
        let end = world.start + self.arrivals.last().map_or(0.0, |it| it.at);
        self.arrivals.iter().for_each(|it| _ = world.arrive(*it));
        world.run_until(end);
        let is_through = |it: &Life| !it.tokens_at.is_empty();
        while !world.lives.iter().all(is_through) && world.now < end + 2_000.0 {
            world.round();
        }
        world
    }
}

/// What pacing made of a case.
struct Pair {
    case: Case,
    stock: World,
    paced: World,
}

impl Pair {
    fn new(case: Case) -> Self {
        let (stock, paced) = (case.run(false), case.run(true));
        Self { case, stock, paced }
    }

    /// Whether a step with this prompt alone stays within the stall.
    fn is_ordinary(&self, arrival: &Arrival) -> bool {
        let Case { device, stall_s, num_streams, .. } = &self.case;
        let tokens = arrival.own as f64;
        let load = StepLoad {
            num_tokens: arrival.own as u32,
            num_decode_tokens: *num_streams as u32,
            num_prompt_tokens: arrival.own as u32,
            prompt_attention: tokens * (arrival.prefix as f64 + tokens / 2.0),
            ..StepLoad::default()
        };
        device.step_s(&load, false) <= 0.9 * stall_s && arrival.own < device.budget as usize
    }

    /// By how much each prompt of a kind came too late: below 0 if it didn't.
    fn late_s(&self, ordinary: bool) -> Vec<f64> {
        let times = if ordinary { 1.0 } else { SLOWDOWN };
        let first = self.case.num_streams;
        let late = self.case.arrivals.iter().enumerate();
        late.filter(|(_, it)| self.is_ordinary(it) == ordinary)
            .map(|(it, _)| {
                let (stock, paced) = (&self.stock.lives[first + it], &self.paced.lives[first + it]);
                paced.first_s() - times * stock.first_s() - 2.0 * self.case.stall_s
            })
            .collect()
    }

    fn firsts(&self, world: &World, ordinary: bool) -> Vec<f64> {
        let arrivals = self.case.arrivals.iter().enumerate();
        let of_kind = arrivals.filter(|(_, it)| self.is_ordinary(it) == ordinary);
        of_kind.map(|(it, _)| world.lives[self.case.num_streams + it].first_s()).collect()
    }

    fn gaps(&self, world: &World) -> Vec<f64> {
        let streams = world.lives.iter().take(self.case.num_streams.min(1));
        streams.flat_map(|it| it.tokens_at.windows(2).map(|it| it[1] - it[0])).collect()
    }

    fn show(&self) {
        let line = |world: &World| {
            let of = |ordinary, part| quantile(self.firsts(world, ordinary), part);
            let gaps = self.gaps(world);
            let end = (self.paced.now - self.paced.start).min(self.stock.now) + world.start;
            let tokens: usize =
                world.lives.iter().map(|it| it.tokens_at.iter().filter(|at| **at <= end).count()).sum();
            format!(
                "ord {:.2} {:.2} {:.2} long {:.1} {:.1} gap {:.0} {:.0} {:.0} tok {} pre {}",
                of(true, 0.5), of(true, 0.99), of(true, 1.0), of(false, 0.5), of(false, 1.0),
                1e3 * quantile(gaps.clone(), 0.99), 1e3 * quantile(gaps.clone(), 0.999),
                1e3 * quantile(gaps, 1.0), tokens, world.num_preempted
            )
        };
        let count = |late: &[f64]| late.iter().filter(|it| **it > 0.0).count();
        let (ordinary, long) = (self.late_s(true), self.late_s(false));
        let over = self.paced.steps.iter().filter(|it| it.has_prompts()
            && it.load.num_decode_tokens > 0 && it.time_s > 1.02 * self.case.stall_s);
        let unasked = over.clone().filter(|it| it.over_stall.is_none() && it.mode == sparksched_core::Mode::Chunk).count();
        println!(
            "{} on {}\n  vLLM  {}\n  paced {}\n  late: ordinary {} of {} (worst {:.2}), long {} of {} (worst {:.2}); over {} unasked {} of {}; inorder {}",
            self.case.name, self.case.device.name, line(&self.stock), line(&self.paced),
            count(&ordinary), ordinary.len(), ordinary.iter().copied().fold(f64::MIN, f64::max),
            count(&long), long.len(), long.iter().copied().fold(f64::MIN, f64::max),
            over.count(), unasked, self.paced.steps.len(), self.paced.num_preempted_in_order,
        );
        let own = |long: bool| { let all: Vec<f64> = self.paced.late.iter().filter(|it| it.is_long == long).map(|it| it.late_s).collect(); (all.len(), all.iter().copied().fold(0.0, f64::max)) };
        println!("  by their own promises: ordinary {:?} long {:?}", own(false), own(true));
    }
}

fn poisson(chance: &mut Chance, rate: f64, until: f64, mut make: impl FnMut(&mut Chance, f64) -> Arrival) -> Vec<Arrival> {
    let (mut at, mut all) = (0.0, Vec::new());
    loop {
        at -= (1.0 - chance.next()).ln() / rate;
        if at > until {
            return all;
        }
        all.push(make(chance, at));
    }
}

/// Ordinary prompts and long ones, so many of each that together they need this part of what vLLM
/// can.
fn mixture(device: Device, load: f64, seed: u64, until: f64) -> Case {
    let chance = &mut Chance::new(seed);
    let long_part = 0.2 + 0.6 * chance.next();
    let most = if device.budget < 8_192 { 30_000 } else { 100_000 };
    let mut draw_long = |chance: &mut Chance, at| Arrival::new(at, chance.between(most / 10, most), 1 + chance.between(0, 100) as u64);
    let draw_short = |chance: &mut Chance, at| {
        let own = if device.budget < 8_192 { chance.between(10, 250) } else { chance.between(50, 2_000) };
        Arrival::new(at, own, 1 + chance.between(0, 200) as u64)
    };
    let mean = |draw: &mut dyn FnMut(&mut Chance, f64) -> Arrival| {
        let chance = &mut Chance::new(99);
        (0..500).map(|_| { let a = draw(chance, 0.0); device.work_s(a.own as f64, 0.0) }).sum::<f64>() / 500.0
    };
    let long_rate = load * long_part / mean(&mut draw_long);
    let mut short = draw_short;
    let short_rate = load * (1.0 - long_part) / mean(&mut short);
    let mut all = poisson(chance, long_rate, until, &mut draw_long);
    all.extend(poisson(chance, short_rate, until, short));
    Case::new(&format!("load {load:.2}, long {long_part:.2}, seed {seed}"), device, 8 + chance.between(0, 16), all)
}

#[test]
fn explore() {
    let every = |s: f64, n: usize, own, out| (0..n).map(|i| Arrival::new(2.0 + s * i as f64, own, out)).collect::<Vec<_>>();
    let shorts = |rate: f64, until: f64, own| poisson(&mut Chance::new(3), rate, until, |_, at| Arrival::new(at, own, 50));
    let what = std::env::var("WHAT").unwrap_or_default();
    let mut cases = Vec::new();
    for device in [TIMER, MOE] {
        cases.push(Case::new("one long + shorts", device, 16, [every(0.5, 40, 100, 4), vec![Arrival::new(2.0, 60_000, 8)]].concat()));
        cases.push(Case::new("60k each 8 s", device, 16, every(8.0, 20, 60_000, 8)));
        cases.push(Case::new("60k each 8 s + 3/s of 500", device, 16, [every(8.0, 12, 60_000, 8), shorts(3.0, 100.0, 500)].concat()));
        cases.push(Case::new("60k each 8 s + 12/s of 500", device, 16, [every(8.0, 12, 60_000, 8), shorts(12.0, 100.0, 500)].concat()));
        cases.push(Case::new("20 x 20k", device, 16, every(0.0, 20, 20_000, 8)));
        cases.push(Case::new("10 x 20k", device, 16, every(0.0, 10, 20_000, 8)));
        cases.push(Case::new("8 x 60k + 300k", device, 16, [every(1.0, 8, 60_000, 8), vec![Arrival::new(1.0, 300_000, 8)]].concat()));
        let mut tight = Case::new("tight 50 ms", device, 16, every(0.0, 1, 60_000, 8));
        tight.stall_s = 0.05;
        cases.push(tight.clone());
        cases.push(Case { stall_s: 0.001, name: "1 ms".into(), ..tight });
        for rate in [11.0, 14.4, 16.0] {
            cases.push(Case::new(&format!("ordinary {rate}/s"), device, 0, poisson(&mut Chance::new(3), rate, 120.0, |_, at| Arrival::new(at, 1024, 128))));
        }
    }
    for device in [DENSE, MOE, STEEP, SLOW, JITTERY] {
        for load in [0.1, 0.3, 0.5, 0.7, 0.85, 1.2] {
            for seed in 0..3 {
                cases.push(mixture(device, load, seed, 200.0));
            }
        }
    }
    for case in cases {
        let title = format!("{} on {}", case.name, case.device.name);
        if what.split('|').all(|w| title.contains(w)) {
            Pair::new(case).show();
        }
    }
    let _ = Policy::Fcfs;
}

#[test]
fn debug_one() {
    let what = std::env::var("CASE").unwrap_or_default();
    let v: Vec<&str> = what.split(',').collect();
    let device = [DENSE, MOE, STEEP, SLOW, JITTERY, TIMER].into_iter().find(|it| it.name == v[0]).unwrap();
    let pair = Pair::new(mixture(device, v[1].parse().unwrap(), v[2].parse().unwrap(), 200.0));
    pair.show();
    let ordinary = v[3] == "o";
    let first = pair.case.num_streams;
    let times = if ordinary { 1.0 } else { SLOWDOWN };
    let mut late: Vec<(f64, usize)> = pair.case.arrivals.iter().enumerate().filter(|(_, it)| pair.is_ordinary(it) == ordinary)
        .map(|(it, _)| (pair.paced.lives[first + it].first_s() - times * pair.stock.lives[first + it].first_s() - 2.0 * STALL_S, it)).collect();
    late.sort_by(|a, b| b.0.total_cmp(&a.0));
    for &(by, it) in late.iter().take(v[4].parse().unwrap()) {
        let life = &pair.paced.lives[first + it];
        println!("late {by:.2}: arrival {it} at {:.2} own {} stock {:.3} paced {:.3}", pair.case.arrivals[it].at, pair.case.arrivals[it].own, pair.stock.lives[first + it].first_s(), life.first_s());
        if !ordinary { continue }
        for (s, end) in pair.paced.steps.iter().zip(&pair.paced.ends) {
            if *end > life.arrived_at && *end <= life.arrived_at + life.first_s() + 1e-9 {
                println!("   end +{:.3} {:?} took {:.3} pred {:.3} share {:.2} over {:?} max {} thr {} ordered {} prompts {} ptok {} adm {}", end - life.arrived_at, s.mode, s.time_s, s.predicted_s, s.share, s.over_stall, s.max_num_scheduled_tokens, s.long_prefill_token_threshold, s.num_ordered, s.num_prompts, s.load.num_prompt_tokens, s.load.num_admitted);
            }
        }
    }
}
