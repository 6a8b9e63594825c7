//! The whole state as plain data, for tests and support.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sparksched_core::{BlockHash, BlockId, GroupId, Request, RequestSpecStats, Scheduler};

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
    let further_keys = PyDict::new(py);
    for (block, hash, group) in pool.further_keys() {
        let keys = match further_keys.get_item(block.0)? {
            Some(keys) => keys.cast_into()?,
            None => PyList::empty(py),
        };
        keys.append(block_hash_with_group_id(&hash, digest_len, group))?;
        keys.sort()?;
        further_keys.set_item(block.0, keys)?;
    }
    let running: Vec<_> = scheduler.running().iter().map(|&index| id(index)).collect();
    let waiting: Vec<_> = scheduler.waiting().into_iter().map(id).collect();
    let waiting_for = PyDict::new(py);
    for index in scheduler.waiting() {
        waiting_for.set_item(id(index), scheduler.wait_reason(index).name())?;
    }
    let free_blocks: Vec<u32> = pool.free_blocks().map(|id| id.0).collect();

    let snapshot = PyDict::new(py);
    snapshot.set_item("requests", requests)?;
    snapshot.set_item("running", PyList::new(py, running)?)?;
    snapshot.set_item("waiting", PyList::new(py, waiting)?)?;
    snapshot.set_item("waiting_for", waiting_for)?;
    snapshot.set_item("num_kv_holding", scheduler.num_kv_holding())?;
    snapshot.set_item("free_blocks", PyList::new(py, free_blocks)?)?;
    snapshot.set_item("ref_counts", ref_counts)?;
    snapshot.set_item("cached_blocks", cached_blocks)?;
    snapshot.set_item("further_keys", further_keys)?;
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

/// One request's counters, block tables and drafts; `request` is its `Request`.
pub(crate) fn request_snapshot<'py>(
    request: &Bound<'py, PyAny>,
    state: &Request,
) -> PyResult<Bound<'py, PyDict>> {
    let py = request.py();
    let snapshot = PyDict::new(py);
    snapshot.set_item("status", convert::status_name(state.status))?;
    snapshot.set_item("num_computed_tokens", state.num_computed_tokens)?;
    snapshot.set_item("num_output_placeholders", state.num_output_placeholders)?;
    snapshot.set_item("num_in_flight_tokens", state.num_in_flight_tokens)?;
    snapshot.set_item("num_stale_output_tokens", state.num_stale_output_tokens)?;
    snapshot.set_item("num_tokens", state.num_tokens())?;
    snapshot.set_item("num_preemptions", state.num_preemptions)?;
    let tables =
        state.groups.iter().map(|blocks| PyList::new(py, blocks.table.iter().map(|id| id.0)));
    snapshot.set_item("block_ids", tables.collect::<PyResult<Vec<_>>>()?)?;
    snapshot.set_item("spec_token_ids", &state.drafts)?;
    snapshot.set_item("next_decode_eligible_step", state.next_decode_step)?;
    snapshot.set_item("num_prompt_tokens", state.num_prompt_tokens())?;
    let inputs = request.getattr(intern!(py, "streaming_queue"))?;
    snapshot.set_item("num_queued_inputs", if inputs.is_none() { 0 } else { inputs.len()? })?;
    let spec_stats =
        state.spec_stats.as_deref().map(|stats| spec_stats_snapshot(py, stats)).transpose()?;
    snapshot.set_item("spec_decode_metrics", spec_stats)?;
    Ok(snapshot)
}

/// What vLLM's `RequestSpecDecodeMetrics` has, by the names of its fields.
fn spec_stats_snapshot<'py>(
    py: Python<'py>,
    stats: &RequestSpecStats,
) -> PyResult<Bound<'py, PyDict>> {
    let (accepted, drafted): (Vec<u32>, Vec<u32>) = stats.per_step.iter().copied().unzip();
    let snapshot = PyDict::new(py);
    snapshot.set_item("num_spec_tokens", stats.histogram.len() - 1)?;
    snapshot.set_item("histogram", PyList::new(py, &stats.histogram)?)?;
    snapshot.set_item("num_draft_tokens", stats.num_draft_tokens)?;
    snapshot.set_item("per_step_accepted", accepted)?;
    snapshot.set_item("per_step_drafted", drafted)?;
    Ok(snapshot)
}
