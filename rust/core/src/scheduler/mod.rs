//! Requests, their queues and their blocks: the state of vLLM's `Scheduler`, and how requests come
//! and go.
//!
//! `policy.rs` decides what a step computes, `update.rs` takes in what the model runner brought,
//! `demand.rs` shows what is asked of the next step, `waits.rs` what requests wait for, and
//! `transfers.rs`, `encoder_transfer.rs` and `aux_output.rs` are the parts of both that a KV
//! connector, an EC connector and the collector of auxiliary output have.

mod aux_output;
mod demand;
mod encoder_transfer;
mod policy;
mod transfers;
mod update;
mod waits;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::callbacks::Callbacks;
use crate::config::{Policy, RequestSpecMetrics, SchedulerConfig};
use crate::ids::RequestIndex;
use crate::journal::Entry as JournalEntry;
use crate::kv_cache_manager::KvCacheManager;
use crate::order::{Order, OrderSettings};
use crate::request::{
    EventKind, FetchStage, NewRequest, NumGroups, Request, RequestStatus, SessionInput,
};
use crate::request_queue::{RequestQueue, has};
use crate::slots::Slots;
use crate::state_group::ChunkAligner;
use crate::stats::{RequestSpecStats, SchedulerStats, SpecDecodingStats};
use crate::step::Step;
use crate::wait_reason::{WaitCounts, WaitReason};

pub(crate) use self::demand::attention_of;
pub use self::demand::{Demand, Prompt, StepLoad};
pub use self::transfers::{EndedRequest, FailedLoads};
pub use self::update::{RequestNews, RequestOutput, ScheduledOutput};
pub use self::waits::{BlockHolders, HeadOfQueue};

use self::transfers::KvTransfer;

/// Whether requests are scheduled at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PauseState {
    #[default]
    Unpaused,
    /// Running requests go on, waiting ones stay.
    PausedNew,
    PausedAll,
}

/// Requests, their queues and their blocks.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    kv_cache: KvCacheManager,
    slots: Slots,
    waiting: RequestQueue,
    /// Waiting requests that hold blocks. They go first: one that holds blocks must not wait for
    /// one that finds none.
    kv_holding_waiting: RequestQueue,
    running: Vec<RequestIndex>,
    /// Sessions without input. They keep their places in the model runner's batch.
    num_waiting_for_input: usize,
    /// Waiting requests that were skipped or wait for more than their turn.
    deferred: WaitCounts,
    /// Why the last step admitted nobody more; `None` if nobody was left.
    held_up_by: Option<WaitReason>,
    /// Requests that have to be scheduled by a time, and haven't been. A time is given by its bits,
    /// which sort as times from 0 on do.
    queue_deadlines: BTreeSet<(u64, RequestIndex)>,
    /// Finished requests that stay until their blocks are filled or sent.
    num_kept: usize,
    /// Waiting requests that this step has skipped, out of their queues until it is decided.
    skipped: Vec<RequestIndex>,
    pause_state: PauseState,
    /// Counts calls of `schedule()`.
    current_step: u64,
    /// Requests of the step before may continue in the batch: not if all were preempted since.
    has_previous_batch: bool,
    /// Requests were left waiting for room by the last step that deferred no prefills.
    prefill_capacity_bound: bool,
    /// Counts the steps that scheduled tokens.
    num_executed_steps: u64,
    /// Of these, the number of the last one that computed prompts.
    last_prefill_step: Option<u64>,
    /// When somebody looked last, a prompt was running.
    had_prompts: bool,
    step: Step,
    /// Gives arriving requests their priorities; `None` for what their clients ask for.
    order: Option<Order>,
    /// Cuts chunks of prompts where states are to be kept.
    chunk_aligner: Option<ChunkAligner>,
    kv_transfer: KvTransfer,
    /// How the drafts of the last step that came back fared.
    spec_decoding_stats: Option<SpecDecodingStats>,
}

impl Scheduler {
    /// A scheduler without requests.
    ///
    /// # Panics
    /// If the configuration contradicts itself.
    pub fn new(config: SchedulerConfig) -> Self {
        config.check();
        Self {
            kv_cache: KvCacheManager::new(&config),
            slots: Slots::default(),
            waiting: RequestQueue::new(config.policy),
            kv_holding_waiting: RequestQueue::new(config.policy),
            running: Vec::new(),
            num_waiting_for_input: 0,
            deferred: WaitCounts::default(),
            held_up_by: None,
            queue_deadlines: BTreeSet::new(),
            num_kept: 0,
            skipped: Vec::new(),
            pause_state: PauseState::default(),
            current_step: 0,
            has_previous_batch: false,
            prefill_capacity_bound: false,
            num_executed_steps: 0,
            last_prefill_step: None,
            had_prompts: false,
            step: Step::default(),
            order: None,
            chunk_aligner: ChunkAligner::new(&config),
            kv_transfer: KvTransfer::default(),
            spec_decoding_stats: None,
            config,
        }
    }

