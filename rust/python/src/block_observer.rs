//! Hands what the core notes of its blocks to `sparksched.engine.block_observer`.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use sparksched_core::journal::Entry as JournalEntry;
use sparksched_core::{BlockHash, StoredBlocks};

use crate::entries::Entries;

/// `BlockObserver`, if KV cache events or metrics are wanted or there is a KV connector.
pub(crate) struct BlockObserver(pub(crate) Option<Py<PyAny>>);

impl BlockObserver {
    pub(crate) fn is_present(&self) -> bool {
        self.0.is_some()
    }

    /// Calls the observer's methods, one for each entry.
    pub(crate) fn observe(
        &self,
        py: Python<'_>,
        journal: Vec<JournalEntry>,
        entries: &Entries,
        digest_len: usize,
    ) -> PyResult<()> {
        let Some(observer) = &self.0 else { return Ok(()) };
        let observer = observer.bind(py);
        let digest = |hash: &BlockHash| PyBytes::new(py, &hash.0[..digest_len]);
        for entry in journal {
            match entry {
                JournalEntry::Stored(blocks) => {
                    let StoredBlocks {
                        request,
                        group,
                        positions,
                        hashes,
                        parent,
                        tokens,
                        lookahead,
                    } = *blocks;
                    let hashes = PyList::new(py, hashes.iter().map(digest))?;
                    observer.call_method1(
                        intern!(py, "on_stored"),
                        (
                            &entries.get(request).request,
                            group.0,
                            positions,
                            hashes,
                            parent.as_ref().map(digest),
                            tokens,
                            lookahead,
                        ),
                    )?;
                }
                JournalEntry::Removed { hash, group } => {
                    observer.call_method1(intern!(py, "on_removed"), (digest(&hash), group.0))?;
                }
                JournalEntry::Cleared => {
                    observer.call_method0(intern!(py, "on_cleared"))?;
                }
                JournalEntry::Allocated(id) => {
                    observer.call_method1(intern!(py, "on_allocated"), (id.0,))?;
                }
                JournalEntry::Accessed(id) => {
                    observer.call_method1(intern!(py, "on_accessed"), (id.0,))?;
                }
                JournalEntry::Evicted(id) => {
                    observer.call_method1(intern!(py, "on_evicted"), (id.0,))?;
                }
                JournalEntry::Reset => {
                    observer.call_method0(intern!(py, "on_reset"))?;
                }
            }
        }
        Ok(())
    }

    /// Publishes the events of blocks, and those of a KV connector behind them.
    pub(crate) fn publish(
        &self,
        py: Python<'_>,
        of_connector: Option<Bound<'_, PyList>>,
    ) -> PyResult<()> {
        let Some(observer) = &self.0 else { return Ok(()) };
        let of_connector = of_connector.unwrap_or_else(|| PyList::empty(py));
        observer.call_method1(py, intern!(py, "publish"), (of_connector,))?;
        Ok(())
    }

    /// `kv_cache_eviction_events` since the last call.
    pub(crate) fn evictions<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        let Some(observer) = &self.0 else { return Ok(None) };
        let evictions = observer.bind(py).call_method0(intern!(py, "take_evictions"))?;
        Ok(Some(evictions.cast_into()?))
    }
}
