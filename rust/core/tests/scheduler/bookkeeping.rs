//! Random lives of requests: they arrive, run, speculate, are preempted, aborted, loaded, sent and
//! continued, and after each operation queues, requests and blocks agree with each other. In the
//! end nothing is left.
//!
//! `SPARKSCHED_CORE_OPERATIONS` says how many operations, `SPARKSCHED_CORE_SEED` where they begin.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;

use crate::common::{BLOCK_SIZE, Chance, config, new_request};
use sparksched_core::{
    AuxOutputs, BlockId, BlockPool, EcConnector, EncoderInputs, ExternalAllocation, ExternalHit,
    Fallible, GrammarState, Grammars, JournalConfig, KvCacheGroupConfig, KvConnector,
    KvTransferConfig, NewRequest, NextTurn, PauseState, Policy, Request, RequestIndex,
    RequestStatus, ScheduledOutput, Scheduler, SchedulerConfig, SessionInput, Sessions,
    Speculation, StateConfig, StateMode, StepKnobs, StopConditions,
};

const DEFAULT_OPERATIONS: u64 = 1_000_000;
const OPERATIONS_OF_A_WORLD: u64 = 600;
const MAX_LIVE: usize = 20;
const MAX_DRAFTS: u32 = 3;
const TOKENS: u64 = 3;

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => default,
    }
}

// ------------------------------------------------------------------------------------
// What is chosen at random
// ------------------------------------------------------------------------------------

fn random_groups(chance: &mut Chance) -> Vec<KvCacheGroupConfig> {
    let full = KvCacheGroupConfig::FullAttention;
    let window = KvCacheGroupConfig::SlidingWindow {
        window: 2 + chance.below(14) as u32,
        num_retained_tokens: chance.one_of(&[0, 0, 4]),
        max_admission_blocks: 20,
    };
    let chunked = KvCacheGroupConfig::ChunkedLocal { chunk_size: 8, max_admission_blocks: 20 };
    let mode = chance.one_of(&[StateMode::All, StateMode::Align]);
    let state = KvCacheGroupConfig::State {
        mode,
        num_speculative_blocks: chance.one_of(&[0, 0, MAX_DRAFTS]),
        checkpoint_alignment: (mode == StateMode::Align && chance.percent(40)).then_some(1),
    };
    let circular = KvCacheGroupConfig::CircularBuffer;
    match chance.below(12) {
        9 => vec![full, circular],
        10 => vec![circular, window],
        11 => vec![state, full, window, circular, circular],
        6 => vec![state],
        7 => vec![full, state, state],
        8 => vec![state, full, window],
        0 => vec![full],
        1 => vec![window],
        2 => vec![full, window],
        3 => vec![window, full, window],
        4 => vec![chunked],
        _ => vec![chunked, full],
    }
}

/// Those that are configured, or others that vLLM would take.
fn random_knobs(config: &SchedulerConfig, chance: &mut Chance) -> StepKnobs {
    let knobs = config.step_knobs(chance.percent(10));
    if chance.percent(60) {
        return knobs;
    }
    let least = 1 + config.speculation.num_spec_tokens;
    StepKnobs {
        max_num_scheduled_tokens: 1 + chance.below(knobs.max_num_scheduled_tokens.into()) as u32,
        long_prefill_token_threshold: chance.one_of(&[0, least, least + 5, 30]),
        ..knobs
    }
}