    /// Puts a request into the queue and returns its place.
    ///
    /// # Panics
    /// If the request has no token.
    pub fn add_request(&mut self, new: NewRequest, now: f64) -> RequestIndex {
        assert!(!new.tokens.is_empty(), "a request has at least one token");
        let index = self.slots.next_place();
        let expects_remote_prefill = new.expects_remote_prefill;
        let hints = (Arc::clone(&new.tenant), new.ttft_s);
        let (num_tables, num_states) = (self.config.groups.len(), self.kv_cache.num_state_blocks());
        let mut request = Request::new(new, index, NumGroups { num_tables, num_states });
        if let Some(hasher) = &self.config.hasher {
            request.hash_blocks(hasher);
        }
        let speculation = &self.config.speculation;
        if speculation.request_metrics != RequestSpecMetrics::None {
            let stats = RequestSpecStats::new(speculation.num_spec_tokens);
            request.spec_stats = Some(Box::new(stats));
        }
        if self.config.log_stats {
            request.record_event(EventKind::Queued, now);
        }
        self.slots.insert(request);
        self.rank(index, hints, now);
        self.enqueue(index);
        if expects_remote_prefill {
            self.set_fetch_stage(index, Some(FetchStage::WaitingToStart));
        }
        index
    }

    /// Has requests that arrive from now on ordered by more than vLLM's policies.
    ///
    /// # Panics
    /// If the policy isn't [`Policy::Priority`], or there are requests.
    pub fn order_by(&mut self, settings: OrderSettings) {
        assert_eq!(self.config.policy, Policy::Priority, "the order is one of priorities");
        assert!(self.slots.iter().next().is_none(), "the order begins with the first request");
        self.order = Some(Order::new(settings));
    }

    /// Gives a request that has arrived its priority.
    fn rank(&mut self, index: RequestIndex, hints: (Arc<str>, Option<f64>), now: f64) {
        let Some(order) = &mut self.order else { return };
        let request = &mut self.slots[index];
        let hit = self.kv_cache.peek_prefix_hit(request);
        request.priority = order.rank(request, hints, hit.num_tokens, now);
        request.expected_hit = Some(hit);
    }

    /// Whether requests get their priorities here.
    pub fn is_ordered(&self) -> bool {
        self.order.is_some()
    }

    /// The tenants that have requests, if requests are ordered; of each, how many were never
    /// scheduled, and how many have not ended.
    pub fn tenants(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        self.order.iter().flat_map(Order::tenants)
    }

    /// Puts a request that waits into its queue.
    fn enqueue(&mut self, index: RequestIndex) {
        if let Some(reason) = waits::reason_of_status(self.request(index).status) {
            self.defer(index, reason);
        }
        let (queue, slots) = self.queue_of(index);
        queue.add(index, slots);
    }

    /// The queue that a waiting request belongs into, and what it orders requests by.
    fn queue_of(&mut self, index: RequestIndex) -> (&mut RequestQueue, &Slots) {
        let holds_blocks = self.request(index).holds_blocks();
        let queue = if holds_blocks { &mut self.kv_holding_waiting } else { &mut self.waiting };
        (queue, &self.slots)
    }

    /// Has a session that waits for input go on.
    ///
    /// # Panics
    /// If it does not wait for input.
    pub fn continue_session(&mut self, index: RequestIndex, input: SessionInput) {
        assert_eq!(self.request(index).status, RequestStatus::WaitingForInput);
        self.num_waiting_for_input -= 1;
        self.take_input(index, input);
        // It is in one of them.
        self.waiting.note_arrival(index, &self.slots);
        self.kv_holding_waiting.note_arrival(index, &self.slots);
    }

