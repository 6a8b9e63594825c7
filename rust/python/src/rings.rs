//! The shared-memory queues as Python sees them: `EngineRings`, `ClientRings` and their events.
//!
//! Waiting and large copies happen without the GIL.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use pyo3::exceptions::{PyConnectionError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use sparksched_entry_points::entry_points;
use sparksched_ring::client::{ClientOptions, ClientRings};
use sparksched_ring::engine::{EngineEvent, EngineOptions, EngineRings};
use sparksched_ring::handshake::HandshakeError;
use sparksched_ring::link::{End, Event};
use sparksched_ring::outbox::{SendError, Ticket};

use crate::frames::{self, LARGE_BYTES};
use crate::guard::catch_panics;
use crate::links::{Links, PyEngineLinks, limits, seconds, value_error};
use crate::meters::PyEngineMeters;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(note_fork, module)?)?;
    module.add_class::<PyEngineRings>()?;
    module.add_class::<PyClientRings>()?;
    module.add_class::<RingAttached>()?;
    module.add_class::<RingRefused>()?;
    module.add_class::<RingStuck>()?;
    module.add_class::<RingRecovered>()?;
    module.add_class::<RingEnd>()
}

#[entry_points]
#[pyfunction]
fn note_fork() -> PyResult<()> {
    sparksched_ring::link::note_fork();
    Ok(())
}

// ----------------------------------------------------------------------------------------
// Events
// ----------------------------------------------------------------------------------------

#[pyclass(module = "sparksched._core", frozen, get_all)]
struct RingAttached {
    client: u32,
    pid: i32,
}

#[pyclass(module = "sparksched._core", frozen, get_all)]
struct RingRefused {
    reason: String,
}

#[pyclass(module = "sparksched._core", frozen, get_all)]
struct RingStuck {
    client: u32,
    seconds: f64,
}

#[pyclass(module = "sparksched._core", frozen, get_all)]
struct RingRecovered {
    client: u32,
}

#[pyclass(module = "sparksched._core", frozen, get_all)]
struct RingEnd {
    client: u32,
    reason: String,
    is_goodbye: bool,
}

fn link_event(py: Python<'_>, client: u32, event: &Event) -> PyResult<Py<PyAny>> {
    Ok(match event {
        Event::Message(message) => frames::received(py, client, message)?,
        Event::Stuck(silence) => {
            Py::new(py, RingStuck { client, seconds: silence.as_secs_f64() })?.into_any()
        }
        Event::Recovered => Py::new(py, RingRecovered { client })?.into_any(),
        Event::End(end) => {
            let is_goodbye = *end == End::Closed;
            Py::new(py, RingEnd { client, reason: end.to_string(), is_goodbye })?.into_any()
        }
    })
}

fn engine_event(py: Python<'_>, event: &EngineEvent) -> PyResult<Py<PyAny>> {
    Ok(match event {
        EngineEvent::Attached { client, pid } => {
            Py::new(py, RingAttached { client: *client, pid: *pid })?.into_any()
        }
        EngineEvent::Refused(reason) => {
            Py::new(py, RingRefused { reason: reason.clone() })?.into_any()
        }
        EngineEvent::Link { client, event } => link_event(py, *client, event)?,
    })
}

#[expect(clippy::needless_pass_by_value, reason = "a function for map_err")]
fn connection_error(error: HandshakeError) -> PyErr {
    if matches!(error, HandshakeError::Undecided(_)) {
        // Nobody may go on with ZMQ: the engine may send to the rings from now on.
        return PyRuntimeError::new_err(error.to_string());
    }
    PyConnectionError::new_err(error.to_string())
}

// ----------------------------------------------------------------------------------------
// The engine's side
// ----------------------------------------------------------------------------------------

#[pyclass(name = "EngineRings", module = "sparksched._core", frozen, extends = PyEngineLinks)]
struct PyEngineRings {
    rings: Arc<EngineRings>,
}