fn random_config(chance: &mut Chance) -> SchedulerConfig {
    let groups = random_groups(chance);
    let has_chunks =
        groups.iter().any(|group| matches!(group, KvCacheGroupConfig::ChunkedLocal { .. }));
    let retention_interval = chance.one_of(&[None, Some(0), Some(8)]);
    let mut config = config(groups, retention_interval);
    config.async_scheduling = chance.percent(60);
    config.policy = chance.one_of(&[Policy::Fcfs, Policy::Priority]);
    config.max_num_active_reqs = 1 + chance.below(8) as usize;
    config.max_num_scheduled_tokens = 8 + chance.below(56) as u32;
    config.max_num_batched_tokens = config.max_num_scheduled_tokens + 8;
    config.enable_chunked_prefill = chance.percent(80);
    config.long_prefill_token_threshold = chance.one_of(&[0, 0, 6]);
    config.reserve_full_isl = chance.percent(50);
    config.num_blocks = 14 + chance.below(50) as u32;
    config.watermark_blocks = chance.one_of(&[0, 0, 1]);
    config.max_loras = chance.one_of(&[None, Some(2)]);
    if chance.percent(30) {
        config.speculation = Speculation {
            num_spec_tokens: MAX_DRAFTS,
            num_lookahead_tokens: chance.one_of(&[0, MAX_DRAFTS]),
            ..Speculation::default()
        };
        if !has_chunks && chance.percent(50) {
            config.eagle_groups = vec![0];
        }
    }
    if chance.percent(20) {
        config.hasher = None;
    } else if chance.percent(30) {
        config.journal = JournalConfig { prefixes: true, uses: true, ..JournalConfig::default() };
    }
    if chance.percent(50) {
        // As vLLM 0.33.0.
        config.behaviors.continues_after_self_preemption = true;
        config.behaviors.skips_held_up = true;
        config.behaviors.counts_loras_of_all_running = true;
        config.behaviors.caches_settled_output = true;
        config.behaviors.keeps_block_before_junction = true;
        config.behaviors.requeues_sessions_last = true;
    }
    if chance.percent(30) {
        config.kv_transfer = Some(KvTransferConfig {
            defer_block_free: chance.percent(50),
            requires_kv_delivery: chance.percent(50),
            recompute_load_failures: true,
        });
    }
    if config.groups.contains(&KvCacheGroupConfig::CircularBuffer) {
        // No connector fills them.
        config.kv_transfer = None;
        config.zeroes_blocks = chance.percent(50);
    }
    let mut states = config.groups.iter().filter_map(|group| match *group {
        KvCacheGroupConfig::State { mode, checkpoint_alignment, .. } => {
            Some((mode, checkpoint_alignment))
        }
        _ => None,
    });
    if let Some((mode, checkpoint_alignment)) = states.next_back() {
        make_room_for_states(&mut config, chance, mode, checkpoint_alignment);
    }
    config.collects_aux_output = chance.percent(20);
    config.behaviors.caps_hits_to_aux_output = config.collects_aux_output && chance.percent(50);
    config
}

/// Blocks of 8 or 16 tokens, and hits that may end within one.
fn make_room_for_states(
    config: &mut SchedulerConfig,
    chance: &mut Chance,
    mode: StateMode,
    checkpoint_alignment: Option<u32>,
) {
    // They go with nothing of this.
    config.kv_transfer = None;
    config.zeroes_blocks = true;
    config.states = StateConfig {
        aligns_chunks: mode == StateMode::Align,
        block_size: BLOCK_SIZE,
        has_checkpoint_blocks: checkpoint_alignment.is_some(),
        checkpoint_alignment,
        drops_last_unit: !config.eagle_groups.is_empty(),
        ..StateConfig::default()
    };
    let has_window =
        config.groups.iter().any(|group| matches!(group, KvCacheGroupConfig::SlidingWindow { .. }));
    if mode == StateMode::Align && config.groups.len() > 1 && !has_window {
        let block_size = BLOCK_SIZE * chance.one_of(&[2, 4]);
        config.block_size = block_size;
        config.group_block_sizes.fill(block_size);
        config.states.block_size = block_size;
        config.partial_hits = config.hasher.is_some();
        config.retention_interval =
            config.retention_interval.map(|interval| interval.div_ceil(block_size) * block_size);
    }
}

fn random_tokens(chance: &mut Chance, max_len: u64) -> Vec<i32> {
    // Long runs of the same token, so that prefixes meet.
    let shared = chance.below(max_len);
    let tail = 1 + chance.below(6);
    let mut tokens = vec![0; shared as usize];
    tokens.extend((0..tail).map(|_| chance.below(TOKENS) as i32));
    tokens
}

fn random_stop(chance: &mut Chance) -> StopConditions {
    StopConditions {
        max_tokens: 1 + chance.below(20),
        eos_token_id: chance.percent(20).then_some(2),
        ..StopConditions::default()
    }
}

fn random_request(chance: &mut Chance, id: usize, config: &SchedulerConfig) -> NewRequest {
    let max_len = if config.enable_chunked_prefill { 40 } else { 6 };
    NewRequest {
        lora_id: config.max_loras.and_then(|_| chance.one_of(&[None, Some(1), Some(2), Some(3)])),
        priority: i128::from(chance.below(3)),
        arrival_time: f64::from(id as u32),
        stop: random_stop(chance),
        skip_reading_prefix_cache: chance.percent(10),
        use_structured_output: chance.percent(15),
        is_session: chance.percent(20),
        has_encoder_inputs: chance.percent(10),
        reports_cached_blocks: true,
        expects_remote_prefill: config.kv_transfer.is_some() && chance.percent(20),
        ..new_request(id, &random_tokens(chance, max_len))
    }
}

