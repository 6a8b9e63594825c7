//! Blocks that are filled from elsewhere and sent there: what vLLM's `v1/core/sched/scheduler.py`
//! does for a KV connector.
//!
//! A connector may hold the KV of a waiting request's next tokens. It brings them within the step
//! that admits the request, or between steps: then the request waits with its blocks until they
//! are filled. When a request ends, its connector may keep the blocks until they are sent. Left
//! out: hits that end within a block, zeroing of blocks, hand-offs of Mamba states.

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::Scheduler;
use crate::callbacks::{Callbacks, ExternalHit, KvConnector};
use crate::ids::{BlockId, RequestIndex};
use crate::kv_cache_manager::PrefixHit;
use crate::request::{Event, FetchStage, RequestStatus};

#[derive(Clone, Debug, Default)]
pub(super) struct KvTransfer {
    /// Steps with tokens that were scheduled, and of these, steps that have come back.
    num_scheduled_steps: u64,
    num_processed_steps: u64,
    /// Blocks that have no owner any more, and the step that may still write them.
    pub(super) deferred_frees: VecDeque<(u64, Vec<BlockId>)>,
}

/// A prefix of a waiting request that need not be computed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hit {
    /// From the prefix cache.
    pub(super) local: PrefixHit,
    /// Behind that, from elsewhere.
    pub(super) external: ExternalHit,
}

impl Hit {
    pub(super) fn num_tokens(&self) -> u32 {
        self.local.num_tokens.saturating_add_signed(self.external.num_tokens)
    }
}

/// A request that was ended from outside.
#[derive(Clone, Debug)]
pub struct EndedRequest {
    /// Which one; unless it is kept, its place may be given to another from now on.
    pub index: RequestIndex,
    /// What happened to it since its last output.
    pub events: Vec<Event>,
    /// It stays, finished, until its blocks are filled or sent.
    pub is_kept: bool,
}

/// What becomes of the requests whose loads failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailedLoads {
    /// Requests that were waiting for their blocks.
    pub waiting: Vec<RequestIndex>,
    /// Requests that run: what the step has computed for them is void.
    pub running: Vec<RequestIndex>,
    /// Blocks of these that must not be found by others, in the order in which they were noted.
    pub blocks_to_evict: Vec<BlockId>,
    /// Tokens to be computed that were not to be.
    pub num_affected_tokens: u32,
}

impl Scheduler {
    /// Asks the connector what it has of a request. `None` if that is not known yet.
    pub(super) fn find_external_hit<C: KvConnector>(
        &self,
        index: RequestIndex,
        local: PrefixHit,
        callbacks: &mut C,
    ) -> Result<Option<ExternalHit>, C::Error> {
        if self.config.kv_transfer.is_none() {
            return Ok(Some(ExternalHit::default()));
        }
        let request = self.request(index);
        let hit = callbacks.find_external_hit(request, local.num_tokens)?;
        if request.skip_reading_prefix_cache {
            return Ok(Some(ExternalHit::default()));
        }
        Ok(hit)
    }

    /// Free blocks that a load must leave: what those who fill theirs already still lack, and the
    /// drafts of a step. A request that loads holds its blocks and makes no progress.
    pub(super) fn num_blocks_reserved_from_loads(&self) -> u32 {
        let config = &self.config;
        let (num_spec_tokens, num_lookahead_tokens) =
            (config.speculation.num_spec_tokens, config.speculation.num_lookahead_tokens);
        let num_step_tokens =
            if num_spec_tokens > 0 { 1 + num_spec_tokens + num_lookahead_tokens } else { 0 };
        let num_step_blocks =
            num_step_tokens.div_ceil(config.block_size) * config.groups.len() as u32;
        let requests = self.slots.iter();
        let inflight_prefills = requests.filter(|request| request.transfer.is_inflight_prefill);
        let missing = inflight_prefills.map(|request| {
            let num_tokens = (request.num_tokens() as u32).min(config.max_model_len);
            self.kv_cache.num_missing_blocks(request, num_tokens + num_step_tokens)
        });
        missing.sum::<u32>() + num_step_blocks
    }

