//! The page with an engine's meters as Python sees it: `EngineMeters` writes, `MeterReader` reads.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use pyo3::exceptions::PyConnectionError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyList};
use sparksched_core::WaitReason;
use sparksched_entry_points::entry_points;
use sparksched_meters::{
    HistogramReading, MAX_WAIT_REASONS, MeterPage, MeterReader, NUM_BOUNDS, RingsReading, Traffic,
    bound_ns,
};
use sparksched_shm::ShmError;

use crate::pacing;
use crate::scheduler_core::SchedulerCore;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyEngineMeters>()?;
    module.add_class::<PyMeterReader>()?;
    module.add_function(wrap_pyfunction!(meter_bounds_s, module)?)
}

const NS_PER_S: f64 = 1e9;

#[expect(clippy::cast_precision_loss, reason = "exact for years")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / NS_PER_S
}

#[entry_points]
#[pyfunction]
fn meter_bounds_s() -> PyResult<Vec<f64>> {
    Ok((0..NUM_BOUNDS).map(|index| seconds(bound_ns(index))).collect())
}

#[expect(clippy::needless_pass_by_value, reason = "a function for map_err")]
fn connection_error(error: ShmError) -> PyErr {
    PyConnectionError::new_err(error.to_string())
}

// ----------------------------------------------------------------------------------------
// The engine's side
// ----------------------------------------------------------------------------------------

const _: () = assert!(WaitReason::COUNT <= MAX_WAIT_REASONS);

#[pyclass(name = "EngineMeters", module = "sparksched._core", frozen)]
pub(crate) struct PyEngineMeters {
    page: Arc<MeterPage>,
}

impl PyEngineMeters {
    pub(crate) fn page(&self) -> Arc<MeterPage> {
        Arc::clone(&self.page)
    }
}

#[entry_points(EngineMeters)]
#[pymethods]
impl PyEngineMeters {
    #[new]
    fn new(id: u128) -> PyResult<Self> {
        let page = MeterPage::create(id).map_err(connection_error)?;
        Ok(Self { page: Arc::new(page) })
    }

    fn fileno(&self) -> PyResult<i32> {
        Ok(self.page.as_fd().as_raw_fd())
    }

    fn time_steps(&self, scheduler: &Bound<'_, SchedulerCore>) -> PyResult<()> {
        scheduler.try_borrow_mut()?.report_steps_to(self.page());
        Ok(())
    }

    fn count_queue_timeouts(&self, count: u64) -> PyResult<()> {
        self.page.meters().steps().count_queue_timeouts(count);
        Ok(())
    }
}

// ----------------------------------------------------------------------------------------
// The readers' side
// ----------------------------------------------------------------------------------------

#[pyclass(name = "MeterReader", module = "sparksched._core", frozen)]
struct PyMeterReader {
    reader: MeterReader,
}

#[entry_points(MeterReader)]
#[pymethods]
impl PyMeterReader {
    #[new]
    #[pyo3(signature = (*, pid, fd, id))]
    fn new(pid: u32, fd: u32, id: u128) -> PyResult<Self> {
        Ok(Self { reader: MeterReader::open(pid, fd, id).map_err(connection_error)? })
    }

    fn steps<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(reading) = self.reader.steps() else { return Ok(None) };
        let steps = PyDict::new(py);
        steps.set_item("schedule", histogram(py, &reading.schedule)?)?;
        steps.set_item("update_from_output", histogram(py, &reading.update)?)?;
        steps.set_item("step_gap", histogram(py, &reading.gap)?)?;
        steps.set_item("num_running", reading.num_running)?;
        steps.set_item("num_waiting", reading.num_waiting)?;
        let names = WaitReason::ALL.map(WaitReason::name);
        let waiting_for = names.into_iter().zip(reading.waiting_for).into_py_dict(py)?;
        steps.set_item("waiting_for", waiting_for)?;
        steps.set_item("num_queue_timeouts", reading.num_queue_timeouts)?;
        let pacing = self.reader.pacing().map(|it| pacing::named(py, &it)).transpose()?;
        steps.set_item("pacing", pacing)?;
        Ok(Some(steps))
    }

    fn tenants(&self) -> PyResult<Option<String>> {
        Ok(self.reader.tenants())
    }

    fn rings<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(reading) = self.reader.rings() else { return Ok(None) };
        let RingsReading { to_engine, to_client, num_rescues, num_lost } = reading;
        let rings = PyDict::new(py);
        rings.set_item("to_engine", traffic(py, to_engine)?)?;
        rings.set_item("to_client", traffic(py, to_client)?)?;
        rings.set_item("num_rescues", num_rescues)?;
        rings.set_item("num_clients_lost", num_lost)?;
        Ok(Some(rings))
    }
}

fn histogram<'py>(
    py: Python<'py>,
    reading: &HistogramReading,
) -> PyResult<(Bound<'py, PyList>, f64)> {
    Ok((PyList::new(py, reading.counts)?, seconds(reading.sum_ns)))
}

fn traffic(py: Python<'_>, traffic: Traffic) -> PyResult<Bound<'_, PyDict>> {
    let values = [
        ("waiting_bytes", traffic.waiting_bytes),
        ("high_water_bytes", traffic.high_water_bytes),
        ("backlog_bytes", traffic.backlog_bytes),
        ("num_without_room", traffic.num_without_room),
    ];
    values.into_py_dict(py)
}
