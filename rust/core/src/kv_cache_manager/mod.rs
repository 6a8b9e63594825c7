//! Blocks for requests: vLLM's `v1/core/kv_cache_manager.py` and `kv_cache_coordinator.py`.
//!
//! All groups share one pool. Most models have groups of one block size whose blocks are for tokens;
//! what others need besides is in `mixed.rs`. Left out: encoder blocks.

mod mixed;

use smallvec::{SmallVec, smallvec};

use crate::block_hash::BlockHash;
use crate::block_pool::BlockPool;
use crate::config::{KvCacheGroupConfig, SchedulerConfig, StateConfig};
use crate::ids::{BlockId, GroupId};
use crate::journal::{Entry, Journal, StoredBlocks};
use crate::kv_cache_group::{KvCacheGroup, Lookup};
use crate::request::{ExpectedHit, Request};
use crate::state_group::StateBlocks;
use crate::stats::PrefixCacheStats;

/// What the prefix cache has of a waiting request; the blocks stay in the manager until
/// [`KvCacheManager::allocate_slots`] takes them over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHit {
    /// Leading tokens that need not be computed.
    pub num_tokens: u32,
    /// End of a longer prefix that only some groups have; 0 for none.
    pub shared_prefix_boundary: u32,
}

/// What holds for the blocks of a request that is to be admitted.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionTerms {
    /// Its cached prefix, which was just found.
    pub hit: PrefixHit,
    /// Tokens behind that whose KV comes from elsewhere; see [`ExternalHit::num_tokens`](crate::ExternalHit::num_tokens).
    pub num_external_tokens: i32,
    /// They come between steps: nothing is cached yet, no drafter writes anything, and so many
    /// free blocks have to be left to others.
    pub reserved_from_load: Option<u32>,
    /// The whole sequence must fit, not only this step's tokens.
    pub full_sequence_must_fit: bool,
    /// Others run, and the watermark has to stay free for them.
    pub others_run: bool,
}

/// What a request lacked that didn't get its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShortfall {
    /// Free blocks that it wanted.
    pub num_wanted: u32,
    /// Of these, blocks that were to stay free for others.
    pub num_reserved: u32,
}

/// Gives blocks to requests and takes them back.
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
#[derive(Clone, Debug)]
pub struct KvCacheManager {
    pool: BlockPool,
    groups: Vec<KvCacheGroup>,
    lookup_groups: Vec<Vec<u32>>,
    /// Tokens a block, or the least common multiple of the groups' sizes.
    block_size: u32,
    hash_block_size: u32,
    /// All groups have this block size, hash such blocks, and keep neither recurrent states nor
    /// circular buffers; and no worker is told of new blocks.
    is_uniform: bool,
    max_model_len: u32,
    enable_caching: bool,
    /// The last cached block of some group is computed again for a drafter.
    drops_eagle_blocks: bool,
    keeps_block_before_junction: bool,
    watermark_blocks: u32,
    num_lookahead_tokens: u32,
    /// Tokens at the end of what is computed that a drafter may compute again.
    num_reprefillable_tokens: u32,
    /// Blocks of the last prefix hit, by group.
    hits: Vec<Vec<BlockId>>,
    work: BlockWork,
    /// Of the last request that didn't get its blocks; nothing is decided by it.
    shortfall: Option<BlockShortfall>,
    pub(crate) prefix_cache_stats: PrefixCacheStats,
}

/// What groups that differ from each other leave to do in a step.
#[derive(Clone, Debug, Default)]
struct BlockWork {
    states: StateConfig,
    caches_state_tails_once: bool,
    zeroes_blocks: bool,
    /// States that can be found, but are there only after the step.
    cached_this_step: Vec<(BlockHash, GroupId)>,
    /// From where to where blocks are to be copied, by group. Both ends have an owner more, until
    /// the step is told of it.
    copies: Vec<Vec<(BlockId, BlockId)>>,
    /// New blocks that are to be filled with zeros, by group.
    to_zero: Vec<Vec<BlockId>>,
}

