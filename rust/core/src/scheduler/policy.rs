//! The scheduling policy: vLLM's `schedule()` of `v1/core/sched/scheduler.py`, in its order.
//!
//! There is no prefill phase and no decode phase. A request has tokens, and of these some are
//! computed; each step hands out a budget of tokens so that the computed ones catch up, first to
//! the requests that run, then to those that wait.
//!
//! What it does for KV connectors is in `transfers.rs`, for EC connectors in `encoder_transfer.rs`,
//! for auxiliary output in `aux_output.rs`.

use super::transfers::Hit;
use super::{PauseState, Scheduler};
use crate::callbacks::{Callbacks, EncoderInputs, ExternalAllocation, GrammarState, Grammars};
use crate::config::{Policy, StepKnobs};
use crate::ids::RequestIndex;
use crate::kv_cache_manager::AdmissionTerms;
use crate::promise::LateBy;
use crate::request::{EventKind, FetchStage, PrefillStats, Request, RequestStatus};
use crate::request_queue::has;
use crate::state_group::Sequence;
use crate::step::{Admission, ScheduledRequest, Step, UNKNOWN_DRAFT};
use crate::wait_reason::WaitReason;

/// Lists as they were before an order.
struct Places {
    running: Vec<RequestIndex>,
    waiting: Vec<RequestIndex>,
}

/// What is left of a step's allowance.
struct Budget {
    tokens: u32,
    /// Positions that are still free in the model runner's batch.
    input: u32,
    /// Positions of the batch that each request takes for drafting.
    num_draft_slots: u32,
}

impl Budget {
    fn take(&mut self, num_tokens: u32) {
        self.tokens -= num_tokens;
        self.input -= num_tokens + self.num_draft_slots;
    }

    fn give_back(&mut self, num_tokens: u32) {
        self.tokens += num_tokens;
        self.input += num_tokens + self.num_draft_slots;
    }

    fn is_spent(&self) -> bool {
        self.available() == 0
    }

    /// Tokens that one more request may get.
    fn available(&self) -> u32 {
        self.tokens.min(self.input.saturating_sub(self.num_draft_slots))
    }
}

/// What an admitted request gets of a step.
struct Share {
    num_tokens: u32,
    /// Of these, tokens that stand for drafts that there are none of yet.
    num_padding_tokens: u32,
}

/// How a waiting request's turn ends.
enum Turn {
    Admit,
    /// It stays, and the next one has its turn.
    Skip(WaitReason),
    /// It stays, and so do all behind it.
    Stop(WaitReason),
}

/// What holds for a whole call of `schedule()`.
struct StepLimits {
    now: f64,
    /// Most tokens of one request; 0 is no limit.
    long_prefill_threshold: u32,
    /// The longest chunk of a prompt, as far as recurrent states are concerned.
    max_chunk: u32,
    /// Only requests that sample a token are scheduled.
    defer_prefills: bool,
}

impl StepLimits {
    fn cap(&self, num_tokens: u32) -> u32 {
        match self.long_prefill_threshold {
            0 => num_tokens,
            threshold => num_tokens.min(threshold),
        }
    }
}

impl Scheduler {
    /// Decides which requests the next step computes, and counts their tokens as computed:
    /// [`Self::decide`] and [`Self::update_after_schedule`].
    ///
    /// # Errors
    /// What the callbacks fail with; the scheduler is not to be used after that.
    pub fn schedule<C: Callbacks>(
        &mut self,
        knobs: &StepKnobs,
        now: f64,
        callbacks: &mut C,
    ) -> Result<&Step, C::Error> {
        self.decide(knobs, now, callbacks)?;
        self.update_after_schedule();
        Ok(&self.step)
    }

    /// Decides which requests the next step computes, and how many tokens of each.
    ///
    /// `now` is the time for events.
    ///
    /// # Errors
    /// What the callbacks fail with; the scheduler is not to be used after that.
    ///
    /// # Panics
    /// In debug builds, if the knobs allow more tokens than the configuration.
    pub fn decide<C: Callbacks>(
        &mut self,
        knobs: &StepKnobs,
        now: f64,
        callbacks: &mut C,
    ) -> Result<(), C::Error> {
        debug_assert!(knobs.max_num_scheduled_tokens <= self.config.max_num_scheduled_tokens);
        self.current_step += 1;
        self.step.clear();
        self.kv_cache.begin_step();
        let mut budget = Budget {
            tokens: knobs.max_num_scheduled_tokens,
            input: self.config.max_num_batched_tokens,
            num_draft_slots: self.config.speculation.num_draft_slots,
        };
        if self.pause_state == PauseState::PausedAll {
            budget.tokens = 0;
        }
        let limits = self.step_limits(knobs, now);
        let places = (!knobs.order.is_empty()).then(|| self.put_in_order(&knobs.order));

        self.schedule_running(&mut budget, &limits, callbacks)?;
        self.note_loras();
        if self.pause_state == PauseState::PausedAll {
            self.held_up_by = Some(WaitReason::Pause);
        } else if !self.step.preempted.is_empty() {
            self.held_up_by = Some(WaitReason::Blocks);
        } else {
            self.schedule_waiting(&mut budget, &limits, callbacks)?;
        }
        if let Some(places) = places {
            self.put_back(places);
        }
        self.kv_cache.end_step(&mut self.step);
        self.sum_up_step();
        Ok(())
    }

