//! Encoder outputs that come from elsewhere: what vLLM's `v1/core/sched/scheduler.py` asks an EC
//! connector before it schedules a request. The rest is where encoder inputs are scheduled and
//! freed.

use super::Scheduler;
use crate::callbacks::EcConnector;
use crate::request::Request;

impl Scheduler {
    /// Whether an encoder output is still in transit that a request needs behind its first
    /// `num_computed_tokens` tokens.
    pub(super) fn awaits_encoder_outputs<C: EcConnector>(
        &self,
        request: &Request,
        num_computed_tokens: i64,
        callbacks: &mut C,
    ) -> Result<bool, C::Error> {
        if !self.config.transfers_encoder_outputs || !request.has_encoder_inputs {
            return Ok(false);
        }
        Ok(!callbacks.has_encoder_outputs(request, num_computed_tokens)?)
    }
}