/// How many tokens a request is to have room for.
#[derive(Clone, Copy, Debug)]
struct Demand {
    num_tokens: u32,
    /// Of these, tokens that are not only a drafter's.
    num_main_tokens: u32,
    num_computed_tokens: u32,
    /// Of these, tokens that no connector brings.
    num_local_tokens: u32,
    has_hit: bool,
    /// It is asked whether the request can be admitted; otherwise, the blocks are about to be
    /// taken.
    for_admission: bool,
}

impl KvCacheManager {
    /// A manager whose blocks are all free.
    pub fn new(config: &SchedulerConfig) -> Self {
        // Groups that are looked up together drop their last block together.
        let is_eagle = |id: u32| {
            let together = config.lookup_groups.iter().find(|ids| ids.contains(&id));
            together.into_iter().flatten().any(|id| config.eagle_groups.contains(id))
        };
        let hit_alignment =
            if config.partial_hits { config.hash_block_size } else { config.block_size };
        let groups = config.groups.iter().zip(&config.group_block_sizes).enumerate();
        let groups = groups.map(|(id, (&config_of_group, &block_size))| KvCacheGroup {
            config: config_of_group,
            block_size,
            num_hashes: (block_size / config.hash_block_size).max(1),
            hit_alignment,
            retention_interval: config.retention_interval,
            is_eagle: is_eagle(id as u32),
        });
        let enable_caching = config.hasher.is_some();
        let is_uniform = !config.zeroes_blocks
            && config.groups.iter().all(|group| group.has_block_per_tokens())
            && config.group_block_sizes.iter().all(|&size| size == config.block_size)
            && (!enable_caching || config.hash_block_size == config.block_size);
        let num_work_groups = if is_uniform { 0 } else { config.groups.len() };
        let speculation = &config.speculation;
        Self {
            pool: BlockPool::new(config.num_blocks, enable_caching, config.journal),
            groups: groups.collect(),
            lookup_groups: config.lookup_groups.clone(),
            block_size: config.block_size,
            hash_block_size: config.hash_block_size,
            is_uniform,
            max_model_len: config.max_model_len,
            enable_caching,
            drops_eagle_blocks: !config.eagle_groups.is_empty(),
            keeps_block_before_junction: config.behaviors.keeps_block_before_junction,
            watermark_blocks: config.watermark_blocks,
            num_lookahead_tokens: speculation.num_lookahead_tokens,
            num_reprefillable_tokens: speculation.num_prefill_lookahead_tokens.saturating_sub(1),
            hits: vec![Vec::new(); config.groups.len()],
            work: BlockWork {
                states: config.states,
                caches_state_tails_once: config.behaviors.caches_state_tails_once,
                zeroes_blocks: config.zeroes_blocks,
                cached_this_step: Vec::new(),
                copies: vec![Vec::new(); num_work_groups],
                to_zero: vec![Vec::new(); num_work_groups],
            },
            shortfall: None,
            prefix_cache_stats: PrefixCacheStats::default(),
        }
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The blocks themselves, to be lent.
    pub(crate) fn pool_mut(&mut self) -> &mut BlockPool {
        &mut self.pool
    }

    /// What the last request lacked that didn't get its blocks.
    pub(crate) fn shortfall(&self) -> Option<BlockShortfall> {
        self.shortfall
    }

    /// Whether so many blocks are free; notes what is wanted if not.
    fn has_free(&mut self, num_required: i64, num_reserved: i64) -> bool {
        let num_wanted = num_required + num_reserved;
        let is_free = num_wanted <= i64::from(self.pool.num_free());
        if !is_free {
            let count = |blocks: i64| u32::try_from(blocks).unwrap_or(u32::MAX);
            self.shortfall = Some(BlockShortfall {
                num_wanted: count(num_wanted),
                num_reserved: count(num_reserved),
            });
        }
        is_free
    }

    /// Groups for which a request needs more than their tables.
    pub(crate) fn num_state_blocks(&self) -> usize {
        if self.is_uniform { 0 } else { self.groups.len() }
    }

    /// What has happened to blocks since this was last asked, as far as it was to be noted.
    pub fn take_journal(&mut self) -> Vec<Entry> {
        self.pool.journal.take()
    }

    pub fn reads_prefix_cache(&self, request: &Request) -> bool {
        self.enable_caching && !request.skip_reading_prefix_cache
    }

    /// Looks up the longest cached prefix of at most `max_tokens` tokens, and at least one token
    /// short of the whole: the last token has to be computed to sample the next.
    pub fn find_prefix_hit(&mut self, request: &Request, max_tokens: u32) -> PrefixHit {
        self.hits.iter_mut().for_each(Vec::clear);
        if !self.reads_prefix_cache(request) {
            return PrefixHit::default();
        }
        let max_tokens = max_tokens.min(request.num_tokens().saturating_sub(1) as u32);
        let (num_tokens, longest) = self.find_longest_hit(request, max_tokens);
        if num_tokens > 0 && request.reports_cached_blocks {
            self.report_hit(request);
        }
        let shared_prefix_boundary = if longest > num_tokens { longest } else { 0 };
        PrefixHit { num_tokens, shared_prefix_boundary }
    }

    /// What of a request's prefix is cached, without telling anybody of the look.
    pub(crate) fn peek_prefix_hit(&mut self, request: &Request) -> ExpectedHit {
        self.hits.iter_mut().for_each(Vec::clear);
        if !self.reads_prefix_cache(request) {
            return ExpectedHit { num_tokens: 0, num_held_blocks: 0 };
        }
        let max_tokens = request.num_tokens().saturating_sub(1) as u32;
        let num_tokens = self.find_longest_hit(request, max_tokens).0;
        let blocks = self.hits.iter().flatten();
        let is_held = |id: &&BlockId| !id.is_null() && self.pool.ref_count(**id) > 0;
        ExpectedHit { num_tokens, num_held_blocks: blocks.filter(is_held).count() as u32 }
    }

    /// The length that all groups agree on, and the longest that one of them has, in tokens.
    ///
    /// Each kind of group accepts the length so far or shortens it, until none does. Full
    /// attention comes first, and needs no second look: shorter prefixes are cached as well. A
    /// group that drops its last block looks one block further for it, once for each length.
    fn find_longest_hit(&mut self, request: &Request, max_tokens: u32) -> (u32, u32) {
        let hashes = &request.block_hashes;
        let num_kinds = self.lookup_groups.len();
        let first_is_full =
            self.groups[self.lookup_groups[0][0] as usize].config.is_full_attention();
        let is_alone = self.groups.len() == 1;
        let one_round_suffices = is_alone || (num_kinds == 2 && first_is_full);
        let mut full_lengths: SmallVec<[Option<u32>; 4]> = smallvec![None; num_kinds];
        let mut has_dropped: SmallVec<[bool; 4]> = smallvec![false; num_kinds];
        let (mut hit_length, mut longest) = (max_tokens, 0);
        loop {
            let mut length = hit_length;
            for (kind, groups) in self.lookup_groups.iter().enumerate() {
                if let Some(full_length) = full_lengths[kind] {
                    length = length.min(full_length);
                    continue;
                }
                let group = &self.groups[groups[0] as usize];
                let drop_last = group.is_eagle && !has_dropped[kind];
                // States are not dropped: no drafter has one.
                let max_tokens = if drop_last && !is_alone && !group.config.is_state() {
                    let is_fine = group.config.has_fine_hits();
                    let margin = if is_fine {
                        group.hit_alignment.min(group.block_size)
                    } else {
                        group.block_size
                    };
                    (length + margin).min(hashes.len() as u32 * self.hash_block_size)
                } else {
                    length
                };
                let lookup = Lookup { pool: &self.pool, hashes, max_tokens, drop_last, groups };
                let found = group.find_longest_hit(&lookup, &mut self.hits);
                if drop_last {
                    has_dropped[kind] = true;
                } else if found < length {
                    has_dropped.fill(false);
                }
                if group.config.is_full_attention() {
                    full_lengths[kind] = Some(found);
                }
                length = found;
                longest = longest.max(length);
            }
            let settled = length >= hit_length;
            hit_length = length;
            if settled || one_round_suffices {
                break;
            }
        }
        for (group, blocks) in self.groups.iter().zip(&mut self.hits) {
            blocks.truncate(hit_length.div_ceil(group.block_size) as usize);
        }
        // With one group there is no other that could lag behind.
        let longest = if is_alone { hit_length } else { longest };
        (hit_length, longest)
    }

    /// Counts the lookup of a request that has been admitted.
    pub fn record_prefix_cache_stats(&mut self, request: &Request, num_hits: u32) {
        if self.reads_prefix_cache(request) {
            let preempted = request.num_preemptions > 0;
            self.prefix_cache_stats.record(request.num_tokens(), num_hits, preempted);
        }
    }

    /// Gives a running request blocks for `num_new_tokens` more tokens: vLLM's `allocate_slots()`.
    /// Returns whether there were enough; if not, the request keeps what it had, except for blocks
    /// that fell behind a window.
    ///
    /// Each request of each step comes here, and most of them still have room in their last block.
    pub fn extend_slots(&mut self, request: &mut Request, num_new_tokens: u32) -> bool {
        if !self.is_uniform {
            return self.extend_mixed(request, num_new_tokens);
        }
        let num_computed = request.num_computed_tokens.min(self.max_model_len);
        self.remove_skipped_blocks(request, num_computed);

        let num_tokens =
            (num_computed + num_new_tokens + self.num_lookahead_tokens).min(self.max_model_len);
        let num_blocks = num_tokens.div_ceil(self.block_size) as usize;
        let num_missing: u32 =
            request.groups.iter().map(|blocks| blocks.num_missing(num_blocks)).sum();
        if !self.has_free(num_missing.into(), 0) {
            return false;
        }
        for blocks in &mut request.groups {
            blocks.new_from = blocks.table.len() as u32;
            let num_missing = blocks.num_missing(num_blocks);
            if num_missing > 0 {
                self.pool.allocate(num_missing, &mut blocks.table);
            }
        }
        self.cache_final_blocks(request, num_computed + num_new_tokens);
        true
    }

    /// Gives a request that is to be admitted blocks for `num_new_tokens` tokens behind its prefix
    /// hits, and the blocks of these: vLLM's `allocate_slots()`. Returns whether there were enough;
    /// if not, the request keeps what it had.
    pub fn allocate_slots(
        &mut self,
        request: &mut Request,
        num_new_tokens: u32,
        terms: AdmissionTerms,
    ) -> bool {
        let is_load = terms.reserved_from_load.is_some();
        let has_hit = terms.hit.num_tokens > 0;
        let is_filled = terms.num_external_tokens > 0;
        let num_local = request.num_computed_tokens + terms.hit.num_tokens;
        let num_computed =
            num_local.saturating_add_signed(terms.num_external_tokens).min(self.max_model_len);
        let watermark_blocks = i64::from(if terms.others_run { self.watermark_blocks } else { 0 });

        let num_tokens = (request.num_tokens() as u32).min(self.max_model_len);
        let demand = Demand {
            num_tokens,
            num_main_tokens: num_tokens,
            num_computed_tokens: num_computed,
            num_local_tokens: num_local,
            has_hit,
            for_admission: true,
        };
        if terms.full_sequence_must_fit {
            let required = self.num_blocks_to_allocate(request, demand);
            if !self.has_free(required, watermark_blocks) {
                return false;
            }
        }

        self.remove_skipped_blocks(request, num_computed);

        let num_lookahead_tokens = if is_load { 0 } else { self.num_lookahead_tokens };
        let num_main_tokens = num_computed + num_new_tokens;
        let num_tokens = (num_main_tokens + num_lookahead_tokens).min(self.max_model_len);
        let demand = Demand { num_tokens, num_main_tokens, for_admission: false, ..demand };
        let required = self.num_blocks_to_allocate(request, demand);
        let num_reserved = watermark_blocks + i64::from(terms.reserved_from_load.unwrap_or(0));
        if !self.has_free(required, num_reserved) {
            return false;
        }

        // A request whose load failed while it ran has its blocks still.
        let is_new = |request: &Request| request.groups.iter().all(|it| it.num_cached.is_none());
        if (has_hit || is_filled) && is_new(request) {
            self.take_over_hit(request, num_computed, num_local, has_hit);
            if is_filled {
                self.allocate_for_external(request, num_computed);
            }
        }
        self.extend_tables(request, demand);
        if !is_load {
            self.cache_final_blocks(request, num_main_tokens);
        }
        true
    }

    /// Makes full blocks findable whose tokens are known. The others have no hash yet: the last
    /// step's are cached by the next.
    fn cache_final_blocks(&mut self, request: &mut Request, num_tokens: u32) {
        self.cache_blocks(request, num_tokens.min(request.num_tokens() as u32));
    }

    /// Blocks that `num_tokens` need of all groups, but those of states: few are kept at a time.
    pub(crate) fn num_admission_blocks(&self, num_tokens: u32) -> u32 {
        let groups = self.groups.iter().filter(|it| !it.config.is_state());
        groups.map(|it| it.num_admission_blocks(num_tokens)).sum()
    }

    /// Blocks that a request in the middle of its prompt still has to get for `num_tokens`.
    pub(crate) fn num_missing_blocks(&self, request: &Request, num_tokens: u32) -> u32 {
        let groups = self.groups.iter().zip(&request.groups);
        let missing = groups.map(|(group, blocks)| {
            let num_required = group.num_admission_blocks(num_tokens) as usize;
            if blocks.num_cached.is_some() {
                return blocks.num_missing(num_required);
            }
            let num_skipped = group.num_skipped_blocks(request.num_computed_tokens);
            num_required.saturating_sub(num_skipped.max(blocks.table.len())) as u32
        });
        missing.sum()
    }

    /// Blocks that have to be taken from the free ones for the request to hold so many tokens. A
    /// group of states may count fewer than none, and more than there are if it can't be now.
    fn num_blocks_to_allocate(&mut self, request: &mut Request, demand: Demand) -> i64 {
        (0..self.groups.len())
            .map(|id| match self.groups[id].config {
                KvCacheGroupConfig::State { .. } => {
                    self.num_state_blocks_to_allocate(request, id, demand)
                }
                KvCacheGroupConfig::CircularBuffer => {
                    i64::from(request.groups[id].table.is_empty())
                }
                _ => self.num_blocks_of_group(request, id, demand),
            })
            .sum()
    }

    /// The same for a group that keeps every token's block, or those of a window.
    fn num_blocks_of_group(&self, request: &Request, id: usize, demand: Demand) -> i64 {
        let (group, blocks) = (&self.groups[id], &request.groups[id]);
        let num_held = blocks.table.len();
        let num_required = if demand.for_admission {
            group.num_admission_blocks(demand.num_tokens)
        } else {
            demand.num_tokens.div_ceil(group.block_size)
        } as usize;
        if blocks.num_cached.is_some() {
            return i64::from(num_required.saturating_sub(num_held) as u32);
        }
        let hits: &[BlockId] = if demand.has_hit { &self.hits[id] } else { &[] };
        let num_skipped = group.num_skipped_blocks(demand.num_computed_tokens);
        let num_new = num_required.saturating_sub(num_skipped.max(hits.len() + num_held));
        // Blocks of the hit that nobody else uses count as free until they are taken over.
        let num_passed_over = num_skipped.saturating_sub(num_held).min(hits.len());
        let num_taken_over = self.num_evictable(&hits[num_passed_over..]);
        // A block that is shared up to its middle is copied.
        let is_copied = ends_within_block(group, hits, demand.num_local_tokens);
        i64::from((num_new + num_taken_over + usize::from(is_copied)) as u32)
    }

    fn num_evictable(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|&&id| self.pool.is_evictable(id)).count()
    }

