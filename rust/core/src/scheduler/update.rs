//! What the model runner brought: vLLM's `update_from_output()`, `_update_request_with_output()`,
//! `check_stop()` and, for asynchronous scheduling, `v1/core/sched/async_scheduler.py`.

use super::Scheduler;
use crate::callbacks::{Callbacks, NextTurn, Sessions};
use crate::config::{RequestSpecMetrics, SchedulerConfig};
use crate::ids::RequestIndex;
use crate::kv_cache_manager::KvCacheManager;
use crate::request::{Event, PrefillStats, Request, RequestStatus};
use crate::stats::{RequestSpecStats, SpecDecodingStats};
use crate::stop::StopReason;

/// What became of one request of a step that was scheduled earlier.
#[derive(Clone, Copy, Debug)]
pub struct ScheduledOutput<'a> {
    /// The request, if it still exists.
    pub index: Option<RequestIndex>,
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

/// What a client gets of one request.
#[derive(Clone, Debug)]
pub struct RequestOutput {
    /// The request. The next one to arrive may get the index of one that is over.
    pub index: RequestIndex,
    /// Which of the scheduled outputs this is about.
    pub position: usize,
    /// How many of the sampled tokens count: a stop cuts the rest off.
    pub num_new_tokens: usize,
    /// What there is besides tokens; nearly all outputs have nothing.
    pub news: Option<Box<RequestNews>>,
}

/// What a client gets of a request besides its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestNews {
    /// How the request ended, or a session's turn, if it did.
    pub finished: Option<RequestStatus>,
    /// The request is done: a session whose turn has ended is not.
    pub is_over: bool,
    /// It is done, and stays until its blocks are sent.
    pub is_kept: bool,
    pub stop_reason: StopReason,
    /// What happened to the request since the last output.
    pub events: Vec<Event>,
    /// With the request's first output, how its prompt was computed.
    pub prefill_stats: Option<PrefillStats>,
    /// With the request's last output, how its draft tokens fared, if clients get that.
    pub spec_stats: Option<Box<RequestSpecStats>>,
}

/// How a request came out of its new tokens.
struct Advance {
    num_new_tokens: usize,
    stopped: bool,
}

/// Requests that have stopped in a step. The queues lose them all at once, after the last output.
#[derive(Default)]
struct Stopped {
    /// To be taken out of the running ones.
    running: Vec<RequestIndex>,
    /// To be taken out of the queues, where a preemption has put them.
    preempted: Vec<RequestIndex>,
    /// Sessions to be queued for their next turn.
    continuing: Vec<RequestIndex>,
    /// Requests that nothing keeps.
    leaving: Vec<RequestIndex>,
}

