//! Python objects that go to clients with the outputs of a request: a connector's parameters, auxiliary
//! output. They are collected while the core makes a call.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// One kind of such objects, collected in this call, by request id.
pub(crate) struct RequestExtras(Py<PyDict>);

impl RequestExtras {
    pub(crate) fn new(py: Python<'_>) -> Self {
        Self(PyDict::new(py).unbind())
    }

    /// Keeps the object of a request, unless it is None.
    pub(crate) fn note(&self, request: &Bound<'_, PyAny>, extra: Bound<'_, PyAny>) -> PyResult<()> {
        if extra.is_none() {
            return Ok(());
        }
        let py = request.py();
        self.0.bind(py).set_item(request.getattr(intern!(py, "request_id"))?, extra)
    }

    /// Hands out what was collected, if anything was.
    pub(crate) fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let extras = self.0.bind(py);
        if extras.is_empty() {
            return Ok(None);
        }
        let taken = extras.copy()?;
        extras.clear();
        Ok(Some(taken))
    }
}