fn random_input(chance: &mut Chance) -> SessionInput {
    SessionInput {
        tokens: random_tokens(chance, 4),
        has_encoder_inputs: chance.percent(10),
        extra_keys: None,
        stop: random_stop(chance),
        arrival_time: 0.0,
        now: 0.0,
    }
}

/// Answers the scheduler's questions, as unkindly as may be.
struct Answers {
    chance: Chance,
    has_pending_sends: bool,
}

impl Fallible for Answers {
    type Error = Infallible;
}

impl Grammars for Answers {
    fn grammar_state(&mut self, _: RequestIndex) -> Result<GrammarState, Infallible> {
        Ok(self.chance.one_of(&[GrammarState::Pending, GrammarState::Ready]))
    }

    fn accept_tokens(&mut self, _: RequestIndex, _: &[i32], _: usize) -> Result<bool, Infallible> {
        Ok(self.chance.percent(95))
    }
}

impl Sessions for Answers {
    fn next_turn(&mut self, _: RequestIndex, _: &[i32], _: usize) -> Result<NextTurn, Infallible> {
        Ok(match self.chance.below(3) {
            0 => NextTurn::Pending,
            1 => NextTurn::Input(random_input(&mut self.chance)),
            _ => NextTurn::Closed,
        })
    }
}

impl EncoderInputs for Answers {
    fn plan_encoder_inputs(&mut self, _: RequestIndex, _: u32, n: u32) -> Result<u32, Infallible> {
        // Encoder inputs lie in prompts: no token that is generated, and no draft, waits for one.
        let num_generated = 1 + MAX_DRAFTS;
        Ok(match n.checked_sub(num_generated) {
            Some(most @ 1..) if self.chance.percent(30) => self.chance.below(most.into()) as u32,
            _ => n,
        })
    }

    fn schedule_encoder_inputs(&mut self, _: &Request) -> Result<(), Infallible> {
        Ok(())
    }

    fn free_processed_encoder_inputs(&mut self, _: &Request, _: u32) -> Result<(), Infallible> {
        Ok(())
    }

    fn free_encoder_inputs(&mut self, _: RequestIndex) -> Result<(), Infallible> {
        Ok(())
    }
}

impl KvConnector for Answers {
    fn find_external_hit(
        &mut self,
        request: &Request,
        num_local_tokens: u32,
    ) -> Result<Option<ExternalHit>, Infallible> {
        let num_others = request.num_tokens() as u32 - num_local_tokens;
        let num_blocks = u64::from((num_others - 1) / BLOCK_SIZE);
        Ok(match self.chance.below(10) {
            0 => None,
            1..=5 => Some(ExternalHit::default()),
            kind => {
                let num_tokens =
                    self.chance.below(num_blocks + 1) as i32 * BLOCK_SIZE.cast_signed();
                Some(ExternalHit { num_tokens, is_async: kind > 7 && num_tokens > 0 })
            }
        })
    }

    fn note_allocation(
        &mut self,
        _: &Request,
        _: &BlockPool,
        _: ExternalAllocation,
    ) -> Result<(), Infallible> {
        Ok(())
    }

    fn has_pending_block_frees(&mut self) -> Result<bool, Infallible> {
        Ok(self.has_pending_sends)
    }

    fn finish_request(&mut self, _: &Request, _: &[&[BlockId]]) -> Result<bool, Infallible> {
        Ok(self.chance.percent(30))
    }
}

impl EcConnector for Answers {
    fn has_encoder_outputs(&mut self, _: &Request, _: i64) -> Result<bool, Infallible> {
        Ok(self.chance.percent(90))
    }

    fn end_encoder_transfer(&mut self, _: &Request) -> Result<bool, Infallible> {
        Ok(self.chance.percent(20))
    }
}

impl AuxOutputs for Answers {
    fn max_prefix_hit(&mut self, _: &Request, _: &mut BlockPool) -> Result<u32, Infallible> {
        let num_blocks = self.chance.below(8) as u32;
        Ok(num_blocks * BLOCK_SIZE)
    }

    fn cap_external_hit(
        &mut self,
        _: &Request,
        _: &mut BlockPool,
        _: u32,
        num_external_tokens: i32,
    ) -> Result<i32, Infallible> {
        Ok(if self.chance.percent(50) { num_external_tokens } else { 0 })
    }

