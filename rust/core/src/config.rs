//! What the scheduler is built from, and which combinations it refuses.

use crate::block_hash::BlockHasher;
use crate::ids::RequestIndex;
use crate::journal::JournalConfig;

/// In which order requests wait, and which one is preempted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served; the last to run is preempted first.
    Fcfs,
    /// Smaller `(priority, arrival time, request id)` first; the largest is preempted first.
    Priority,
}

/// How the layers of a KV cache group attend, as far as their blocks are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvCacheGroupConfig {
    /// Every token's KV is kept until the request ends.
    FullAttention,
    /// Only the last `window` tokens are attended; blocks that fall behind return to the pool.
    SlidingWindow {
        /// Attention window in tokens, the current token included.
        window: u32,
        /// Tokens behind the window whose blocks are kept nevertheless, for a drafter that may
        /// compute the end of the sequence again.
        num_retained_tokens: u32,
        /// Most blocks that one request is ever counted for when it is admitted.
        max_admission_blocks: u32,
    },
    /// Tokens attend to those of their own chunk; blocks of earlier chunks return to the pool.
    ChunkedLocal {
        /// Tokens a chunk.
        chunk_size: u32,
        /// Most blocks that one request is ever counted for when it is admitted.
        max_admission_blocks: u32,
    },
    /// A recurrent state (Mamba, linear attention) takes the place of the tokens before it.
    State {
        mode: StateMode,
        /// Blocks for the states after each draft token.
        num_speculative_blocks: u32,
        /// A chunk of a prompt may keep a state from its middle, in a block of its own, if that is
        /// a multiple of so many tokens from its start.
        checkpoint_alignment: Option<u32>,
    },
    /// One block a request that is written round and round: what the tokens not compressed yet
    /// leave behind. Nobody else can use it, so it has no part in the prefix cache.
    CircularBuffer,
}

/// Which states are kept: vLLM's `mamba_cache_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateMode {
    /// The last one.
    None,
    /// One at the end of each block.
    All,
    /// Those at the end of a block that ends a step's chunk.
    Align,
}

/// What holds for all groups of states.
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateConfig {
    /// Chunks of a prompt end where a state is to be kept.
    pub aligns_chunks: bool,
    /// Tokens a block, as far as chunks are concerned (`cache_config.block_size`); at least 1 if
    /// they are aligned.
    pub block_size: u32,
    /// Every group of states has blocks for those from the middle of a chunk.
    pub has_checkpoint_blocks: bool,
    /// The first group's alignment of these.
    pub checkpoint_alignment: Option<u32>,
    /// A drafter has the end of a hit computed again, so that a state there is of no use.
    pub drops_last_unit: bool,
    /// The state where a request parts from others is kept even within a block.
    pub keeps_junctions: bool,
    /// Tokens behind a block that its hash covers as well.
    pub num_hash_lookahead_tokens: u32,
}

impl KvCacheGroupConfig {
    pub(crate) const fn is_state(self) -> bool {
        matches!(self, Self::State { .. })
    }

    /// Whether hits in the group may end within a block.
    pub(crate) const fn has_fine_hits(self) -> bool {
        matches!(self, Self::FullAttention | Self::State { .. })
    }

    /// Whether others may find a request's blocks in the prefix cache.
    pub(crate) const fn is_prefix_cacheable(self) -> bool {
        !matches!(self, Self::CircularBuffer)
    }

    /// Whether each block is for tokens of its own, a block size of them.
    pub(crate) const fn has_block_per_tokens(self) -> bool {
        !matches!(self, Self::State { .. } | Self::CircularBuffer)
    }

    pub(crate) const fn is_full_attention(self) -> bool {
        matches!(self, Self::FullAttention)
    }
}

/// Speculative decoding, as far as it takes part in scheduling. All zero without it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    /// Most draft tokens of a request in a step.
    pub num_spec_tokens: u32,
    /// Positions behind the scheduled tokens that the drafter writes KV for.
    pub num_lookahead_tokens: u32,
    /// Known tokens behind a chunk of a prompt that the drafter reads: no chunk may end closer to
    /// the prompt's end than that.
    pub num_prefill_lookahead_tokens: u32,
    /// Positions of the model runner's batch that drafting takes for each request.
    pub num_draft_slots: u32,
    /// Draft tokens by the number of requests in a step (dynamic speculation), from index 1.
    pub by_batch_size: Option<Vec<u32>>,
    /// What clients are told of each request's drafts.
    pub request_metrics: RequestSpecMetrics,
}

