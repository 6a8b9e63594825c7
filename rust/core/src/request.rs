//! A request's state: vLLM's `v1/request.py`, reduced to what scheduling needs.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::block_hash::{BlockHash, BlockHasher, ExtraKeys};
use crate::ids::{BlockId, RequestIndex};
use crate::promise::Promise;
use crate::state_group::StateBlocks;
use crate::stats::RequestSpecStats;
use crate::stop::{StopConditions, StopReason};
use crate::wait_reason::WaitReason;

/// Where a request is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestStatus {
    /// In the queue, never run.
    #[default]
    Waiting,
    /// In the queue until its grammar is compiled.
    WaitingForGrammar,
    /// In the queue with its blocks until its client sends the session's next input.
    WaitingForInput,
    /// In the queue with its blocks until a KV connector has filled them.
    WaitingForRemoteKvs,
    /// Has blocks and is scheduled each step.
    Running,
    /// Back in the queue: its blocks were needed by another.
    Preempted,
    /// Done: a stop token.
    FinishedStopped,
    /// Done: as long as allowed.
    FinishedLengthCapped,
    /// Done: the client gave up.
    FinishedAborted,
    /// Done: refused because of its length.
    FinishedIgnored,
    /// Done: something failed.
    FinishedError,
    /// Done: it repeats itself.
    FinishedRepetition,
}

impl RequestStatus {
    pub fn is_finished(self) -> bool {
        !matches!(
            self,
            Self::Waiting
                | Self::WaitingForGrammar
                | Self::WaitingForInput
                | Self::WaitingForRemoteKvs
                | Self::Running
                | Self::Preempted
        )
    }

    /// Whether a request waits for something besides its turn.
    pub fn is_blocked(self) -> bool {
        matches!(self, Self::WaitingForGrammar | Self::WaitingForInput | Self::WaitingForRemoteKvs)
    }
}

/// What happened to a request, for its latency statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Queued,
    Scheduled,
    Preempted,
}

/// An event and when it was, in seconds of the caller's monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    pub kind: EventKind,
    /// When, in seconds.
    pub timestamp: f64,
}

/// How the prompt was computed, told to the client with the first token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillStats {
    /// Tokens of the prompt, or 0 if the request never reached the prefix cache.
    pub num_prompt_tokens: u32,
    /// Of these, tokens found in the prefix cache.
    pub num_local_cached_tokens: u32,
    /// Of the others, tokens whose KV came from elsewhere; see [`ExternalHit::num_tokens`](crate::ExternalHit::num_tokens).
    pub num_external_cached_tokens: i32,
    /// Of the others, tokens that were computed and can now be found in the prefix cache.
    pub num_cache_creation_tokens: u32,
}

impl PrefillStats {
    /// Tokens that were not computed.
    pub fn num_cached_tokens(&self) -> u32 {
        self.num_local_cached_tokens.saturating_add_signed(self.num_external_cached_tokens)
    }
}

/// How far a request's load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchStage {
    /// There is something to load, and no room for it yet.
    WaitingToStart,
    /// Blocks are being filled.
    InProgress,
    /// They are filled, and the request waits for its turn.
    CompletedWaiting,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestTransfer {
    /// Noted only for statistics.
    pub(crate) fetch_stage: Option<FetchStage>,
    /// The load has ended, well or not.
    pub(crate) has_arrived: bool,
    /// A part of it failed; what is left is what `num_computed_tokens` says.
    pub(crate) has_failed: bool,
    /// It has begun to fill its blocks and is not done: loads leave it the blocks that it lacks.
    pub(crate) is_inflight_prefill: bool,
    /// Number of the last step with tokens that it was part of.
    pub(crate) last_step_seq: u64,
}

