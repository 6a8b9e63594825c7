//! What the model runner brought: vLLM's `update_from_output()`, `_update_request_with_output()`
//! and, for asynchronous scheduling, `v1/core/sched/async_scheduler.py`.

use smallvec::SmallVec;

use crate::config::RequestSpecMetrics;
use crate::hooks::{Hooks, NextTurn};
use crate::ids::RequestIndex;
use crate::request::{Event, PrefillStats, RequestStatus};
use crate::scheduler::Scheduler;
use crate::stats::{RequestSpecStats, SpecDecodingStats};
use crate::stop::{StopReason, check_stop};

/// What became of one request of a step that was scheduled earlier.
#[derive(Clone, Copy, Debug)]
pub struct ScheduledOutput<'a> {
    /// The request, if it still exists.
    pub index: Option<RequestIndex>,
    /// Tokens that were scheduled for it.
    pub num_scheduled_tokens: u32,
    /// Tokens that were sampled, none if its prompt is not computed to the end.
    pub sampled_tokens: &'a [i32],
    /// Draft tokens that the step verified.
    pub num_draft_tokens: u32,
    /// Of these, tokens that a grammar had ruled out before.
    pub num_invalid_drafts: u32,
    /// The step brought the vector that a pooling request is for.
    pub is_pooled: bool,
    /// What was sampled is void: it rests on blocks that could not be filled.
    pub is_void: bool,
}

/// What a client is to be told of one request.
#[derive(Clone, Debug)]
pub struct RequestOutput {
    /// The request; its place may be given to another once the outputs have been told.
    pub index: RequestIndex,
    /// Which of the scheduled outputs this is about.
    pub position: usize,
    /// How many of the sampled tokens count: a stop cuts the rest off.
    pub num_new_tokens: usize,
    /// How the request ended, or a session's turn, if it did.
    pub finished: Option<RequestStatus>,
    /// The request is done: a session whose turn has ended is not.
    pub is_over: bool,
    /// It is done, and stays until its blocks are sent.
    pub is_kept: bool,
    /// Why it ended.
    pub stop_reason: StopReason,
    /// What happened to the request since the last output.
    pub events: SmallVec<[Event; 2]>,
    /// With the request's first output, how its prompt was computed.
    pub prefill_stats: Option<PrefillStats>,
    /// With its last, how its draft tokens fared, if clients are to be told.
    pub spec_stats: Option<Box<RequestSpecStats>>,
}

impl RequestOutput {
    /// Whether there is nothing to tell but tokens.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.finished.is_none()
            && self.events.is_empty()
            && self.prefill_stats.is_none()
            && self.spec_stats.is_none()
            && self.stop_reason == StopReason::None
    }
}

/// How a request came out of its new tokens.
struct Advance {
    num_new_tokens: usize,
    stopped: bool,
}

