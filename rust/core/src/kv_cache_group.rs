//! What differs between KV cache groups: which tokens no longer need blocks, which cached blocks
//! make a prefix usable, and which blocks are worth caching. Mirrors `FullAttentionManager` and
//! `SlidingWindowManager` of vLLM's `v1/core/single_type_kv_cache_manager.py`; left out are
//! groups whose block size differs from the hash's, EAGLE and context parallelism.

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
}

impl KvCacheGroup {
    /// Leading tokens that the next token does not attend to.
    ///
    /// With a window of 4 and 7 tokens computed, token 7 attends to tokens 4 to 7: 4 are skipped.
    #[must_use]
    pub fn num_skipped_tokens(&self, num_computed_tokens: u32) -> u32 {
        match self.config {
            KvCacheGroupConfig::FullAttention => 0,
            KvCacheGroupConfig::SlidingWindow { window, .. } => {
                (num_computed_tokens + 1).saturating_sub(window)
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
            KvCacheGroupConfig::SlidingWindow { max_admission_blocks, .. } => {
                required.min(max_admission_blocks)
            }
        }
    }

    /// Consecutive cached blocks before a position that let a request go on from there.
    fn num_blocks_for_hit(&self, window: u32) -> usize {
        (window - 1).div_ceil(self.block_size) as usize
    }

    /// Whether block `position` can ever be part of a hit, and so is worth caching. `boundaries`
    /// are the tokens at which a later request may take up this prompt.
    pub(crate) fn is_reachable(&self, position: usize, boundaries: &[u32]) -> bool {
        let KvCacheGroupConfig::SlidingWindow { window, .. } = self.config else {
            return true;
        };
        let need = self.num_blocks_for_hit(window);
        let Some(interval) = self.retention_interval else {
            return need > 0;
        };
        let per_segment = (interval / self.block_size) as usize;
        let ends_segment = per_segment > 0
            && (need >= per_segment || position % per_segment >= per_segment - need);
        ends_segment
            || boundaries.iter().any(|tokens| {
                let end = (tokens / self.block_size) as usize;
                (end.saturating_sub(need)..end).contains(&position)
            })
    }

    /// Finds the longest prefix of at most `max_blocks` blocks that all of `groups` have cached,
    /// and writes each one's blocks into its entry of `hits`. Returns the length in blocks.
    pub(crate) fn find_longest_hit(
        &self,
        pool: &BlockPool,
        hashes: &[BlockHash],
        max_blocks: usize,
        groups: &[u32],
        hits: &mut [Vec<BlockId>],
    ) -> usize {
        let hashes = &hashes[..max_blocks.min(hashes.len())];
        for &group in groups {
            hits[group as usize].clear();
        }
        match self.config {
            KvCacheGroupConfig::FullAttention => longest_full_hit(pool, hashes, groups, hits),
            KvCacheGroupConfig::SlidingWindow { window, .. } => {
                longest_window_hit(pool, hashes, self.num_blocks_for_hit(window), groups, hits)
            }
        }
    }
}

/// A block that is missing is missing for all longer prefixes too: from left to right.
fn longest_full_hit(
    pool: &BlockPool,
    hashes: &[BlockHash],
    groups: &[u32],
    hits: &mut [Vec<BlockId>],
) -> usize {
    for (position, hash) in hashes.iter().enumerate() {
        for &group in groups {
            let Some(block) = pool.find_cached(hash, GroupId(group)) else {
                truncate(groups, hits, position);
                return position;
            };
            hits[group as usize].push(block);
        }
    }
    hashes.len()
}

/// Only the last `need` blocks of a prefix must be there: from right to left, until so many have
/// been found in a row. Positions before them stay null.
fn longest_window_hit(
    pool: &BlockPool,
    hashes: &[BlockHash],
    need: usize,
    groups: &[u32],
    hits: &mut [Vec<BlockId>],
) -> usize {
    for &group in groups {
        hits[group as usize].resize(hashes.len(), BlockId::NULL);
    }
    let mut in_a_row = 0;
    let mut length = None;
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
            length = Some(position + in_a_row);
            break;
        }
    }
    // A run that reaches the first block is a hit however short it is.
    let length = length.unwrap_or(in_a_row);
    truncate(groups, hits, length);
    length
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
        let config = KvCacheGroupConfig::SlidingWindow { window, max_admission_blocks: 8 };
        KvCacheGroup { config, block_size: 4, retention_interval }
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
    }
}