    /// Has a request that has its blocks now wait until they are filled.
    pub(super) fn begin_load(&mut self, index: RequestIndex, num_computed_tokens: u32) {
        let request = &mut self.slots[index];
        request.status = RequestStatus::WaitingForRemoteKvs;
        request.num_computed_tokens = num_computed_tokens;
        request.transfer.is_inflight_prefill = true;
        self.set_fetch_stage(index, Some(FetchStage::InProgress));
    }

    /// Makes a request whose load has ended an ordinary waiting one; what was loaded can be found
    /// by others.
    pub(super) fn end_load(&mut self, index: RequestIndex) {
        let Self { slots, kv_cache, .. } = self;
        let request = &mut slots[index];
        request.transfer.has_arrived = false;
        let has_failed = std::mem::take(&mut request.transfer.has_failed);
        if has_failed && request.num_computed_tokens == 0 {
            kv_cache.free(request);
        } else {
            kv_cache.cache_blocks(request, request.num_computed_tokens);
        }
        // The last token is always computed, to sample the next.
        let last_token = request.num_tokens() as u32 - 1;
        request.num_computed_tokens = request.num_computed_tokens.min(last_token);
        request.status = if request.num_preemptions > 0 {
            RequestStatus::Preempted
        } else {
            RequestStatus::Waiting
        };
    }

    /// Takes note that a request's blocks are filled, as far as they ever will be. Returns whether
    /// that was all that kept a finished request: then it is gone.
    ///
    /// # Panics
    /// If the place holds no request, or one that does not wait for that.
    pub fn end_receiving(&mut self, index: RequestIndex) -> bool {
        let request = &mut self.slots[index];
        if request.status == RequestStatus::WaitingForRemoteKvs {
            request.transfer.has_arrived = true;
            self.set_fetch_stage(index, Some(FetchStage::CompletedWaiting));
            return false;
        }
        self.end_sending(index);
        true
    }

    /// Whether a request waits for blocks to be filled, or is finished and kept.
    pub fn is_receiving_or_kept(&self, index: RequestIndex) -> bool {
        let status = self.get(index).map(|it| it.status);
        status == Some(RequestStatus::WaitingForRemoteKvs) || self.is_kept(index)
    }

    /// Whether a request is finished and kept until its blocks are filled or sent.
    pub fn is_kept(&self, index: RequestIndex) -> bool {
        self.get(index).is_some_and(|request| request.status.is_finished())
    }

    /// Finished requests that are kept until their blocks are filled or sent.
    pub fn num_kept_requests(&self) -> usize {
        self.num_kept
    }

    /// Frees the blocks of a finished request that was kept for them, and its place.
    ///
    /// # Panics
    /// If the place holds no finished request.
    pub fn end_sending(&mut self, index: RequestIndex) {
        assert!(self.request(index).status.is_finished(), "its blocks are still in use");
        self.num_kept -= 1;
        self.free_blocks(index);
        self.slots.vacate(index);
    }

    /// Notes how far a request's load is, if anybody counts that.
    pub(super) fn set_fetch_stage(&mut self, index: RequestIndex, stage: Option<FetchStage>) {
        if self.config.log_stats && self.config.kv_transfer.is_some() {
            let request = &mut self.slots[index];
            request.transfer.fetch_stage = stage;
        }
    }

    /// Requests with a load, by [`FetchStage`].
    pub fn num_fetches(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for stage in self.slots.iter().filter_map(|it| it.transfer.fetch_stage) {
            counts[stage as usize] += 1;
        }
        counts
    }

    /// Ends a request that has left the queues: its status says how. Returns whether it is kept.
    ///
    /// A request that `is_loading` is kept in any case: its blocks are being written.
    pub(super) fn end_request<C: Callbacks>(
        &mut self,
        index: RequestIndex,
        is_loading: bool,
        callbacks: &mut C,
    ) -> Result<bool, C::Error> {
        if let Some(order) = &mut self.order {
            order.end(&self.slots[index]);
        }
        self.end_aux_output(index, callbacks)?;
        let mut is_kept = is_loading;
        if self.config.kv_transfer.is_some() {
            self.set_fetch_stage(index, None);
            is_kept |= self.hand_over_blocks(index, callbacks)?;
        }
        if self.config.transfers_encoder_outputs {
            is_kept |= callbacks.end_encoder_transfer(self.request(index))?;
        }
        if self.request(index).has_encoder_inputs {
            callbacks.free_encoder_inputs(index)?;
        }
        if is_kept {
            self.num_kept += 1;
        } else {
            // Now, not when it leaves its place: the order of blocks among those of others that
            // stop in the same step decides who gets them next.
            self.free_blocks(index);
        }
        Ok(is_kept)
    }

