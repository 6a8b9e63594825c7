//! What differs between KV cache groups: which tokens no longer need blocks, which cached blocks
//! make a prefix usable, and which blocks are worth caching. Mirrors `FullAttentionManager`,
//! `SlidingWindowManager` and `ChunkedLocalAttentionManager` of vLLM's
//! `v1/core/single_type_kv_cache_manager.py`; left out are groups whose block size differs from the
//! hash's, and context parallelism.

use crate::block_hash::BlockHash;
use crate::block_pool::BlockPool;
use crate::config::KvCacheGroupConfig;
use crate::ids::{BlockId, GroupId};

/// A KV cache group with what it needs to know of the whole.
#[derive(Clone, Copy, Debug)]
pub struct KvCacheGroup {
    pub(crate) config: KvCacheGroupConfig,
    pub(crate) block_size: u32,
    pub(crate) retention_interval: Option<u32>,
    /// The last cached block is computed again for a drafter (EAGLE, MTP): hits end before it, and
    /// a boundary needs the block behind it, too.
    pub(crate) is_eagle: bool,
}

/// A search for a cached prefix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lookup<'a> {
    pub(crate) pool: &'a BlockPool,
    /// Hashes of the request's full blocks.
    pub(crate) hashes: &'a [BlockHash],
    /// Longest prefix that is of use, in tokens.
    pub(crate) max_tokens: u32,
    /// The last block found does not count.
    pub(crate) drop_last: bool,
    /// The groups that must all have it.
    pub(crate) groups: &'a [u32],
}

impl KvCacheGroup {
    /// Leading tokens that the next token does not attend to.
    ///
    /// With a window of 4 and 7 tokens computed, token 7 attends to tokens 4 to 7: 4 are skipped.
    #[must_use]
    pub fn num_skipped_tokens(&self, num_computed_tokens: u32) -> u32 {
        match self.config {
            KvCacheGroupConfig::FullAttention => 0,
            KvCacheGroupConfig::SlidingWindow { window, num_retained_tokens, .. } => {
                (num_computed_tokens + 1).saturating_sub(window + num_retained_tokens)
            }
            KvCacheGroupConfig::ChunkedLocal { chunk_size, .. } => {
                num_computed_tokens - num_computed_tokens % chunk_size
            }
        }
    }

    /// Leading blocks without a token that the next one attends to.
    #[must_use]
    pub fn num_skipped_blocks(&self, num_computed_tokens: u32) -> usize {
        (self.num_skipped_tokens(num_computed_tokens) / self.block_size) as usize
    }

