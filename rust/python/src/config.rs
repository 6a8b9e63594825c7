//! The dictionary that `sparksched.engine.config.core_config` makes of vLLM's configuration.

use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sparksched_core::{
    Behaviors, BlockHasher, JournalConfig, KvCacheGroupConfig, KvTransferConfig, Policy,
    RequestSpecMetrics, SchedulerConfig, Speculation, StateConfig, StateMode,
};

use crate::hasher::new_block_hasher;

/// A structure whose fields have the names of keys; those behind the semicolon are given.
macro_rules! read {
    ($dict:expr => $type:ident { $($key:ident),*; $($given:ident: $value:expr),* }) => {
        $type { $($key: get($dict, stringify!($key))?,)* $($given: $value),* }
    };
}

/// Reads all of it.
pub(crate) fn scheduler_config(config: &Bound<'_, PyDict>) -> PyResult<SchedulerConfig> {
    let policy: String = get(config, "policy")?;
    let policy = match policy.as_str() {
        "fcfs" => Policy::Fcfs,
        "priority" => Policy::Priority,
        other => {
            return Err(PyValueError::new_err(format!("unknown scheduling policy {other:?}")));
        }
    };
    let groups: Vec<(String, u32, u32, u32)> = get(config, "groups")?;
    let hash_block_size = get(config, "hash_block_size")?;
    let hash_algorithm: Option<String> = get(config, "hash_algorithm")?;
    // vLLM sets NONE_HASH only after the scheduler is built.
    let lookahead = get(config, "num_hash_lookahead_tokens")?;
    let hasher = |it: String| new_block_hasher(&it, hash_block_size, &[], lookahead);
    let hasher = hash_algorithm.map(hasher).transpose()?;
    Ok(read!(config => SchedulerConfig {
        async_scheduling, max_num_active_reqs, max_num_scheduled_tokens, max_num_batched_tokens,
        max_model_len, enable_chunked_prefill, long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive, reserve_full_isl, num_sampled_tokens_per_step, max_loras,
        decode_stagger, resume_as_new, sends_sampled_tokens, log_stats, block_size, partial_hits,
        zeroes_blocks, num_blocks, watermark_blocks, group_block_sizes, lookup_groups, eagle_groups,
        retention_interval, transfers_encoder_outputs, collects_aux_output;
        policy: policy,
        hash_block_size: hash_block_size,
        speculation: speculation(config)?,
        behaviors: behaviors(config)?,
        groups: groups.into_iter().map(kv_cache_group).collect::<PyResult<_>>()?,
        states: states(config)?,
        journal: JournalConfig {
            prefixes: get(config, "enable_kv_cache_events")?,
            uses: get(config, "kv_cache_metrics")?,
            num_lookahead_tokens: hasher.as_ref().map_or(0, BlockHasher::num_lookahead_tokens),
        },
        kv_transfer: kv_transfer(config)?,
        hasher: hasher
    }))
}

/// A group's kind, and what its kind needs of: window or chunk, tokens retained behind a window,
/// most blocks that a request is counted for. Of states: speculative blocks, and the alignment of
/// those kept from within a chunk, or 0.
fn kv_cache_group(group: (String, u32, u32, u32)) -> PyResult<KvCacheGroupConfig> {
    let (kind, span, num_retained_tokens, max_admission_blocks) = group;
    Ok(match kind.as_str() {
        "full" => KvCacheGroupConfig::FullAttention,
        "sliding" => KvCacheGroupConfig::SlidingWindow {
            window: span,
            num_retained_tokens,
            max_admission_blocks,
        },
        "chunked" => KvCacheGroupConfig::ChunkedLocal { chunk_size: span, max_admission_blocks },
        "circular" => KvCacheGroupConfig::CircularBuffer,
        "states:none" => state_group(StateMode::None, span, num_retained_tokens),
        "states:all" => state_group(StateMode::All, span, num_retained_tokens),
        "states:align" => state_group(StateMode::Align, span, num_retained_tokens),
        other => return Err(PyValueError::new_err(format!("unknown KV cache group {other:?}"))),
    })
}

fn state_group(mode: StateMode, num_speculative_blocks: u32, alignment: u32) -> KvCacheGroupConfig {
    let checkpoint_alignment = (alignment > 0).then_some(alignment);
    KvCacheGroupConfig::State { mode, num_speculative_blocks, checkpoint_alignment }
}

fn states(config: &Bound<'_, PyDict>) -> PyResult<StateConfig> {
    let config = item(config, "states")?;
    let config = config.cast::<PyDict>()?;
    Ok(read!(config => StateConfig {
        aligns_chunks, block_size, has_checkpoint_blocks, checkpoint_alignment, drops_last_unit,
        keeps_junctions, num_hash_lookahead_tokens;
    }))
}

fn speculation(config: &Bound<'_, PyDict>) -> PyResult<Speculation> {
    let metrics: String = get(config, "per_request_spec_decode_metrics")?;
    Ok(read!(config => Speculation {
        num_spec_tokens, num_lookahead_tokens, num_prefill_lookahead_tokens, num_draft_slots;
        by_batch_size: get(config, "num_spec_tokens_by_batch_size")?,
        request_metrics: match metrics.as_str() {
            "none" => RequestSpecMetrics::None,
            "summary" => RequestSpecMetrics::Summary,
            "detailed" => RequestSpecMetrics::Detailed,
            other => return Err(PyValueError::new_err(format!("unknown level {other:?}"))),
        }
    }))
}

fn kv_transfer(config: &Bound<'_, PyDict>) -> PyResult<Option<KvTransferConfig>> {
    let config = item(config, "kv_transfer")?;
    if config.is_none() {
        return Ok(None);
    }
    let config = config.cast::<PyDict>()?;
    Ok(Some(read!(config => KvTransferConfig {
        defer_block_free, requires_kv_delivery, recompute_load_failures;
    })))
}

fn behaviors(config: &Bound<'_, PyDict>) -> PyResult<Behaviors> {
    Ok(read!(config => Behaviors {
        continues_after_self_preemption, skips_held_up, counts_loras_of_all_running,
        caches_settled_output, keeps_block_before_junction, requeues_sessions_last,
        caches_state_tails_once, caps_hits_to_aux_output, can_skip_drafts, local_prefill_interval;
    }))
}

fn get<'py, T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(
    config: &Bound<'py, PyDict>,
    name: &str,
) -> PyResult<T> {
    item(config, name)?.extract()
}

fn item<'py>(config: &Bound<'py, PyDict>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    config.get_item(name)?.ok_or_else(|| PyKeyError::new_err(name.to_owned()))
}
