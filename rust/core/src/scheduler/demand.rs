//! What the requests ask of the next step, for whoever chooses its knobs. Looking changes nothing
//! that a decision depends on.

use super::policy::reaches_max_tokens_in_flight;
use super::{PauseState, Scheduler};
use crate::config::Policy;
use crate::ids::RequestIndex;
use crate::promise::Promise;
use crate::request::{ExpectedHit, Request, RequestStatus};
use crate::step::ScheduledRequest;
use crate::wait_reason::WaitReason;

/// Of the requests that wait, so many are looked at: a queue may be long.
const MAX_WAITING: usize = 1_024;

/// Blocks that a running request may want of each group in a step, beside those for its tokens.
const MAX_PARTIAL_BLOCKS: u32 = 2;

/// A prompt, or what a preempted request has to compute again.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    pub index: RequestIndex,
    /// Tokens that are to be computed, those that the prefix cache is expected to have left out.
    pub num_missing: u32,
    /// Tokens before these.
    pub num_computed: u32,
    pub is_running: bool,
    /// It runs, or nothing is known to keep it from coming in: it has a place, and there are blocks
    /// for it besides those that running prompts still lack.
    pub may_run: bool,
    pub promise: Option<Promise>,
}

/// What the requests ask of the next step.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Tokens that those who generate want, drafts included.
    pub num_decode_tokens: u32,
    /// Prompts: first those that run, then those that wait, in their order, up to the first that
    /// keeps those behind it waiting.
    pub prompts: Vec<Prompt>,
    /// `throttle_prefills` would hold prompts back.
    pub can_throttle: bool,
    /// The last of these prompts waits for blocks.
    pub lacks_blocks: bool,
    /// The part of all blocks that the largest running prompt needs.
    pub largest_part: f64,
}

/// What a step that was decided on holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepLoad {
    pub num_tokens: u32,
    /// Of these, tokens of requests that generate.
    pub num_decode_tokens: u32,
    /// Of these, tokens of prompts.
    pub num_prompt_tokens: u32,
    /// The same, each times the number of tokens that it attends to.
    pub prompt_attention: f64,
    pub num_admitted: usize,
}

impl Scheduler {
    /// Whether a prompt runs or waits: whether [`Self::survey`] has something to find.
    pub fn may_have_prompts(&self) -> bool {
        self.num_waiting() > 0
            || self.step.has_prefill
            || !self.step.admitted.is_empty()
            || self.had_prompts
    }

    /// Looks what the requests ask of the next step.
    pub fn survey(&mut self, demand: &mut Demand) {
        (demand.num_decode_tokens, demand.lacks_blocks) = (0, false);
        demand.prompts.clear();
        demand.can_throttle = !self.prefill_capacity_bound;
        // Where a release doesn't count the adapters of prompts that are held back, one more could
        // come in beside them, and the next step with all of them would be an error.
        let forgets_adapters =
            self.config.max_loras.is_some() && !self.config.behaviors.counts_loras_of_all_running;
        for &index in &self.running {
            let request = self.request(index);
            let num_known = request.num_tokens() as u32 + request.num_output_placeholders;
            let num_missing = num_known.saturating_sub(request.num_computed_tokens);
            if request.is_prefill_chunk {
                demand.can_throttle &= !(forgets_adapters && request.lora_id.is_some());
                demand.prompts.push(Prompt {
                    index,
                    num_missing,
                    num_computed: request.num_computed_tokens,
                    is_running: true,
                    may_run: true,
                    promise: request.promise,
                });
            } else if !reaches_max_tokens_in_flight(request) {
                demand.num_decode_tokens += num_missing + request.drafts.len() as u32;
            }
        }
        self.had_prompts = !demand.prompts.is_empty();
        let num_tokens = demand.prompts.iter().map(|it| it.num_computed + it.num_missing).max();
        let num_blocks = num_tokens.map_or(0, |it| self.kv_cache.num_admission_blocks(it));
        demand.largest_part = f64::from(num_blocks) / f64::from(self.config.num_blocks);
        self.survey_waiting(demand);
    }