    /// Makes the blocks of the last prefix hit, if there was one, the beginning of the request's
    /// tables.
    fn take_over_hit(
        &mut self,
        request: &mut Request,
        num_computed_tokens: u32,
        num_local_tokens: u32,
        has_hit: bool,
    ) {
        for id in 0..self.groups.len() {
            let (group, blocks) = (&self.groups[id], &mut request.groups[id]);
            debug_assert!(blocks.table.is_empty() && blocks.num_cached.is_none());
            let hits: &[BlockId] = if has_hit { &self.hits[id] } else { &[] };
            let num_skipped = group.num_skipped_blocks(num_computed_tokens);
            let kept = &hits[num_skipped.min(hits.len())..];
            self.pool.touch(kept);
            blocks.table.resize(num_skipped, BlockId::NULL);
            blocks.table.extend_from_slice(kept);
            blocks.num_cached = Some(blocks.table.len() as u32);
            blocks.num_skipped = num_skipped as u32;
            if ends_within_block(group, kept, num_local_tokens) {
                let place = num_local_tokens / group.block_size;
                blocks.num_cached = Some(place);
                request.states[id].partial = kept.last().map(|&block| (place as usize, block));
            }
        }
    }

    /// Adds blocks that will be filled from elsewhere. All groups have taken over their hits by
    /// now, so that none of these blocks is one of those.
    fn allocate_for_external(&mut self, request: &mut Request, num_computed_tokens: u32) {
        for (group, blocks) in self.groups.iter().zip(&mut request.groups) {
            if group.num_skipped_tokens(num_computed_tokens) >= num_computed_tokens {
                continue;
            }
            let num_blocks = num_computed_tokens.div_ceil(group.block_size) as usize;
            self.pool.allocate(blocks.num_missing(num_blocks), &mut blocks.table);
        }
    }