    /// Lets the connector have a look at the blocks of a request that has ended. Returns whether it
    /// keeps them for a while.
    fn hand_over_blocks<C: KvConnector>(
        &mut self,
        index: RequestIndex,
        callbacks: &mut C,
    ) -> Result<bool, C::Error> {
        let Self { slots, kv_cache, config, .. } = self;
        let request = &mut slots[index];
        request.transfer.is_inflight_prefill = false;
        kv_cache.remove_skipped_blocks(request, request.num_computed_tokens);
        let num_blocks = request.num_computed_tokens.div_ceil(config.block_size) as usize;
        let groups = request.groups.iter();
        let tables: SmallVec<[&[BlockId]; 4]> =
            groups.map(|it| &it.table[..num_blocks.min(it.table.len())]).collect();
        callbacks.finish_request(request, &tables)
    }

    /// Whether no step in flight writes the request's blocks, as far as that matters.
    pub(super) fn can_free_blocks(&self, index: RequestIndex) -> bool {
        !self.defers_frees()
            || self.request(index).transfer.last_step_seq <= self.kv_transfer.num_processed_steps
    }

    fn defers_frees(&self) -> bool {
        self.config.kv_transfer.is_some_and(|config| config.defer_block_free)
    }

    /// Takes a request's blocks back, now or when no step in flight writes them any more.
    pub(super) fn free_blocks(&mut self, index: RequestIndex) {
        let is_free = self.can_free_blocks(index);
        let Self { slots, kv_cache, kv_transfer, .. } = self;
        let request = &mut slots[index];
        if is_free {
            kv_cache.free(request);
            return;
        }
        let blocks = request.take_blocks();
        if !blocks.is_empty() {
            kv_transfer.deferred_frees.push_back((kv_transfer.num_scheduled_steps, blocks));
        }
    }

    /// Counts a step with tokens; its requests' blocks are being written from now on.
    pub(super) fn note_scheduled_step(&mut self) {
        if !self.defers_frees() || self.step.total_num_tokens == 0 {
            return;
        }
        self.kv_transfer.num_scheduled_steps += 1;
        let Self { step, slots, kv_transfer, .. } = self;
        for scheduled in step.scheduled() {
            let request = &mut slots[scheduled.index];
            request.transfer.last_step_seq = kv_transfer.num_scheduled_steps;
        }
    }

    /// Counts a step with tokens that has come back, and frees the blocks that waited for it.
    pub(super) fn note_processed_step(&mut self) {
        if !self.defers_frees() {
            return;
        }
        let KvTransfer { num_processed_steps, deferred_frees, .. } = &mut self.kv_transfer;
        *num_processed_steps += 1;
        let is_due = |(fence, _): &&(u64, Vec<BlockId>)| *fence <= *num_processed_steps;
        let num_due = deferred_frees.iter().take_while(is_due).count();
        for (_, blocks) in deferred_frees.drain(..num_due) {
            self.kv_cache.release(&blocks);
        }
    }

    /// Has the requests whose load failed as a whole compute all of it, or be failed by the
    /// caller. Returns those that are to fail.
    pub fn fail_loads(&mut self, indices: &[RequestIndex]) -> Vec<RequestIndex> {
        let recomputes = self.recomputes_load_failures();
        let mut failed = Vec::new();
        for &index in indices {
            let Some(request) = self.slots.get_mut(index) else { continue };
            if request.status != RequestStatus::WaitingForRemoteKvs {
                continue;
            }
            if recomputes {
                request.num_computed_tokens = 0;
                request.transfer.has_failed = true;
            } else {
                failed.push(index);
            }
        }
        failed
    }

