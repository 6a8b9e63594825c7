//! Hands what the core says of encoder inputs to `sparksched.engine.encoder_transfer`.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sparksched_core::{EcConnector, Request};

use crate::request_extras::RequestExtras;

use super::PyCallbacks;

/// `EncoderTransfer`, if there is an EC connector.
pub(crate) struct EncoderTransfer {
    python: Option<Py<PyAny>>,
    /// What the connector said of requests that ended in this call, by request id.
    params: RequestExtras,
}

impl EncoderTransfer {
    pub(crate) fn new(py: Python<'_>, python: Option<Py<PyAny>>) -> Self {
        Self { python, params: RequestExtras::new(py) }
    }

    fn python<'a, 'py>(&'a self, py: Python<'py>) -> &'a Bound<'py, PyAny> {
        self.python.as_ref().expect("the core asks only if there is a connector").bind(py)
    }

    pub(super) fn is_present(&self) -> bool {
        self.python.is_some()
    }

    /// What the connector said of the requests that ended in this call, if it did.
    pub(crate) fn take_params<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.params.take(py)
    }

    /// The ids of requests whose inputs can't be had any more: a set.
    pub(crate) fn take_unavailable<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(python) = &self.python else { return Ok(None) };
        let ids = python.bind(py).call_method0(intern!(py, "take_unavailable"))?;
        Ok(ids.is_truthy()?.then_some(ids))
    }

    /// Tells the connector what its workers report, None or not.
    pub(crate) fn update(&self, model_runner_output: &Bound<'_, PyAny>) -> PyResult<()> {
        let Some(python) = &self.python else { return Ok(()) };
        let py = model_runner_output.py();
        let report = model_runner_output.getattr(intern!(py, "ec_connector_output"))?;
        python.bind(py).call_method1(intern!(py, "update"), (report,))?;
        Ok(())
    }

    /// `ec_connector_stats` of the step, if there is a connector.
    pub(crate) fn take_stats<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(python) = &self.python else { return Ok(None) };
        python.bind(py).call_method0(intern!(py, "take_stats")).map(Some)
    }
}

impl EcConnector for PyCallbacks<'_, '_> {
    fn has_encoder_outputs(
        &mut self,
        request: &Request,
        num_computed_tokens: i64,
    ) -> PyResult<bool> {
        let (py, object) = (self.py, self.shown(request)?);
        let arguments = (object, num_computed_tokens);
        self.encoder_transfer
            .python(py)
            .call_method1(intern!(py, "has_outputs"), arguments)?
            .is_truthy()
    }

    fn end_encoder_transfer(&mut self, request: &Request) -> PyResult<bool> {
        let (py, object) = (self.py, self.shown(request)?);
        let answer = self
            .encoder_transfer
            .python(py)
            .call_method1(intern!(py, "finish_request"), (object,))?;
        let (is_kept, params): (bool, Bound<'_, PyAny>) = answer.extract()?;
        self.encoder_transfer.params.note(object, params)?;
        Ok(is_kept)
    }
}
