//! What an engine sends through to its clients, as Python sees it: `EngineLinks`, the base class of
//! `EngineRings` and `EngineSockets`.

use std::sync::Arc;
use std::time::Duration;

use pyo3::PyClass;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use sparksched_backlog::Limits;
use sparksched_entry_points::entry_points;
use sparksched_ring::message::{Message, Unsendable};

use crate::convert::StepOutputs;
use crate::frames;

/// An engine's links to its clients.
pub(crate) trait Links: Send + Sync {
    fn link(&self, client: u32) -> Option<&dyn Outgoing>;

    /// Whether each client has come, and has gone.
    fn is_deserted(&self) -> bool;

    /// Ends all links, once clients have taken what waits or `linger` is over.
    fn close(&self, linger: Duration);
}

/// What is sent to one client. Nothing here waits for it.
pub(crate) trait Outgoing: Sync {
    /// Sends a message, or keeps it until there is room. Returns false if too much waits already,
    /// or did since the last [`Self::unblock`]: nothing overtakes what is lost. What is sent
    /// `regardless` is never refused. A client that is gone takes all, and gets nothing.
    fn send(&self, kind: u8, frames: &[&[u8]], regardless: bool) -> Result<bool, Unsendable>;

    /// Bytes of messages that wait.
    fn backlog_bytes(&self) -> usize;

    /// Takes back messages of which nothing was sent, but for those sent regardless: the newest
    /// first, until they have `max_bytes` or none is left.
    fn take_back_newest(&self, max_bytes: usize) -> Vec<Message>;

    /// Accepts messages again after one was refused.
    fn unblock(&self);
}

#[pyclass(name = "EngineLinks", module = "sparksched._core", frozen, subclass)]
pub(crate) struct PyEngineLinks {
    links: Arc<dyn Links>,
}

impl PyEngineLinks {
    /// An object of a subclass.
    pub(crate) fn with<T: PyClass<BaseType = Self>>(
        links: Arc<dyn Links>,
        subclass: T,
    ) -> PyClassInitializer<T> {
        PyClassInitializer::from(Self { links }).add_subclass(subclass)
    }

    fn link(&self, client: u32) -> PyResult<&dyn Outgoing> {
        self.links
            .link(client)
            .ok_or_else(|| PyRuntimeError::new_err(format!("there is no link to client {client}")))
    }
}

#[entry_points(EngineLinks)]
#[pymethods]
impl PyEngineLinks {
    fn is_attached(&self, client: u32) -> PyResult<bool> {
        Ok(self.links.link(client).is_some())
    }

    #[getter]
    fn is_deserted(&self) -> PyResult<bool> {
        Ok(self.links.is_deserted())
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
        let link = self.link(client)?;
        frames::send(py, frames, |frames| link.send(kind, frames, regardless))?.map_err(value_error)
    }

    fn send_outputs(
        &self,
        py: Python<'_>,
        client: u32,
        kind: u8,
        outputs: &mut StepOutputs,
    ) -> PyResult<bool> {
        let link = self.link(client)?;
        frames::send_outputs(py, outputs, |frames| link.send(kind, frames, false))?
            .map_err(value_error)
    }

    fn backlog_bytes(&self, client: u32) -> PyResult<usize> {
        Ok(self.link(client)?.backlog_bytes())
    }

    #[pyo3(signature = (client, *, max_bytes))]
    fn take_back_newest<'py>(
        &self,
        py: Python<'py>,
        client: u32,
        max_bytes: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for message in self.link(client)?.take_back_newest(max_bytes) {
            list.append(frames::received(py, client, &message)?)?;
        }
        Ok(list)
    }

    fn unblock(&self, client: u32) -> PyResult<()> {
        self.link(client)?.unblock();
        Ok(())
    }

    #[pyo3(signature = (*, linger_s = 0.0))]
    fn close(&self, py: Python<'_>, linger_s: f64) -> PyResult<()> {
        let linger = seconds("linger_s", linger_s)?;
        py.detach(|| self.links.close(linger));
        Ok(())
    }
}

pub(crate) fn value_error(error: Unsendable) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub(crate) fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{name} is {value}: {error}")))
}

pub(crate) fn limits(
    max_idle_backlog_bytes: usize,
    max_backlog_bytes: usize,
    stuck_after_s: f64,
) -> PyResult<Limits> {
    Ok(Limits {
        idle_bytes: max_idle_backlog_bytes,
        patience: seconds("stuck_after_s", stuck_after_s)?,
        max_bytes: max_backlog_bytes,
    })
}
