//! `StepOutputs`: what a step brings to one client, as a message instead of `EngineCoreOutputs`.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PySet};
use sparksched_core::SchedulerStats;
use sparksched_entry_points::entry_points;
use sparksched_wire::{Envelope, Message, Output, Stats};

use super::{EngineOutputTypes, OtherStats};

/// `scheduler_stats`: as the core knows them, until somebody wants to see or to change them.
enum StatsField {
    None,
    Core(SchedulerStats),
    Object(Py<PyAny>),
}

#[pyclass(module = "sparksched._core")]
pub(crate) struct StepOutputs {
    message: Message,
    /// What vLLM's encoder keeps out of the message: buffers of arrays and tensors. The first is
    /// the message's own place, as in vLLM's lists of frames.
    frames: Py<PyList>,
    /// vLLM's encoder, for what only Python knows.
    encode_part: Py<PyAny>,
    types: Arc<EngineOutputTypes>,
    #[pyo3(get, set)]
    engine_index: i64,
    #[pyo3(get)]
    timestamp: f64,
    scheduler_stats: StatsField,
    #[pyo3(get, set)]
    finished_requests: Option<Py<PySet>>,
    #[pyo3(get, set)]
    weight_version: Option<String>,
}

#[entry_points(StepOutputs)]
#[pymethods]
impl StepOutputs {
    /// `scheduler_stats` as vLLM's object: the caller may change what it gets.
    #[getter]
    fn scheduler_stats(&mut self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        if let StatsField::Core(stats) = &self.scheduler_stats {
            let object = self.types.scheduler_stats(py, stats, &OtherStats::default())?;
            self.scheduler_stats = StatsField::Object(object.unbind());
        }
        Ok(match &self.scheduler_stats {
            StatsField::Object(stats) => Some(stats.clone_ref(py)),
            _ => None,
        })
    }

    #[setter(scheduler_stats)]
    fn assign_scheduler_stats(&mut self, stats: Option<Py<PyAny>>) -> PyResult<()> {
        self.scheduler_stats = stats.map_or(StatsField::None, StatsField::Object);
        Ok(())
    }

    fn frames<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.read_frames(py, |message, buffers| {
            let frames = PyList::new(py, [PyBytes::new(py, message)])?;
            for buffer in buffers {
                frames.append(buffer)?;
            }
            Ok(frames)
        })
    }
}

impl StepOutputs {
    /// No outputs yet.
    pub(crate) fn new(
        py: Python<'_>,
        types: &Arc<EngineOutputTypes>,
        encode_part: &Py<PyAny>,
        num_bytes: usize,
    ) -> PyResult<Self> {
        Ok(Self {
            message: Message::new(types.num_output_fields(), num_bytes),
            frames: PyList::new(py, [PyBytes::new(py, b"")])?.unbind(),
            encode_part: encode_part.clone_ref(py),
            types: Arc::clone(types),
            engine_index: 0,
            timestamp: 0.0,
            scheduler_stats: StatsField::None,
            finished_requests: None,
            weight_version: None,
        })
    }

    /// Adds what the core knows of a request.
    pub(crate) fn push(&mut self, output: &Output<'_>) {
        self.message.push(output);
    }

    /// Adds an `EngineCoreOutput`.
    pub(crate) fn push_object(&mut self, output: &Bound<'_, PyAny>) -> PyResult<()> {
        let encoded = self.encoded_part(output)?;
        self.message.push_encoded(encoded.as_bytes());
        Ok(())
    }

    /// Notes that the outputs are known now.
    pub(crate) fn stamp(&mut self, py: Python<'_>) -> PyResult<()> {
        self.timestamp = self.types.monotonic(py)?;
        Ok(())
    }

    /// Sets `scheduler_stats` to what the core and others know.
    pub(crate) fn set_core_stats<'py>(
        &mut self,
        py: Python<'py>,
        stats: SchedulerStats,
        others: &OtherStats<'py>,
    ) -> PyResult<()> {
        self.scheduler_stats = if others.is_empty() {
            StatsField::Core(stats)
        } else {
            StatsField::Object(self.types.scheduler_stats(py, &stats, others)?.unbind())
        };
        Ok(())
    }

    /// Calls `read` with the message and with the buffers that it refers to by their place.
    pub(crate) fn read_frames<'py, T>(
        &mut self,
        py: Python<'py>,
        read: impl FnOnce(&[u8], Vec<Bound<'py, PyAny>>) -> PyResult<T>,
    ) -> PyResult<T> {
        let encoded;
        let scheduler_stats = match &self.scheduler_stats {
            StatsField::None => Stats::None,
            StatsField::Core(stats) => {
                Stats::Core { stats, kv_fetch_stages: self.types.kv_fetch_stages() }
            }
            StatsField::Object(stats) => {
                encoded = self.encoded_part(stats.bind(py))?;
                Stats::Encoded(encoded.as_bytes())
            }
        };
        let finished = self.finished_requests.as_ref().map(|ids| request_ids(ids.bind(py)));
        let finished = finished.transpose()?;
        let envelope = Envelope {
            engine_index: self.engine_index,
            scheduler_stats,
            timestamp: self.timestamp,
            finished_requests: finished.as_deref(),
            weight_version: self.weight_version.as_deref(),
        };
        let buffers = self.frames.bind(py).iter().skip(1).collect();
        read(self.message.bytes(&envelope), buffers)
    }

    fn encoded_part<'py>(&self, part: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let py = part.py();
        let encoded = self.encode_part.bind(py).call1((part, &self.frames))?;
        Ok(encoded.cast_into()?)
    }
}

fn request_ids(ids: &Bound<'_, PySet>) -> PyResult<Vec<String>> {
    ids.iter().map(|id| id.extract()).collect()
}
