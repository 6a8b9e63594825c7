//! What differs between KV cache groups: which tokens no longer need blocks, which cached blocks
//! make a prefix usable, and which blocks are worth caching. Mirrors `FullAttentionManager`,
//! `SlidingWindowManager`, `ChunkedLocalAttentionManager`, `MambaManager` and
//! `CircularBufferManager` of vLLM's `v1/core/single_type_kv_cache_manager.py`; left out is context
//! parallelism. How states move from block to block is in `state_group.rs`.

use crate::block_hash::BlockHash;
use crate::block_pool::BlockPool;
use crate::config::KvCacheGroupConfig;
use crate::ids::{BlockId, GroupId};

/// A KV cache group with what it needs to know of the whole.
#[derive(Clone, Copy, Debug)]
pub struct KvCacheGroup {
    pub(crate) config: KvCacheGroupConfig,
    pub(crate) block_size: u32,
    /// Hashes a block.
    pub(crate) num_hashes: u32,
    /// Hits end at multiples of so many tokens: less than a block if they may end within one.
    pub(crate) hit_alignment: u32,
    pub(crate) retention_interval: Option<u32>,
    /// The last cached block is computed again for a drafter (EAGLE, MTP): hits end before it, and
    /// a boundary needs the block behind it, too.
    pub(crate) is_eagle: bool,
}

/// A search for a cached prefix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lookup<'a> {
    pub(crate) pool: &'a BlockPool,
    /// Hashes of the request's sequence.
    pub(crate) hashes: &'a [BlockHash],
    /// Longest prefix that is of use, in tokens.
    pub(crate) max_tokens: u32,
    /// The last block found does not count.
    pub(crate) drop_last: bool,
    pub(crate) groups: &'a [u32],
}

impl KvCacheGroup {
    /// Leading tokens that the next token does not attend to.
    ///
    /// With a window of 4 and 7 tokens computed, token 7 attends to tokens 4 to 7: 4 are skipped.
    pub fn num_skipped_tokens(&self, num_computed_tokens: u32) -> u32 {
        match self.config {
            KvCacheGroupConfig::FullAttention | KvCacheGroupConfig::CircularBuffer => 0,
            KvCacheGroupConfig::SlidingWindow { window, num_retained_tokens, .. } => {
                (num_computed_tokens + 1).saturating_sub(window + num_retained_tokens)
            }
            KvCacheGroupConfig::ChunkedLocal { chunk_size, .. } => {
                num_computed_tokens - num_computed_tokens % chunk_size
            }
            KvCacheGroupConfig::State { .. } => num_computed_tokens.saturating_sub(1),
        }
    }

