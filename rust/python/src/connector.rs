//! A Python object that answers the core's questions: `KVTransfer`, `EncoderTransfer` or vLLM's collector
//! of auxiliary output. What it says of requests goes to clients with their outputs.

use pyo3::call::PyCallArgs;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

pub(crate) struct Connector {
    python: Option<Py<PyAny>>,
    /// What was said of requests in this call, by request id.
    extras: Py<PyDict>,
}

impl Connector {
    pub(crate) fn new(py: Python<'_>, python: Option<Py<PyAny>>) -> Self {
        Self { python, extras: PyDict::new(py).unbind() }
    }

    pub(crate) fn is_present(&self) -> bool {
        self.python.is_some()
    }

    /// Calls a method of the object, which must be there: the core asks only then.
    pub(crate) fn call<'py>(
        &self,
        name: &Bound<'py, PyString>,
        arguments: impl PyCallArgs<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let python = self.python.as_ref().expect("the core asks only if it is there");
        python.bind(name.py()).call_method1(name, arguments)
    }

    /// Calls a method without arguments, if the object is there.
    pub(crate) fn call_if_present<'py>(
        &self,
        name: &Bound<'py, PyString>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.is_present().then(|| self.call(name, ())).transpose()
    }

    /// Keeps what is to go to a request's client, unless it is None.
    pub(crate) fn note(&self, request: &Bound<'_, PyAny>, extra: Bound<'_, PyAny>) -> PyResult<()> {
        if extra.is_none() {
            return Ok(());
        }
        let py = request.py();
        self.extras.bind(py).set_item(request.getattr(intern!(py, "request_id"))?, extra)
    }

    /// Hands out what was kept, if anything was.
    pub(crate) fn take_extras<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let extras = self.extras.bind(py);
        if extras.is_empty() {
            return Ok(None);
        }
        let taken = extras.copy()?;
        extras.clear();
        Ok(Some(taken))
    }
}
