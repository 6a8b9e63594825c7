//! What connectors say of requests while the core makes a call: it goes to clients with the outputs.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What one connector has said in this call, by request id.
pub(crate) struct Told(Py<PyDict>);

impl Told {
    pub(crate) fn new(py: Python<'_>) -> Self {
        Self(PyDict::new(py).unbind())
    }

    /// Keeps what was said of a request, unless it is None.
    pub(crate) fn note(&self, request: &Bound<'_, PyAny>, said: Bound<'_, PyAny>) -> PyResult<()> {
        if said.is_none() {
            return Ok(());
        }
        let py = request.py();
        self.0.bind(py).set_item(request.getattr(intern!(py, "request_id"))?, said)
    }

    /// Hands out what was said, if anything was.
    pub(crate) fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let told = self.0.bind(py);
        if told.is_empty() {
            return Ok(None);
        }
        let taken = told.copy()?;
        told.clear();
        Ok(Some(taken))
    }
}
