//! Blocks for requests: vLLM's `v1/core/kv_cache_manager.py` and `kv_cache_coordinator.py`.
//!
//! All groups share one pool. Left out: KV connectors, speculative look-ahead, encoder blocks,
//! KV events, groups of different block sizes.

use crate::block_pool::BlockPool;
use crate::config::SchedulerConfig;
use crate::ids::{BlockId, GroupId};
use crate::kv_cache_group::KvCacheGroup;
use crate::request::{GroupBlocks, Request};
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

/// What an allocation may take.
#[derive(Clone, Copy, Debug)]
pub enum AllocationFor {
    /// A request that runs: whatever is free.
    Running,
    /// A request to be admitted, with the hit that was just found for it.
    Admission {
        /// Its cached prefix.
        hit: PrefixHit,
        /// The whole sequence must fit, not only this step's tokens.
        full_sequence_must_fit: bool,
        /// Others run, and the watermark has to stay free for them.
        others_run: bool,
    },
}

/// Gives blocks to requests and takes them back.
#[derive(Clone, Debug)]
pub struct KvCacheManager {
    pool: BlockPool,
    groups: Vec<KvCacheGroup>,
    lookup_groups: Vec<Vec<u32>>,
    block_size: u32,
    max_model_len: u32,
    enable_caching: bool,
    watermark_blocks: u32,
    /// Blocks of the last prefix hit, by group.
    hits: Vec<Vec<BlockId>>,
    pub(crate) prefix_cache_stats: PrefixCacheStats,
}

impl KvCacheManager {
    /// A manager whose blocks are all free.
    #[must_use]
    pub fn new(config: &SchedulerConfig) -> Self {
        let group = |&config_of_group| KvCacheGroup {
            config: config_of_group,
            block_size: config.block_size,
            retention_interval: config.retention_interval,
        };
        let enable_caching = config.hasher.is_some();
        Self {
            pool: BlockPool::new(config.num_blocks, enable_caching),
            groups: config.groups.iter().map(group).collect(),
            lookup_groups: config.lookup_groups.clone(),
            block_size: config.block_size,
            max_model_len: config.max_model_len,
            enable_caching,
            watermark_blocks: config.watermark_blocks,
            hits: vec![Vec::new(); config.groups.len()],
            prefix_cache_stats: PrefixCacheStats::default(),
        }
    }

    /// The blocks themselves.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Whether the prefix cache is asked for this request.
    #[must_use]
    pub fn reads_prefix_cache(&self, request: &Request) -> bool {
        self.enable_caching && !request.skip_reading_prefix_cache
    }

    /// Looks up the longest cached prefix, at least one token short of the whole: the last token
    /// has to be computed to sample the next.
    pub fn find_prefix_hit(&mut self, request: &Request) -> PrefixHit {
        self.hits.iter_mut().for_each(Vec::clear);
        if !self.reads_prefix_cache(request) {
            return PrefixHit::default();
        }
        let max_blocks = (request.num_tokens().saturating_sub(1)) / self.block_size as usize;
        let (num_blocks, longest) = self.find_longest_hit(request, max_blocks);
        let tokens = |blocks: usize| blocks as u32 * self.block_size;
        PrefixHit {
            num_tokens: tokens(num_blocks),
            shared_prefix_boundary: if longest > num_blocks { tokens(longest) } else { 0 },
        }
    }

    /// The length that all groups agree on, and the longest that one of them has, in blocks.
    ///
    /// Each kind of group accepts the length so far or shortens it, until none does. Full
    /// attention comes first, and needs no second look: shorter prefixes are cached as well.
    fn find_longest_hit(&mut self, request: &Request, max_blocks: usize) -> (usize, usize) {
        let hashes = request.block_hashes();
        let first_is_full =
            self.groups[self.lookup_groups[0][0] as usize].config.is_full_attention();
        let one_round_suffices = self.lookup_groups.len() == 2 && first_is_full;
        let mut full_lengths: Vec<Option<usize>> = vec![None; self.lookup_groups.len()];
        let mut hit_length = max_blocks;
        let mut longest = 0;
        loop {
            let mut length = hit_length;
            for (ids, full_length) in self.lookup_groups.iter().zip(&mut full_lengths) {
                if let Some(full_length) = *full_length {
                    length = length.min(full_length);
                    continue;
                }
                let group = &self.groups[ids[0] as usize];
                length = group.find_longest_hit(&self.pool, hashes, length, ids, &mut self.hits);
                if group.config.is_full_attention() {
                    *full_length = Some(length);
                }
                longest = longest.max(length);
            }
            let settled = length >= hit_length;
            hit_length = hit_length.min(length);
            if settled || one_round_suffices {
                break;
            }
        }
        self.hits.iter_mut().for_each(|blocks| blocks.truncate(hit_length));
        // With one group there is no other that could lag behind.
        let longest = if self.groups.len() == 1 { hit_length } else { longest };
        (hit_length, longest)
    }

