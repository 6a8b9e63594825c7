//! PUSH sockets to clients that stay on ZMQ, as Python sees them.

use std::sync::Arc;

use pyo3::exceptions::PyConnectionError;
use pyo3::prelude::*;
use sparksched_entry_points::entry_points;
use sparksched_zmtp::push::Event;
use sparksched_zmtp::sockets::PushSockets;

use crate::links::{Links, PyEngineLinks, limits};

#[pyclass(name = "EngineSockets", module = "sparksched._core", frozen, extends = PyEngineLinks)]
pub(crate) struct PyEngineSockets {
    sockets: Arc<PushSockets>,
}

#[entry_points(EngineSockets)]
#[pymethods]
impl PyEngineSockets {
    #[new]
    #[pyo3(signature = (
        addresses, *, max_idle_backlog_bytes, max_backlog_bytes, stuck_after_s
    ))]
    fn new(
        addresses: Vec<String>,
        max_idle_backlog_bytes: usize,
        max_backlog_bytes: usize,
        stuck_after_s: f64,
    ) -> PyResult<PyClassInitializer<Self>> {
        let limits = limits(max_idle_backlog_bytes, max_backlog_bytes, stuck_after_s)?;
        let sockets = PushSockets::new(addresses, limits)
            .map_err(|error| PyConnectionError::new_err(error.to_string()))?;
        let sockets = Arc::new(sockets);
        let links = Links::Sockets(Arc::clone(&sockets));
        Ok(PyEngineLinks::with(links, Self { sockets }))
    }

    fn wait(&self, py: Python<'_>) -> PyResult<Vec<(u32, Option<String>)>> {
        let events = py.detach(|| self.sockets.wait());
        let reason = |event| match event {
            Event::Ready => None,
            Event::Gone(reason) => Some(reason),
        };
        Ok(events.into_iter().map(|(client, event)| (client, reason(event))).collect())
    }
}