    /// Has the requests of an order go last of those that run and first of those that wait, until
    /// [`Self::put_back`].
    #[cold]
    fn put_in_order(&mut self, order: &[RequestIndex]) -> Places {
        let running = self.running.clone();
        let (runs, is_moved) = (has(&running), has(order));
        self.running.retain(|index| !is_moved(index));
        self.running.extend(order.iter().filter(|it| runs(it)));
        Places { running, waiting: self.waiting.bring_forward(order) }
    }

    /// Those who were moved and have not left go back to their places.
    #[cold]
    fn put_back(&mut self, places: Places) {
        let Places { mut running, waiting } = places;
        if !running.is_empty() {
            let num_left = self.running.len() - self.step.admitted.len();
            if num_left < running.len() {
                running.retain(|&index| self.request(index).status == RequestStatus::Running);
            }
            self.running[..num_left].copy_from_slice(&running);
        }
        self.waiting.put_back(&waiting);
    }

    /// What follows from the requests of the step taken together.
    fn sum_up_step(&mut self) {
        let step = &mut self.step;
        let speculation = &self.config.speculation;
        step.total_num_tokens = step.scheduled().map(|it| it.num_tokens).sum();
        debug_assert!(step.total_num_tokens <= self.config.max_num_scheduled_tokens);
        let num_requests = step.running.len() + step.admitted.len();
        step.num_spec_tokens_to_schedule = match &speculation.by_batch_size {
            Some(by_batch_size) if num_requests > 0 => by_batch_size[num_requests],
            _ => speculation.num_spec_tokens,
        };
    }

    fn step_limits(&self, knobs: &StepKnobs, now: f64) -> StepLimits {
        let is_generating = |&index: &RequestIndex| !self.request(index).is_prefill_chunk;
        let defer_prefills = (knobs.throttle_prefills || self.is_soon_after_prefill())
            && !self.prefill_capacity_bound
            && self.running.iter().any(is_generating);

        // The limit keeps a long prompt from starving others; alone it may use the whole budget.
        let config = &self.config;
        let num_requests = (self.running.len() + self.num_waiting()) as u32;
        let mut long_prefill_threshold = knobs.long_prefill_token_threshold;
        if num_requests <= 1 {
            long_prefill_threshold = 0;
        } else if long_prefill_threshold > 0 && config.long_prefill_token_threshold_adaptive {
            let fair_share = config.max_num_batched_tokens / num_requests;
            long_prefill_threshold = long_prefill_threshold.max(fair_share);
        }
        // The states of a lone prompt are kept as if the limit held for it.
        let max_chunk = match knobs.long_prefill_token_threshold {
            0 => knobs.max_num_scheduled_tokens,
            threshold => threshold.min(knobs.max_num_scheduled_tokens),
        };
        StepLimits { now, long_prefill_threshold, max_chunk, defer_prefills }
    }

    /// Whether the next step comes too soon after one that computed prompts to do so again.
    fn is_soon_after_prefill(&self) -> bool {
        let interval = u64::from(self.config.behaviors.local_prefill_interval);
        let this_step = self.num_executed_steps + 1;
        self.last_prefill_step.is_some_and(|last| this_step - last < interval)
    }