/// A request as it arrives.
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
#[derive(Clone, Debug, Default)]
pub struct NewRequest {
    /// Unique among the requests that are not finished.
    pub id: Box<str>,
    /// The tokens so far: the prompt, and output if there is any already.
    pub tokens: Vec<i32>,
    pub num_prompt_tokens: usize,
    /// Hashes of the full blocks of `tokens`; what is missing is computed when caching is on.
    pub block_hashes: Vec<BlockHash>,
    /// What its blocks are hashed with besides their tokens.
    pub extra_keys: Option<Box<ExtraKeys>>,
    /// The adapter that it is computed with.
    pub lora_id: Option<i64>,
    /// Smaller is more urgent.
    pub priority: i128,
    /// Seconds of the client's clock.
    pub arrival_time: f64,
    pub stop: StopConditions,
    /// Its prompt is computed even if it is cached.
    pub skip_reading_prefix_cache: bool,
    /// A grammar restricts its tokens.
    pub use_structured_output: bool,
    /// It wants a vector of its prompt, and no tokens.
    pub is_pooling: bool,
    /// Blocks that it finds in the prefix cache are told to those who follow the cache's events.
    pub reports_cached_blocks: bool,
    /// It is a streaming-input session: when it stops, it may go on with more input.
    pub is_session: bool,
    /// Its prompt has images or the like, which an encoder turns into embeddings.
    pub has_encoder_inputs: bool,
    /// Its client says that another engine has computed its prompt.
    pub expects_remote_prefill: bool,
    /// Whose it is, if requests are ordered.
    pub tenant: Arc<str>,
    /// When its first token is due, in seconds from its arrival.
    pub ttft_s: Option<f64>,
}

#[derive(Clone, Debug)]
pub struct SessionInput {
    /// More of the prompt.
    pub tokens: Vec<i32>,
    pub has_encoder_inputs: bool,
    /// What all blocks are hashed with from now on besides their tokens.
    pub extra_keys: Option<Box<ExtraKeys>>,
    /// What ends the next turn.
    pub stop: StopConditions,
    /// Seconds of the client's clock.
    pub arrival_time: f64,
    /// Now, in seconds of the scheduler's clock.
    pub now: f64,
}

/// The blocks of a request in one KV cache group.
#[derive(Clone, Debug, Default)]
pub struct GroupBlocks {
    /// One entry a block of tokens; [`BlockId::NULL`] where none is held any more.
    pub table: Vec<BlockId>,
    /// Where the blocks begin that the last allocation added.
    pub new_from: u32,
    /// Leading blocks that are cached or passed over; `None` until the group knows the request.
    pub num_cached: Option<u32>,
    /// Leading blocks that no token attends to any more: given back, or never taken.
    pub(crate) num_skipped: u32,
}

impl GroupBlocks {
    /// Blocks that are missing for a table of `num_blocks`.
    pub(crate) fn num_missing(&self, num_blocks: usize) -> u32 {
        num_blocks.saturating_sub(self.table.len()) as u32
    }

    /// Blocks that the last allocation added.
    pub fn new_blocks(&self) -> &[BlockId] {
        &self.table[self.new_from as usize..]
    }
}

/// A request's state. Counters of tokens are named as in vLLM. Others may read it; the scheduler lends it to
/// nobody to be written.
///
/// Fields lie in memory in this order. What each step of each running request touches comes first
/// and shares cache lines: with hundreds of requests a step costs as much as the lines that it
/// misses.
#[derive(Clone, Debug, Default)]
#[repr(C, align(64))]
pub struct Request {
    /// Tokens with KV in the cache, counted as soon as they are scheduled.
    pub num_computed_tokens: u32,
    /// Output tokens that scheduled steps will bring (asynchronous scheduling).
    pub num_output_placeholders: u32,
    /// Tokens of steps whose output has not come back. Below zero if a step of an ended request
    /// with the same id comes back.
    pub num_in_flight_tokens: i64,
    /// Of these, tokens scheduled before the last preemption.
    pub num_stale_output_tokens: i64,
    /// Number of the last step that it was part of.
    pub last_step: u64,
    /// The first step that may compute its next token (pipeline parallelism).
    pub next_decode_step: u64,
    num_prompt_tokens: usize,
    pub status: RequestStatus,
    /// The last step computed a part of the prompt that is not its end.
    pub is_prefill_chunk: bool,
    /// What the stale steps bring is thrown away rather than delivered.
    pub(crate) drop_stale_output: bool,
    pub has_encoder_inputs: bool,
    pub use_structured_output: bool,
    pub(crate) is_session: bool,
    pub(crate) is_pooling: bool,
    pub(crate) stop_reason: StopReason,