    /// Gives back the blocks that lie before every window of a request with so many computed
    /// tokens. What steps in flight still read stays.
    pub(crate) fn remove_skipped_blocks(&mut self, request: &mut Request, num_computed: u32) {
        let num_settled = request.num_settled(num_computed);
        for (group, blocks) in self.groups.iter().zip(&mut request.groups) {
            let end = group.num_skipped_blocks(num_settled).min(blocks.table.len());
            let begin = blocks.num_skipped as usize;
            if begin < end {
                let skipped = &mut blocks.table[begin..end];
                self.pool.release(skipped.iter().rev().copied());
                skipped.fill(BlockId::NULL);
                blocks.num_skipped = end as u32;
            }
        }
        if !self.is_uniform {
            self.remove_former_states(request, num_settled);
        }
    }

    /// Makes the request's full blocks among its first `num_tokens` tokens findable, as far as they
    /// have hashes: those that look ahead wait for the tokens behind a block.
    ///
    /// # Panics
    /// If a full block has no place in a table.
    pub fn cache_blocks(&mut self, request: &mut Request, num_tokens: u32) {
        if !self.enable_caching {
            return;
        }
        if !self.is_uniform {
            self.cache_mixed_blocks(request, num_tokens);
            return;
        }
        let num_hashed = request.block_hashes.len() as u32;
        let num_full = num_hashed.min(num_tokens / self.block_size);
        if request.groups.iter().all(|blocks| blocks.num_cached.unwrap_or(0) >= num_full) {
            return;
        }
        for id in 0..self.groups.len() {
            let num_full = self.num_cacheable_tokens(id, num_tokens) / self.block_size;
            let num_full = num_hashed.min(num_full);
            let num_cached = request.groups[id].num_cached.unwrap_or(0);
            if num_cached < num_full {
                let boundaries = self.replay_boundaries(request, id);
                let positions = num_cached as usize..num_full as usize;
                self.cache_full_blocks(request, id, positions, &boundaries);
                request.groups[id].num_cached = Some(num_full);
            }
        }
    }

