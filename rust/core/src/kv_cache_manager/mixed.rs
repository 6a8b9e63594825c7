//! Groups that differ: in their block size, or because one of them holds recurrent states or circular
//! buffers. What `MambaManager`, `CircularBufferManager` and the fine-grained managers of vLLM's
//! `v1/core/single_type_kv_cache_manager.py` do, and what they leave to the workers: blocks to be
//! copied and blocks to be filled with zeros.
//!
//! An example: full attention, a state that is kept at the ends of blocks, and a circular buffer, all
//! with blocks of 16 tokens; a prompt of 40 tokens, then output. 0 is the null block.
//!
//! | step | full attention | state | circular | filled with zeros |
//! | --- | --- | --- | --- | --- |
//! | tokens 1 to 32 | 1 2 | 0 3 | 4 | 1 2 |
//! | tokens 33 to 40 | 1 2 5 | 0 3 6 | 4 | 5 |
//! | token 41 | 1 2 5 | 0 0 6 | 4 | |
//! | token 49 | 1 2 5 7 | 0 0 6 8 | 4 | 7 |
//! | token 50 | 1 2 5 7 | 0 0 0 8 | 4 | |
//!
//! A second request with the same prompt finds 32 tokens: blocks 1 and 2, and the state in block 3. It
//! computes 8 tokens, into blocks of its own: `1 2 9`, `0 3 10` and `11`. Where a hit ends within a
//! block, a request gets a copy of that block.

use super::{Demand, KvCacheManager};
use crate::block_hash::BlockHash;
use crate::block_pool::BlockPool;
use crate::config::{KvCacheGroupConfig, StateMode};
use crate::ids::{BlockId, GroupId};
use crate::journal::{Entry, StoredBlocks};
use crate::request::Request;
use crate::state_group::{Checkpoint, Chunk};
use crate::step::Step;

impl KvCacheManager {
    /// A step begins: the states of the one before are there.
    pub(crate) fn begin_step(&mut self) {
        self.work.cached_this_step.clear();
    }

    /// Tells a step which blocks its workers are to copy and to fill with zeros. The copies are
    /// part of the step, so that nobody needs their ends to be kept.
    pub(crate) fn end_step(&mut self, step: &mut Step) {
        for copies in &mut self.work.copies {
            step.block_copies.append(copies);
        }
        let ends = step.block_copies.iter().flat_map(|&(from, to)| [from, to]);
        self.pool.release(ends);
        for blocks in &mut self.work.to_zero {
            step.blocks_to_zero.append(blocks);
        }
    }

    /// Of `extend_slots()`, what holds for all kinds of groups.
    pub(super) fn extend_mixed(&mut self, request: &mut Request, num_new_tokens: u32) -> bool {
        let num_computed = request.num_computed_tokens.min(self.max_model_len);
        self.remove_skipped_blocks(request, num_computed);
        let num_main_tokens = num_computed + num_new_tokens;
        let demand = Demand {
            num_tokens: (num_main_tokens + self.num_lookahead_tokens).min(self.max_model_len),
            num_main_tokens,
            num_computed_tokens: request.num_computed_tokens,
            num_local_tokens: request.num_computed_tokens,
            has_hit: false,
            for_admission: false,
        };
        let required = self.num_blocks_to_allocate(request, demand);
        if !self.has_free(required, 0) {
            return false;
        }
        self.extend_tables(request, demand);
        self.cache_final_blocks(request, num_main_tokens);
        true
    }

    /// Gives a request the blocks that it lacks in each group.
    pub(super) fn extend_tables(&mut self, request: &mut Request, demand: Demand) {
        for id in 0..self.groups.len() {
            let block_size = self.groups[id].block_size;
            match self.groups[id].config {
                KvCacheGroupConfig::State { mode: StateMode::Align, .. } => {
                    self.extend_states(request, id, demand.num_main_tokens);
                }
                KvCacheGroupConfig::State { num_speculative_blocks, .. } => {
                    let num_tokens = demand.num_tokens + block_size * num_speculative_blocks;
                    self.extend_table(request, id, num_tokens);
                }
                // One block, however long the request gets.
                KvCacheGroupConfig::CircularBuffer => self.extend_table(request, id, 1),
                _ => self.extend_table(request, id, demand.num_tokens),
            }
        }
    }

