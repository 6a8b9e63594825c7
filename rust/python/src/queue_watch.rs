//! `QueueWatch`: why the head of the queue doesn't move.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sparksched_core::queue_watch::{Finding, QueueWatch};
use sparksched_core::{HeadOfQueue, WaitReason};
use sparksched_entry_points::entry_points;

use crate::scheduler_core::SchedulerCore;

#[pyclass(name = "QueueWatch", module = "sparksched._core")]
pub(crate) struct PyQueueWatch(QueueWatch);

#[entry_points(QueueWatch)]
#[pymethods]
impl PyQueueWatch {
    #[new]
    fn new(after_s: f64) -> PyResult<Self> {
        Ok(Self(QueueWatch::new(after_s)))
    }

    fn look<'py>(
        &mut self,
        scheduler: &Bound<'py, SchedulerCore>,
        now: f64,
    ) -> PyResult<(Option<Bound<'py, PyDict>>, f64)> {
        // A callback in the midst of a step may let another thread run: that step goes on soon.
        let Ok(core) = scheduler.try_borrow() else { return Ok((None, f64::INFINITY)) };
        let finding = self.0.look(core.scheduler(), now);
        let py = scheduler.py();
        let told = match finding {
            None => None,
            Some(Finding::Stuck { head, waits_s }) => Some(stuck(py, &core, head, waits_s)?),
            Some(Finding::Moves { id, waited_s }) => {
                let told = PyDict::new(py);
                told.set_item("request_id", &*id)?;
                told.set_item("reason", py.None())?;
                told.set_item("waits_s", waited_s)?;
                Some(told)
            }
        };
        Ok((told, core.scheduler().next_queue_deadline()))
    }
}

fn stuck<'py>(
    py: Python<'py>,
    core: &SchedulerCore,
    head: HeadOfQueue,
    waits_s: f64,
) -> PyResult<Bound<'py, PyDict>> {
    let scheduler = core.scheduler();
    let counts = scheduler.wait_counts();
    let told = PyDict::new(py);
    told.set_item("request_id", core.id_of(head.index))?;
    told.set_item("reason", head.reason.name())?;
    told.set_item("waits_s", waits_s)?;
    told.set_item("num_running", scheduler.running().len())?;
    told.set_item("num_waiting", scheduler.num_waiting())?;
    told.set_item("num_sessions", counts.by_reason()[WaitReason::SessionInput as usize])?;
    told.set_item("lora_id", scheduler.request(head.index).lora_id)?;
    told.set_item("lora_ids", scheduler.loras_of_step())?;
    let holders = scheduler.block_holders();
    let blocks = PyDict::new(py);
    blocks.set_item("all", holders.num_blocks)?;
    blocks.set_item("free", holders.num_free)?;
    blocks.set_item("running", holders.num_running)?;
    blocks.set_item("sessions", holders.num_sessions)?;
    blocks.set_item("waiting", holders.num_waiting)?;
    blocks.set_item("ended", holders.num_ended)?;
    let shortfall = scheduler.block_shortfall();
    blocks.set_item("wanted", shortfall.map(|it| it.num_wanted))?;
    blocks.set_item("reserved", shortfall.map(|it| it.num_reserved))?;
    told.set_item("blocks", blocks)?;
    Ok(told)
}
