//! Requests that end: from outside, by an error, or because the core is broken.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySet};
use sparksched_core::{EndedRequest, RequestIndex, RequestStatus, Scheduler};

use super::SchedulerCore;
use crate::entries::Entries;

impl SchedulerCore {
    /// Ends the requests with these ids, in the order of the ids; returns them.
    pub(super) fn finish<'py>(
        &mut self,
        ids: &Bound<'py, PyAny>,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = status.py();
        let status = self.message_writer.types.statuses.parse(status)?;
        let requests = PyList::empty(py);
        for ended in self.end_requests(ids, status)? {
            let told = requests.append(&self.entries.get(ended.index).request);
            let noted = told.and_then(|()| self.note_end(py, ended.index, status, ended.is_kept));
            self.or_stop(noted)?;
        }
        self.kv_transfer.take_extras(py)?;
        self.encoder_transfer.take_extras(py)?;
        Ok(requests)
    }

    /// Ends the requests with these ids in the core, in the order of the ids.
    pub(super) fn end_requests(
        &mut self,
        ids: &Bound<'_, PyAny>,
        status: RequestStatus,
    ) -> PyResult<Vec<EndedRequest>> {
        let mut indices = Vec::new();
        for id in ids.try_iter()? {
            indices.extend(self.place(&id?)?);
        }
        let (scheduler, mut callbacks) = self.split(ids.py());
        let ended = scheduler.finish_requests(&indices, status, &mut callbacks);
        self.or_stop(ended)
    }

    /// Notes for the next step and for its client that the core has ended a request, and drops what
    /// belongs to it unless it is kept.
    pub(super) fn note_end(
        &mut self,
        py: Python<'_>,
        index: RequestIndex,
        status: RequestStatus,
        is_kept: bool,
    ) -> PyResult<()> {
        let entry = self.entries.get(index);
        let member = self.message_writer.types.statuses.member(status);
        entry.request.bind(py).setattr(intern!(py, "status"), member)?;
        self.finished_req_ids.bind(py).add(&entry.id)?;
        if let Some(by_client) = &self.finished_by_client {
            let by_client = by_client.bind(py);
            match by_client.get_item(entry.client_index)? {
                Some(ids) => ids.cast::<PySet>()?.add(&entry.id)?,
                None => by_client.set_item(entry.client_index, PySet::new(py, [&entry.id])?)?,
            }
        }
        if is_kept { Ok(()) } else { self.drop_entry(py, index) }
    }

    /// Drops what belongs to a request that is gone.
    pub(super) fn drop_entry(&mut self, py: Python<'_>, index: RequestIndex) -> PyResult<()> {
        let entry = self.entries.take(index);
        self.places.bind(py).del_item(&entry.id)?;
        self.requests.bind(py).del_item(&entry.id)
    }

    /// After an internal error the core is not to be trusted, but clients have to be told. What is
    /// left has nothing to do and still refuses to go on.
    pub(super) fn finish_all_when_broken<'py>(
        &mut self,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = status.py();
        self.message_writer.types.statuses.parse(status)?;
        let requests = self.requests.bind(py).values();
        for request in &requests {
            request.setattr(intern!(py, "status"), status)?;
        }
        self.scheduler = Scheduler::new(self.scheduler.config().clone());
        self.entries = Entries::default();
        self.requests.bind(py).clear();
        self.places.bind(py).clear();
        Ok(requests)
    }
}