    /// Makes a table long enough for so many tokens; a block that is shared up to its middle is
    /// copied first.
    fn extend_table(&mut self, request: &mut Request, id: usize, num_tokens: u32) {
        let group = &self.groups[id];
        let blocks = &mut request.groups[id];
        blocks.new_from = blocks.table.len() as u32;
        let records = self.work.zeroes_blocks && group.config.has_block_per_tokens();
        let partial = request.states.get_mut(id).and_then(|state| state.partial.take());
        if let Some((place, source)) = partial {
            let copy = allocate_one(&mut self.pool);
            blocks.table[place] = copy;
            self.work.copies[id].push((source, copy));
            self.pool.add_owner(copy);
            if self.work.zeroes_blocks {
                self.work.to_zero[id].push(copy);
            }
        }
        let num_blocks = num_tokens.div_ceil(group.block_size) as usize;
        let num_missing = blocks.num_missing(num_blocks);
        if num_missing > 0 {
            self.pool.allocate(num_missing, &mut blocks.table);
            if records {
                self.work.to_zero[id].extend_from_slice(blocks.new_blocks());
            }
        }
    }

    /// Counts blocks as `num_blocks_of_group()` does, for states.
    pub(super) fn num_state_blocks_to_allocate(
        &mut self,
        request: &mut Request,
        id: usize,
        demand: Demand,
    ) -> i64 {
        let group = self.groups[id];
        let KvCacheGroupConfig::State { mode, num_speculative_blocks, .. } = group.config else {
            return 0;
        };
        let hits: &[BlockId] = if demand.has_hit { &self.hits[id] } else { &[] };
        let key = hits.last().and_then(|&block| self.pool.key_of(block));
        if key.is_some_and(|key| self.work.cached_this_step.contains(&key)) {
            // The state is not there yet: the request has to wait for the next step.
            return i64::from(self.pool.num_blocks()) + 1;
        }
        if mode == StateMode::Align {
            let num_evictable = i64::from(self.num_evictable(hits) as u32);
            return self.num_aligned_state_blocks(request, id, demand) + num_evictable;
        }
        let num_tokens = demand.num_tokens + group.block_size * num_speculative_blocks;
        self.num_blocks_of_group(request, id, Demand { num_tokens, ..demand })
    }

    /// The same where states are kept at the ends of chunks: without those of a hit. Notes whether
    /// one is to be kept from within this chunk.
    fn num_aligned_state_blocks(&self, request: &mut Request, id: usize, demand: Demand) -> i64 {
        let group = self.groups[id];
        let KvCacheGroupConfig::State { num_speculative_blocks, .. } = group.config else {
            return 0;
        };
        let hits: &[BlockId] = if demand.has_hit { &self.hits[id] } else { &[] };
        let num_required = demand.num_main_tokens.div_ceil(group.block_size);
        let num_held = hits.len() + request.groups[id].table.len();
        let mut num_new =
            i64::from(num_required + num_speculative_blocks) - i64::from(num_held as u32);
        let is_copied = super::ends_within_block(&group, hits, demand.num_local_tokens)
            || request.states[id].partial.is_some();
        if is_copied {
            num_new = num_new.max(0) + 1;
        }
        let checkpoint = self.checkpoint_within(request, id, demand);
        let state = &mut request.states[id];
        if !demand.for_admission {
            state.checkpoint = checkpoint;
        }
        let mut most = 1 + i64::from(is_copied) + i64::from(checkpoint.is_some());
        if !state.is_allocated {
            most += i64::from(num_speculative_blocks);
        }
        if num_new > 0 { num_new.min(most) } else { num_new }
    }