    /// Gives a session its next input, wherever it is.
    fn take_input(&mut self, index: RequestIndex, input: SessionInput) {
        let request = &mut self.slots[index];
        let now = input.now;
        request.continue_with(input, self.config.hasher.as_ref());
        request.status = RequestStatus::Waiting;
        // A turn that stopped among accepted drafts has more computed than it has tokens; vLLM
        // fails an assertion if the input doesn't make up for that.
        let last_token = request.num_tokens() as u32 - 1;
        request.num_computed_tokens = request.num_computed_tokens.min(last_token);
        if self.config.log_stats {
            request.record_event(EventKind::Queued, now);
        }
        if request.deferred_by.is_some() {
            self.defer(index, WaitReason::Turn);
        }
    }

    /// Has a session wait for input whose turn has ended.
    fn await_input(&mut self, index: RequestIndex) {
        let request = &mut self.slots[index];
        request.status = RequestStatus::WaitingForInput;
        self.num_waiting_for_input += 1;
    }

    /// Takes the drafts for the next step of a request; those for a part of a prompt are dropped.
    pub fn set_drafts(&mut self, index: RequestIndex, drafts: &[i32]) {
        let Some(request) = self.slots.get_mut(index) else { return };
        if request.status.is_finished() {
            return;
        }
        request.drafts.clear();
        if !request.is_prefill_chunk {
            request.drafts.extend_from_slice(drafts);
        }
    }

    /// Ends requests from outside: aborted by their client, or failed. Places that hold no request
    /// are ignored. Returns the requests that were ended, in the given order.
    ///
    /// # Errors
    /// What the callbacks fail with; the scheduler is not to be used after that.
    pub fn finish_requests<C: Callbacks>(
        &mut self,
        indices: &[RequestIndex],
        status: RequestStatus,
        callbacks: &mut C,
    ) -> Result<Vec<EndedRequest>, C::Error> {
        debug_assert!(status.is_finished());
        let mut running = Vec::new();
        let mut waiting = Vec::new();
        for &index in indices {
            match self.get(index).map(|it| it.status) {
                Some(RequestStatus::Running) => running.push(index),
                Some(status) if !status.is_finished() => waiting.push(index),
                _ => {}
            }
        }
        self.remove_running(&running);
        self.remove_waiting(&waiting);
        let mut ended = Vec::with_capacity(indices.len());
        for &index in indices {
            let Some(request) = self.slots.get_mut(index) else { continue };
            // An id may be given twice.
            if request.status.is_finished() {
                continue;
            }
            let was = std::mem::replace(&mut request.status, status);
            let is_loading =
                was == RequestStatus::WaitingForRemoteKvs && !request.transfer.has_arrived;
            let events = std::mem::take(&mut request.events);
            self.num_waiting_for_input -= usize::from(was == RequestStatus::WaitingForInput);
            let is_kept = self.end_request(index, is_loading, callbacks)?;
            if !is_kept {
                self.slots.vacate(index);
            }
            ended.push(EndedRequest { index, events, is_kept });
        }
        Ok(ended)
    }

    fn remove_running(&mut self, indices: &[RequestIndex]) {
        match indices {
            [] => {}
            [one] => self.running.retain(|index| index != one),
            many => {
                let is_leaving = has(many);
                self.running.retain(|index| !is_leaving(index));
            }
        }
    }

    fn remove_waiting(&mut self, indices: &[RequestIndex]) {
        if indices.is_empty() {
            return;
        }
        for &index in indices {
            if let Some(reason) = self.slots[index].deferred_by.take() {
                self.deferred.remove(reason);
            }
            self.drop_queue_deadline(index);
        }
        // Each is in one of them.
        self.waiting.remove_all(indices, &self.slots);
        self.kv_holding_waiting.remove_all(indices, &self.slots);
    }

