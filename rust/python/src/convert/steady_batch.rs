//! Objects that a step has in common with the one before it.
//!
//! In steady decode the same requests run, one token each, from step to step. What tells so is built
//! once and kept here; each step gets copies of its own, because model runners keep and change
//! what they are given. A copy of a list or of a dictionary is a fraction of building it.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sparksched_core::{RequestIndex, Step};

use crate::entries::Entries;

/// The requests of the last step, and their objects once they have been the same for two steps.
///
/// The place of a request that is gone may be given to another, but that one comes into a step by
/// its admission first, and of such a step nothing is kept.
#[derive(Default)]
pub(crate) struct SteadyBatch {
    scheduled: Vec<(RequestIndex, u32)>,
    objects: Option<Objects>,
}

struct Objects {
    req_ids: Py<PyList>,
    new_block_ids: Py<PyList>,
    num_scheduled_tokens: Py<PyDict>,
}

pub(crate) struct Copies<'a, 'py> {
    py: Python<'py>,
    objects: &'a Objects,
}

impl SteadyBatch {
    /// Compares a step with the one before it.
    pub(crate) fn observe(
        &mut self,
        py: Python<'_>,
        entries: &Entries,
        step: &Step,
    ) -> PyResult<()> {
        let scheduled = step.running.iter().map(|it| (it.index, it.num_tokens));
        if step.admitted.is_empty() && self.scheduled.iter().copied().eq(scheduled.clone()) {
            if self.objects.is_none() && !self.scheduled.is_empty() {
                self.objects = Some(Objects::build(py, entries, &self.scheduled)?);
            }
            return Ok(());
        }
        self.objects = None;
        self.scheduled.clear();
        if step.admitted.is_empty() {
            self.scheduled.extend(scheduled);
        }
        Ok(())
    }

    /// What this step has in common with the one before it.
    pub(crate) fn objects<'a, 'py>(&'a self, py: Python<'py>) -> Option<Copies<'a, 'py>> {
        self.objects.as_ref().map(|objects| Copies { py, objects })
    }
}

impl Objects {
    fn build(
        py: Python<'_>,
        entries: &Entries,
        scheduled: &[(RequestIndex, u32)],
    ) -> PyResult<Self> {
        let ids: Vec<_> = scheduled.iter().map(|(index, _)| &entries.get(*index).id).collect();
        let num_scheduled_tokens = PyDict::new(py);
        for (id, (_, num_tokens)) in ids.iter().zip(scheduled) {
            num_scheduled_tokens.set_item(id, num_tokens)?;
        }
        Ok(Self {
            req_ids: PyList::new(py, ids)?.unbind(),
            new_block_ids: PyList::new(py, scheduled.iter().map(|_| py.None()))?.unbind(),
            num_scheduled_tokens: num_scheduled_tokens.unbind(),
        })
    }
}

impl<'py> Copies<'_, 'py> {
    /// `CachedRequestData.req_ids`.
    pub(crate) fn req_ids(&self) -> Bound<'py, PyList> {
        copy(self.objects.req_ids.bind(self.py))
    }

    /// `CachedRequestData.new_block_ids` of requests that got none.
    pub(crate) fn new_block_ids(&self) -> Bound<'py, PyList> {
        copy(self.objects.new_block_ids.bind(self.py))
    }

    /// `SchedulerOutput.num_scheduled_tokens`.
    pub(crate) fn num_scheduled_tokens(&self) -> PyResult<Bound<'py, PyDict>> {
        self.objects.num_scheduled_tokens.bind(self.py).copy()
    }
}

fn copy<'py>(list: &Bound<'py, PyList>) -> Bound<'py, PyList> {
    list.get_slice(0, list.len())
}