    /// The state to be kept from within the chunk that ends with these tokens, if one is.
    fn checkpoint_within(
        &self,
        request: &Request,
        id: usize,
        demand: Demand,
    ) -> Option<Checkpoint> {
        let group = &self.groups[id];
        let KvCacheGroupConfig::State { num_speculative_blocks, checkpoint_alignment, .. } =
            group.config
        else {
            return None;
        };
        checkpoint_alignment?;
        let end = demand.num_main_tokens;
        let num_tokens = self.work.states.checkpoint_position(end, group.hit_alignment);
        // Unless every block is kept, it is the prompt's end that counts.
        let is_sparse = group.retention_interval == Some(0);
        let num_prompt_tokens = request.num_prompt_tokens() as u32;
        let prefill_end = num_prompt_tokens.max(request.num_tokens() as u32 - 1);
        let chunk = Chunk {
            start: demand.num_computed_tokens,
            end,
            prefill_end: if is_sparse { prefill_end } else { 0 },
        };
        let is_valid = chunk.can_keep(
            num_tokens,
            self.hash_block_size,
            group.block_size,
            checkpoint_alignment,
        );
        let place = (end.div_ceil(group.block_size) as usize).checked_sub(2)?;
        let (table, state) = (&request.groups[id].table, &request.states[id]);
        let num_kept = table.len().saturating_sub(num_speculative_blocks as usize);
        let is_free = table.get(place).is_none_or(|block| block.is_null())
            || (state.is_allocated && place >= num_kept);
        (is_valid && num_tokens > 0 && is_free).then_some(Checkpoint { num_tokens, place })
    }

    /// Gives a request the block that the state after `num_tokens` tokens is written to, and those
    /// for speculation behind it. Positions between the former state and this one stay null.
    fn extend_states(&mut self, request: &mut Request, id: usize, num_tokens: u32) {
        let group = self.groups[id];
        let KvCacheGroupConfig::State { num_speculative_blocks, .. } = group.config else { return };
        let num_speculative = num_speculative_blocks as usize;
        let (blocks, state) = (&mut request.groups[id], &mut request.states[id]);
        let num_before = blocks.table.len();
        blocks.new_from = num_before as u32;
        let place = (num_tokens.div_ceil(group.block_size) as usize).saturating_sub(1);
        let num_required = place + 1 + num_speculative;
        let was_allocated = std::mem::replace(&mut state.is_allocated, true);
        if num_required <= num_before && state.partial.is_none() && state.checkpoint.is_none() {
            return;
        }
        if was_allocated {
            state.last_state = num_before.checked_sub(1 + num_speculative);
        } else if num_before > 0 {
            // Of a hit, the last block is the state.
            state.last_state = Some(num_before - 1);
        }
        // The block before the last gets the checkpoint.
        let num_passed = place.saturating_sub(usize::from(state.checkpoint.is_some()));
        if num_before < num_passed {
            blocks.table.resize(num_passed, BlockId::NULL);
        }
        if was_allocated {
            // Speculative blocks that lie behind move to the end.
            for at in num_before.saturating_sub(num_speculative)..num_before.min(num_passed) {
                let block = std::mem::replace(&mut blocks.table[at], BlockId::NULL);
                blocks.table.push(block);
            }
        }
        if let Some((at, source)) = state.partial.take() {
            let copy = allocate_one(&mut self.pool);
            self.work.copies[id].push((source, copy));
            if was_allocated {
                // The workers know a running request's blocks: it goes on in its own, and the copy
                // takes its place in the cache.
                self.pool.move_keys(source, copy);
                self.pool.add_owner(source);
                if let Some(key) = self.pool.key_of(copy) {
                    self.work.cached_this_step.push(key);
                }
            } else {
                blocks.table[at] = copy;
                self.pool.add_owner(copy);
            }
        }
        let num_missing = blocks.num_missing(num_required);
        if num_missing > 0 {
            self.pool.allocate(num_missing, &mut blocks.table);
        }
    }