    /// Blocks that `num_tokens` need, no more than the group ever counts for an admission.
    pub(crate) fn num_admission_blocks(&self, num_tokens: u32) -> u32 {
        let required = num_tokens.div_ceil(self.block_size);
        match self.config {
            KvCacheGroupConfig::FullAttention => required,
            KvCacheGroupConfig::SlidingWindow { max_admission_blocks, .. }
            | KvCacheGroupConfig::ChunkedLocal { max_admission_blocks, .. } => {
                required.min(max_admission_blocks)
            }
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
        let KvCacheGroupConfig::SlidingWindow { window, .. } = self.config else {
            return true;
        };
        let need = self.num_blocks_for_hit(window, self.is_eagle);
        let Some(interval) = self.retention_interval else {
            return need > 0;
        };
        // The block that is dropped lies behind the boundary.
        let shift = usize::from(self.is_eagle);
        let per_segment = (interval / self.block_size) as usize;
        let ends_segment = per_segment > 0
            && (need >= per_segment
                || (position >= shift && (position - shift) % per_segment >= per_segment - need));
        ends_segment
            || boundaries.iter().any(|tokens| {
                let end = (tokens / self.block_size) as usize + shift;
                (end.saturating_sub(need)..end).contains(&position)
            })
    }

    /// Finds the longest prefix that all of the groups have cached, and writes each one's blocks
    /// into its entry of `hits`. Returns its length in tokens.
    pub(crate) fn find_longest_hit(&self, lookup: &Lookup<'_>, hits: &mut [Vec<BlockId>]) -> u32 {
        for &group in lookup.groups {
            hits[group as usize].clear();
        }
        let max_blocks = (lookup.max_tokens / self.block_size) as usize;
        let hashes = &lookup.hashes[..max_blocks.min(lookup.hashes.len())];
        let num_blocks = match self.config {
            KvCacheGroupConfig::FullAttention => longest_run(lookup, hashes, 0, hits),
            KvCacheGroupConfig::SlidingWindow { window, .. } => {
                let need = self.num_blocks_for_hit(window, lookup.drop_last);
                longest_window_hit(lookup, hashes, need, hits)
            }
            KvCacheGroupConfig::ChunkedLocal { chunk_size, .. } => {
                let chunk_start = lookup.max_tokens - lookup.max_tokens % chunk_size;
                longest_run(lookup, hashes, (chunk_start / self.block_size) as usize, hits)
            }
        };
        let num_blocks = num_blocks.saturating_sub(usize::from(lookup.drop_last));
        truncate(lookup.groups, hits, num_blocks);
        num_blocks as u32 * self.block_size
    }
}

/// From left to right, until a block is missing. Those before `first` are not attended to, and
/// stay null.
fn longest_run(
    lookup: &Lookup<'_>,
    hashes: &[BlockHash],
    first: usize,
    hits: &mut [Vec<BlockId>],
) -> usize {
    for &group in lookup.groups {
        hits[group as usize].resize(first, BlockId::NULL);
    }
    for (position, hash) in hashes.iter().enumerate().skip(first) {
        for &group in lookup.groups {
            let Some(block) = lookup.pool.find_cached(hash, GroupId(group)) else {
                return position;
            };
            hits[group as usize].push(block);
        }
    }
    hashes.len().max(first)
}

/// Only the last `need` blocks of a prefix must be there: from right to left, until so many have
/// been found in a row. Positions before them stay null.
fn longest_window_hit(
    lookup: &Lookup<'_>,
    hashes: &[BlockHash],
    need: usize,
    hits: &mut [Vec<BlockId>],
) -> usize {
    let Lookup { pool, groups, .. } = *lookup;
    for &group in groups {
        hits[group as usize].resize(hashes.len(), BlockId::NULL);
    }
    let mut in_a_row = 0;
    for (position, hash) in hashes.iter().enumerate().rev() {
        let cached = |&group: &u32| pool.find_cached(hash, GroupId(group)).is_some();
        if !groups.iter().all(cached) {
            in_a_row = 0;
            continue;
        }
        for &group in groups {
            let block = pool.find_cached(hash, GroupId(group)).expect("found a moment ago");
            hits[group as usize][position] = block;
        }
        in_a_row += 1;
        if in_a_row >= need {
            return position + in_a_row;
        }
    }
    // A run that reaches the first block is a hit however short it is.
    in_a_row
}

fn truncate(groups: &[u32], hits: &mut [Vec<BlockId>], length: usize) {
    for &group in groups {
        hits[group as usize].truncate(length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sliding(window: u32, retention_interval: Option<u32>) -> KvCacheGroup {
        let config = KvCacheGroupConfig::SlidingWindow {
            window,
            num_retained_tokens: 0,
            max_admission_blocks: 8,
        };
        KvCacheGroup { config, block_size: 4, retention_interval, is_eagle: false }
    }

    #[test]
    fn tokens_behind_the_window_are_skipped() {
        let group = sliding(4, None);
        let skipped: Vec<u32> = (0..9).map(|n| group.num_skipped_tokens(n)).collect();
        assert_eq!(skipped, [0, 0, 0, 0, 1, 2, 3, 4, 5]);
        assert_eq!(group.num_skipped_blocks(7), 1);
    }

    #[test]
    fn sparse_retention_keeps_the_blocks_before_a_boundary() {
        let kept = |group: KvCacheGroup, boundaries: &[u32]| -> Vec<usize> {
            (0..8).filter(|&position| group.is_reachable(position, boundaries)).collect()
        };
        assert_eq!(kept(sliding(8, None), &[]), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(kept(sliding(8, Some(0)), &[]), [0; 0]);
        assert_eq!(kept(sliding(8, Some(0)), &[22]), [3, 4]);
        assert_eq!(kept(sliding(4, Some(16)), &[22]), [3, 4, 7]);
        assert_eq!(kept(sliding(1, None), &[22]), [0; 0]);
        let eagle = |group: KvCacheGroup| KvCacheGroup { is_eagle: true, ..group };
        assert_eq!(kept(eagle(sliding(8, Some(0))), &[16]), [2, 3, 4]);
        assert_eq!(kept(eagle(sliding(4, Some(16))), &[]), [3, 4, 7]);
    }

    #[test]
    fn chunks_that_are_over_are_skipped() {
        let config = KvCacheGroupConfig::ChunkedLocal { chunk_size: 8, max_admission_blocks: 8 };
        let group = KvCacheGroup { config, ..sliding(1, None) };
        let skipped: Vec<u32> = [0, 7, 8, 13, 16].map(|n| group.num_skipped_tokens(n)).to_vec();
        assert_eq!(skipped, [0, 0, 8, 8, 16]);
    }
}
