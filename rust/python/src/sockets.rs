//! PUSH sockets to clients that stay on ZMQ, as Python sees them.

use pyo3::exceptions::{PyConnectionError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use sparksched_backlog::Limits;
use sparksched_entry_points::entry_points;
use sparksched_ring::message::Message;
use sparksched_zmtp::push::{Event, Push, Sent};
use sparksched_zmtp::sockets::PushSockets;

use crate::convert::StepOutputs;
use crate::frames;
use crate::rings::{message_event, seconds};

#[pyclass(name = "EngineSockets", module = "sparksched._core", frozen)]
pub(crate) struct PyEngineSockets {
    sockets: PushSockets,
}

impl PyEngineSockets {
    fn socket(&self, client: u32) -> PyResult<&Push> {
        self.sockets
            .socket(client)
            .ok_or_else(|| PyRuntimeError::new_err(format!("client {client} is not on this host")))
    }
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
    ) -> PyResult<Self> {
        let limits = Limits {
            idle_bytes: max_idle_backlog_bytes,
            patience: seconds("stuck_after_s", stuck_after_s)?,
            max_bytes: max_backlog_bytes,
        };
        let sockets = PushSockets::new(addresses, limits)
            .map_err(|error| PyConnectionError::new_err(error.to_string()))?;
        Ok(Self { sockets })
    }

    fn is_attached(&self, client: u32) -> PyResult<bool> {
        Ok(self.sockets.socket(client).is_some())
    }

    #[getter]
    fn is_deserted(&self) -> PyResult<bool> {
        Ok(self.sockets.is_deserted())
    }

    fn wait(&self, py: Python<'_>) -> PyResult<Vec<(u32, Option<String>)>> {
        let events = py.detach(|| self.sockets.wait());
        let reason = |event| match event {
            Event::Ready => None,
            Event::Gone(reason) => Some(reason),
        };
        Ok(events.into_iter().map(|(client, event)| (client, reason(event))).collect())
    }

    #[pyo3(signature = (client, kind, frames, *, regardless = false))]
    fn send(
        &self,
        py: Python<'_>,
        client: u32,
        kind: u8,
        frames: &Bound<'_, PyAny>,
        regardless: bool,
    ) -> PyResult<bool> {
        let _ = kind; // what ZMQ's clients read has none
        let socket = self.socket(client)?;
        let sent =
            frames::send(py, frames, |frames| self.sockets.send(socket, frames, regardless))?;
        Ok(sent == Sent::Accepted)
    }

    fn send_outputs(
        &self,
        py: Python<'_>,
        client: u32,
        kind: u8,
        outputs: &mut StepOutputs,
    ) -> PyResult<bool> {
        let _ = kind;
        let socket = self.socket(client)?;
        let sent =
            frames::send_outputs(py, outputs, |frames| self.sockets.send(socket, frames, false))?;
        Ok(sent == Sent::Accepted)
    }

    fn backlog_bytes(&self, client: u32) -> PyResult<usize> {
        Ok(self.socket(client)?.backlog_bytes())
    }

    #[pyo3(signature = (client, *, max_bytes))]
    fn take_back_newest<'py>(
        &self,
        py: Python<'py>,
        client: u32,
        max_bytes: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for frames in self.socket(client)?.take_back_newest(max_bytes) {
            list.append(message_event(py, client, &Message { kind: 0, frames })?)?;
        }
        Ok(list)
    }

    fn unblock(&self, client: u32) -> PyResult<()> {
        self.socket(client)?.unblock();
        Ok(())
    }

    #[pyo3(signature = (*, linger_s = 0.0))]
    fn close(&self, py: Python<'_>, linger_s: f64) -> PyResult<()> {
        let linger = seconds("linger_s", linger_s)?;
        py.detach(|| self.sockets.close(linger));
        Ok(())
    }
}