    fn survey_waiting(&mut self, demand: &mut Demand) {
        let num_active = self.running.len() + self.num_waiting_for_input;
        let mut num_places = self.config.max_num_active_reqs.saturating_sub(num_active);
        if self.num_waiting() == 0 || self.pause_state == PauseState::PausedAll {
            return;
        }
        let takes_new = self.pause_state == PauseState::Unpaused;
        let new = self.waiting.roughly_first(if takes_new { MAX_WAITING } else { 0 });
        let indices: Vec<RequestIndex> =
            self.kv_holding_waiting.roughly_first(MAX_WAITING).chain(new).collect();
        let num_lacking = self.num_blocks_lacking();
        let mut num_free = self.kv_cache.pool().num_free().saturating_sub(num_lacking);
        for index in indices {
            // Whether a grammar is compiled is only known when its request has its turn.
            let status = self.request(index).status;
            if status.is_blocked() && status != RequestStatus::WaitingForGrammar {
                continue;
            }
            let hit = self.expected_hit(index);
            let request = self.request(index);
            let num_tokens = request.num_tokens() as u32;
            let num_missing = num_tokens.saturating_sub(hit.num_tokens).max(1);
            let num_blocks = self.kv_cache.num_missing_blocks(request, num_tokens);
            let num_blocks = num_blocks.saturating_sub(hit.num_held_blocks);
            let has_room = num_blocks <= num_free && num_places > 0;
            let was_skipped = request.deferred_by.is_some_and(|it| it != WaitReason::Turn);
            demand.prompts.push(Prompt {
                index,
                num_missing,
                num_computed: hit.num_tokens,
                is_running: false,
                may_run: has_room && !was_skipped,
                promise: request.promise,
            });
            if !has_room {
                demand.lacks_blocks = num_blocks > num_free;
                break;
            }
            num_free -= num_blocks;
            num_places -= 1;
        }
    }

    /// Blocks that running prompts will still take.
    fn num_blocks_lacking(&self) -> u32 {
        let running = self.running.iter().map(|&index| self.request(index));
        let lacking = |it: &Request| self.kv_cache.num_missing_blocks(it, it.num_tokens() as u32);
        running.filter(|it| it.is_prefill_chunk).map(lacking).sum()
    }

    /// What of a waiting request need not be computed: looked up once, so it may be more by the time
    /// of its turn.
    fn expected_hit(&mut self, index: RequestIndex) -> ExpectedHit {
        let request = &self.slots[index];
        if request.num_computed_tokens > 0 {
            let num_tokens = request.num_computed_tokens;
            return ExpectedHit { num_tokens, num_held_blocks: 0 };
        }
        if let Some(expected) = request.expected_hit {
            return expected;
        }
        let expected = self.kv_cache.peek_prefix_hit(request);
        self.slots[index].expected_hit = Some(expected);
        expected
    }

    pub(crate) fn set_promise(&mut self, index: RequestIndex, promise: Promise) {
        self.slots[index].promise = Some(promise);
    }

    /// Whether a step of so many tokens may be decided on in another order: where nobody can lose
    /// blocks, the order doesn't say whose they would be.
    pub(crate) fn can_be_reordered(&self, max_num_tokens: u32) -> bool {
        let smallest = self.config.group_block_sizes.iter().min().copied().unwrap_or(1);
        let num_tokens = max_num_tokens + self.config.speculation.num_lookahead_tokens;
        let partial = MAX_PARTIAL_BLOCKS * self.running.len() as u32;
        let num_blocks =
            self.config.groups.len() as u32 * (num_tokens.div_ceil(smallest) + partial);
        self.config.policy == Policy::Fcfs && num_blocks <= self.kv_cache.pool().num_free()
    }

    /// Takes what those were promised whose prompts end with the step that was decided on last.
    pub(crate) fn take_promises(&mut self, kept: &mut Vec<Promise>) {
        for scheduled in self.step.scheduled() {
            let request = &mut self.slots[scheduled.index];
            let end = scheduled.num_computed_tokens + scheduled.num_tokens;
            if end as usize >= request.num_tokens() {
                kept.extend(request.promise.take().filter(|_| scheduled.num_output_tokens == 0));
            }
        }
    }

    /// What the step holds that was decided on last.
    pub fn step_load(&self) -> StepLoad {
        let step = &self.step;
        let mut load = StepLoad {
            num_tokens: step.total_num_tokens,
            num_admitted: step.admitted.len(),
            ..StepLoad::default()
        };
        for scheduled in step.scheduled() {
            if is_of_prompt(self.request(scheduled.index), scheduled) {
                load.num_prompt_tokens += scheduled.num_tokens;
                load.prompt_attention +=
                    attention_of(scheduled.num_computed_tokens.into(), scheduled.num_tokens.into());
            } else {
                load.num_decode_tokens += scheduled.num_tokens;
            }
        }
        load
    }
}

/// So many tokens behind others, each times the number of tokens that it attends to.
pub(crate) fn attention_of(num_computed: f64, num_tokens: f64) -> f64 {
    num_tokens * (num_computed + 0.5 * num_tokens)
}

/// Whether a request lacked more than its next token when it was scheduled.
fn is_of_prompt(request: &Request, scheduled: &ScheduledRequest) -> bool {
    let num_known = request.num_prompt_tokens() as u32 + scheduled.num_output_tokens;
    num_known > scheduled.num_computed_tokens + 1
}
