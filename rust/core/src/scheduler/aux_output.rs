//! Auxiliary output, such as routed experts: what vLLM's `v1/core/sched/scheduler.py` does for its
//! `aux_output_connector`.
//!
//! Workers collect it by block, and hand it out with a request's tokens. So whoever owns it is told
//! when a request's blocks are given up; and a prefix whose output is gone is computed again.

use super::Scheduler;
use super::transfers::Hit;
use crate::callbacks::AuxOutputs;
use crate::ids::RequestIndex;

impl Scheduler {
    /// The most tokens that a hit in the prefix cache may have.
    pub(super) fn max_prefix_hit<C: AuxOutputs>(
        &mut self,
        index: RequestIndex,
        callbacks: &mut C,
    ) -> Result<u32, C::Error> {
        if !self.config.behaviors.caps_hits_to_aux_output {
            return Ok(u32::MAX);
        }
        callbacks.max_prefix_hit(&self.slots[index], self.kv_cache.pool_mut())
    }

    /// Leaves tokens to be computed that a KV connector has, but without auxiliary output.
    pub(super) fn cap_external_hit<C: AuxOutputs>(
        &mut self,
        index: RequestIndex,
        mut hit: Hit,
        callbacks: &mut C,
    ) -> Result<Hit, C::Error> {
        if !self.config.behaviors.caps_hits_to_aux_output || self.config.kv_transfer.is_none() {
            return Ok(hit);
        }
        let (request, pool) = (&self.slots[index], self.kv_cache.pool_mut());
        let external = &mut hit.external;
        external.num_tokens =
            callbacks.cap_external_hit(request, pool, hit.local.num_tokens, external.num_tokens)?;
        external.is_async &= external.num_tokens > 0;
        Ok(hit)
    }

    /// Tells that a KV connector begins to load a request's blocks.
    pub(super) fn note_load<C: AuxOutputs>(
        &self,
        index: RequestIndex,
        callbacks: &mut C,
    ) -> Result<(), C::Error> {
        if self.config.behaviors.caps_hits_to_aux_output {
            callbacks.note_load(self.request(index))?;
        }
        Ok(())
    }

    /// Tells that a request is about to lose its blocks.
    pub(super) fn end_aux_output<C: AuxOutputs>(
        &mut self,
        index: RequestIndex,
        callbacks: &mut C,
    ) -> Result<(), C::Error> {
        if self.config.collects_aux_output {
            callbacks.end_aux_output(&self.slots[index], self.kv_cache.pool_mut())?;
        }
        Ok(())
    }
}