    /// First the requests that run, in their order.
    fn schedule_running<C: Callbacks>(
        &mut self,
        budget: &mut Budget,
        limits: &StepLimits,
        callbacks: &mut C,
    ) -> Result<(), C::Error> {
        let mut position = 0;
        while position < self.running.len() && !budget.is_spent() {
            let index = self.running[position];
            let num_tokens = self.num_tokens_to_run(index, budget, limits, callbacks)?;
            if num_tokens == 0 {
                // Those behind it may still run: not strictly first come, first served.
                position += 1;
                continue;
            }
            let at = &mut position;
            if !self.allocate_or_preempt(index, num_tokens, at, budget, limits.now, callbacks)? {
                let has_left = self.request(index).status == RequestStatus::Preempted;
                if has_left && self.config.behaviors.continues_after_self_preemption {
                    // So `position` is that of the next one.
                    continue;
                }
                break;
            }
            if self.request(index).has_encoder_inputs {
                callbacks.schedule_encoder_inputs(self.request(index))?;
            }
            self.note_use_of_drafts(index, num_tokens);
            let mut scheduled = self.scheduled(index, num_tokens);
            self.take_drafts(&mut scheduled);
            self.step.has_prefill |= self.request(index).is_prefill_chunk;
            self.step.running.push(scheduled);
            budget.take(num_tokens);
            position += 1;
        }
        Ok(())
    }

    /// Tokens that a running request gets; 0 if it has to sit this step out.
    fn num_tokens_to_run<C: Callbacks>(
        &self,
        index: RequestIndex,
        budget: &Budget,
        limits: &StepLimits,
        callbacks: &mut C,
    ) -> Result<u32, C::Error> {
        let request = self.request(index);
        if reaches_max_tokens_in_flight(request)
            || self.current_step < request.next_decode_step
            || (limits.defer_prefills && request.is_prefill_chunk)
        {
            return Ok(0);
        }
        let num_settled =
            i64::from(request.num_computed_tokens) - i64::from(request.num_output_placeholders);
        if self.awaits_encoder_outputs(request, num_settled, callbacks)? {
            return Ok(0);
        }
        let num_known =
            (request.num_tokens() + request.drafts.len()) as u32 + request.num_output_placeholders;
        let num_new = num_known.saturating_sub(request.num_computed_tokens);
        // A position is left for the token that will be sampled.
        let until_max_model_len = self
            .config
            .max_model_len
            .saturating_sub(request.num_computed_tokens + self.config.num_sampled_tokens_per_step);
        let num_tokens = limits.cap(num_new).min(budget.available()).min(until_max_model_len);
        let num_tokens = self.align_chunk(request, request.num_computed_tokens, num_tokens, limits);
        self.fit_to_drafter_and_encoder(index, request.num_computed_tokens, num_tokens, callbacks)
    }

    /// Shortens a chunk of a prompt so that it ends where recurrent states are kept.
    fn align_chunk(
        &self,
        request: &Request,
        start: u32,
        num_tokens: u32,
        limits: &StepLimits,
    ) -> u32 {
        let Some(aligner) = &self.chunk_aligner else { return num_tokens };
        let sequence = Sequence {
            num_prompt_tokens: request.num_prompt_tokens() as u32,
            num_tokens: request.num_tokens() as u32,
            junction: request.shared_prefix_boundary,
        };
        aligner.align(sequence, start, num_tokens, limits.max_chunk)
    }

    /// Shortens a chunk to what the encoder can provide, and to where a drafter can go on.
    fn fit_to_drafter_and_encoder<C: EncoderInputs>(
        &self,
        index: RequestIndex,
        num_computed_tokens: u32,
        num_tokens: u32,
        callbacks: &mut C,
    ) -> Result<u32, C::Error> {
        let request = self.request(index);
        let mut num_tokens = num_tokens;
        if request.has_encoder_inputs {
            num_tokens = callbacks.plan_encoder_inputs(index, num_computed_tokens, num_tokens)?;
        }
        Ok(self.reserve_prefill_lookahead(request, num_computed_tokens, num_tokens))
    }

    /// Shortens a chunk that would end so close to the prompt's end that a drafter, which reads
    /// ahead, would miss known tokens.
    fn reserve_prefill_lookahead(
        &self,
        request: &Request,
        num_computed_tokens: u32,
        num_tokens: u32,
    ) -> u32 {
        let lookahead = self.config.speculation.num_prefill_lookahead_tokens;
        let end = num_computed_tokens + num_tokens;
        match (request.num_tokens() as u32).saturating_sub(end) {
            remaining @ 1.. if remaining < lookahead => {
                num_tokens.saturating_sub(lookahead - remaining)
            }
            _ => num_tokens,
        }
    }

    /// Moves a running request's drafts into the step, as far as they fit. What is left is
    /// forgotten: the drafter proposes anew after each step.
    fn take_drafts(&mut self, scheduled: &mut ScheduledRequest) {
        let request = &mut self.slots[scheduled.index];
        if request.drafts.is_empty() {
            return;
        }
        let end = request.num_computed_tokens + scheduled.num_tokens;
        let num_known = request.num_tokens() as u32 + request.num_output_placeholders;
        let num_drafts = (end.saturating_sub(num_known) as usize).min(request.drafts.len());
        self.step.set_drafts(scheduled, &request.drafts[..num_drafts]);
        request.drafts.clear();
    }