impl Scheduler {
    /// Appends what was sampled, ends the requests that are done, and writes what is to be told
    /// into `outputs`, in the order of `scheduled`.
    ///
    /// # Errors
    /// What the hooks fail with; the scheduler is not to be used after that.
    ///
    /// # Panics
    /// If more stale output comes back than was in flight.
    pub fn update_from_output<'a, H: Hooks>(
        &mut self,
        scheduled: impl Iterator<Item = ScheduledOutput<'a>>,
        hooks: &mut H,
        outputs: &mut Vec<RequestOutput>,
    ) -> Result<(), H::Error> {
        outputs.clear();
        self.spec_decoding_stats = None;
        let mut stopped_running = Vec::new();
        let mut stopped_preempted = Vec::new();
        let mut continuing = Vec::new();
        for (position, scheduled) in scheduled.enumerate() {
            if position == 0 {
                self.note_processed_step();
            }
            // The request may have been aborted while the step ran.
            let Some(index) = scheduled.index.filter(|&index| self.get(index).is_some()) else {
                continue;
            };
            let was_running = self.request(index).status == RequestStatus::Running;
            let Some(advance) = self.advance_request(index, &scheduled, hooks)? else {
                continue;
            };
            if advance.num_new_tokens == 0 && !advance.stopped && !scheduled.is_pooled {
                continue;
            }
            let outcome = self.begin_output(index, position, advance.num_new_tokens);
            let stays = !advance.stopped || !self.end_turn(index, was_running, hooks)?;
            let mut outcome = self.complete_output(outcome, stays);
            if advance.stopped {
                let requeues_last = self.config.behaviors.requeues_sessions_last;
                if was_running {
                    stopped_running.push(index);
                } else if !stays || requeues_last {
                    stopped_preempted.push(index);
                }
                if stays && requeues_last {
                    continuing.push(index);
                }
                outcome.is_kept = !stays && self.end_request(index, false, hooks)?;
            }
            outputs.push(outcome);
        }
        self.remove_running(&stopped_running);
        self.remove_waiting(&stopped_preempted);
        for index in continuing {
            self.enqueue(index);
        }
        for output in outputs.iter().filter(|output| output.is_over && !output.is_kept) {
            self.vacate(output.index);
        }
        Ok(())
    }

    /// Settles one request's share of the step; `None` if what it brought does not count.
    fn advance_request<H: Hooks>(
        &mut self,
        index: RequestIndex,
        scheduled: &ScheduledOutput<'_>,
        hooks: &mut H,
    ) -> Result<Option<Advance>, H::Error> {
        let (request, _) = self.get_mut(index).expect("looked up by the caller");
        request.num_in_flight_tokens -= i64::from(scheduled.num_scheduled_tokens);
        let is_stale = request.num_stale_output_tokens > 0;
        if is_stale {
            request.num_stale_output_tokens -= i64::from(scheduled.num_scheduled_tokens);
            assert!(request.num_stale_output_tokens >= 0, "more stale output than was in flight");
        }
        let is_dropped = is_stale && request.drop_stale_output;
        if scheduled.is_void || request.status.is_finished() || is_dropped {
            return Ok(None);
        }
        let use_structured_output = request.use_structured_output;
        self.settle_drafts(index, scheduled, is_stale);
        let request = self.request(index);
        if request.has_encoder_inputs {
            let num_processed =
                request.num_computed_tokens.saturating_sub(request.num_output_placeholders);
            hooks.free_processed_encoder_inputs(index, num_processed)?;
        }
        let mut advance = self.append_tokens(index, scheduled.sampled_tokens, is_stale);
        if scheduled.is_pooled && advance.num_new_tokens == 0 {
            advance.stopped = self.end_pooling(index);
        }
        if advance.num_new_tokens > 0 && use_structured_output {
            let sequence = self.request(index).tokens();
            if !hooks.accept_tokens(index, sequence, advance.num_new_tokens)? {
                let (request, _) = self.get_mut(index).expect("looked up above");
                request.status = RequestStatus::FinishedError;
                request.is_session = false;
                advance.stopped = true;
            }
        }
        Ok(Some(advance))
    }

    /// Takes back the positions of rejected draft tokens: they will be computed again, with the
    /// tokens that were sampled in their place.
    fn settle_drafts(&mut self, index: RequestIndex, scheduled: &ScheduledOutput<'_>, stale: bool) {
        let num_drafts = scheduled.num_draft_tokens;
        let Self { config, slots, spec_decoding_stats, .. } = self;
        let num_sampled = config.num_sampled_tokens_per_step;
        if num_drafts == 0 || (scheduled.sampled_tokens.is_empty() && num_sampled > 0) {
            return;
        }
        let request = slots[index.index()].as_mut().expect("looked up by the caller");
        let num_accepted = (scheduled.sampled_tokens.len() as u32).saturating_sub(num_sampled);
        let num_rejected = num_drafts.saturating_sub(num_accepted);
        // A stale step's count is from before the preemption, which has taken back all.
        if !stale && request.num_computed_tokens > 0 {
            request.num_computed_tokens -= num_rejected;
        }
        if !stale && request.num_output_placeholders > 0 {
            request.num_output_placeholders -= num_rejected;
        }
        let num_valid_drafts = num_drafts.saturating_sub(scheduled.num_invalid_drafts);
        let num_spec_tokens = config.speculation.num_spec_tokens;
        if config.log_stats {
            let new = || SpecDecodingStats::new(num_spec_tokens);
            spec_decoding_stats.get_or_insert_with(new).observe(num_valid_drafts, num_accepted);
        }
        if let Some(stats) = &mut request.spec_stats {
            let in_detail = config.speculation.request_metrics == RequestSpecMetrics::Detailed;
            stats.observe(num_valid_drafts, num_accepted, in_detail);
        }
    }

    /// A pooling request is over as soon as its vector is there. Returns whether it is one.
    fn end_pooling(&mut self, index: RequestIndex) -> bool {
        let (request, _) = self.get_mut(index).expect("looked up by the caller");
        if request.is_pooling {
            request.status = RequestStatus::FinishedStopped;
        }
        request.is_pooling
    }

    /// Appends tokens until one of them ends the request.
    fn append_tokens(&mut self, index: RequestIndex, tokens: &[i32], is_stale: bool) -> Advance {
        let mut advance = Advance { num_new_tokens: 0, stopped: false };
        if tokens.is_empty() {
            return advance;
        }
        let Self { config, kv_cache, slots, .. } = self;
        let request = slots[index.index()].as_mut().expect("looked up by the caller");
        let was_running = request.status == RequestStatus::Running;
        let had_placeholders = request.num_output_placeholders > 0;
        for &token in tokens {
            request.append_output_token(token, config.hasher.as_ref());
            advance.num_new_tokens += 1;
            advance.stopped = check_stop(request, config.max_model_len);
            if advance.stopped {
                break;
            }
        }
        if config.behaviors.caches_settled_output {
            if is_stale {
                return advance;
            }
            // Tokens that a stop has cut off are computed for nobody.
            let num_cut = (tokens.len() - advance.num_new_tokens) as u32;
            request.num_computed_tokens -= num_cut.min(request.num_computed_tokens);
            if had_placeholders {
                request.num_output_placeholders -= tokens.len() as u32;
            }
            if was_running && (had_placeholders || config.speculation.num_spec_tokens > 0) {
                kv_cache.cache_blocks(request, request.num_settled_tokens());
            }
        } else if config.async_scheduling {
            // A preemption has cleared the placeholders of stale tokens already.
            if !is_stale {
                request.num_output_placeholders -= advance.num_new_tokens as u32;
            }
            if was_running {
                let num_final = request.num_computed_tokens - request.num_output_placeholders;
                kv_cache.cache_blocks(request, num_final);
            }
        }
        advance
    }

    /// What is to be told of a request, as it is before the scheduler reacts to a stop.
    fn begin_output(
        &mut self,
        index: RequestIndex,
        position: usize,
        num_new_tokens: usize,
    ) -> RequestOutput {
        let (request, kv_cache) = self.get_mut(index).expect("looked up by the caller");
        let prefill_stats = request.prefill_stats.take().map(|stats| {
            let num_cached = kv_cache.num_cached_tokens(request).min(stats.num_prompt_tokens);
            PrefillStats {
                num_cache_creation_tokens: num_cached.saturating_sub(stats.num_cached_tokens()),
                ..stats
            }
        });
        RequestOutput {
            index,
            position,
            num_new_tokens,
            finished: Some(request.status).filter(|status| status.is_finished()),
            is_over: false,
            is_kept: false,
            spec_stats: None,
            stop_reason: StopReason::None,
            events: SmallVec::new(),
            prefill_stats,
        }
    }

    fn complete_output(&mut self, mut output: RequestOutput, stays: bool) -> RequestOutput {
        let (request, _) = self.get_mut(output.index).expect("looked up by the caller");
        output.is_over = !stays;
        output.spec_stats = output.finished.and_then(|_| request.spec_stats.clone());
        output.stop_reason = request.stop_reason;
        output.events = std::mem::take(&mut request.events);
        output
    }

    /// Lets a session that has stopped go on, now or when its next input comes. Returns whether
    /// the request is over.
    fn end_turn<H: Hooks>(
        &mut self,
        index: RequestIndex,
        was_running: bool,
        hooks: &mut H,
    ) -> Result<bool, H::Error> {
        let (request, _) = self.get_mut(index).expect("looked up by the caller");
        if !request.is_session {
            return Ok(true);
        }
        // What is in flight belongs to the turn that is over.
        request.num_computed_tokens -= request.num_output_placeholders;
        request.num_output_placeholders = 0;
        request.drafts.clear();
        request.drop_stale_output = true;
        request.num_stale_output_tokens = request.num_in_flight_tokens;
        match hooks.next_turn(index, request.tokens(), request.num_kept_tokens())? {
            NextTurn::Closed => return Ok(true),
            NextTurn::Pending => self.await_input(index),
            NextTurn::Input(input) => self.take_input(index, input),
        }
        // One that was preempted is in its queue already.
        if was_running && !self.config.behaviors.requeues_sessions_last {
            self.enqueue(index);
        }
        Ok(false)
    }
}
