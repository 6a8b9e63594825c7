//! What Python knows of each request that the core does not.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;
use sparksched_core::RequestIndex;
use sparksched_wire::RequestId;

/// What Python knows of a request that the core does not.
pub(crate) struct Entry {
    /// `request_id`, the very object: dictionaries find it by identity.
    pub(crate) id: Py<PyString>,
    /// The same for messages.
    pub(crate) wire_id: RequestId,
    pub(crate) request: Py<PyAny>,
    /// Which front end it came from.
    pub(crate) client_index: i64,
    pub(crate) wants_logprobs: bool,
    pub(crate) trace_headers: Option<Py<PyAny>>,
    /// The last count that the model runner told.
    pub(crate) num_nans_in_logits: i64,
}

/// Entries by the places of their requests in the core.
#[derive(Default)]
pub(crate) struct Entries(Vec<Option<Entry>>);

impl Entries {
    pub(crate) fn get(&self, index: RequestIndex) -> &Entry {
        self.0[index.index()].as_ref().expect("each request has an entry")
    }

    pub(crate) fn get_mut(&mut self, index: RequestIndex) -> &mut Entry {
        self.0[index.index()].as_mut().expect("each request has an entry")
    }

    pub(crate) fn insert(&mut self, index: RequestIndex, entry: Entry) {
        if index.index() >= self.0.len() {
            self.0.resize_with(index.index() + 1, || None);
        }
        self.0[index.index()] = Some(entry);
    }

    pub(crate) fn take(&mut self, index: RequestIndex) -> Entry {
        self.0[index.index()].take().expect("each request has an entry")
    }
}

impl Entry {
    /// Reads what is needed of a `Request`.
    pub(crate) fn of(request: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = request.py();
        let trace_headers = request.getattr(intern!(py, "trace_headers"))?;
        let id = request.getattr(intern!(py, "request_id"))?.cast_into::<PyString>()?;
        Ok(Self {
            wire_id: RequestId::new(id.to_cow()?.as_ref()),
            id: id.unbind(),
            request: request.clone().unbind(),
            client_index: request.getattr(intern!(py, "client_index"))?.extract()?,
            wants_logprobs: wants_logprobs(request)?,
            trace_headers: (!trace_headers.is_none()).then(|| trace_headers.unbind()),
            num_nans_in_logits: request.getattr(intern!(py, "num_nans_in_logits"))?.extract()?,
        })
    }

    /// Reads again what a session's next input has changed.
    pub(crate) fn refresh(&mut self, py: Python<'_>) -> PyResult<()> {
        self.wants_logprobs = wants_logprobs(self.request.bind(py))?;
        Ok(())
    }

    /// Whether its outputs carry something that most don't.
    pub(crate) fn is_rare(&self) -> bool {
        self.wants_logprobs || self.trace_headers.is_some() || self.num_nans_in_logits != 0
    }
}

fn wants_logprobs(request: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = request.py();
    let sampling_params = request.getattr(intern!(py, "sampling_params"))?;
    // A pooling request has none.
    Ok(!sampling_params.is_none()
        && !sampling_params.getattr(intern!(py, "num_logprobs"))?.is_none())
}