impl Scheduler {
    /// Appends what was sampled, ends the requests that are done, and writes what clients get into
    /// `outputs`, in the order of `scheduled`.
    ///
    /// # Errors
    /// What the callbacks fail with; the scheduler is not to be used after that.
    ///
    /// # Panics
    /// If more stale output comes back than was in flight.
    pub fn update_from_output<'a, C: Callbacks>(
        &mut self,
        scheduled: impl Iterator<Item = ScheduledOutput<'a>>,
        callbacks: &mut C,
        outputs: &mut Vec<RequestOutput>,
    ) -> Result<(), C::Error> {
        outputs.clear();
        self.spec_decoding_stats = None;
        let mut all_stopped = Stopped::default();
        for (position, scheduled) in scheduled.enumerate() {
            if position == 0 {
                self.note_processed_step();
            }
            // The request may have been aborted while the step ran.
            let Some(index) = scheduled.index else { continue };
            let Some(request) = self.get(index) else { continue };
            let was_running = request.status == RequestStatus::Running;
            let Some(advance) = self.advance_request(index, &scheduled, callbacks)? else {
                continue;
            };
            let Advance { num_new_tokens, stopped } = advance;
            if num_new_tokens == 0 && !stopped && !scheduled.is_pooled {
                continue;
            }
            if self.config.collects_aux_output {
                callbacks.take_aux_output(self.request(index))?;
            }
            let mut news = self.take_news(index);
            if stopped {
                let news = news.as_mut().expect("that a request has stopped is news");
                self.stop(index, was_running, news, &mut all_stopped, callbacks)?;
            }
            outputs.push(RequestOutput { index, position, num_new_tokens, news });
        }
        self.remove_running(&all_stopped.running);
        self.remove_waiting(&all_stopped.preempted);
        for index in all_stopped.continuing {
            self.enqueue(index);
        }
        for index in all_stopped.leaving {
            self.slots.vacate(index);
        }
        Ok(())
    }

    /// Ends a request that has stopped, or the turn of a session. Completes its news.
    fn stop<C: Callbacks>(
        &mut self,
        index: RequestIndex,
        was_running: bool,
        news: &mut RequestNews,
        all_stopped: &mut Stopped,
        callbacks: &mut C,
    ) -> Result<(), C::Error> {
        let stays = !self.end_turn(index, was_running, callbacks)?;
        let requeues_last = self.config.behaviors.requeues_sessions_last;
        if was_running {
            all_stopped.running.push(index);
        } else if !stays || requeues_last {
            all_stopped.preempted.push(index);
        }
        if stays {
            if requeues_last {
                all_stopped.continuing.push(index);
            }
            // The next turn has begun, and this output says so.
            news.events.append(&mut self.slots[index].events);
            return Ok(());
        }
        news.is_over = true;
        news.is_kept = self.end_request(index, false, callbacks)?;
        if !news.is_kept {
            all_stopped.leaving.push(index);
        }
        Ok(())
    }

    /// Settles one request's share of the step; `None` if what it brought does not count.
    fn advance_request<C: Callbacks>(
        &mut self,
        index: RequestIndex,
        scheduled: &ScheduledOutput<'_>,
        callbacks: &mut C,
    ) -> Result<Option<Advance>, C::Error> {
        let Self { config, kv_cache, slots, spec_decoding_stats, .. } = self;
        let request = &mut slots[index];
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
        if scheduled.num_draft_tokens > 0 {
            settle_drafts(request, config, spec_decoding_stats, scheduled, is_stale);
        }
        if request.has_encoder_inputs {
            let num_processed =
                request.num_computed_tokens.saturating_sub(request.num_output_placeholders);
            callbacks.free_processed_encoder_inputs(request, num_processed)?;
        }
        let sampled_tokens = scheduled.sampled_tokens;
        let mut advance = append_tokens(request, config, kv_cache, sampled_tokens, is_stale);
        if scheduled.is_pooled && request.is_pooling && advance.num_new_tokens == 0 {
            // It is over as soon as its vector is there.
            request.status = RequestStatus::FinishedStopped;
            advance.stopped = true;
        }
        if advance.num_new_tokens > 0
            && request.use_structured_output
            && !callbacks.accept_tokens(index, request.tokens(), advance.num_new_tokens)?
        {
            request.status = RequestStatus::FinishedError;
            request.is_session = false;
            advance.stopped = true;
        }
        Ok(Some(advance))
    }

    /// What a client gets of a request besides its tokens, before the scheduler reacts to a stop.
    fn take_news(&mut self, index: RequestIndex) -> Option<Box<RequestNews>> {
        let Self { slots, kv_cache, .. } = self;
        let request = &mut slots[index];
        let is_finished = request.status.is_finished();
        let has_news = is_finished
            || request.prefill_stats.is_some()
            || !request.events.is_empty()
            || request.stop_reason != StopReason::None;
        if !has_news {
            return None;
        }
        let prefill_stats = request.prefill_stats.take().map(|stats| {
            let num_cached = kv_cache.num_cached_tokens(request).min(stats.num_prompt_tokens);
            PrefillStats {
                num_cache_creation_tokens: num_cached.saturating_sub(stats.num_cached_tokens()),
                ..stats
            }
        });
        Some(Box::new(RequestNews {
            finished: is_finished.then_some(request.status),
            is_over: false,
            is_kept: false,
            stop_reason: request.stop_reason,
            events: std::mem::take(&mut request.events),
            prefill_stats,
            spec_stats: if is_finished { request.spec_stats.clone() } else { None },
        }))
    }

    /// Lets a session that has stopped go on, now or when its next input comes. Returns whether
    /// the request is over.
    fn end_turn<C: Sessions>(
        &mut self,
        index: RequestIndex,
        was_running: bool,
        callbacks: &mut C,
    ) -> Result<bool, C::Error> {
        let request = &mut self.slots[index];
        if !request.is_session {
            return Ok(true);
        }
        // What is in flight belongs to the turn that is over.
        request.num_computed_tokens -= request.num_output_placeholders;
        request.num_output_placeholders = 0;
        request.drafts.clear();
        request.drop_stale_output = true;
        request.num_stale_output_tokens = request.num_in_flight_tokens;
        match callbacks.next_turn(index, request.tokens(), request.num_kept_tokens())? {
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

/// Takes back the positions of rejected draft tokens: they will be computed again, with the tokens
/// that were sampled in their place.
fn settle_drafts(
    request: &mut Request,
    config: &SchedulerConfig,
    step_stats: &mut Option<SpecDecodingStats>,
    scheduled: &ScheduledOutput<'_>,
    is_stale: bool,
) {
    let num_sampled = config.num_sampled_tokens_per_step;
    if scheduled.sampled_tokens.is_empty() && num_sampled > 0 {
        return;
    }
    let num_drafts = scheduled.num_draft_tokens;
    let num_accepted = (scheduled.sampled_tokens.len() as u32).saturating_sub(num_sampled);
    let num_rejected = num_drafts.saturating_sub(num_accepted);
    // A stale step's count is from before the preemption, which has taken back all.
    if !is_stale && request.num_computed_tokens > 0 {
        request.num_computed_tokens -= num_rejected;
    }
    if !is_stale && request.num_output_placeholders > 0 {
        request.num_output_placeholders -= num_rejected;
    }
    let num_valid_drafts = num_drafts.saturating_sub(scheduled.num_invalid_drafts);
    if config.log_stats {
        let new = || SpecDecodingStats::new(config.speculation.num_spec_tokens);
        step_stats.get_or_insert_with(new).observe(num_valid_drafts, num_accepted);
    }
    if let Some(stats) = &mut request.spec_stats {
        let in_detail = config.speculation.request_metrics == RequestSpecMetrics::Detailed;
        stats.observe(num_valid_drafts, num_accepted, in_detail);
    }
}

/// Appends tokens until one of them ends the request.
fn append_tokens(
    request: &mut Request,
    config: &SchedulerConfig,
    kv_cache: &mut KvCacheManager,
    tokens: &[i32],
    is_stale: bool,
) -> Advance {
    let mut advance = Advance { num_new_tokens: 0, stopped: false };
    if tokens.is_empty() {
        return advance;
    }
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
            kv_cache.cache_blocks(request, request.num_settled(request.num_computed_tokens));
        }
    } else if config.async_scheduling {
        // A preemption has cleared the placeholders of stale tokens already.
        if !is_stale {
            request.num_output_placeholders -= advance.num_new_tokens as u32;
        }
        if was_running {
            // Below zero if a failed load has taken back tokens that other steps go on from.
            let num_final =
                request.num_computed_tokens.saturating_sub(request.num_output_placeholders);
            kv_cache.cache_blocks(request, num_final);
        }
    }
    advance
}

/// Looks at the request's last token; returns whether the request is done and if so, sets its
/// status and reason. The order of the checks is vLLM's and part of the contract.
///
/// # Panics
/// If the request has no token.
fn check_stop(request: &mut Request, max_model_len: u32) -> bool {
    let last = *request.tokens().last().expect("a stop is checked after a token was appended");
    let num_output = request.num_output_tokens() as u64;
    let stop = request.stop_conditions();

    let (status, reason) = if stop.eos_token_id == Some(last) {
        (RequestStatus::FinishedStopped, StopReason::None)
    } else if stop.stop_token_ids.contains(&last) {
        (RequestStatus::FinishedStopped, StopReason::Token(last))
    } else if request.num_tokens() >= max_model_len as usize || num_output >= stop.max_tokens {
        (RequestStatus::FinishedLengthCapped, StopReason::None)
    } else if num_output < stop.min_tokens {
        return false;
    } else if stop.repetition.as_ref().is_some_and(|params| params.matches(request.output_tokens()))
    {
        (RequestStatus::FinishedRepetition, StopReason::Repetition)
    } else {
        return false;
    };
    request.status = status;
    if reason != StopReason::None {
        request.stop_reason = reason;
    }
    true
}