    tokens: Vec<i32>,
    pub block_hashes: Vec<BlockHash>,
    pub(crate) transfer: RequestTransfer,
    /// Draft tokens to be verified by the next step; -1 stands for one that only the model runner
    /// knows.
    pub drafts: Vec<i32>,
    pub groups: SmallVec<[GroupBlocks; 2]>,
    stop: StopConditions,
    pub events: Vec<Event>,
    /// `None` once the client has them.
    pub(crate) prefill_stats: Option<PrefillStats>,

    id: Box<str>,
    index: RequestIndex,
    /// Smaller is more urgent.
    pub priority: i128,
    /// Seconds of the client's clock.
    pub(crate) arrival_time: f64,
    extra_keys: Option<Box<ExtraKeys>>,
    pub lora_id: Option<i64>,
    /// How its drafts fared, if that is wanted for each request.
    pub spec_stats: Option<Box<RequestSpecStats>>,
    /// By KV cache group, where groups differ; else empty.
    pub(crate) states: Vec<StateBlocks>,
    pub num_preemptions: u32,
    /// End of a prefix shared with others that some groups had to compute again; 0 for none.
    pub shared_prefix_boundary: u32,
    /// Tokens that the prefix cache had of it when somebody looked; no decision rests on it.
    pub(crate) expected_hit: Option<ExpectedHit>,
    /// What pacing has promised it; no decision rests on it.
    pub(crate) promise: Option<Promise>,
    pub(crate) skip_reading_prefix_cache: bool,
    pub(crate) reports_cached_blocks: bool,
    /// What it waits for besides its turn, or was skipped for.
    pub(crate) deferred_by: Option<WaitReason>,
    /// Until when it has to be scheduled for the first time, in seconds of the scheduler's clock;
    /// infinity if that is settled.
    pub(crate) queue_deadline: f64,
}

/// What the prefix cache had of a request when somebody looked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpectedHit {
    pub(crate) num_tokens: u32,
    /// Blocks of it that others hold: the request needs no free ones in their place.
    pub(crate) num_held_blocks: u32,
}

/// What a request keeps of how many KV cache groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NumGroups {
    pub(crate) num_tables: usize,
    pub(crate) num_states: usize,
}

impl Request {
    pub(crate) fn new(new: NewRequest, index: RequestIndex, groups: NumGroups) -> Self {
        Self {
            id: new.id,
            num_prompt_tokens: new.num_prompt_tokens,
            tokens: new.tokens,
            block_hashes: new.block_hashes,
            extra_keys: new.extra_keys,
            index,
            lora_id: new.lora_id,
            is_pooling: new.is_pooling,
            reports_cached_blocks: new.reports_cached_blocks,
            is_session: new.is_session,
            has_encoder_inputs: new.has_encoder_inputs,
            stop: new.stop,
            priority: new.priority,
            arrival_time: new.arrival_time,
            skip_reading_prefix_cache: new.skip_reading_prefix_cache,
            status: if new.use_structured_output {
                RequestStatus::WaitingForGrammar
            } else {
                RequestStatus::Waiting
            },
            use_structured_output: new.use_structured_output,
            queue_deadline: f64::INFINITY,
            prefill_stats: Some(PrefillStats::default()),
            groups: (0..groups.num_tables).map(|_| GroupBlocks::default()).collect(),
            states: vec![StateBlocks::default(); groups.num_states],
            ..Self::default()
        }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn index(&self) -> RequestIndex {
        self.index
    }

    /// Prompt and output.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    pub fn output_tokens(&self) -> &[i32] {
        &self.tokens[self.num_prompt_tokens..]
    }

    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    pub fn num_prompt_tokens(&self) -> usize {
        self.num_prompt_tokens
    }