    fn note_load(&mut self, _: &Request) -> Result<(), Infallible> {
        Ok(())
    }

    fn end_aux_output(&mut self, _: &Request, _: &mut BlockPool) -> Result<(), Infallible> {
        Ok(())
    }

    fn take_aux_output(&mut self, _: &Request) -> Result<(), Infallible> {
        Ok(())
    }
}

// ------------------------------------------------------------------------------------
// A scheduler and what goes on around it
// ------------------------------------------------------------------------------------

/// One request's part of a step that the model runner has.
struct InFlight {
    id: usize,
    num_tokens: u32,
    num_drafts: u32,
    samples: bool,
}

struct World {
    scheduler: Scheduler,
    chance: Chance,
    answers: Answers,
    in_flight: VecDeque<Vec<InFlight>>,
    /// Places of the requests that the scheduler knows, by id.
    places: BTreeMap<usize, RequestIndex>,
    num_added: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let config = random_config(&mut chance);
        let answers = Answers { chance: Chance::new(chance.next()), has_pending_sends: false };
        Self {
            scheduler: Scheduler::new(config),
            chance,
            answers,
            in_flight: VecDeque::new(),
            places: BTreeMap::new(),
            num_added: 0,
        }
    }

    fn operate(&mut self) {
        match self.chance.below(100) {
            0..35 => self.schedule(),
            35..68 => self.update(),
            68..84 => self.add(),
            84..88 => self.abort(),
            88..90 => self.propose_drafts(),
            90..93 => self.continue_session(),
            93..96 => self.end_transfer(),
            96 => self.reset(),
            97 => self.pause(),
            _ => drop((self.scheduler.take_stats(), self.scheduler.take_journal())),
        }
        self.forget_those_that_left();
        self.scheduler.check_invariants();
    }

    /// A request that a place has been given back from is known to nobody any more.
    fn forget_those_that_left(&mut self) {
        let scheduler = &self.scheduler;
        self.places.retain(|id, index| {
            scheduler.get(*index).is_some_and(|it| it.id() == format!("request-{id}"))
        });
    }

    fn request(&self, id: usize) -> &Request {
        self.scheduler.request(self.places[&id])
    }

    /// A random one of the requests that are as wanted.
    fn pick(&mut self, is_wanted: impl Fn(&Request) -> bool) -> Option<RequestIndex> {
        let is_wanted = |index: &&RequestIndex| is_wanted(self.scheduler.request(**index));
        let wanted: Vec<RequestIndex> = self.places.values().filter(is_wanted).copied().collect();
        (!wanted.is_empty()).then(|| self.chance.one_of(&wanted))
    }

    fn schedule(&mut self) {
        if self.in_flight.len() > usize::from(self.scheduler.config().async_scheduling) {
            return;
        }
        self.answers.has_pending_sends =
            self.scheduler.num_kept_requests() > 0 && self.chance.percent(30);
        let knobs = random_knobs(self.scheduler.config(), &mut self.chance);
        let Ok(step) = self.scheduler.schedule(&knobs, 0.0, &mut self.answers);
        let num_tokens = step.total_num_tokens;
        let scheduled: Vec<_> = step.scheduled().copied().collect();
        assert!(num_tokens <= knobs.max_num_scheduled_tokens);
        assert!(scheduled.len() <= self.scheduler.config().max_num_active_reqs);
        let in_flight = scheduled.iter().map(|it| {
            let request = self.scheduler.request(it.index);
            InFlight {
                id: request.id()["request-".len()..].parse().expect("ids are numbered"),
                num_tokens: it.num_tokens,
                num_drafts: it.num_draft_tokens,
                samples: !request.is_prefill_chunk,
            }
        });
        self.in_flight.push_back(in_flight.collect());
    }

    fn update(&mut self) {
        let Some(step) = self.in_flight.pop_front() else { return };
        let chance = &mut self.chance;
        let sampled: Vec<Vec<i32>> = step
            .iter()
            .map(|it| {
                let num_accepted = chance.below(u64::from(it.num_drafts) + 1);
                let num_sampled = if it.samples { 1 + num_accepted } else { 0 };
                (0..num_sampled).map(|_| chance.below(TOKENS) as i32).collect()
            })
            .collect();
        let scheduled = step.iter().zip(&sampled).map(|(it, tokens)| ScheduledOutput {
            index: self.places.get(&it.id).copied(),
            num_scheduled_tokens: it.num_tokens,
            sampled_tokens: tokens,
            num_draft_tokens: it.num_drafts,
            num_invalid_drafts: 0,
            is_pooled: false,
            is_void: false,
        });
        let mut outputs = Vec::new();
        let Ok(()) = self.scheduler.update_from_output(scheduled, &mut self.answers, &mut outputs);
        for output in outputs {
            assert!(output.num_new_tokens <= sampled[output.position].len());
        }
    }

    fn add(&mut self) {
        if self.places.len() < MAX_LIVE {
            let id = self.num_added;
            self.num_added += 1;
            let request = random_request(&mut self.chance, id, self.scheduler.config());
            self.places.insert(id, self.scheduler.add_request(request, 0.0));
        }
    }

    fn abort(&mut self) {
        let Some(index) = self.pick(|_| true) else { return };
        // Some ids are given twice.
        let indices = vec![index; 1 + self.chance.below(2) as usize];
        let status = RequestStatus::FinishedAborted;
        let Ok(_) = self.scheduler.finish_requests(&indices, status, &mut self.answers);
    }

    fn propose_drafts(&mut self) {
        let num_drafts = self.scheduler.config().speculation.num_spec_tokens as usize;
        if num_drafts == 0 || self.scheduler.config().async_scheduling {
            return;
        }
        if let Some(index) = self.pick(|it| it.status == RequestStatus::Running) {
            let drafts: Vec<i32> = vec![1; self.chance.below(num_drafts as u64 + 1) as usize];
            self.scheduler.set_drafts(index, &drafts);
        }
    }

    fn continue_session(&mut self) {
        if let Some(index) = self.pick(|it| it.status == RequestStatus::WaitingForInput) {
            let input = random_input(&mut self.chance);
            self.scheduler.continue_session(index, input);
        }
    }

    fn end_transfer(&mut self) {
        let is_in_transfer = |it: &Request| {
            it.status == RequestStatus::WaitingForRemoteKvs || it.status.is_finished()
        };
        if let Some(index) = self.pick(is_in_transfer) {
            self.scheduler.end_receiving(index);
        }
    }

    fn reset(&mut self) {
        if self.chance.percent(50) {
            let Ok(_) = self.scheduler.preempt_running(0.0, &mut self.answers);
        }
        self.scheduler.reset_prefix_cache();
    }

    fn pause(&mut self) {
        use PauseState::{PausedAll, PausedNew, Unpaused};
        let state = self.chance.one_of(&[Unpaused, Unpaused, PausedNew, PausedAll]);
        self.scheduler.set_pause_state(state);
    }

    /// Ends everything that is still there.
    fn drain(&mut self) {
        while !self.in_flight.is_empty() {
            self.update();
        }
        self.forget_those_that_left();
        let indices: Vec<RequestIndex> = self.places.values().copied().collect();
        let status = RequestStatus::FinishedAborted;
        let Ok(_) = self.scheduler.finish_requests(&indices, status, &mut self.answers);
        self.forget_those_that_left();
        for id in self.places.keys().copied().collect::<Vec<_>>() {
            assert!(self.request(id).status.is_finished(), "an aborted request goes on");
            self.scheduler.end_receiving(self.places[&id]);
        }
        self.forget_those_that_left();
        self.scheduler.check_invariants();
        assert!(self.places.is_empty(), "a request is left");
        assert_eq!(self.scheduler.num_unfinished_requests(), 0);
        assert_eq!(self.scheduler.num_kept_requests(), 0);
        let pool = self.scheduler.kv_cache().pool();
        assert_eq!(pool.num_free(), pool.num_blocks() - 1, "blocks are left");
    }
}

/// Says how to see a failure again.
struct Reproducer(u64);

impl Drop for Reproducer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "reproduce with SPARKSCHED_CORE_OPERATIONS=1 SPARKSCHED_CORE_SEED={}",
                self.0
            );
        }
    }
}

#[test]
fn nothing_is_lost_and_nothing_leaks() {
    let num_worlds =
        number("SPARKSCHED_CORE_OPERATIONS", DEFAULT_OPERATIONS).div_ceil(OPERATIONS_OF_A_WORLD);
    let first = number("SPARKSCHED_CORE_SEED", 0);
    let mut num_added = 0;
    for seed in first..first + num_worlds {
        let _reproducer = Reproducer(seed);
        let mut world = World::new(seed);
        for _ in 0..OPERATIONS_OF_A_WORLD {
            world.operate();
        }
        world.drain();
        num_added += world.num_added;
    }
    println!("{num_worlds} worlds, {num_added} requests");
}
