//! Hands what the core says of KV transfers to `sparksched.engine.kv_transfer`, and the other way round.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySet, PyTuple};
use sparksched_core::{
    BlockId, BlockPool, ExternalAllocation, ExternalHit, FailedLoads, KvConnector, Request,
    RequestIndex, Scheduler,
};

use crate::connector::Connector;
use crate::entries::Entries;

use super::PyCallbacks;

/// Whom a step's failed loads concern.
#[derive(Default)]
pub(crate) struct LoadFailures<'py> {
    /// What these got of the step does not count.
    pub(crate) void: Vec<RequestIndex>,
    /// The ids of those who fail for it: a set whose order is that of vLLM's.
    pub(crate) failed_ids: Option<Bound<'py, PySet>>,
}

impl<'py> PyCallbacks<'_, 'py> {
    /// By group: number, owners and hash of each block.
    fn blocks_of(&self, request: &Request, pool: &BlockPool) -> PyResult<Bound<'py, PyTuple>> {
        let py = self.py;
        let groups = request.groups.iter().map(|group| {
            let blocks = group.table.iter().map(|&id| {
                let hash = pool.key_of(id);
                let hash = hash.map(|(hash, group)| self.view.hash_with_group(py, &hash, group));
                (id.0, pool.ref_count(id), hash)
            });
            PyList::new(py, blocks.collect::<Vec<_>>())
        });
        PyTuple::new(py, groups.collect::<PyResult<Vec<_>>>()?)
    }
}

impl KvConnector for PyCallbacks<'_, '_> {
    fn find_external_hit(
        &mut self,
        request: &Request,
        num_local_tokens: u32,
    ) -> PyResult<Option<ExternalHit>> {
        let arguments = (self.shown(request)?, num_local_tokens);
        let answer = self.kv_transfer.call(intern!(self.py, "find_external_hit"), arguments)?;
        let (num_tokens, is_async): (Option<i64>, bool) = answer.extract()?;
        let Some(num_tokens) = num_tokens else { return Ok(None) };
        let num_local = i64::from(num_local_tokens);
        let num_missing = i64::from(request.num_tokens() as u32) - num_local;
        // Less than nothing is nothing: vLLM's ExampleConnector says so of a prompt of one token.
        let possible = Some(num_tokens.max(-num_local)).filter(|&it| it <= num_missing);
        let num_tokens = possible.and_then(|it| i32::try_from(it).ok()).ok_or_else(|| {
            PyValueError::new_err(format!(
                "the KV connector has {num_tokens} tokens of request {}, which lacks {num_missing}",
                request.id()
            ))
        })?;
        Ok(Some(ExternalHit { num_tokens, is_async: is_async && num_tokens > 0 }))
    }

    fn note_allocation(
        &mut self,
        request: &Request,
        pool: &BlockPool,
        allocation: ExternalAllocation,
    ) -> PyResult<()> {
        let (object, tables) = (self.shown(request)?, self.blocks_of(request, pool)?);
        let arguments = (object, tables, allocation.num_tokens, allocation.num_queried_tokens);
        self.kv_transfer.call(intern!(self.py, "note_allocation"), arguments)?;
        Ok(())
    }

    fn has_pending_block_frees(&mut self) -> PyResult<bool> {
        self.kv_transfer.call(intern!(self.py, "has_pending_block_frees"), ())?.is_truthy()
    }

    fn finish_request(&mut self, request: &Request, tables: &[&[BlockId]]) -> PyResult<bool> {
        let (py, object) = (self.py, self.shown(request)?);
        let tables = tables.iter().map(|table| PyList::new(py, table.iter().map(|id| id.0)));
        let tables = PyTuple::new(py, tables.collect::<PyResult<Vec<_>>>()?)?;
        let answer = self.kv_transfer.call(intern!(py, "finish_request"), (object, tables))?;
        let (is_kept, params): (Bound<'_, PyAny>, Bound<'_, PyAny>) = answer.extract()?;
        self.kv_transfer.note(object, params)?;
        is_kept.is_truthy()
    }
}

/// What a step's failed loads are looked up in.
pub(crate) struct LoadReport<'a, 'py> {
    /// `KVConnectorOutput`.
    pub(crate) report: &'a Bound<'py, PyAny>,
    pub(crate) num_scheduled_tokens: Bound<'py, PyDict>,
    /// `request_id` to place.
    pub(crate) places: &'a Bound<'py, PyDict>,
    pub(crate) entries: &'a Entries,
}

