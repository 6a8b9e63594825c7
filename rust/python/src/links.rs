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
use sparksched_ring::engine::EngineRings;
use sparksched_ring::link::Link;
use sparksched_ring::message::{Message, Unsendable};
use sparksched_ring::outbox::SendError;
use sparksched_zmtp::push::{Push, Sent};
use sparksched_zmtp::sockets::PushSockets;

use crate::convert::StepOutputs;
use crate::frames;

/// An engine's links to its clients.
pub(crate) enum Links {
    Rings(Arc<EngineRings>),
    Sockets(Arc<PushSockets>),
}

/// What is sent to one client. Nothing here waits for it.
#[derive(Clone, Copy)]
enum Outgoing<'a> {
    Ring(&'a Link),
    Socket(&'a Push),
}

impl Outgoing<'_> {
    /// Sends a message, or keeps it until there is room. Returns false if too much waits already,
    /// or did since the last [`Self::unblock`]: nothing overtakes what is lost. What is sent
    /// `regardless` is never refused. A client that is gone takes all, and gets nothing.
    fn send(self, kind: u8, frames: &[&[u8]], regardless: bool) -> Result<bool, Unsendable> {
        match self {
            Self::Ring(link) => match link.send(kind, frames, regardless) {
                Ok(_) | Err(SendError::Gone) => Ok(true),
                Err(SendError::Full) => Ok(false),
                Err(SendError::Unsendable(error)) => Err(error),
                Err(SendError::Corrupt(_)) => {
                    link.hang_up();
                    Ok(true)
                }
            },
            // ZMQ's messages have no kind, and any frames can be sent.
            Self::Socket(push) => Ok(push.send(frames, regardless) == Sent::Accepted),
        }
    }
}

#[pyclass(name = "EngineLinks", module = "sparksched._core", frozen, subclass)]
pub(crate) struct PyEngineLinks {
    links: Links,
}

impl PyEngineLinks {
    /// An object of a subclass.
    pub(crate) fn with<T: PyClass<BaseType = Self>>(
        links: Links,
        subclass: T,
    ) -> PyClassInitializer<T> {
        PyClassInitializer::from(Self { links }).add_subclass(subclass)
    }

    fn find(&self, client: u32) -> Option<Outgoing<'_>> {
        match &self.links {
            Links::Rings(rings) => rings.link(client).map(|link| Outgoing::Ring(link)),
            Links::Sockets(sockets) => sockets.socket(client).map(Outgoing::Socket),
        }
    }

    fn link(&self, client: u32) -> PyResult<Outgoing<'_>> {
        self.find(client)
            .ok_or_else(|| PyRuntimeError::new_err(format!("there is no link to client {client}")))
    }
}

#[entry_points(EngineLinks)]
#[pymethods]
impl PyEngineLinks {
    fn is_attached(&self, client: u32) -> PyResult<bool> {
        Ok(self.find(client).is_some())
    }

    #[getter]
    fn is_deserted(&self) -> PyResult<bool> {
        Ok(match &self.links {
            Links::Rings(rings) => rings.is_deserted(),
            Links::Sockets(sockets) => sockets.is_deserted(),
        })
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
        Ok(match self.link(client)? {
            Outgoing::Ring(link) => link.backlog_bytes(),
            Outgoing::Socket(push) => push.backlog_bytes(),
        })
    }

    #[pyo3(signature = (client, *, max_bytes))]
    fn take_back_newest<'py>(
        &self,
        py: Python<'py>,
        client: u32,
        max_bytes: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        let messages = match self.link(client)? {
            Outgoing::Ring(link) => link.take_back_newest(max_bytes),
            Outgoing::Socket(push) => {
                let taken = push.take_back_newest(max_bytes).into_iter();
                taken.map(|frames| Message { kind: 0, frames }).collect()
            }
        };
        let list = PyList::empty(py);
        for message in messages {
            list.append(frames::received(py, client, &message)?)?;
        }
        Ok(list)
    }

    fn unblock(&self, client: u32) -> PyResult<()> {
        match self.link(client)? {
            Outgoing::Ring(link) => link.unblock(),
            Outgoing::Socket(push) => push.unblock(),
        }
        Ok(())
    }

    #[pyo3(signature = (*, linger_s = 0.0))]
    fn close(&self, py: Python<'_>, linger_s: f64) -> PyResult<()> {
        let linger = seconds("linger_s", linger_s)?;
        py.detach(|| match &self.links {
            Links::Rings(rings) => rings.close(linger),
            Links::Sockets(sockets) => sockets.close(linger),
        });
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