/// What clients are told of a request's drafts when it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestSpecMetrics {
    #[default]
    None,
    /// How many were accepted.
    Summary,
    /// The same for each step, too.
    Detailed,
}

/// How blocks go elsewhere and come from there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvTransferConfig {
    /// Loads are not ordered against steps in flight: blocks that such a step may still write stay
    /// out of the pool until it has come back.
    pub defer_block_free: bool,
    /// What a request is sampled after it lost its blocks is dropped, so that it does not end
    /// before there are blocks again to be sent.
    pub requires_kv_delivery: bool,
    /// Tokens whose load failed are computed; otherwise their requests fail.
    pub recompute_load_failures: bool,
}

/// What vLLM's releases decide differently. The default is vLLM 0.32.0's.
///
/// Each field is one behaviour: which release has which is known to `sparksched.compat.releases` alone.
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Behaviors {
    /// A running request that had to preempt itself does not end the step for those behind it.
    pub continues_after_self_preemption: bool,
    /// A waiting request that the encoder or a drafter leaves no token is skipped, and does
    /// not end the step for those behind it.
    pub skips_held_up: bool,
    /// Adapters of running requests that sit a step out count, too: they may be back in the next.
    pub counts_loras_of_all_running: bool,
    /// Output is cached as far as no step in flight can change it, by synchronous speculation,
    /// too; and tokens that a stop has cut off do not count as computed.
    pub caches_settled_output: bool,
    /// Where only some groups had a prefix, those that drop their last block keep the place one
    /// block before its end, too.
    pub keeps_block_before_junction: bool,
    /// Sessions that go on are queued when all that stopped have left their queues.
    pub requeues_sessions_last: bool,
    /// Steps tell whether anybody can use the drafts that are proposed after them.
    pub can_skip_drafts: bool,
    /// The state at the end of a prompt is cached once, not with each step that ends there.
    pub caches_state_tails_once: bool,
    /// Hits end where the auxiliary output of a prefix ends that is still there.
    pub caps_hits_to_aux_output: bool,
    /// Steps with tokens from one that computes prompts to the next that may, while others
    /// generate; 0 and 1 are every step.
    pub local_prefill_interval: u32,
}

/// Everything that decides how requests are scheduled.
#[expect(clippy::struct_excessive_bools, reason = "they are vLLM's settings, one by one")]
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Steps are scheduled before the output of the former one is known.
    pub async_scheduling: bool,
    pub policy: Policy,
    /// Most requests that may run at once (`max_num_active_seqs`, else `max_num_seqs`).
    pub max_num_active_reqs: usize,
    pub max_num_scheduled_tokens: u32,
    /// Most tokens that the model runner's input batch holds.
    pub max_num_batched_tokens: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u32,
    /// A prompt may be computed in several steps.
    pub enable_chunked_prefill: bool,
    /// Most tokens of one request in a step when others wait; 0 is no limit.
    pub long_prefill_token_threshold: u32,
    /// The threshold is at least a fair share of the input budget.
    pub long_prefill_token_threshold_adaptive: bool,
    /// A request is admitted only if its whole sequence fits into the free blocks.
    pub reserve_full_isl: bool,
    pub speculation: Speculation,
    /// Tokens that a step samples besides accepted drafts: 1, or 0 for pooling models.
    pub num_sampled_tokens_per_step: u32,
    /// Most different adapters in a step; `None` without `LoRA`.
    pub max_loras: Option<u32>,
    /// Steps from one token of a request to the next that the stages of a pipeline need; 1 without
    /// a pipeline, 0 where nobody asks.
    pub decode_stagger: u32,
    /// The model runner takes resumed requests as new ones (Model Runner V2).
    pub resume_as_new: bool,
    /// The model runner is told the tokens that it has sampled (a pipeline's first stage).
    pub sends_sampled_tokens: bool,
    pub behaviors: Behaviors,
    /// Events and statistics are collected.
    pub log_stats: bool,
    /// Tokens a block; the least common multiple if groups have blocks of different sizes.
    pub block_size: u32,
    /// Tokens that a hash covers more than the one before it: a divisor of the block size of each
    /// group in the prefix cache.
    pub hash_block_size: u32,
    /// Hits may end within a block, where a hash does: the block is copied then.
    pub partial_hits: bool,
    /// New blocks are told to the workers, who fill them with zeros.
    pub zeroes_blocks: bool,
    /// Blocks in the pool, the null block included.
    pub num_blocks: u32,
    /// Blocks that an admission leaves free while others run.
    pub watermark_blocks: u32,
    /// The KV cache groups, in the order of their ids.
    pub groups: Vec<KvCacheGroupConfig>,
    /// Tokens a block, by group.
    pub group_block_sizes: Vec<u32>,
    /// What holds for all groups of states.
    pub states: StateConfig,
    /// Ids of the groups that are looked up together because their specs are equal: full
    /// attention first. Circular buffers are in none.
    pub lookup_groups: Vec<Vec<u32>>,
    /// Ids of the groups whose last cached block is computed again for the drafter.
    pub eagle_groups: Vec<u32>,
    /// Spacing in tokens of the windows that stay in the prefix cache: `None` keeps every block,
    /// `Some(0)` only the places where a prompt can be taken up again.
    pub retention_interval: Option<u32>,
    /// How blocks are hashed; `None` turns prefix caching off.
    pub hasher: Option<BlockHasher>,
    pub journal: JournalConfig,
    /// How blocks go elsewhere and come from there; `None` without a KV connector.
    pub kv_transfer: Option<KvTransferConfig>,
    /// Encoder outputs come from elsewhere and go there, by an EC connector.
    pub transfers_encoder_outputs: bool,
    /// Workers collect more of a step than tokens, such as the experts that tokens were routed to.
    pub collects_aux_output: bool,
}