    /// Where a later request may take up this prompt in a group, in tokens.
    fn replay_boundaries(&self, request: &Request, group: usize) -> SmallVec<[u32; 4]> {
        let num_prompt_tokens = request.num_prompt_tokens() as u32;
        // The last token of a prompt is always computed, so a resend resumes before it.
        let resend = num_prompt_tokens.saturating_sub(1);
        let mut boundaries = SmallVec::new();
        if self.drops_eagle_blocks {
            // One block before what matches; a longer prompt matches the last full block, too.
            let block_before =
                |tokens: u32| (tokens - tokens % self.block_size).saturating_sub(self.block_size);
            boundaries.extend([block_before(resend), block_before(num_prompt_tokens)]);
        } else {
            boundaries.push(resend);
        }
        let junction = request.shared_prefix_boundary;
        if junction > 0 {
            boundaries.push(junction);
            // A request that parts right behind the junction has no block there to be dropped.
            if self.keeps_block_before_junction && self.groups[group].is_eagle {
                boundaries.push(junction.saturating_sub(self.groups[group].block_size));
            }
        }
        boundaries
    }

    /// Of the first `num_tokens` tokens, those whose KV in this group is final and that a hit can
    /// end behind.
    fn num_cacheable_tokens(&self, id: usize, num_tokens: u32) -> u32 {
        let num_final = num_tokens.saturating_sub(self.num_reprefillable_tokens);
        if self.groups.len() == 1 {
            return num_final;
        }
        let group = &self.groups[id];
        let align = |num_tokens: u32| {
            // Where hits may end within a block, there is nothing to round.
            let is_aligned = group.hit_alignment == self.block_size;
            num_tokens - if is_aligned { num_tokens % self.block_size } else { 0 }
        };
        if group.is_eagle && align(num_tokens) > 0 {
            // A drafter's hit looks at one block more, and drops it.
            return num_final.min(align(num_final) + group.block_size);
        }
        align(num_tokens)
    }