    /// Collects the adapters that the step uses so far.
    fn note_loras(&mut self) {
        if self.config.max_loras.is_none() {
            return;
        }
        let Self { step, slots, running, config, .. } = self;
        let note = |index: RequestIndex| {
            let request = &slots[index];
            note_lora(&mut step.loras, request);
        };
        if config.behaviors.counts_loras_of_all_running {
            running.iter().copied().for_each(note);
        } else {
            step.running.iter().map(|scheduled| scheduled.index).for_each(note);
        }
    }

    /// Notes whether a request of the step can use the drafts that are proposed after it. It can't
    /// if the step samples nothing for it, or the last token that it may have.
    fn note_use_of_drafts(&mut self, index: RequestIndex, num_tokens: u32) {
        if !self.config.behaviors.can_skip_drafts || self.step.needs_drafts {
            return;
        }
        let request = self.request(index);
        let end = (request.num_computed_tokens + num_tokens) as usize;
        // One from this step, and at least one from those in flight.
        let num_sampled = 1 + u64::from(request.num_output_placeholders > 0);
        let least_output = request.num_output_tokens() as u64 + num_sampled;
        let is_unused =
            end < request.num_tokens() || least_output >= request.stop_conditions().max_tokens;
        self.step.needs_drafts = !is_unused;
    }

    /// Finds blocks for a running request, at the expense of less urgent ones if it must be and if
    /// that brings blocks at once. Returns whether the request can run; `position` follows it when
    /// others leave before it.
    fn allocate_or_preempt<C: Callbacks>(
        &mut self,
        index: RequestIndex,
        num_tokens: u32,
        position: &mut usize,
        budget: &mut Budget,
        now: f64,
        callbacks: &mut C,
    ) -> Result<bool, C::Error> {
        loop {
            let request = &mut self.slots[index];
            if self.kv_cache.extend_slots(request, num_tokens) {
                return Ok(true);
            }
            let kv_transfer = self.config.kv_transfer;
            if kv_transfer.is_some() && callbacks.has_pending_block_frees()? {
                return Ok(false);
            }
            let victim_at = self.least_urgent();
            if !self.can_free_blocks(self.running[victim_at]) {
                return Ok(false);
            }
            let victim = self.remove_from_step(victim_at, position, budget);
            let drop_stale_output = kv_transfer.is_some_and(|config| config.requires_kv_delivery);
            self.preempt(victim, now, drop_stale_output, callbacks)?;
            self.step.preempted.push(victim);
            if victim == index {
                return Ok(false);
            }
        }
    }

    /// Which of the running requests is to give way.
    fn least_urgent(&self) -> usize {
        let urgency = |at: usize| {
            let request = self.request(self.running[at]);
            (request.priority, request.arrival_time)
        };
        match self.config.policy {
            Policy::Fcfs => self.running.len() - 1,
            // The first of several equals.
            Policy::Priority => (1..self.running.len())
                .fold(0, |worst, at| if urgency(at) > urgency(worst) { at } else { worst }),
        }
    }

    /// Takes a request out of the running ones, and out of this step if it had been scheduled
    /// already.
    fn remove_from_step(
        &mut self,
        victim_at: usize,
        position: &mut usize,
        budget: &mut Budget,
    ) -> RequestIndex {
        let victim = self.running.remove(victim_at);
        if victim_at < *position {
            *position -= 1;
        }
        let scheduled = self.step.running.iter().position(|scheduled| scheduled.index == victim);
        if let Some(at) = scheduled {
            budget.give_back(self.step.running.remove(at).num_tokens);
        }
        victim
    }

    /// Then the requests that wait, until one can't be admitted.
    fn schedule_waiting<C: Callbacks>(
        &mut self,
        budget: &mut Budget,
        limits: &StepLimits,
        callbacks: &mut C,
    ) -> Result<(), C::Error> {
        let admitted = self.admit_waiting(budget, limits, callbacks);
        // Back to the front, in their order.
        while let Some(index) = self.skipped.pop() {
            let (queue, slots) = self.queue_of(index);
            queue.prepend(index, slots);
        }
        if !limits.defer_prefills {
            self.prefill_capacity_bound = self.num_waiting() > self.deferred.total();
        }
        admitted
    }

