//! The whole state as plain data, for tests and support.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sparksched_core::{BlockHash, BlockId, GroupId, Request, Scheduler};

use crate::convert;
use crate::entries::Entries;

/// `SparkScheduler.snapshot()`; `requests` in their order of arrival.
pub(crate) fn snapshot<'py>(
    py: Python<'py>,
    scheduler: &Scheduler,
    entries: &Entries,
    requests: Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyDict>> {
    let id = |index| entries.get(index).id.bind(py);
    let pool = scheduler.kv_cache().pool();
    let digest_len =
        scheduler.config().hasher.as_ref().map_or(0, sparksched_core::BlockHasher::digest_len);
    let ref_counts = PyDict::new(py);
    for block in (1..pool.num_blocks()).map(BlockId).filter(|&id| pool.ref_count(id) > 0) {
        ref_counts.set_item(block.0, pool.ref_count(block))?;
    }
    let cached_blocks = PyDict::new(py);
    for (block, hash, group) in pool.cached_blocks() {
        cached_blocks.set_item(block.0, block_hash_with_group_id(&hash, digest_len, group))?;
    }
    let running: Vec<_> = scheduler.running().iter().map(|&index| id(index)).collect();
    let waiting: Vec<_> = scheduler.waiting().in_order().map(id).collect();
    let free_blocks: Vec<u32> = pool.free_blocks().map(|id| id.0).collect();

    let snapshot = PyDict::new(py);
    snapshot.set_item("requests", requests)?;
    snapshot.set_item("running", PyList::new(py, running)?)?;
    snapshot.set_item("waiting", PyList::new(py, waiting)?)?;
    snapshot.set_item("free_blocks", PyList::new(py, free_blocks)?)?;
    snapshot.set_item("ref_counts", ref_counts)?;
    snapshot.set_item("cached_blocks", cached_blocks)?;
    Ok(snapshot)
}

/// In hex, as vLLM concatenates the two.
fn block_hash_with_group_id(hash: &BlockHash, digest_len: usize, group: GroupId) -> String {
    use std::fmt::Write as _;
    let bytes = hash.0[..digest_len].iter().copied().chain(group.0.to_be_bytes());
    bytes.fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("a String takes any text");
        hex
    })
}

/// One request's counters and block tables, and its drafts if there is speculation.
pub(crate) fn request_snapshot<'py>(
    py: Python<'py>,
    request: &Request,
    has_drafts: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let snapshot = PyDict::new(py);
    snapshot.set_item("status", convert::status_name(request.status()))?;
    snapshot.set_item("num_computed_tokens", request.num_computed_tokens())?;
    snapshot.set_item("num_output_placeholders", request.num_output_placeholders())?;
    snapshot.set_item("num_in_flight_tokens", request.num_in_flight_tokens())?;
    snapshot.set_item("num_stale_output_tokens", request.num_stale_output_tokens())?;
    snapshot.set_item("num_tokens", request.num_tokens())?;
    snapshot.set_item("num_preemptions", request.num_preemptions())?;
    let tables =
        request.groups().iter().map(|blocks| PyList::new(py, blocks.table.iter().map(|id| id.0)));
    snapshot.set_item("block_ids", tables.collect::<PyResult<Vec<_>>>()?)?;
    if has_drafts {
        snapshot.set_item("spec_token_ids", request.drafts())?;
    }
    Ok(snapshot)
}