    /// Counts the lookup of a request that has been admitted.
    pub fn record_prefix_cache_stats(&mut self, request: &Request, num_hits: u32) {
        if self.reads_prefix_cache(request) {
            let preempted = request.num_preemptions > 0;
            self.prefix_cache_stats.record(request.num_tokens(), num_hits, preempted);
        }
    }

    /// Gives the request blocks for `num_new_tokens` more tokens, and what its prefix hit found.
    /// Returns whether there were enough; if not, the request keeps what it had, except for
    /// blocks that fell behind a window.
    pub fn allocate_slots(
        &mut self,
        request: &mut Request,
        num_new_tokens: u32,
        purpose: AllocationFor,
    ) -> bool {
        let (hit_tokens, watermark_blocks) = match purpose {
            AllocationFor::Running => (0, 0),
            AllocationFor::Admission { hit, others_run, .. } => {
                (hit.num_tokens, if others_run { self.watermark_blocks } else { 0 })
            }
        };
        let has_hit = hit_tokens > 0;
        let num_computed = (request.num_computed_tokens + hit_tokens).min(self.max_model_len);

        if let AllocationFor::Admission { full_sequence_must_fit: true, .. } = purpose {
            let num_tokens = (request.num_tokens() as u32).min(self.max_model_len);
            let required =
                self.num_blocks_to_allocate(request, num_tokens, num_computed, has_hit, true);
            if required + watermark_blocks > self.pool.num_free() {
                return false;
            }
        }

        // What steps in flight still read must stay: count only tokens that have been processed.
        let num_processed = (i64::from(num_computed) - request.num_in_flight_tokens).max(0);
        self.remove_skipped_blocks(request, u32::try_from(num_processed).unwrap_or(u32::MAX));

        let num_tokens = (num_computed + num_new_tokens).min(self.max_model_len);
        let required =
            self.num_blocks_to_allocate(request, num_tokens, num_computed, has_hit, false);
        if required + watermark_blocks > self.pool.num_free() {
            return false;
        }

        if has_hit {
            self.take_over_hit(request, num_computed);
        }
        for blocks in &mut request.groups {
            blocks.new_from = blocks.table.len();
            let num_required = num_tokens.div_ceil(self.block_size) as usize;
            let num_missing = num_required.saturating_sub(blocks.table.len());
            self.pool.allocate(num_missing as u32, &mut blocks.table);
        }
        // Tokens that are not there yet have no hash: the last step's are cached by the next.
        let num_final = (num_computed + num_new_tokens).min(request.num_tokens() as u32);
        self.cache_blocks(request, num_final);
        true
    }

    /// Blocks that have to be taken from the free ones for the request to hold `num_tokens`.
    fn num_blocks_to_allocate(
        &self,
        request: &Request,
        num_tokens: u32,
        num_computed_tokens: u32,
        has_hit: bool,
        for_admission: bool,
    ) -> u32 {
        let groups = self.groups.iter().zip(&request.groups).zip(&self.hits);
        let missing = groups.map(|((group, blocks), hits)| {
            let num_held = blocks.table.len();
            let num_required = if for_admission {
                group.num_admission_blocks(num_tokens)
            } else {
                num_tokens.div_ceil(self.block_size)
            } as usize;
            if blocks.num_cached.is_some() {
                return num_required.saturating_sub(num_held);
            }
            let hits: &[BlockId] = if has_hit { hits } else { &[] };
            let num_skipped = group.num_skipped_blocks(num_computed_tokens);
            let num_new = num_required.saturating_sub(num_skipped.max(hits.len() + num_held));
            // Blocks of the hit that nobody else uses count as free until they are taken over.
            let num_passed_over = num_skipped.saturating_sub(num_held).min(hits.len());
            let is_evictable = |&&id: &&BlockId| self.pool.is_evictable(id);
            num_new + hits[num_passed_over..].iter().filter(is_evictable).count()
        });
        missing.sum::<usize>() as u32
    }