    fn admit_waiting<C: Callbacks>(
        &mut self,
        budget: &mut Budget,
        limits: &StepLimits,
        callbacks: &mut C,
    ) -> Result<(), C::Error> {
        self.held_up_by = Some(WaitReason::TokenBudget);
        while !budget.is_spent() {
            let Some(index) = self.next_to_admit() else {
                self.held_up_by = (!self.waiting.is_empty()).then_some(WaitReason::Pause);
                break;
            };
            let num_active = self.running.len() + self.num_waiting_for_input;
            let turn = if num_active >= self.config.max_num_active_reqs {
                Turn::Stop(WaitReason::MaxNumSeqs)
            } else if let Some(reason) = self.not_ready(index, callbacks)? {
                Turn::Skip(reason)
            } else {
                self.admit(index, budget, limits, callbacks)?
            };
            match turn {
                Turn::Admit => {}
                Turn::Skip(reason) => self.skip(reason),
                Turn::Stop(reason) => {
                    self.hold_up(index, reason);
                    break;
                }
            }
        }
        Ok(())
    }

    /// The waiting request whose turn it is. While new requests are paused, only those that hold
    /// blocks have one.
    fn next_to_admit(&self) -> Option<RequestIndex> {
        let others = || self.waiting.peek().filter(|_| self.pause_state == PauseState::Unpaused);
        self.kv_holding_waiting.peek().or_else(others)
    }

    /// Takes the request whose turn it is out of its queue.
    fn pop_next(&mut self) -> RequestIndex {
        let Self { kv_holding_waiting, waiting, slots, .. } = self;
        let popped = kv_holding_waiting.pop(slots).or_else(|| waiting.pop(slots));
        popped.expect("the request that was looked at")
    }

    /// What a waiting request waits for besides its turn; `None` for nothing.
    fn not_ready<C: Grammars>(
        &mut self,
        index: RequestIndex,
        callbacks: &mut C,
    ) -> Result<Option<WaitReason>, C::Error> {
        let request = &mut self.slots[index];
        if request.status == RequestStatus::WaitingForGrammar {
            if callbacks.grammar_state(index)? != GrammarState::Ready {
                return Ok(Some(WaitReason::Grammar));
            }
            request.status = RequestStatus::Waiting;
        }
        if request.status == RequestStatus::WaitingForInput {
            return Ok(Some(WaitReason::SessionInput));
        }
        if request.status == RequestStatus::WaitingForRemoteKvs {
            if !request.transfer.has_arrived {
                return Ok(Some(WaitReason::KvLoad));
            }
            self.end_load(index);
        }
        let request = self.request(index);
        // Tokens of an earlier life are still to be delivered: resumed now, it would sample them
        // a second time.
        if request.num_stale_output_tokens > 0 && !request.drop_stale_output {
            return Ok(Some(WaitReason::StaleOutput));
        }
        Ok(self.exceeds_max_loras(index).then_some(WaitReason::Adapter))
    }

    /// Whether a request's adapter would be one too many in this step.
    fn exceeds_max_loras(&self, index: RequestIndex) -> bool {
        let loras = &self.step.loras;
        let lora = self.request(index).lora_id;
        self.config.max_loras.zip(lora).is_some_and(|(max_loras, lora)| {
            loras.len() == max_loras as usize && !loras.contains(&lora)
        })
    }

    fn skip(&mut self, reason: WaitReason) {
        let index = self.pop_next();
        self.defer(index, reason);
        self.skipped.push(index);
    }

    /// Admits the request at the head of the queue, if that can be.
    fn admit<C: Callbacks>(
        &mut self,
        index: RequestIndex,
        budget: &mut Budget,
        limits: &StepLimits,
        callbacks: &mut C,
    ) -> Result<Turn, C::Error> {
        let looks_up = self.request(index).num_computed_tokens == 0;
        let hit = if looks_up { self.find_hit(index, callbacks)? } else { Some(Hit::default()) };
        let Some(hit) = hit else { return Ok(Turn::Skip(WaitReason::KvLookup)) };
        let request = self.request(index);
        let num_computed_tokens = request.num_computed_tokens + hit.num_tokens();
        if self.awaits_encoder_outputs(request, num_computed_tokens.into(), callbacks)? {
            return Ok(Turn::Skip(WaitReason::EncoderLoad));
        }
        if looks_up {
            self.note_hit(index, &hit);
        }
        if hit.external.is_async {
            if !self.allocate_admitted(index, hit, 0, looks_up, callbacks)? {
                return Ok(Turn::Stop(WaitReason::Blocks));
            }
            self.begin_load(index, num_computed_tokens);
            self.note_load(index, callbacks)?;
            return Ok(Turn::Skip(WaitReason::KvLoad));
        }
        let share =
            self.share_of_admitted(index, num_computed_tokens, budget, limits, callbacks)?;
        let share = match share {
            Ok(share) => share,
            Err(reason) => return Ok(Turn::Stop(reason)),
        };
        if share.num_tokens == 0 {
            let turn = if self.config.behaviors.skips_held_up { Turn::Skip } else { Turn::Stop };
            return Ok(turn(WaitReason::Encoder));
        }
        if !self.allocate_admitted(index, hit, share.num_tokens, looks_up, callbacks)? {
            return Ok(Turn::Stop(WaitReason::Blocks));
        }
        self.run(index, num_computed_tokens, &share, limits.now);
        self.step.has_sync_kv_loads |= hit.external.num_tokens > 0;
        budget.take(share.num_tokens);
        if self.request(index).has_encoder_inputs {
            callbacks.schedule_encoder_inputs(self.request(index))?;
        }
        Ok(Turn::Admit)
    }

