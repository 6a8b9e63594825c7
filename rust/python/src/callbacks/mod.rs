//! The core's questions, answered by vLLM's objects: an `impl` for each owner of answers.

mod aux_outputs;
mod encoder_transfer;
mod kv_transfer;

use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sparksched_core::{
    EncoderInputs, Fallible, GrammarState, Grammars, NextTurn, Request, RequestIndex, Sessions,
};

use crate::connector::Connector;
use crate::convert::{self, ExtraKeysReader, RequestView};
use crate::entries::Entries;

pub(crate) use aux_outputs::{AuxOutputs, CachedBlocks};
pub(crate) use kv_transfer::{LoadFailures, LoadReport};

/// The Python functions that are called for the few requests that need them.
pub(crate) struct PythonFunctions {
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
pub(crate) struct PyCallbacks<'a, 'py> {
    pub(crate) py: Python<'py>,
    pub(crate) entries: &'a Entries,
    pub(crate) functions: &'a PythonFunctions,
    pub(crate) extra_keys: &'a ExtraKeysReader,
    pub(crate) kv_transfer: &'a Connector,
    pub(crate) encoder_transfer: &'a Connector,
    pub(crate) aux_outputs: &'a AuxOutputs,
    pub(crate) view: &'a RequestView,
    /// Why the grammars of requests can't be compiled, by id.
    pub(crate) grammar_errors: &'a Py<PyDict>,
}

impl<'a, 'py> PyCallbacks<'a, 'py> {
    fn request(&self, index: RequestIndex) -> &'a Bound<'py, PyAny> {
        self.entries.get(index).request.bind(self.py)
    }

    /// A `Request` that somebody will look at, brought up to date.
    fn shown(&self, request: &Request) -> PyResult<&'a Bound<'py, PyAny>> {
        let object = self.request(request.index());
        self.view.update(object, request)?;
        Ok(object)
    }

    /// A `Request` of which encoder inputs come and go: an EC connector looks at it, if there is one.
    fn seen_by_encoder(&self, request: &Request) -> PyResult<&'a Bound<'py, PyAny>> {
        if self.encoder_transfer.is_present() {
            return self.shown(request);
        }
        Ok(self.request(request.index()))
    }

    fn encoder_inputs(&self) -> &Bound<'py, PyAny> {
        self.functions.encoder_inputs.bind(self.py)
    }
}

impl Fallible for PyCallbacks<'_, '_> {
    type Error = PyErr;
}

impl Grammars for PyCallbacks<'_, '_> {
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
        self.functions.accept_tokens.bind(self.py).call1((request, tokens))?.is_truthy()
    }
}

impl Sessions for PyCallbacks<'_, '_> {
    fn next_turn(
        &mut self,
        index: RequestIndex,
        sequence: &[i32],
        num_kept_tokens: usize,
    ) -> PyResult<NextTurn> {
        let request = self.request(index);
        convert::sync_request_tokens(request, sequence)?;
        let next_turn = self.functions.next_turn.bind(self.py);
        let has_input: Option<bool> = next_turn.call1((request, num_kept_tokens))?.extract()?;
        Ok(match has_input {
            None => NextTurn::Pending,
            Some(false) => NextTurn::Closed,
            Some(true) => {
                NextTurn::Input(convert::session_input(request, num_kept_tokens, self.extra_keys)?)
            }
        })
    }
}

impl EncoderInputs for PyCallbacks<'_, '_> {
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
        let object = self.seen_by_encoder(request)?;
        let arguments = (object,);
        self.encoder_inputs().call_method1(intern!(self.py, "schedule"), arguments)?;
        Ok(())
    }

    fn free_processed_encoder_inputs(
        &mut self,
        request: &Request,
        num_processed_tokens: u32,
    ) -> PyResult<()> {
        let object = self.seen_by_encoder(request)?;
        let arguments = (object, num_processed_tokens);
        self.encoder_inputs().call_method1(intern!(self.py, "free_processed"), arguments)?;
        Ok(())
    }

    fn free_encoder_inputs(&mut self, index: RequestIndex) -> PyResult<()> {
        let arguments = (self.request(index),);
        self.encoder_inputs().call_method1(intern!(self.py, "free"), arguments)?;
        Ok(())
    }
}
