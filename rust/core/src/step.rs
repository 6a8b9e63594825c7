//! What one call of `schedule()` decided: the content of vLLM's `SchedulerOutput`.

use crate::ids::{BlockId, RequestIndex};
use crate::request::Request;

/// How a request that was not running came into the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// For the first time.
    New,
    /// Again, after a preemption.
    Resumed,
}

/// A request of the step and how many of its tokens are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledRequest {
    pub index: RequestIndex,
    /// Tokens of this step, at least one.
    pub num_tokens: u32,
    /// `num_computed_tokens` before this step.
    pub num_computed_tokens: u32,
    /// `num_in_flight_tokens` before this step.
    pub num_in_flight_tokens: i64,
    /// Output tokens, those that scheduled steps will bring included, before this step.
    pub num_output_tokens: u32,
    /// The last `schedule()` before this one did not include the request.
    pub is_new_to_batch: bool,
    pub has_new_blocks: bool,
    /// Of this step's tokens, draft tokens: the last ones.
    pub num_draft_tokens: u32,
    /// Where they are in [`Step::draft_tokens`].
    first_draft: u32,
}

impl ScheduledRequest {
    pub(crate) fn new(
        request: &Request,
        index: RequestIndex,
        num_tokens: u32,
        is_new_to_batch: bool,
    ) -> Self {
        Self {
            index,
            num_tokens,
            num_computed_tokens: request.num_computed_tokens,
            num_in_flight_tokens: request.num_in_flight_tokens,
            num_output_tokens: request.num_output_tokens() as u32 + request.num_output_placeholders,
            is_new_to_batch,
            has_new_blocks: request.groups.iter().any(|it| !it.new_blocks().is_empty()),
            num_draft_tokens: 0,
            first_draft: 0,
        }
    }
}

/// Stands for a draft token that only the model runner knows.
pub const UNKNOWN_DRAFT: i32 = -1;

/// One step. Its buffers are reused by the next.
#[expect(clippy::struct_excessive_bools, reason = "they are vLLM's flags, one by one")]
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Requests that were running already, in the order in which they were scheduled.
    pub running: Vec<ScheduledRequest>,
    /// Requests that were waiting, in the order of their admission.
    pub admitted: Vec<(Admission, ScheduledRequest)>,
    /// Requests that lost their blocks to others in this step, in that order.
    pub preempted: Vec<RequestIndex>,
    /// Tokens of all requests together.
    pub total_num_tokens: u32,
    /// A request of the step that samples a token uses structured output.
    pub has_structured_output_requests: bool,
    /// One of these still waits for the token before.
    pub pending_structured_output_tokens: bool,
    /// A request of the step has tokens whose KV a connector brings within the step.
    pub has_sync_kv_loads: bool,
    /// From where to where the workers copy blocks before they compute the step.
    pub block_copies: Vec<(BlockId, BlockId)>,
    /// Blocks that the workers fill with zeros before that.
    pub blocks_to_zero: Vec<BlockId>,
    /// Draft tokens that each request is to get for the next step.
    pub num_spec_tokens_to_schedule: u32,
    /// A request can use the drafts that are proposed after this step. Only noted where drafting
    /// can be skipped.
    pub needs_drafts: bool,
    /// One of the running requests computes a part of its prompt.
    pub(crate) has_prefill: bool,
    /// One of the admitted requests computes more than its last known token.
    pub(crate) has_admitted_prefill: bool,
    pub(crate) loras: Vec<i64>,
    drafts: Vec<i32>,
}

impl Step {
    pub(crate) fn clear(&mut self) {
        self.running.clear();
        self.admitted.clear();
        self.preempted.clear();
        self.total_num_tokens = 0;
        self.has_structured_output_requests = false;
        self.pending_structured_output_tokens = false;
        self.has_sync_kv_loads = false;
        self.block_copies.clear();
        self.blocks_to_zero.clear();
        self.needs_drafts = false;
        self.has_prefill = false;
        self.has_admitted_prefill = false;
        self.loras.clear();
        self.drafts.clear();
    }

    /// Draft tokens that a request of this step verifies.
    pub fn draft_tokens(&self, scheduled: &ScheduledRequest) -> &[i32] {
        &self.drafts[scheduled.first_draft as usize..][..scheduled.num_draft_tokens as usize]
    }

    /// Has a request of this step verify draft tokens.
    pub(crate) fn set_drafts(&mut self, scheduled: &mut ScheduledRequest, drafts: &[i32]) {
        scheduled.first_draft = self.drafts.len() as u32;
        scheduled.num_draft_tokens = drafts.len() as u32;
        self.drafts.extend_from_slice(drafts);
    }

    /// Has a request of this step verify drafts that only the model runner knows.
    pub(crate) fn set_unknown_drafts(&mut self, scheduled: &mut ScheduledRequest, num_drafts: u32) {
        scheduled.first_draft = self.drafts.len() as u32;
        scheduled.num_draft_tokens = num_drafts;
        self.drafts.resize(self.drafts.len() + num_drafts as usize, UNKNOWN_DRAFT);
    }

    /// All requests of the step: the running ones, then the admitted ones.
    pub fn scheduled(&self) -> impl Iterator<Item = &ScheduledRequest> {
        self.running.iter().chain(self.admitted.iter().map(|(_, scheduled)| scheduled))
    }
}