    /// Makes the blocks at these positions findable, as far as they can ever be of use.
    fn cache_full_blocks(
        &mut self,
        request: &Request,
        id: usize,
        positions: std::ops::Range<usize>,
        boundaries: &[u32],
    ) {
        let (group, hashes) = (self.groups[id], &request.block_hashes);
        let table = &request.groups[id].table;
        let num_hashed = hashes.len() / group.num_hashes as usize;
        assert!(positions.end <= num_hashed.min(table.len()), "full blocks have hashes");
        let group_id = GroupId(id as u32);
        let mut stored = Vec::new();
        for position in positions.clone() {
            let block = table[position];
            if block.is_null() || !group.is_reachable(position, boundaries) {
                continue;
            }
            let Some(hash) = group.hash_of(hashes, position) else { continue };
            // A part of it may have been findable.
            self.pool.forget(block);
            let num_tokens = (position as u32 + 1) * group.block_size;
            self.pool.cache(block, hash, group_id, num_tokens);
            if self.pool.journal.config().prefixes {
                stored.push(position as u32);
            }
        }
        note_stored(&mut self.pool.journal, request, (group_id, &group), positions, stored);
    }

    /// Tells which cached blocks a request has found.
    fn report_hit(&mut self, request: &Request) {
        for (id, hits) in self.hits.iter().enumerate().filter(|(_, hits)| !hits.is_empty()) {
            let group = &self.groups[id];
            // Of a hit that ends within a block, vLLM tells the whole of it if it has a hash.
            let num_hashed = request.block_hashes.len() / group.num_hashes as usize;
            let stored = (0..hits.len().min(num_hashed) as u32).collect();
            let group = (GroupId(id as u32), group);
            note_stored(&mut self.pool.journal, request, group, 0..hits.len(), stored);
        }
    }