/// What may be chosen anew before each step: values that vLLM's scheduler has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepKnobs {
    /// Most tokens that the step may schedule; at most what is configured.
    pub max_num_scheduled_tokens: u32,
    /// Most tokens of one request when there are others; 0 is no limit.
    pub long_prefill_token_threshold: u32,
    /// Prompts are held back while others generate, unless they could not all be admitted the last
    /// time.
    pub throttle_prefills: bool,
    /// For this step alone, these requests go to the end of the running list or to the front of the
    /// queue, wherever they are, in this order; afterwards each is back in its place. A queue by
    /// priority stays as it is.
    pub order: Vec<RequestIndex>,
}

impl SchedulerConfig {
    /// Checks how the fields that the rest of the crate relies on go together.
    ///
    /// # Panics
    /// If they contradict each other, which is a bug of the caller.
    pub(crate) fn check(&self) {
        let divides = |size: u32| size >= 1 && self.block_size.is_multiple_of(size);
        assert!(
            self.group_block_sizes.len() == self.groups.len()
                && self.group_block_sizes.iter().all(|&size| divides(size)),
            "each group needs a block size that block_size is a multiple of"
        );
        let is_hashed =
            |id: u32| self.group_block_sizes[id as usize].is_multiple_of(self.hash_block_size);
        assert!(
            self.hasher.is_none() || self.cacheable_groups().all(is_hashed),
            "each group's block size must be a multiple of hash_block_size"
        );
        assert!(
            self.hasher.is_none() || self.cacheable_groups().next().is_some(),
            "prefix caching needs a KV cache group"
        );
        assert!(
            self.kv_transfer.is_none() || self.cacheable_groups().count() == self.groups.len(),
            "a KV connector does not fill circular buffers"
        );
        assert!(
            self.retention_interval.is_none_or(|interval| interval % self.block_size == 0),
            "retention_interval must be a multiple of block_size"
        );
        let mut looked_up: Vec<u32> = self.lookup_groups.iter().flatten().copied().collect();
        looked_up.sort_unstable();
        assert!(
            looked_up.iter().copied().eq(self.cacheable_groups()),
            "lookup_groups must hold each KV cache group once, but for circular buffers"
        );
        let spec = |&id: &u32| (self.groups[id as usize], self.group_block_sizes[id as usize]);
        assert!(
            self.lookup_groups.iter().all(|ids| ids.iter().all(|id| spec(id) == spec(&ids[0]))),
            "groups that are looked up together must have equal specs"
        );
        let is_full = |ids: &Vec<u32>| self.groups[ids[0] as usize].is_full_attention();
        assert!(
            self.lookup_groups.iter().skip_while(|ids| is_full(ids)).all(|ids| !is_full(ids)),
            "full attention groups must be looked up first"
        );
    }

    /// The knobs of a step for which nobody has chosen others.
    pub fn step_knobs(&self, throttle_prefills: bool) -> StepKnobs {
        StepKnobs {
            order: Vec::new(),
            max_num_scheduled_tokens: self.max_num_scheduled_tokens,
            long_prefill_token_threshold: self.long_prefill_token_threshold,
            throttle_prefills,
        }
    }

    /// Ids of the groups in the prefix cache.
    fn cacheable_groups(&self) -> impl Iterator<Item = u32> {
        (0..self.groups.len() as u32).filter(|&id| self.groups[id as usize].is_prefix_cacheable())
    }
}