impl<'py> LoadReport<'_, 'py> {
    /// Looks whose loads have failed. Sets of ids are made and joined as vLLM does it: their order
    /// decides who is told first.
    pub(crate) fn take_in(
        &self,
        scheduler: &mut Scheduler,
        kv_transfer: &Connector,
    ) -> PyResult<LoadFailures<'py>> {
        let py = self.report.py();
        let mut failures = LoadFailures::default();
        let failed_ids = PySet::empty(py)?;
        let update =
            |ids: Bound<'py, PyAny>| failed_ids.call_method1(intern!(py, "update"), (ids,));
        let failed_recving = self.report.getattr(intern!(py, "failed_recving"))?;
        if failed_recving.is_truthy()? {
            let failed = scheduler.fail_loads(&self.known(&failed_recving)?);
            update(self.ids(&failed)?.into_any())?;
            failures.void.extend(failed);
        }
        let invalid_blocks = self.report.getattr(intern!(py, "invalid_block_ids"))?;
        if invalid_blocks.is_truthy()? {
            let failed = self.invalidate_blocks(scheduler, &invalid_blocks)?;
            let recomputes = scheduler.recomputes_load_failures();
            let mut ids = self.ids(&failed.running)?.into_any();
            failures.void.extend(&failed.running);
            if !recomputes {
                ids = self.ids(&failed.waiting)?.call_method1(intern!(py, "union"), (ids,))?;
                failures.void.extend(&failed.waiting);
            }
            update(ids)?;
            let num_requests = failed.waiting.len() + failed.running.len();
            if num_requests > 0 {
                let failed_ids = (!recomputes).then_some(&failed_ids);
                let arguments = (num_requests, failed.num_affected_tokens, failed_ids);
                kv_transfer.call(intern!(py, "log_failures"), arguments)?;
            }
        }
        if !scheduler.recomputes_load_failures() && !failed_ids.is_empty() {
            failures.failed_ids = Some(failed_ids);
        }
        Ok(failures)
    }

    fn known(&self, ids: &Bound<'py, PyAny>) -> PyResult<Vec<RequestIndex>> {
        let mut indices = Vec::new();
        for id in ids.try_iter()? {
            if let Some(place) = self.places.get_item(id?)? {
                indices.push(RequestIndex(place.extract()?));
            }
        }
        Ok(indices)
    }

    fn ids(&self, indices: &[RequestIndex]) -> PyResult<Bound<'py, PySet>> {
        let py = self.report.py();
        PySet::new(py, indices.iter().map(|&index| &self.entries.get(index).id))
    }

    fn invalidate_blocks(
        &self,
        scheduler: &mut Scheduler,
        invalid_blocks: &Bound<'py, PyAny>,
    ) -> PyResult<FailedLoads> {
        let py = self.report.py();
        if scheduler.config().groups.len() != 1 {
            return Err(PyRuntimeError::new_err(
                "the KV connector reports the numbers of blocks that failed to load \
                 (invalid_block_ids), which says nothing in a model with several KV cache groups: \
                 it has to report requests (failed_recving)",
            ));
        }
        let mut invalid: Vec<u32> = Vec::new();
        for id in invalid_blocks.try_iter()? {
            invalid.push(id?.extract()?);
        }
        invalid.sort_unstable();
        let is_invalid = |block: BlockId| invalid.binary_search(&block.0).is_ok();
        let num_scheduled_tokens = |index: RequestIndex| -> PyResult<u32> {
            let num_tokens = self.num_scheduled_tokens.get_item(&self.entries.get(index).id)?;
            num_tokens.map_or(Ok(0), |it| it.extract())
        };
        let failed = scheduler.invalidate_blocks(&is_invalid, &num_scheduled_tokens)?;
        if !scheduler.recomputes_load_failures() {
            let blocks = PySet::new(py, failed.blocks_to_evict.iter().map(|id| id.0))?;
            let blocks: Vec<u32> = blocks.iter().map(|id| id.extract()).collect::<PyResult<_>>()?;
            scheduler.evict_blocks(blocks.into_iter().map(BlockId));
        }
        Ok(failed)
    }
}
