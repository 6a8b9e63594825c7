//! The dictionary that `sparksched.scheduler.core_config` makes of vLLM's configuration.

use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sparksched_core::{KvCacheGroupConfig, Policy, SchedulerConfig};

use crate::hasher::new_block_hasher;

/// Reads it.
pub(crate) fn scheduler_config(config: &Bound<'_, PyDict>) -> PyResult<SchedulerConfig> {
    fn get<'py, T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(
        config: &Bound<'py, PyDict>,
        name: &str,
    ) -> PyResult<T> {
        let value = config.get_item(name)?.ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        value.extract()
    }
    let policy: String = get(config, "policy")?;
    let policy = match policy.as_str() {
        "fcfs" => Policy::Fcfs,
        "priority" => Policy::Priority,
        other => {
            return Err(PyValueError::new_err(format!("unknown scheduling policy {other:?}")));
        }
    };
    let groups: Vec<Option<(u32, u32)>> = get(config, "groups")?;
    let group = |window: Option<(u32, u32)>| match window {
        None => KvCacheGroupConfig::FullAttention,
        Some((window, max_admission_blocks)) => {
            KvCacheGroupConfig::SlidingWindow { window, max_admission_blocks }
        }
    };
    let block_size = get(config, "block_size")?;
    let hash_algorithm: Option<String> = get(config, "hash_algorithm")?;
    // vLLM sets NONE_HASH only after the scheduler is built.
    let hasher = hash_algorithm.map(|it| new_block_hasher(&it, block_size, &[])).transpose()?;
    Ok(SchedulerConfig {
        async_scheduling: get(config, "async_scheduling")?,
        policy,
        max_num_active_reqs: get(config, "max_num_active_reqs")?,
        max_num_scheduled_tokens: get(config, "max_num_scheduled_tokens")?,
        max_num_batched_tokens: get(config, "max_num_batched_tokens")?,
        max_model_len: get(config, "max_model_len")?,
        enable_chunked_prefill: get(config, "enable_chunked_prefill")?,
        long_prefill_token_threshold: get(config, "long_prefill_token_threshold")?,
        long_prefill_token_threshold_adaptive: get(
            config,
            "long_prefill_token_threshold_adaptive",
        )?,
        reserve_full_isl: get(config, "reserve_full_isl")?,
        resume_as_new: get(config, "resume_as_new")?,
        log_stats: get(config, "log_stats")?,
        block_size,
        num_blocks: get(config, "num_blocks")?,
        watermark_blocks: get(config, "watermark_blocks")?,
        groups: groups.into_iter().map(group).collect(),
        lookup_groups: get(config, "lookup_groups")?,
        retention_interval: get(config, "retention_interval")?,
        hasher,
    })
}