    /// Tokens of the request's prefix that are in the cache, in all groups.
    pub fn num_cached_tokens(&self, request: &Request) -> u32 {
        let groups = self.groups.iter().zip(&request.groups).filter_map(|(group, blocks)| {
            let mut tokens = blocks.table.iter().rev().map(|&id| self.pool.hash_num_tokens(id));
            match group.config {
                KvCacheGroupConfig::CircularBuffer => None,
                KvCacheGroupConfig::State { .. } => Some(tokens.max().unwrap_or(0)),
                // Positions grow along a table: the last cached block has the longest prefix.
                _ => Some(tokens.find(|&tokens| tokens > 0).unwrap_or(0)),
            }
        });
        groups.min().unwrap_or(0)
    }

    /// Takes all blocks back; the end of the sequence is reused first.
    pub fn free(&mut self, request: &mut Request) {
        for blocks in &mut request.groups {
            self.pool.release(blocks.table.drain(..).rev());
            blocks.new_from = 0;
            blocks.num_cached = None;
            blocks.num_skipped = 0;
        }
        request.states.fill_with(StateBlocks::default);
    }

    /// Takes back blocks that no table holds any more; the last ones are reused first.
    pub(crate) fn release(&mut self, blocks: &[BlockId]) {
        self.pool.release(blocks.iter().rev().copied());
    }