    /// Forgets all cached prefixes, if no request holds a block. Returns whether it did.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.kv_cache.reset_prefix_cache()
    }

    /// What has happened to blocks since this was last asked, as far as the configuration wants it
    /// noted.
    pub fn take_journal(&mut self) -> Vec<JournalEntry> {
        self.kv_cache.take_journal()
    }

    /// Tells what stands in for the parent of a first block, which vLLM decides only after the
    /// scheduler is built. Returns whether it can be.
    pub fn set_none_hash(&mut self, none_hash: &[u8]) -> bool {
        let Some(hasher) = &mut self.config.hasher else { return true };
        hasher.set_none_hash(none_hash)
    }

    pub fn pause_state(&self) -> PauseState {
        self.pause_state
    }

    pub fn set_pause_state(&mut self, state: PauseState) {
        self.pause_state = state;
    }

    /// The request at a place that is known to hold one.
    ///
    /// # Panics
    /// If there is none.
    pub fn request(&self, index: RequestIndex) -> &Request {
        &self.slots[index]
    }

    /// The request at a place, if there is one.
    pub fn get(&self, index: RequestIndex) -> Option<&Request> {
        self.slots.get(index)
    }

    /// What the last call of [`Self::schedule`] decided.
    pub fn step(&self) -> &Step {
        &self.step
    }

    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    pub fn kv_cache(&self) -> &KvCacheManager {
        &self.kv_cache
    }

    pub fn running(&self) -> &[RequestIndex] {
        &self.running
    }

    pub fn waiting(&self) -> Vec<RequestIndex> {
        let mut waiting = self.kv_holding_waiting.in_order(&self.slots);
        waiting.extend(self.waiting.in_order(&self.slots));
        waiting
    }

    pub fn num_waiting(&self) -> usize {
        self.waiting.len() + self.num_kv_holding()
    }

    /// Of these, the ones that hold blocks: the first.
    pub fn num_kv_holding(&self) -> usize {
        self.kv_holding_waiting.len()
    }

    /// Requests that are not finished and, as far as the pause state goes, have work to do.
    ///
    /// As vLLM counts them: while new requests wait, sessions without input are taken off that were
    /// not counted if they hold no blocks. It may be less than none then.
    pub fn num_unfinished_requests(&self) -> i64 {
        let num_waiting = match self.pause_state {
            PauseState::Unpaused => self.num_waiting(),
            PauseState::PausedNew => self.num_kv_holding(),
            PauseState::PausedAll => return 0,
        };
        let num_counted = (self.running.len() + num_waiting) as u32;
        i64::from(num_counted) - i64::from(self.num_waiting_for_input as u32)
    }

    /// The state of queues and cache; counters of the prefix cache start again at zero.
    pub fn take_stats(&mut self) -> SchedulerStats {
        SchedulerStats {
            num_running_reqs: self.running.len(),
            num_waiting_reqs: self.num_waiting() - self.deferred.total(),
            num_skipped_waiting_reqs: self.deferred.total(),
            kv_cache_usage: self.kv_cache.pool().usage(),
            prefix_cache_stats: std::mem::take(&mut self.kv_cache.prefix_cache_stats),
            spec_decoding_stats: self.spec_decoding_stats.take(),
        }
    }

    /// Walks everything and panics at the first contradiction. For tests.
    ///
    /// # Panics
    /// If queues, requests and blocks contradict each other.
    pub fn check_invariants(&self) {
        let pool = self.kv_cache.pool();
        pool.check_invariants();
        let mut owners = vec![0; pool.num_blocks() as usize];
        for request in self.slots.iter() {
            let blocks = request.groups.iter().flat_map(|blocks| &blocks.table);
            blocks.filter(|id| !id.is_null()).for_each(|id| owners[id.0 as usize] += 1);
        }
        for &id in self.kv_transfer.deferred_frees.iter().flat_map(|(_, blocks)| blocks) {
            owners[id.0 as usize] += u32::from(!id.is_null());
        }
        for (id, &owners) in owners.iter().enumerate() {
            let counted = pool.ref_count(crate::BlockId(id as u32));
            assert_eq!(counted, owners, "block {id} counts {counted} owners and has {owners}");
        }
        let num_requests = self.slots.iter().count();
        let num_queued = self.running.len() + self.num_waiting();
        assert_eq!(num_requests, num_queued + self.num_kept, "a request is lost");
        assert!(
            self.running.iter().all(|&index| self.request(index).status == RequestStatus::Running)
        );
        let waiting = self.waiting().into_iter().map(|index| self.request(index));
        let waiting: Vec<&Request> = waiting.collect();
        let idle = waiting.iter().filter(|it| it.status == RequestStatus::WaitingForInput).count();
        assert_eq!(idle, self.num_waiting_for_input, "sessions without input are miscounted");
        assert!(waiting.iter().all(|request| request.status != RequestStatus::Running));
        let mut deferred = WaitCounts::default();
        waiting.iter().filter_map(|it| it.deferred_by).for_each(|reason| deferred.add(reason));
        assert_eq!(deferred, self.deferred, "deferred requests are miscounted");
        for &(bits, index) in &self.queue_deadlines {
            let deadline = self.request(index).queue_deadline;
            assert_eq!(deadline.to_bits(), bits, "a time to be scheduled by is not the request's");
            assert!(waiting.iter().any(|it| it.index() == index), "a request waits no more");
        }
    }
}
