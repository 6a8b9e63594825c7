//! Auxiliary output, such as routed experts: hands what the core says of requests to vLLM's
//! `AuxOutputSchedulerConnector`.

use pyo3::call::PyCallArgs;
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use sparksched_core::{BlockPool, GroupId, JournalConfig, Request};
use sparksched_entry_points::entry_points;

use crate::connector::Connector;
use crate::convert;

use super::PyCallbacks;

/// What vLLM's connector may ask of the block pool: which blocks are cached. There is an answer
/// while the core lends the pool, which is whenever it calls the connector.
#[pyclass(module = "sparksched._core")]
pub(crate) struct CachedBlocks {
    lent: Option<BlockPool>,
}

#[entry_points(CachedBlocks)]
#[pymethods]
impl CachedBlocks {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self { lent: None })
    }

    fn get_cached_block(
        &self,
        block_hash: &Bound<'_, PyAny>,
        kv_cache_group_ids: Vec<u32>,
    ) -> PyResult<Option<Vec<u32>>> {
        let out_of_turn =
            || PyRuntimeError::new_err("blocks can be looked up only when the scheduler calls");
        let pool = self.lent.as_ref().ok_or_else(out_of_turn)?;
        let hash = convert::block_hash(block_hash)?;
        let find = |id| pool.find_cached(&hash, GroupId(id)).map(|block| block.0);
        Ok(kv_cache_group_ids.into_iter().map(find).collect())
    }
}

/// `sparksched.engine.aux_outputs.AuxOutputs`, if auxiliary output is collected.
pub(crate) struct AuxOutputs {
    connector: Connector,
    /// Where the connector looks blocks up, if it does.
    cached_blocks: Option<Py<CachedBlocks>>,
    /// What the workers collected in the step that is being taken in.
    collected: Option<Py<PyAny>>,
}

impl AuxOutputs {
    pub(crate) fn new(py: Python<'_>, python: Option<Py<PyAny>>) -> PyResult<Self> {
        let Some(python) = python else {
            let connector = Connector::new(py, None);
            return Ok(Self { connector, cached_blocks: None, collected: None });
        };
        let connector = Connector::new(py, Some(python.getattr(py, "connector")?));
        let cached_blocks = python.getattr(py, "cached_blocks")?.extract(py)?;
        Ok(Self { connector, cached_blocks, collected: None })
    }

    /// Keeps what the workers collected in a step until the core has taken the step in.
    pub(crate) fn begin_update(&mut self, model_runner_output: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.connector.is_present() {
            let name = intern!(model_runner_output.py(), "aux_output_connector_output");
            self.collected = Some(model_runner_output.getattr(name)?.unbind());
        }
        Ok(())
    }

    /// What of it goes to clients, by request id, if output is collected at all.
    pub(crate) fn end_update<'py>(
        &mut self,
        py: Python<'py>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        if self.collected.take().is_none() {
            return Ok(None);
        }
        Ok(Some(self.connector.take_extras(py)?.unwrap_or_else(|| PyDict::new(py))))
    }

    /// Makes a call during which the connector can look blocks up.
    fn lend<T>(
        &self,
        py: Python<'_>,
        pool: &mut BlockPool,
        call: impl FnOnce() -> PyResult<T>,
    ) -> PyResult<T> {
        let Some(cached_blocks) = &self.cached_blocks else { return call() };
        let empty = BlockPool::new(1, false, JournalConfig::default());
        cached_blocks.borrow_mut(py).lent = Some(std::mem::replace(pool, empty));
        let result = call();
        if let Some(lent) = cached_blocks.borrow_mut(py).lent.take() {
            *pool = lent;
        }
        result
    }
}

impl PyCallbacks<'_, '_> {
    /// Asks the connector something of a request, while it can look blocks up.
    fn ask<'py>(
        &self,
        pool: &mut BlockPool,
        name: &Bound<'py, PyString>,
        arguments: impl PyCallArgs<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let outputs = self.aux_outputs;
        outputs.lend(self.py, pool, || outputs.connector.call(name, arguments))
    }
}

impl sparksched_core::AuxOutputs for PyCallbacks<'_, '_> {
    fn max_prefix_hit(&mut self, request: &Request, pool: &mut BlockPool) -> PyResult<u32> {
        let arguments = (self.shown(request)?,);
        self.ask(pool, intern!(self.py, "max_cache_hit"), arguments)?.extract()
    }

    fn cap_external_hit(
        &mut self,
        request: &Request,
        pool: &mut BlockPool,
        num_local_tokens: u32,
        num_external_tokens: i32,
    ) -> PyResult<i32> {
        let arguments = (self.shown(request)?, num_local_tokens, num_external_tokens);
        self.ask(pool, intern!(self.py, "cap_external_hit"), arguments)?.extract()
    }

    fn note_load(&mut self, request: &Request) -> PyResult<()> {
        let arguments = (self.shown(request)?, request.num_computed_tokens);
        self.aux_outputs.connector.call(intern!(self.py, "request_loading"), arguments)?;
        Ok(())
    }

    fn end_aux_output(&mut self, request: &Request, pool: &mut BlockPool) -> PyResult<()> {
        let arguments = (self.shown(request)?,);
        self.ask(pool, intern!(self.py, "request_finished"), arguments)?;
        Ok(())
    }

    fn take_aux_output(&mut self, request: &Request) -> PyResult<()> {
        let (object, connector) = (self.shown(request)?, &self.aux_outputs.connector);
        let arguments = (object, &self.aux_outputs.collected);
        let rows = connector.call(intern!(self.py, "take_output"), arguments)?;
        connector.note(object, rows)
    }
}
