//! A message's frames as Python has them: lent to whoever sends them, and made of what has come.
//!
//! A frame is any object with a contiguous buffer on its way out; on its way in the first frame of a
//! message is `bytes` and the others, which tensors may be made of, are writable `bytearray`s.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyMemoryView};
use sparksched_ring::message::Message;

use crate::convert::StepOutputs;

/// Messages above this are copied without the GIL.
pub(crate) const LARGE_BYTES: usize = 256 << 10;

/// A frame that outlives the loan of its Python object, or borrows from immutable bytes.
enum Frame<'py> {
    Borrowed(Bound<'py, PyBytes>),
    Copied(Vec<u8>),
}

impl<'py> Frame<'py> {
    fn read(frame: Bound<'py, PyAny>) -> PyResult<Self> {
        match frame.cast_into::<PyBytes>() {
            Ok(bytes) => Ok(Self::Borrowed(bytes)),
            Err(error) => {
                let frame = error.into_inner();
                // Arrays and tensors come with their own formats and shapes.
                let view = PyMemoryView::from(&frame)?;
                if view.getattr("nbytes")?.extract::<usize>()? == 0 {
                    return Ok(Self::Copied(Vec::new()));
                }
                let view = view.call_method1("cast", ("B",))?;
                Ok(Self::Copied(PyBuffer::<u8>::get(&view)?.to_vec(frame.py())?))
            }
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes.as_bytes(),
            Self::Copied(bytes) => bytes,
        }
    }
}

/// Calls `call` with the bytes of an iterable of buffers.
pub(crate) fn send<T: Send>(
    py: Python<'_>,
    frames: &Bound<'_, PyAny>,
    call: impl Send + Sync + Fn(&[&[u8]]) -> T,
) -> PyResult<T> {
    let frames: Vec<_> =
        frames.try_iter()?.map(|frame| Frame::read(frame?)).collect::<PyResult<_>>()?;
    let parts: Vec<&[u8]> = frames.iter().map(Frame::bytes).collect();
    Ok(send_parts(py, &parts, call))
}

/// Calls `call` with the frames of a step's outputs.
pub(crate) fn send_outputs<T: Send>(
    py: Python<'_>,
    outputs: &mut StepOutputs,
    call: impl Send + Sync + Fn(&[&[u8]]) -> T,
) -> PyResult<T> {
    outputs.read_frames(py, |message, buffers| {
        let buffers: Vec<_> = buffers.into_iter().map(Frame::read).collect::<PyResult<_>>()?;
        let parts: Vec<&[u8]> =
            std::iter::once(message).chain(buffers.iter().map(Frame::bytes)).collect();
        Ok(send_parts(py, &parts, call))
    })
}

fn send_parts<T: Send>(
    py: Python<'_>,
    parts: &[&[u8]],
    call: impl Send + Sync + Fn(&[&[u8]]) -> T,
) -> T {
    let is_large = parts.iter().map(|part| part.len()).sum::<usize>() > LARGE_BYTES;
    if is_large { py.detach(|| call(parts)) } else { call(parts) }
}

#[pyclass(module = "sparksched._core", frozen, get_all)]
pub(crate) struct RingMessage {
    client: u32,
    kind: u8,
    frames: Py<PyList>,
}

/// A message from a client, or one that was to go to it.
pub(crate) fn received(py: Python<'_>, client: u32, message: &Message) -> PyResult<Py<PyAny>> {
    let frames = PyList::empty(py);
    let mut parts = message.frames.iter();
    if let Some(first) = parts.next() {
        frames.append(PyBytes::new(py, first))?;
    }
    for frame in parts {
        frames.append(PyByteArray::new(py, frame))?;
    }
    Ok(Py::new(py, RingMessage { client, kind: message.kind, frames: frames.unbind() })?.into_any())
}