    pub fn num_output_tokens(&self) -> usize {
        self.tokens.len() - self.num_prompt_tokens
    }

    /// Whether the next output that comes back belongs to an earlier life and is dropped.
    pub fn drops_stale_output(&self) -> bool {
        self.num_stale_output_tokens > 0 && self.drop_stale_output
    }

    /// Of so many computed tokens, those that no step in flight computes.
    pub(crate) fn num_settled(&self, num_computed_tokens: u32) -> u32 {
        let num_settled = i64::from(num_computed_tokens) - self.num_in_flight_tokens;
        // Below zero if a step was lost.
        u32::try_from(num_settled.max(0)).unwrap_or(u32::MAX)
    }

    /// Whether it holds blocks while it waits.
    pub fn holds_blocks(&self) -> bool {
        // A load that failed has taken back what counted as computed, and still has its blocks.
        self.num_computed_tokens > 0 || self.status == RequestStatus::WaitingForRemoteKvs
    }

    /// Tokens of a session that stay when its next input comes: those that are computed. The last
    /// one that was sampled is none of them.
    pub fn num_kept_tokens(&self) -> usize {
        match self.num_computed_tokens {
            // It was preempted in the meantime.
            0 => self.tokens.len() - 1,
            num_computed_tokens => self.tokens.len().min(num_computed_tokens as usize),
        }
    }

    /// Takes its blocks from it: group by group, in the order of the tables.
    pub(crate) fn take_blocks(&mut self) -> Vec<BlockId> {
        self.states.fill_with(StateBlocks::default);
        let tables = self.groups.iter_mut().map(|blocks| std::mem::take(blocks).table);
        tables.flatten().collect()
    }

    pub(crate) fn stop_conditions(&self) -> &StopConditions {
        &self.stop
    }

    pub(crate) fn record_event(&mut self, kind: EventKind, timestamp: f64) {
        self.events.push(Event { kind, timestamp });
    }

    /// Appends a generated token and hashes the block that it completes, if it completes one.
    pub(crate) fn append_output_token(&mut self, token: i32, hasher: Option<&BlockHasher>) {
        self.tokens.push(token);
        if let Some(hasher) = hasher.filter(|it| it.completes_block(self.tokens.len())) {
            self.hash_blocks(hasher);
        }
    }

    /// Hashes its full blocks, as far as they have no hash yet.
    pub(crate) fn hash_blocks(&mut self, hasher: &BlockHasher) {
        hasher.extend_hashes(&self.tokens, self.extra_keys.as_deref(), &mut self.block_hashes);
    }

    /// Hashes the blocks of a session anew whose KV is computed anew: hashes that look ahead may
    /// cover a token that the session has dropped since.
    pub(crate) fn refresh_hashes(&mut self, hasher: &BlockHasher) {
        if self.is_session && hasher.num_lookahead_tokens() > 0 {
            self.block_hashes.clear();
            self.hash_blocks(hasher);
        }
    }

    /// Takes a session's next input: all tokens so far become its prompt.
    pub(crate) fn continue_with(&mut self, input: SessionInput, hasher: Option<&BlockHasher>) {
        self.tokens.truncate(self.num_kept_tokens());
        if let Some(hasher) = hasher {
            self.block_hashes.truncate(self.tokens.len() / hasher.block_size());
        }
        self.tokens.extend(input.tokens);
        self.num_prompt_tokens = self.tokens.len();
        self.states.iter_mut().for_each(|state| state.is_tail_cached = false);
        self.has_encoder_inputs = input.has_encoder_inputs;
        self.extra_keys = input.extra_keys;
        self.stop = input.stop;
        self.arrival_time = input.arrival_time;
        if let Some(hasher) = hasher {
            self.hash_blocks(hasher);
        }
    }
}