    /// The hash of a block of a sequence, or `None` if it has none yet.
    pub(crate) fn hash_of<'a>(
        &self,
        hashes: &'a [BlockHash],
        position: usize,
    ) -> Option<&'a BlockHash> {
        hashes.get((position + 1) * self.num_hashes as usize - 1)
    }

    /// Whether hits may end within a block.
    fn has_partial_hits(&self) -> bool {
        self.hit_alignment < self.block_size
    }

    /// Leading blocks without a token that the next one attends to.
    pub fn num_skipped_blocks(&self, num_computed_tokens: u32) -> usize {
        (self.num_skipped_tokens(num_computed_tokens) / self.block_size) as usize
    }

    /// Blocks that `num_tokens` need, no more than the group ever counts for an admission.
    pub(crate) fn num_admission_blocks(&self, num_tokens: u32) -> u32 {
        let required = num_tokens.div_ceil(self.block_size);
        match self.config {
            KvCacheGroupConfig::FullAttention | KvCacheGroupConfig::State { .. } => required,
            KvCacheGroupConfig::SlidingWindow { max_admission_blocks, .. }
            | KvCacheGroupConfig::ChunkedLocal { max_admission_blocks, .. } => {
                required.min(max_admission_blocks)
            }
            KvCacheGroupConfig::CircularBuffer => 1,
        }
    }

    /// Consecutive cached blocks up to a position that let a request go on from there, the block
    /// that is dropped again included.
    fn num_blocks_for_hit(&self, window: u32, drop_last: bool) -> usize {
        (window - 1).div_ceil(self.block_size) as usize + usize::from(drop_last)
    }

    /// Whether block `position` can ever be part of a hit, and so is worth caching. `boundaries`
    /// are the tokens at which a later request may take up this prompt.
    pub(crate) fn is_reachable(&self, position: usize, boundaries: &[u32]) -> bool {
        match self.config {
            KvCacheGroupConfig::SlidingWindow { window, .. } => {
                self.is_in_reachable_window(window, position, boundaries)
            }
            KvCacheGroupConfig::State { .. } => self.is_reachable_state(position, boundaries),
            _ => true,
        }
    }

    /// The block that ends where a hit does, `tokens` being where it could at most.
    fn end_of_hit(&self, tokens: u32) -> usize {
        ((tokens - tokens % self.hit_alignment) / self.block_size) as usize
    }

    fn is_in_reachable_window(&self, window: u32, position: usize, boundaries: &[u32]) -> bool {
        if !self.hit_alignment.is_multiple_of(self.block_size) {
            return true;
        }
        let need = self.num_blocks_for_hit(window, self.is_eagle);
        // The block that is dropped lies behind the boundary.
        let shift = usize::from(self.is_eagle);
        let segment = self.retention_interval.unwrap_or(self.hit_alignment);
        let per_segment = (segment / self.block_size) as usize;
        let ends_segment = per_segment > 0
            && (need >= per_segment
                || (position >= shift && (position - shift) % per_segment >= per_segment - need));
        let mut boundaries =
            if self.retention_interval.is_some() { boundaries } else { &[] }.iter();
        ends_segment
            || boundaries.any(|&tokens| {
                let end = self.end_of_hit(tokens) + shift;
                (end.saturating_sub(need)..end).contains(&position)
            })
    }

    /// A hit needs the one state at its end.
    fn is_reachable_state(&self, position: usize, boundaries: &[u32]) -> bool {
        let Some(interval) = self.retention_interval else {
            return true;
        };
        let per_segment = (interval / self.block_size) as usize;
        let ends_segment =
            interval > 0 && (per_segment <= 1 || (position + 1).is_multiple_of(per_segment));
        ends_segment || boundaries.iter().any(|&tokens| self.end_of_hit(tokens) == position + 1)
    }

    /// Finds the longest prefix that all of the groups have cached, and writes each one's blocks
    /// into its entry of `hits`. Returns its length in tokens.
    pub(crate) fn find_longest_hit(&self, lookup: &Lookup<'_>, hits: &mut [Vec<BlockId>]) -> u32 {
        for &group in lookup.groups {
            hits[group as usize].clear();
        }
        let num_tokens = match self.config {
            KvCacheGroupConfig::FullAttention => self.longest_run(lookup, 0, hits),
            KvCacheGroupConfig::SlidingWindow { window, .. } => {
                let need = self.num_blocks_for_hit(window, lookup.drop_last);
                self.longest_window_hit(lookup, need, hits)
            }
            KvCacheGroupConfig::ChunkedLocal { chunk_size, .. } => {
                let chunk_start = lookup.max_tokens - lookup.max_tokens % chunk_size;
                self.longest_run(lookup, (chunk_start / self.block_size) as usize, hits)
            }
            KvCacheGroupConfig::State { .. } => self.last_state_hit(lookup, hits),
            // It is not asked: the hits of the others go without it.
            KvCacheGroupConfig::CircularBuffer => 0,
        };
        for &group in lookup.groups {
            hits[group as usize].truncate(num_tokens.div_ceil(self.block_size) as usize);
        }
        num_tokens
    }

    /// Full blocks that a hit may have.
    fn max_blocks(&self, lookup: &Lookup<'_>) -> usize {
        let num_hashed = lookup.hashes.len() / self.num_hashes as usize;
        num_hashed.min((lookup.max_tokens / self.block_size) as usize)
    }

    /// From left to right, until a block is missing; then as far into that block as somebody has
    /// got. Those before `first` are not attended to, and stay null.
    fn longest_run(&self, lookup: &Lookup<'_>, first: usize, hits: &mut [Vec<BlockId>]) -> u32 {
        for &group in lookup.groups {
            hits[group as usize].resize(first, BlockId::NULL);
        }
        let max_blocks = self.max_blocks(lookup);
        let mut num_blocks = first;
        while num_blocks < max_blocks {
            let hash = self.hash_of(lookup.hashes, num_blocks);
            if !hash.is_some_and(|hash| lookup.push_cached(hash, hits)) {
                break;
            }
            num_blocks += 1;
        }
        let mut num_tokens = num_blocks as u32 * self.block_size;
        if self.has_partial_hits() {
            for &group in lookup.groups {
                hits[group as usize].truncate(num_blocks);
            }
            num_tokens = self.extend_into_block(lookup, num_tokens, hits);
        }
        if lookup.drop_last {
            num_tokens = num_tokens.saturating_sub(self.hit_alignment.min(self.block_size));
        }
        num_tokens - num_tokens % self.hit_alignment
    }

    /// Looks how much of the block behind a hit is cached.
    fn extend_into_block(
        &self,
        lookup: &Lookup<'_>,
        num_tokens: u32,
        hits: &mut [Vec<BlockId>],
    ) -> u32 {
        let unit = self.hit_alignment;
        let max_tokens = (num_tokens + self.block_size - unit).min(lookup.max_tokens);
        let begin = (num_tokens / unit) as usize;
        let end = ((max_tokens / unit) as usize).min(lookup.hashes.len());
        let is_cached = |&at: &usize| lookup.is_cached(&lookup.hashes[at]);
        let Some(at) = (begin..end).rev().find(is_cached) else { return num_tokens };
        lookup.push_cached(&lookup.hashes[at], hits);
        (at as u32 + 1) * unit
    }

    /// Only the last `need` blocks of a prefix must be there: from right to left, until so many
    /// have been found in a row. Positions before them stay null.
    fn longest_window_hit(
        &self,
        lookup: &Lookup<'_>,
        need: usize,
        hits: &mut [Vec<BlockId>],
    ) -> u32 {
        let dropped = usize::from(lookup.drop_last);
        let num_tokens = |num_blocks: usize| num_blocks as u32 * self.block_size;
        let is_aligned = |num_blocks: usize| {
            self.block_size == self.hit_alignment
                || num_tokens(num_blocks).is_multiple_of(self.hit_alignment)
        };
        let max_blocks = self.max_blocks(lookup);
        for &group in lookup.groups {
            hits[group as usize].resize(max_blocks, BlockId::NULL);
        }
        let (mut in_a_row, mut found) = (0, None);
        for position in (0..max_blocks).rev() {
            let hash = self.hash_of(lookup.hashes, position);
            let Some(hash) = hash.filter(|hash| lookup.is_cached(hash)) else {
                in_a_row = 0;
                continue;
            };
            if in_a_row == 0 && !is_aligned(position + 1 - dropped) {
                continue;
            }
            for &group in lookup.groups {
                let block = lookup.pool.find_cached(hash, GroupId(group));
                hits[group as usize][position] = block.unwrap_or(BlockId::NULL);
            }
            in_a_row += 1;
            if in_a_row >= need {
                found = Some(position + in_a_row);
                break;
            }
        }
        // A run that reaches the first block is a hit however short it is.
        let mut num_blocks = found.unwrap_or(in_a_row);
        while found.is_none() && !is_aligned(num_blocks) {
            num_blocks -= 1;
        }
        num_blocks = num_blocks.saturating_sub(dropped);
        while lookup.drop_last && !is_aligned(num_blocks) {
            num_blocks -= 1;
        }
        num_tokens(num_blocks)
    }

    /// The last state that is cached makes a hit, whatever is before it.
    fn last_state_hit(&self, lookup: &Lookup<'_>, hits: &mut [Vec<BlockId>]) -> u32 {
        // In hashes: where a hit may end.
        let unit = if self.has_partial_hits() { 1 } else { self.num_hashes as usize };
        let num_tokens_of_hash = self.block_size / self.num_hashes;
        let max_hashes = (lookup.max_tokens / num_tokens_of_hash) as usize;
        let num_units = max_hashes.min(lookup.hashes.len()) / unit;
        for num_hashes in (1..=num_units).rev().map(|units| units * unit) {
            let num_tokens = num_hashes as u32 * num_tokens_of_hash;
            let hash = &lookup.hashes[num_hashes - 1];
            if !num_tokens.is_multiple_of(self.hit_alignment) || !lookup.is_cached(hash) {
                continue;
            }
            for &group in lookup.groups {
                let num_skipped = num_tokens.div_ceil(self.block_size) as usize - 1;
                hits[group as usize].resize(num_skipped, BlockId::NULL);
            }
            lookup.push_cached(hash, hits);
            return num_tokens;
        }
        0
    }
}

impl Lookup<'_> {
    fn is_cached(&self, hash: &BlockHash) -> bool {
        self.groups.iter().all(|&group| self.pool.find_cached(hash, GroupId(group)).is_some())
    }

    /// Adds a block to each group's hit. Returns whether all have one; if not, some have got theirs.
    fn push_cached(&self, hash: &BlockHash, hits: &mut [Vec<BlockId>]) -> bool {
        self.groups.iter().all(|&group| {
            let block = self.pool.find_cached(hash, GroupId(group));
            hits[group as usize].extend(block);
            block.is_some()
        })
    }
}