    /// Gives back the states that the present one has replaced.
    pub(super) fn remove_former_states(&mut self, request: &mut Request, num_settled: u32) {
        for id in 0..self.groups.len() {
            let group = &self.groups[id];
            if !matches!(group.config, KvCacheGroupConfig::State { mode: StateMode::Align, .. }) {
                continue;
            }
            let table = &mut request.groups[id].table;
            let num_blocks = num_settled.div_ceil(group.block_size) as usize;
            if let Some(last) = request.states[id].last_state.filter(|last| last + 1 < num_blocks)
                && let Some(block) = table.get_mut(last)
            {
                let block = std::mem::replace(block, BlockId::NULL);
                self.pool.release(std::iter::once(block));
            }
        }
    }

    /// Of `cache_blocks()`, what holds for all kinds of groups.
    pub(super) fn cache_mixed_blocks(&mut self, request: &mut Request, num_tokens: u32) {
        let num_hashed_tokens = request.block_hashes.len() as u32 * self.hash_block_size;
        for id in 0..self.groups.len() {
            if !self.groups[id].config.is_prefix_cacheable() {
                continue;
            }
            let num_tokens = self.num_cacheable_tokens(id, num_tokens);
            let num_full = num_tokens.min(num_hashed_tokens) / self.groups[id].block_size;
            let num_cached = request.groups[id].num_cached.unwrap_or(0);
            if num_cached < num_full {
                let boundaries = self.replay_boundaries(request, id);
                let positions = num_cached as usize..num_full as usize;
                self.cache_full_blocks(request, id, positions, &boundaries);
                request.groups[id].num_cached = Some(num_full);
            }
            match self.groups[id].config {
                KvCacheGroupConfig::FullAttention if self.groups[id].num_hashes > 1 => {
                    self.cache_prompt_tail(request, id, num_tokens);
                }
                KvCacheGroupConfig::State { mode, .. } => {
                    if mode == StateMode::Align
                        && let Some(hash) = self.cache_state_tail(request, id, num_tokens)
                    {
                        self.work.cached_this_step.push((hash, GroupId(id as u32)));
                    }
                    for position in num_cached..num_full {
                        let block = request.groups[id].table[position as usize];
                        if let Some(key) = self.pool.key_of(block) {
                            self.work.cached_this_step.push(key);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// Makes the last block of a prompt findable up to where a hash ends.
    fn cache_prompt_tail(&mut self, request: &mut Request, id: usize, num_tokens: u32) {
        if request.states[id].is_tail_cached {
            return;
        }
        let group = &self.groups[id];
        let num_prompt_tokens = request.num_prompt_tokens() as u32;
        // A resend computes its last token anew; a drafter looks at all and drops more than that.
        let limit = num_prompt_tokens.saturating_sub(u32::from(!group.is_eagle));
        let num_hashes = (limit / self.hash_block_size).min(request.block_hashes.len() as u32);
        let boundary = num_hashes * self.hash_block_size;
        let place = (boundary / group.block_size) as usize;
        if boundary == 0 || boundary > num_tokens || boundary.is_multiple_of(group.block_size) {
            return;
        }
        let Some(&block) = request.groups[id].table.get(place) else { return };
        self.cache_partial(request, id, block, boundary, false);
        // Once the block is full, nothing takes its keys away any more.
        let is_full = request.groups[id].num_cached.is_some_and(|num| num as usize > place);
        request.states[id].is_tail_cached = is_full;
    }

    /// Makes the state after `num_tokens` tokens findable, or one from within the chunk that ends
    /// there. Returns what it is found by.
    fn cache_state_tail(
        &mut self,
        request: &mut Request,
        id: usize,
        num_tokens: u32,
    ) -> Option<BlockHash> {
        let (group, states) = (self.groups[id], self.work.states);
        let num_prompt_tokens = request.num_prompt_tokens() as u32;
        if let Some(checkpoint) = request.states[id].checkpoint {
            return self.cache_checkpoint(request, id, checkpoint);
        }
        if num_tokens == 0 || !num_tokens.is_multiple_of(self.hash_block_size) {
            return None;
        }
        let is_tail =
            num_tokens == states.checkpoint_position(num_prompt_tokens, self.hash_block_size);
        // While a prompt is computed: later, the state is overwritten where it is.
        let is_junction = states.keeps_junctions
            && num_tokens == request.shared_prefix_boundary
            && request.num_computed_tokens < num_tokens
            && num_tokens <= num_prompt_tokens;
        if !is_tail && !is_junction {
            return None;
        }
        let place = num_tokens.div_ceil(group.block_size) as usize - 1;
        let block = *request.groups[id].table.get(place)?;
        let is_known =
            self.work.caches_state_tails_once && self.pool.hash_num_tokens(block) == num_tokens;
        if block.is_null() || is_known {
            return None;
        }
        let hash = self.cache_partial(request, id, block, num_tokens, false)?;
        if !num_tokens.is_multiple_of(group.block_size) {
            request.states[id].partial = Some((place, block));
            request.groups[id].num_cached = Some(place as u32);
        }
        Some(hash)
    }

    /// Makes the state from within a chunk findable, if anybody will look for it.
    fn cache_checkpoint(
        &mut self,
        request: &Request,
        id: usize,
        checkpoint: Checkpoint,
    ) -> Option<BlockHash> {
        let (group, states) = (self.groups[id], self.work.states);
        let Checkpoint { num_tokens, place } = checkpoint;
        let block = *request.groups[id].table.get(place)?;
        let num_prompt_tokens = request.num_prompt_tokens() as u32;
        let is_of_prompt =
            num_tokens == states.checkpoint_position(num_prompt_tokens, group.hit_alignment);
        let is_retained = num_tokens.is_multiple_of(group.block_size)
            && group.is_reachable((num_tokens / group.block_size) as usize - 1, &[]);
        if !is_of_prompt && !is_retained && num_tokens != request.shared_prefix_boundary {
            // Whatever it was found by, it holds something else now.
            self.pool.evict(block);
            return None;
        }
        if self.pool.hash_num_tokens(block) == num_tokens {
            return None;
        }
        self.cache_partial(request, id, block, num_tokens, true)
    }

    /// Makes a block findable for a prefix that ends within it; with `is_rewritten`, it is found by
    /// nothing else. Returns what it is found by: vLLM's `cache_partial_block()`.
    fn cache_partial(
        &mut self,
        request: &Request,
        id: usize,
        block: BlockId,
        num_tokens: u32,
        is_rewritten: bool,
    ) -> Option<BlockHash> {
        let last = (num_tokens / self.hash_block_size).checked_sub(1)? as usize;
        let hash = *request.block_hashes.get(last)?;
        if block.is_null() {
            return None;
        }
        let group = GroupId(id as u32);
        let has_key = self.pool.has_key(block, &hash, group);
        if is_rewritten || (!has_key && self.pool.hash_num_tokens(block) < num_tokens) {
            self.pool.forget(block);
        }
        if has_key && !is_rewritten {
            return Some(hash);
        }
        self.pool.add_key(block, &hash, group, num_tokens);
        self.note_partial(request, group, last);
        Some(hash)
    }

    /// Notes that a prefix can be found that ends with this hash.
    fn note_partial(&mut self, request: &Request, group: GroupId, position: usize) {
        let hash_block_size = self.hash_block_size;
        let num_lookahead_tokens = self.pool.journal.config().num_lookahead_tokens;
        self.pool.journal.note_prefix(|| {
            let (hashes, tokens) = (&request.block_hashes, request.tokens());
            let begin = position * hash_block_size as usize;
            let end = begin + hash_block_size as usize;
            let lookahead_end = (end + num_lookahead_tokens).min(tokens.len());
            Entry::Stored(Box::new(StoredBlocks {
                request: request.index(),
                group,
                block_size: hash_block_size,
                positions: vec![position as u32],
                hashes: vec![hashes[position]],
                parent: position.checked_sub(1).map(|before| hashes[before]),
                tokens: tokens[begin..end].to_vec(),
                lookahead: vec![tokens[end..lookahead_end].to_vec()],
            }))
        });
    }
}

fn allocate_one(pool: &mut BlockPool) -> BlockId {
    let mut block = Vec::with_capacity(1);
    pool.allocate(1, &mut block);
    block[0]
}