    /// Removes blocks from the prefix cache, whoever holds them.
    pub(crate) fn evict(&mut self, blocks: impl Iterator<Item = BlockId>) {
        blocks.for_each(|id| self.pool.evict(id));
    }

    /// Forgets all cached prefixes, if no request holds a block. Returns whether it did.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let reset = self.pool.reset_cache();
        self.prefix_cache_stats.reset |= reset;
        reset
    }
}

/// Whether a hit ends within the last of its blocks.
fn ends_within_block(group: &KvCacheGroup, hits: &[BlockId], num_tokens: u32) -> bool {
    !hits.is_empty() && group.num_hashes > 1 && !num_tokens.is_multiple_of(group.block_size)
}

/// Notes that the blocks at `stored` of the positions that were looked at are in the cache.
fn note_stored(
    journal: &mut Journal,
    request: &Request,
    (group_id, group): (GroupId, &KvCacheGroup),
    positions: std::ops::Range<usize>,
    stored: Vec<u32>,
) {
    let num_lookahead_tokens = journal.config().num_lookahead_tokens;
    let block_size = group.block_size as usize;
    journal.note_prefix(|| {
        let hashes = &request.block_hashes;
        let tokens_behind = |&position: &u32| {
            let begin = ((position as usize + 1) * block_size).min(request.num_tokens());
            let end = (begin + num_lookahead_tokens).min(request.num_tokens());
            request.tokens()[begin..end].to_vec()
        };
        let end = (positions.end * block_size).min(request.num_tokens());
        let parent = positions.start.checked_sub(1);
        let hash_at = |position: &u32| group.hash_of(hashes, *position as usize).copied();
        Entry::Stored(Box::new(StoredBlocks {
            request: request.index(),
            group: group_id,
            block_size: group.block_size,
            hashes: stored.iter().filter_map(hash_at).collect(),
            lookahead: stored.iter().map(tokens_behind).collect(),
            positions: stored,
            parent: parent.and_then(|position| group.hash_of(hashes, position).copied()),
            tokens: request.tokens()[positions.start * block_size..end].to_vec(),
        }))
    });
}
