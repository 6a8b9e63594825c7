//! The core's questions, answered by vLLM's objects.

use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sparksched_core::{
    BlockId, BlockPool, ExternalAllocation, ExternalHit, GrammarState, Hooks, NextTurn, Request,
    RequestIndex,
};

use crate::aux_outputs::AuxOutputs;
use crate::convert;
use crate::convert::ExtraKeysReader;
use crate::encoder_transfer::EncoderTransfer;
use crate::entries::Entries;
use crate::kv_transfer::KvTransfer;

/// The Python functions that are called for the few requests that need them.
pub(crate) struct Callbacks {
    /// `accept_tokens(request, token_ids) -> bool`.
    pub(crate) accept_tokens: Py<PyAny>,
    /// `validate_tokens(request, token_ids) -> list[int]`: those before the first that the grammar
    /// rejects.
    pub(crate) validate_tokens: Py<PyAny>,
    /// `next_turn(request, num_kept_tokens) -> bool | None`: gives a session its next input, if
    /// there is one; False if it is closed.
    pub(crate) next_turn: Py<PyAny>,
    /// `sparksched.engine.encoder_inputs.EncoderInputs`.
    pub(crate) encoder_inputs: Py<PyAny>,
    /// `step_perf_stats(scheduler_output) -> PerfStats`, if MFU metrics are on.
    pub(crate) step_perf_stats: Option<Py<PyAny>>,
}

/// Answers for the duration of one call.
pub(crate) struct PyHooks<'a, 'py> {
    pub(crate) py: Python<'py>,
    pub(crate) entries: &'a Entries,
    pub(crate) callbacks: &'a Callbacks,
    pub(crate) extra_keys: &'a ExtraKeysReader,
    pub(crate) kv_transfer: &'a KvTransfer,
    pub(crate) encoder_transfer: &'a EncoderTransfer,
    pub(crate) aux_outputs: &'a AuxOutputs,
    /// Why the grammars of requests can't be compiled, by id.
    pub(crate) grammar_errors: &'a Py<PyDict>,
}

impl<'py> PyHooks<'_, 'py> {
    fn request(&self, index: RequestIndex) -> &Bound<'py, PyAny> {
        self.entries.get(index).request.bind(self.py)
    }

    fn encoder_inputs(&self) -> &Bound<'py, PyAny> {
        self.callbacks.encoder_inputs.bind(self.py)
    }
}

impl Hooks for PyHooks<'_, '_> {
    type Error = PyErr;

    fn grammar_state(&mut self, index: RequestIndex) -> PyResult<GrammarState> {
        let py = self.py;
        let structured = self.request(index).getattr(intern!(py, "structured_output_request"))?;
        if structured.is_none() {
            return Ok(GrammarState::Pending);
        }
        let grammar = structured.getattr(intern!(py, "grammar"))?;
        if grammar.is_none() {
            return Ok(GrammarState::Pending);
        }
        if grammar.is_instance_of::<PyException>() {
            self.grammar_errors.bind(py).set_item(&self.entries.get(index).id, grammar)?;
            return Ok(GrammarState::Failed);
        }
        Ok(GrammarState::Ready)
    }

    fn accept_tokens(
        &mut self,
        index: RequestIndex,
        sequence: &[i32],
        num_new_tokens: usize,
    ) -> PyResult<bool> {
        let request = self.request(index);
        // Reasoning parsers look at the whole sequence, the new tokens included.
        convert::sync_request_tokens(request, sequence)?;
        let tokens = PyList::new(self.py, &sequence[sequence.len() - num_new_tokens..])?;
        self.callbacks.accept_tokens.bind(self.py).call1((request, tokens))?.is_truthy()
    }

    fn next_turn(
        &mut self,
        index: RequestIndex,
        sequence: &[i32],
        num_kept_tokens: usize,
    ) -> PyResult<NextTurn> {
        let request = self.request(index);
        convert::sync_request_tokens(request, sequence)?;
        let next_turn = self.callbacks.next_turn.bind(self.py);
        let has_input: Option<bool> = next_turn.call1((request, num_kept_tokens))?.extract()?;
        Ok(match has_input {
            None => NextTurn::Pending,
            Some(false) => NextTurn::Closed,
            Some(true) => {
                NextTurn::Input(convert::session_input(request, num_kept_tokens, self.extra_keys)?)
            }
        })
    }