    /// Looks what of a request need not be computed. `None` if that is not known yet.
    fn find_hit<C: Callbacks>(
        &mut self,
        index: RequestIndex,
        callbacks: &mut C,
    ) -> Result<Option<Hit>, C::Error> {
        let request = &mut self.slots[index];
        if let Some(hasher) = &self.config.hasher {
            request.refresh_hashes(hasher);
        }
        let max_tokens = self.max_prefix_hit(index, callbacks)?;
        let request = &mut self.slots[index];
        let local = self.kv_cache.find_prefix_hit(request, max_tokens);
        request.shared_prefix_boundary = local.shared_prefix_boundary;
        let Some(external) = self.find_external_hit(index, local, callbacks)? else {
            return Ok(None);
        };
        self.cap_external_hit(index, Hit { local, external }, callbacks).map(Some)
    }

    /// Notes what a request that was looked up need not compute.
    fn note_hit(&mut self, index: RequestIndex, hit: &Hit) {
        let request = &mut self.slots[index];
        note_first_prefill(request, hit);
        self.set_fetch_stage(index, hit.external.is_async.then_some(FetchStage::WaitingToStart));
    }

    /// Finds blocks for a waiting request and its hit. Returns whether there were enough.
    fn allocate_admitted<C: Callbacks>(
        &mut self,
        index: RequestIndex,
        hit: Hit,
        num_tokens: u32,
        looks_up: bool,
        callbacks: &mut C,
    ) -> Result<bool, C::Error> {
        let is_load = hit.external.is_async;
        let terms = AdmissionTerms {
            hit: hit.local,
            num_external_tokens: hit.external.num_tokens,
            reserved_from_load: is_load.then(|| self.num_blocks_reserved_from_loads()),
            full_sequence_must_fit: self.config.reserve_full_isl,
            others_run: !self.running.is_empty(),
        };
        let request = &mut self.slots[index];
        if !self.kv_cache.allocate_slots(request, num_tokens, terms) {
            if request.has_encoder_inputs {
                callbacks.free_encoder_inputs(index)?;
            }
            return Ok(false);
        }
        if self.config.kv_transfer.is_some() {
            let num_asked = request.num_tokens() as u32 - hit.local.num_tokens;
            let allocation = ExternalAllocation {
                num_tokens: hit.external.num_tokens,
                num_queried_tokens: if looks_up { num_asked } else { 0 },
            };
            callbacks.note_allocation(request, self.kv_cache.pool(), allocation)?;
        }
        if self.config.log_stats && looks_up {
            self.kv_cache.record_prefix_cache_stats(request, hit.local.num_tokens);
        }
        Ok(true)
    }

    /// Makes the request at the head of the queue, which has its blocks, part of the step.
    fn run(&mut self, index: RequestIndex, num_computed_tokens: u32, share: &Share, now: f64) {
        let log_stats = self.config.log_stats;
        let request = &mut self.slots[index];
        if log_stats {
            request.record_event(EventKind::Scheduled, now);
        }
        let admission = match request.status {
            RequestStatus::Preempted => Admission::Resumed,
            _ => Admission::New,
        };
        if let Some(reason) = request.deferred_by.take() {
            self.deferred.remove(reason);
        }
        request.status = RequestStatus::Running;
        request.num_computed_tokens = num_computed_tokens;
        note_lora(&mut self.step.loras, request);
        // What is computed in one go reserves nothing.
        request.transfer.is_inflight_prefill |=
            num_computed_tokens + share.num_tokens < request.num_tokens() as u32;
        self.step.has_admitted_prefill |= num_computed_tokens + 1 < request.num_tokens() as u32;
        self.pop_next();
        self.drop_queue_deadline(index);
        if let Some(order) = &mut self.order {
            order.admit(&self.slots[index], now);
        }
        self.set_fetch_stage(index, None);
        self.running.push(index);
        self.note_use_of_drafts(index, share.num_tokens);
        let mut scheduled = self.scheduled(index, share.num_tokens);
        self.step.set_unknown_drafts(&mut scheduled, share.num_padding_tokens);
        self.step.admitted.push((admission, scheduled));
    }