#[entry_points(EngineRings)]
#[pymethods]
impl PyEngineRings {
    #[new]
    #[pyo3(signature = (
        name, *, num_clients, ring_bytes, max_idle_backlog_bytes, max_backlog_bytes, stuck_after_s
    ))]
    fn new(
        name: &str,
        num_clients: u32,
        ring_bytes: usize,
        max_idle_backlog_bytes: usize,
        max_backlog_bytes: usize,
        stuck_after_s: f64,
    ) -> PyResult<PyClassInitializer<Self>> {
        let backlog = limits(max_idle_backlog_bytes, max_backlog_bytes, stuck_after_s)?;
        let options = EngineOptions {
            num_clients,
            ring_bytes,
            backlog,
            stuck_after: backlog.patience,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let rings = Arc::new(EngineRings::listen(name, options).map_err(connection_error)?);
        let links = Links::Rings(Arc::clone(&rings));
        Ok(PyEngineLinks::with(links, Self { rings }))
    }

    #[getter]
    fn name(&self) -> PyResult<&str> {
        Ok(self.rings.name())
    }

    fn report_to(&self, meters: &PyEngineMeters) -> PyResult<()> {
        self.rings.report_to(meters.page());
        Ok(())
    }

    #[pyo3(signature = (*, timeout_s = None))]
    fn receive<'py>(
        &self,
        py: Python<'py>,
        timeout_s: Option<f64>,
    ) -> PyResult<Bound<'py, PyList>> {
        let timeout = timeout_s.map(|timeout_s| seconds("timeout_s", timeout_s)).transpose()?;
        let events = py.detach(|| self.rings.receive(timeout));
        let list = PyList::empty(py);
        for event in &events {
            list.append(engine_event(py, event)?)?;
        }
        Ok(list)
    }

    fn interrupt(&self) -> PyResult<()> {
        self.rings.interrupt();
        Ok(())
    }

    #[getter]
    fn is_closed(&self) -> PyResult<bool> {
        Ok(self.rings.is_closed())
    }

    fn hang_up(&self, client: u32) -> PyResult<()> {
        let link = self.rings.link(client);
        link.ok_or_else(|| PyRuntimeError::new_err(format!("client {client} has not come yet")))?
            .hang_up();
        Ok(())
    }
}

// ----------------------------------------------------------------------------------------
// The client's side
// ----------------------------------------------------------------------------------------

#[pyclass(name = "ClientRings", module = "sparksched._core", frozen)]
struct PyClientRings {
    rings: ClientRings,
    client_index: u32,
}

impl PyClientRings {
    /// Runs a call that uses the link. A panic in it ends the link, for nobody knows what it has left
    /// in the rings: the engine hears a goodbye, and all that is in flight fails.
    fn linked<T>(
        &self,
        entry: &'static str,
        call: impl FnOnce(&Self) -> PyResult<T>,
    ) -> PyResult<T> {
        catch_panics(entry, || call(self)).inspect_err(|_| self.rings.link().hang_up())?
    }
}

#[entry_points(ClientRings)]
#[pymethods]
impl PyClientRings {
    #[new]
    #[pyo3(signature = (name, *, client_index, stuck_after_s))]
    fn new(py: Python<'_>, name: &str, client_index: u32, stuck_after_s: f64) -> PyResult<Self> {
        let options = ClientOptions {
            client_index,
            stuck_after: seconds("stuck_after_s", stuck_after_s)?,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let connected = py.detach(|| ClientRings::connect(name, options));
        Ok(Self { rings: connected.map_err(connection_error)?, client_index })
    }

    #[getter]
    fn ring_bytes(&self) -> PyResult<usize> {
        Ok(self.rings.link().ring_bytes())
    }

    fn fileno(&self) -> PyResult<i32> {
        Ok(self.rings.event_fd().as_raw_fd())
    }

    #[pyo3(signature = (*, max_messages = 64))]
    #[by(linked)]
    fn receive<'py>(&self, py: Python<'py>, max_messages: usize) -> PyResult<Bound<'py, PyList>> {
        let link = self.rings.link();
        let events = if link.readable_bytes() > LARGE_BYTES {
            py.detach(|| self.rings.receive(max_messages))
        } else {
            self.rings.receive(max_messages)
        };
        let list = PyList::empty(py);
        for event in &events {
            list.append(link_event(py, self.client_index, event)?)?;
        }
        Ok(list)
    }

    #[pyo3(signature = (timeout_s = None))]
    #[by(linked)]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        let timeout = timeout_s.map(|timeout_s| seconds("timeout_s", timeout_s)).transpose()?;
        py.detach(|| self.rings.wait(timeout));
        py.check_signals()
    }

    #[by(linked)]
    fn send(&self, py: Python<'_>, kind: u8, frames: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        let link = self.rings.link();
        let sent = frames::send(py, frames, |frames| link.send(kind, frames, true))?;
        sent.map_err(|error| {
            if let SendError::Unsendable(error) = error {
                return value_error(error);
            }
            if matches!(error, SendError::Corrupt(_)) {
                link.hang_up();
            }
            PyConnectionError::new_err(error.to_string())
        })
    }

    #[by(linked)]
    fn sent_before(&self) -> PyResult<Ticket> {
        let link = self.rings.link();
        Ok(link.sent_before())
    }

    #[getter]
    #[by(linked)]
    fn without_room_for_s(&self) -> PyResult<Option<f64>> {
        Ok(self.rings.link().without_room_for().map(|time| time.as_secs_f64()))
    }

    #[getter]
    fn stuck_for_s(&self) -> PyResult<Option<f64>> {
        Ok(self.rings.link().stuck_for().map(|silence| silence.as_secs_f64()))
    }

    #[pyo3(signature = (*, linger_s = 0.0))]
    #[by(linked)]
    fn close(&self, py: Python<'_>, linger_s: f64) -> PyResult<()> {
        let linger = seconds("linger_s", linger_s)?;
        py.detach(|| self.rings.close(linger));
        Ok(())
    }
}