    fn plan_encoder_inputs(
        &mut self,
        index: RequestIndex,
        num_computed_tokens: u32,
        num_new_tokens: u32,
    ) -> PyResult<u32> {
        let arguments = (self.request(index), num_computed_tokens, num_new_tokens);
        self.encoder_inputs().call_method1(intern!(self.py, "plan"), arguments)?.extract()
    }

    fn schedule_encoder_inputs(&mut self, request: &Request) -> PyResult<()> {
        let object = self.request(request.index());
        self.encoder_transfer.show(object, request)?;
        let arguments = (object,);
        self.encoder_inputs().call_method1(intern!(self.py, "schedule"), arguments)?;
        Ok(())
    }

    fn free_processed_encoder_inputs(
        &mut self,
        request: &Request,
        num_processed_tokens: u32,
    ) -> PyResult<()> {
        let object = self.request(request.index());
        self.encoder_transfer.show(object, request)?;
        let arguments = (object, num_processed_tokens);
        self.encoder_inputs().call_method1(intern!(self.py, "free_processed"), arguments)?;
        Ok(())
    }

    fn free_encoder_inputs(&mut self, index: RequestIndex) -> PyResult<()> {
        let arguments = (self.request(index),);
        self.encoder_inputs().call_method1(intern!(self.py, "free"), arguments)?;
        Ok(())
    }

    fn find_external_hit(
        &mut self,
        request: &Request,
        num_local_tokens: u32,
    ) -> PyResult<Option<ExternalHit>> {
        let object = self.request(request.index());
        self.kv_transfer.find_external_hit(object, request, num_local_tokens)
    }

    fn note_allocation(
        &mut self,
        request: &Request,
        pool: &BlockPool,
        allocation: ExternalAllocation,
    ) -> PyResult<()> {
        let object = self.request(request.index());
        self.kv_transfer.note_allocation(object, request, pool, allocation)
    }

    fn has_pending_block_frees(&mut self) -> PyResult<bool> {
        self.kv_transfer.has_pending_block_frees(self.py)
    }

    fn finish_request(&mut self, request: &Request, tables: &[&[BlockId]]) -> PyResult<bool> {
        self.kv_transfer.finish_request(self.request(request.index()), request, tables)
    }

    fn has_encoder_outputs(
        &mut self,
        request: &Request,
        num_computed_tokens: i64,
    ) -> PyResult<bool> {
        let object = self.request(request.index());
        self.encoder_transfer.has_outputs(object, request, num_computed_tokens)
    }

    fn end_encoder_transfer(&mut self, request: &Request) -> PyResult<bool> {
        self.encoder_transfer.finish_request(self.request(request.index()), request)
    }

    fn max_prefix_hit(&mut self, request: &Request, pool: &mut BlockPool) -> PyResult<u32> {
        self.aux_outputs.max_prefix_hit(self.request(request.index()), request, pool)
    }

    fn cap_external_hit(
        &mut self,
        request: &Request,
        pool: &mut BlockPool,
        num_local_tokens: u32,
        num_external_tokens: i32,
    ) -> PyResult<i32> {
        let object = self.request(request.index());
        let (num_local, num_external) = (num_local_tokens, num_external_tokens);
        self.aux_outputs.cap_external_hit(object, request, pool, num_local, num_external)
    }

    fn note_load(&mut self, request: &Request) -> PyResult<()> {
        self.aux_outputs.note_load(self.request(request.index()), request)
    }

    fn end_aux_output(&mut self, request: &Request, pool: &mut BlockPool) -> PyResult<()> {
        self.aux_outputs.end(self.request(request.index()), request, pool)
    }

    fn take_aux_output(&mut self, request: &Request) -> PyResult<()> {
        self.aux_outputs.take(self.request(request.index()), request)
    }
}