    /// What a request gets of the step that admits it, or why it and those behind it have to wait.
    /// It gets no tokens if the encoder or a drafter holds it up.
    fn share_of_admitted<C: Callbacks>(
        &self,
        index: RequestIndex,
        num_computed_tokens: u32,
        budget: &Budget,
        limits: &StepLimits,
        callbacks: &mut C,
    ) -> Result<Result<Share, WaitReason>, C::Error> {
        let request = self.request(index);
        let num_missing = request.num_tokens() as u32 - num_computed_tokens;
        if limits.defer_prefills && num_missing > 1 {
            return Ok(Err(WaitReason::HeldBack));
        }
        let available = budget.available();
        let mut share = Share { num_tokens: num_missing, num_padding_tokens: 0 };
        if num_missing == 1 && self.pads_decode(num_computed_tokens) {
            let num_padding_tokens = self.config.speculation.num_spec_tokens;
            let num_tokens = 1 + num_padding_tokens;
            if num_tokens > available {
                return Ok(Err(WaitReason::TokenBudget));
            }
            // With a threshold below that vLLM fails an assertion. Here the request gets no padding.
            if limits.cap(num_tokens) == num_tokens {
                share = Share { num_tokens, num_padding_tokens };
            }
        }
        let num_tokens = limits.cap(share.num_tokens);
        if !self.config.enable_chunked_prefill && num_tokens > available {
            return Ok(Err(WaitReason::TokenBudget));
        }
        let num_tokens = num_tokens.min(available);
        let mut num_tokens = self.align_chunk(request, num_computed_tokens, num_tokens, limits);
        if num_tokens == 0 {
            return Ok(Err(WaitReason::TokenBudget));
        }
        if share.num_padding_tokens > 0 && num_tokens != share.num_tokens {
            // Padding that is cut in part goes as a whole.
            share.num_padding_tokens = 0;
            num_tokens = 1;
        }
        share.num_tokens =
            self.fit_to_drafter_and_encoder(index, num_computed_tokens, num_tokens, callbacks)?;
        Ok(Ok(share))
    }

    /// Whether a request that lacks nothing but its next token is given as many tokens as those
    /// that verify drafts: a batch of equal requests can run as one CUDA graph.
    fn pads_decode(&self, num_computed_tokens: u32) -> bool {
        let speculation = &self.config.speculation;
        let num_sampled_tokens = self.config.num_sampled_tokens_per_step;
        let end = num_computed_tokens + 1 + speculation.num_spec_tokens + num_sampled_tokens;
        speculation.num_spec_tokens > 0
            && speculation.by_batch_size.is_none()
            && num_sampled_tokens > 0
            && !self.step.has_prefill
            && (!self.step.running.is_empty() || num_computed_tokens > 0)
            && end <= self.config.max_model_len
    }

    /// The request as part of this step, as it is before the step.
    fn scheduled(&self, index: RequestIndex, num_tokens: u32) -> ScheduledRequest {
        let request = self.request(index);
        let previous_step = self.current_step - 1;
        let is_new_to_batch = !self.has_previous_batch || request.last_step != previous_step;
        ScheduledRequest::new(request, index, num_tokens, is_new_to_batch)
    }

    /// Takes the blocks of a running request away and puts it back into the queue. It must have
    /// left `running` already.
    fn preempt<C: Callbacks>(
        &mut self,
        index: RequestIndex,
        now: f64,
        drop_stale_output: bool,
        callbacks: &mut C,
    ) -> Result<(), C::Error> {
        debug_assert_eq!(self.request(index).status, RequestStatus::Running);
        self.end_aux_output(index, callbacks)?;
        self.free_blocks(index);
        let request = &mut self.slots[index];
        if request.has_encoder_inputs {
            callbacks.free_encoder_inputs(index)?;
        }
        request.transfer.is_inflight_prefill = false;
        request.status = RequestStatus::Preempted;
        request.num_computed_tokens = 0;
        request.drafts.clear();
        // All that is in flight belongs to the life that ends here. What an earlier preemption
        // condemned stays condemned: its positions have been sampled again.
        request.drop_stale_output =
            drop_stale_output || (request.drop_stale_output && request.num_stale_output_tokens > 0);
        request.num_stale_output_tokens = request.num_in_flight_tokens;
        request.num_output_placeholders = 0;
        request.expected_hit = None;
        request.promise.iter_mut().for_each(|it| it.void(LateBy::Preemption));
        request.num_preemptions += 1;
        if self.config.log_stats {
            request.record_event(EventKind::Preempted, now);
        }
        self.waiting.prepend(index, &self.slots);
        Ok(())
    }

