//! PUSH sockets to clients that stay on ZMQ, as Python sees them.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyConnectionError;
use pyo3::prelude::*;
use sparksched_entry_points::entry_points;
use sparksched_ring::message::{Message, Unsendable};
use sparksched_zmtp::push::{Event, Push, Sent};
use sparksched_zmtp::sockets::PushSockets;

use crate::links::{Links, Outgoing, PyEngineLinks, limits};

impl Links for PushSockets {
    fn link(&self, client: u32) -> Option<&dyn Outgoing> {
        Some(self.socket(client)?)
    }

    fn is_deserted(&self) -> bool {
        self.is_deserted()
    }

    fn close(&self, linger: Duration) {
        self.close(linger);
    }
}

/// ZMQ's messages have no kind, and any frames can be sent.
impl Outgoing for Push {
    fn send(&self, _kind: u8, frames: &[&[u8]], regardless: bool) -> Result<bool, Unsendable> {
        Ok(self.send(frames, regardless) == Sent::Accepted)
    }

    fn backlog_bytes(&self) -> usize {
        self.backlog_bytes()
    }

    fn take_back_newest(&self, max_bytes: usize) -> Vec<Message> {
        let taken = self.take_back_newest(max_bytes).into_iter();
        taken.map(|frames| Message { kind: 0, frames }).collect()
    }

    fn unblock(&self) {
        self.unblock();
    }
}

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
        let links = Arc::clone(&sockets);
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
