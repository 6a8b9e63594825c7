//! What one call of `schedule()` decided: the content of vLLM's `SchedulerOutput`.

use crate::ids::RequestIndex;

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
    /// Which request.
    pub index: RequestIndex,
    /// Tokens of this step, at least one.
    pub num_tokens: u32,
    /// `num_computed_tokens` before this step.
    pub num_computed_tokens: u32,
    /// Output tokens, those that scheduled steps will bring included, before this step.
    pub num_output_tokens: u32,
    /// The last `schedule()` before this one did not include the request.
    pub is_new_to_batch: bool,
}

/// One step. Its buffers are reused by the next.
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
}

impl Step {
    pub(crate) fn clear(&mut self) {
        self.running.clear();
        self.admitted.clear();
        self.preempted.clear();
        self.total_num_tokens = 0;
        self.has_structured_output_requests = false;
        self.pending_structured_output_tokens = false;
    }

    /// All requests of the step: the running ones, then the admitted ones.
    pub fn scheduled(&self) -> impl Iterator<Item = &ScheduledRequest> {
        self.running.iter().chain(self.admitted.iter().map(|(_, scheduled)| scheduled))
    }
}