    /// Whether tokens whose load failed are computed; otherwise their requests fail.
    pub fn recomputes_load_failures(&self) -> bool {
        self.config.kv_transfer.is_some_and(|config| config.recompute_load_failures)
    }

    /// Looks who is affected by blocks that could not be filled, and cuts what counts as computed
    /// before the first of them. `num_scheduled_tokens` are those of the step that noticed.
    ///
    /// # Errors
    /// What `num_scheduled_tokens` fails with.
    ///
    /// # Panics
    /// With several KV cache groups: their tables tell blocks apart by group.
    pub fn invalidate_blocks<E>(
        &mut self,
        is_invalid: &dyn Fn(BlockId) -> bool,
        num_scheduled_tokens: &dyn Fn(RequestIndex) -> Result<u32, E>,
    ) -> Result<FailedLoads, E> {
        let mut failed = FailedLoads::default();
        let waiting = self.kv_holding_waiting.in_order(&self.slots);
        let loads = |&index: &RequestIndex| {
            self.request(index).status == RequestStatus::WaitingForRemoteKvs
        };
        let loading: Vec<RequestIndex> = waiting.into_iter().filter(loads).collect();
        let mut marked = Vec::new();
        for index in loading {
            let num_scheduled = num_scheduled_tokens(index)?;
            let cut = self.cut_at_invalid(index, num_scheduled, is_invalid, &mut marked);
            if let Some(cut) = cut {
                failed.waiting.push(index);
                failed.num_affected_tokens += cut.num_affected_tokens;
            }
        }
        marked.clear();
        for at in 0..self.running.len() {
            let index = self.running[at];
            let num_scheduled = num_scheduled_tokens(index)?;
            let cut = self.cut_at_invalid(index, num_scheduled, is_invalid, &mut marked);
            if let Some(cut) = cut {
                failed.running.push(index);
                failed.num_affected_tokens += cut.num_affected_tokens;
                let table = &self.request(index).groups[0].table;
                failed.blocks_to_evict.extend_from_slice(&table[cut.first_block..]);
            }
        }
        if self.recomputes_load_failures() {
            for &index in &failed.waiting {
                let request = &mut self.slots[index];
                request.transfer.has_failed = true;
            }
        }
        Ok(failed)
    }

    /// Cuts one request before its first invalid block, if it has one. A block that is `marked`
    /// will be computed by another request, and counts as computed for this one.
    fn cut_at_invalid(
        &mut self,
        index: RequestIndex,
        num_scheduled_tokens: u32,
        is_invalid: &dyn Fn(BlockId) -> bool,
        marked: &mut Vec<BlockId>,
    ) -> Option<Cut> {
        let block_size = self.config.block_size;
        let request = &mut self.slots[index];
        assert_eq!(request.groups.len(), 1, "blocks are told apart by their numbers alone");
        let num_computed = request.num_computed_tokens.saturating_sub(num_scheduled_tokens);
        let num_blocks = num_computed.div_ceil(block_size) as usize;
        let blocks = request.groups[0].table.iter().take(num_blocks).copied();
        let mut invalid = blocks.enumerate().filter(|&(_, block)| is_invalid(block)).peekable();
        invalid.peek()?;
        let mut first = None;
        for (position, block) in invalid {
            if !marked.contains(&block) {
                marked.push(block);
                first.get_or_insert(position);
            }
        }
        let num_before = request.num_computed_tokens;
        let num_left = first.map_or(num_computed, |position| position as u32 * block_size);
        request.num_computed_tokens = num_left;
        Some(Cut {
            first_block: first.unwrap_or(request.groups[0].table.len()),
            // vLLM counts the step's own tokens where others compute what is missing.
            num_affected_tokens: match first {
                Some(_) => num_computed - num_left,
                None => num_before - num_computed,
            },
        })
    }

    /// Removes blocks from the prefix cache, whoever holds them.
    pub fn evict_blocks(&mut self, blocks: impl Iterator<Item = BlockId>) {
        self.kv_cache.evict(blocks);
    }
}

struct Cut {
    /// The first block of its table that is not to be found any more.
    first_block: usize,
    num_affected_tokens: u32,
}
