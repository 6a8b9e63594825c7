//! The dictionary that `sparksched.engine.config.core_config` makes of vLLM's configuration.

use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sparksched_core::{
    Behaviors, BlockHasher, JournalConfig, KvCacheGroupConfig, KvTransferConfig, Policy,
    RequestSpecMetrics, SchedulerConfig, Speculation, StateConfig, StateMode,
};

use crate::hasher::new_block_hasher;

/// Reads it.
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
        speculation: speculation(config)?,
        num_sampled_tokens_per_step: get(config, "num_sampled_tokens_per_step")?,
        max_loras: get(config, "max_loras")?,
        decode_stagger: get(config, "decode_stagger")?,
        resume_as_new: get(config, "resume_as_new")?,
        sends_sampled_tokens: get(config, "sends_sampled_tokens")?,
        behaviors: behaviors(config)?,
        log_stats: get(config, "log_stats")?,
        block_size: get(config, "block_size")?,
        hash_block_size,
        partial_hits: get(config, "partial_hits")?,
        zeroes_blocks: get(config, "zeroes_blocks")?,
        num_blocks: get(config, "num_blocks")?,
        watermark_blocks: get(config, "watermark_blocks")?,
        groups: groups.into_iter().map(kv_cache_group).collect::<PyResult<_>>()?,
        group_block_sizes: get(config, "group_block_sizes")?,
        states: states(config)?,
        lookup_groups: get(config, "lookup_groups")?,
        eagle_groups: get(config, "eagle_groups")?,
        retention_interval: get(config, "retention_interval")?,
        journal: JournalConfig {
            prefixes: get(config, "enable_kv_cache_events")?,
            uses: get(config, "kv_cache_metrics")?,
            num_lookahead_tokens: hasher.as_ref().map_or(0, BlockHasher::num_lookahead_tokens),
        },
        kv_transfer: kv_transfer(config)?,
        transfers_encoder_outputs: get(config, "transfers_encoder_outputs")?,
        collects_aux_output: get(config, "collects_aux_output")?,
        hasher,
    })
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
    Ok(StateConfig {
        aligns_chunks: get(config, "aligns_chunks")?,
        block_size: get(config, "block_size")?,
        has_checkpoint_blocks: get(config, "has_checkpoint_blocks")?,
        checkpoint_alignment: get(config, "checkpoint_alignment")?,
        drops_last_unit: get(config, "drops_last_unit")?,
        keeps_junctions: get(config, "keeps_junctions")?,
        num_hash_lookahead_tokens: get(config, "num_hash_lookahead_tokens")?,
    })
}

fn speculation(config: &Bound<'_, PyDict>) -> PyResult<Speculation> {
    let metrics: String = get(config, "per_request_spec_decode_metrics")?;
    Ok(Speculation {
        num_spec_tokens: get(config, "num_spec_tokens")?,
        num_lookahead_tokens: get(config, "num_lookahead_tokens")?,
        num_prefill_lookahead_tokens: get(config, "num_prefill_lookahead_tokens")?,
        num_draft_slots: get(config, "num_draft_slots")?,
        by_batch_size: get(config, "num_spec_tokens_by_batch_size")?,
        request_metrics: match metrics.as_str() {
            "none" => RequestSpecMetrics::None,
            "summary" => RequestSpecMetrics::Summary,
            "detailed" => RequestSpecMetrics::Detailed,
            other => return Err(PyValueError::new_err(format!("unknown level {other:?}"))),
        },
    })
}

fn kv_transfer(config: &Bound<'_, PyDict>) -> PyResult<Option<KvTransferConfig>> {
    let config = item(config, "kv_transfer")?;
    if config.is_none() {
        return Ok(None);
    }
    let config = config.cast::<PyDict>()?;
    Ok(Some(KvTransferConfig {
        defer_block_free: get(config, "defer_block_free")?,
        requires_kv_delivery: get(config, "requires_kv_delivery")?,
        recompute_load_failures: get(config, "recompute_load_failures")?,
    }))
}

fn behaviors(config: &Bound<'_, PyDict>) -> PyResult<Behaviors> {
    Ok(Behaviors {
        continues_after_self_preemption: get(config, "continues_after_self_preemption")?,
        skips_held_up: get(config, "skips_held_up")?,
        counts_loras_of_all_running: get(config, "counts_loras_of_all_running")?,
        caches_settled_output: get(config, "caches_settled_output")?,
        keeps_block_before_junction: get(config, "keeps_block_before_junction")?,
        requeues_sessions_last: get(config, "requeues_sessions_last")?,
        caches_state_tails_once: get(config, "caches_state_tails_once")?,
        caps_hits_to_aux_output: get(config, "caps_hits_to_aux_output")?,
        can_skip_drafts: get(config, "can_skip_drafts")?,
        local_prefill_interval: get(config, "local_prefill_interval")?,
    })
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