    /// Makes the blocks of the last prefix hit the beginning of the request's tables.
    fn take_over_hit(&mut self, request: &mut Request, num_computed_tokens: u32) {
        for ((group, blocks), hits) in self.groups.iter().zip(&mut request.groups).zip(&self.hits) {
            debug_assert!(blocks.table.is_empty() && blocks.num_cached.is_none());
            let num_skipped = group.num_skipped_blocks(num_computed_tokens);
            let kept = &hits[num_skipped.min(hits.len())..];
            self.pool.touch(kept);
            blocks.table.resize(num_skipped, BlockId::NULL);
            blocks.table.extend_from_slice(kept);
            blocks.num_cached = Some(blocks.table.len());
        }
    }

    /// Gives back the blocks that lie before every window.
    fn remove_skipped_blocks(&mut self, request: &mut Request, num_processed_tokens: u32) {
        for (group, GroupBlocks { table, .. }) in self.groups.iter().zip(&mut request.groups) {
            let end = group.num_skipped_blocks(num_processed_tokens).min(table.len());
            // Those before the last null block were given back by an earlier call.
            let begin = table[..end].iter().rposition(|id| id.is_null()).map_or(0, |at| at + 1);
            if begin < end {
                self.pool.release(table[begin..end].iter().rev().copied());
                table[begin..end].fill(BlockId::NULL);
            }
        }
    }

    /// Makes the request's full blocks among its first `num_tokens` tokens findable.
    ///
    /// # Panics
    /// If a full block has no hash or no place in a table.
    pub fn cache_blocks(&mut self, request: &mut Request, num_tokens: u32) {
        if !self.enable_caching {
            return;
        }
        let num_full = (num_tokens / self.block_size) as usize;
        if request.groups.iter().all(|blocks| blocks.num_cached.unwrap_or(0) >= num_full) {
            return;
        }
        // The last token of a prompt is always computed, so a resend resumes before it.
        let last_prompt_token = request.num_prompt_tokens().saturating_sub(1) as u32;
        let boundaries = [last_prompt_token, request.shared_prefix_boundary];
        let hashes = request.block_hashes.as_slice();
        let groups = self.groups.iter().zip(&mut request.groups);
        for (id, (group, blocks)) in groups.enumerate() {
            let num_cached = blocks.num_cached.unwrap_or(0);
            if num_cached >= num_full {
                continue;
            }
            assert!(num_full <= hashes.len().min(blocks.table.len()), "full blocks have hashes");
            let full = blocks.table.iter().zip(hashes).take(num_full).enumerate().skip(num_cached);
            for (position, (&block, hash)) in full {
                if !block.is_null() && group.is_reachable(position, &boundaries) {
                    let num_tokens = (position as u32 + 1) * self.block_size;
                    self.pool.cache(block, hash, GroupId(id as u32), num_tokens);
                }
            }
            blocks.num_cached = Some(num_full);
        }
    }

    /// Tokens of the request's prefix that are in the cache, in all groups.
    #[must_use]
    pub fn num_cached_tokens(&self, request: &Request) -> u32 {
        let groups = request.groups.iter().map(|blocks| {
            let mut tokens = blocks.table.iter().rev().map(|&id| self.pool.hash_num_tokens(id));
            // Positions grow along a table: the last cached block has the longest prefix.
            tokens.find(|&tokens| tokens > 0).unwrap_or(0)
        });
        groups.min().unwrap_or(0)
    }

    /// Takes all blocks back; the end of the sequence is reused first.
    pub fn free(&mut self, request: &mut Request) {
        for blocks in &mut request.groups {
            self.pool.release(blocks.table.drain(..).rev());
            blocks.new_from = 0;
            blocks.num_cached = None;
        }
    }

    /// Forgets all cached prefixes, if no request holds a block. Returns whether it did.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let reset = self.pool.reset_cache();
        self.prefix_cache_stats.reset |= reset;
        reset
    }
}