    /// Counts the step's tokens as computed, so that the next step can be scheduled before this
    /// one's output is there.
    ///
    /// # Panics
    /// If it is not called right after [`Self::decide`].
    pub fn update_after_schedule(&mut self) {
        self.note_scheduled_step();
        let step = &mut self.step;
        let admitted = step.admitted.iter().map(|(_, scheduled)| scheduled);
        for scheduled in step.running.iter().chain(admitted) {
            let request = &mut self.slots[scheduled.index];
            request.last_step = self.current_step;
            request.num_computed_tokens += scheduled.num_tokens;
            request.num_in_flight_tokens += i64::from(scheduled.num_tokens);
            let known = request.num_tokens() as u32 + request.num_output_placeholders;
            request.is_prefill_chunk = request.num_computed_tokens < known;
            request.transfer.is_inflight_prefill &= request.is_prefill_chunk;
            if request.is_prefill_chunk {
                continue;
            }
            step.has_structured_output_requests |= request.use_structured_output;
            if self.config.async_scheduling {
                step.pending_structured_output_tokens |=
                    request.use_structured_output && request.num_output_placeholders > 0;
                request.num_output_placeholders +=
                    self.config.num_sampled_tokens_per_step + scheduled.num_draft_tokens;
                // Placeholders of the drafts that this step will bring.
                request.drafts.clear();
                request.drafts.resize(step.num_spec_tokens_to_schedule as usize, UNKNOWN_DRAFT);
                if self.config.decode_stagger > 0 {
                    request.next_decode_step =
                        self.current_step + u64::from(self.config.decode_stagger);
                }
            }
        }
        self.has_previous_batch = true;
        self.num_executed_steps += u64::from(step.total_num_tokens > 0);
        if step.has_prefill || step.has_admitted_prefill {
            self.last_prefill_step = Some(self.num_executed_steps);
        }
    }

    /// Takes the blocks of all running requests away; what their steps in flight bring will be
    /// dropped. Returns them, the last one to run first.
    ///
    /// # Errors
    /// What the callbacks fail with; the scheduler is not to be used after that.
    pub fn preempt_running<C: Callbacks>(
        &mut self,
        now: f64,
        callbacks: &mut C,
    ) -> Result<Vec<RequestIndex>, C::Error> {
        // From the last to the first, so that they queue in their order.
        let preempted: Vec<RequestIndex> = self.running.drain(..).rev().collect();
        for &index in &preempted {
            self.preempt(index, now, true, callbacks)?;
        }
        // They may run again in the very next step, but not as a continuation.
        self.has_previous_batch = false;
        Ok(preempted)
    }
}

/// Whether the steps in flight will bring the last token that the request may have. Scheduling it
/// once more would compute a token that nobody gets.
pub(super) fn reaches_max_tokens_in_flight(request: &Request) -> bool {
    let placeholders = u64::from(request.num_output_placeholders);
    let last_known = u64::from(request.num_computed_tokens) + 2;
    let limit =
        (request.num_prompt_tokens() as u64).saturating_add(request.stop_conditions().max_tokens);
    placeholders > 0 && last_known >= limit.saturating_add(placeholders)
}

fn note_lora(loras: &mut Vec<i64>, request: &Request) {
    if let Some(lora) = request.lora_id.filter(|lora| !loras.contains(lora)) {
        loras.push(lora);
    }
}

/// Prefill statistics are those of the first prefill, not of repeats after a preemption.
fn note_first_prefill(request: &mut Request, hit: &Hit) {
    let num_prompt_tokens = request.num_prompt_tokens() as u32;
    if let (Some(stats), 0) = (&mut request.prefill_stats, request.num_preemptions) {
        *stats = PrefillStats {
            num_prompt_tokens,
            num_local_cached_tokens: hit.local.num_tokens,
            num_external_cached_tokens: hit.external.num_tokens,
            num_cache_creation_tokens: 0,
        };
    }
}
