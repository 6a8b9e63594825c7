//! `SchedulerStats` and the statistics in it, `PrefillStats` and `RequestSpecDecodeMetrics`: maps
//! from the names of their fields.

use sparksched_core::{
    PrefillStats, PrefixCacheStats, RequestSpecStats, SchedulerStats, SpecDecodingStats,
};

use crate::msgpack::Writer;

/// The `scheduler_stats` of a message.
#[derive(Clone, Copy, Debug)]
pub enum Stats<'a> {
    /// Another client gets them, or nobody.
    None,
    /// Those of the core, everything that it doesn't know at its default.
    Core {
        /// What the core knows.
        stats: &'a SchedulerStats,
        /// Keys of `num_kv_fetch_reqs_by_stage`.
        kv_fetch_stages: &'a [String],
    },
    /// `SchedulerStats` as msgpack.
    Encoded(&'a [u8]),
}

impl Stats<'_> {
    pub(crate) fn write(&self, to: &mut Writer) {
        match self {
            Self::None => to.nil(),
            Self::Core { stats, kv_fetch_stages } => scheduler_stats(to, stats, kv_fetch_stages),
            Self::Encoded(stats) => to.encoded(stats),
        }
    }
}

fn scheduler_stats(to: &mut Writer, stats: &SchedulerStats, kv_fetch_stages: &[String]) {
    to.map(18);
    uint(to, "num_running_reqs", stats.num_running_reqs as u64);
    uint(to, "num_waiting_reqs", stats.num_waiting_reqs as u64);
    uint(to, "num_skipped_waiting_reqs", stats.num_skipped_waiting_reqs as u64);
    to.str("num_kv_fetch_reqs_by_stage");
    to.map(kv_fetch_stages.len());
    for stage in kv_fetch_stages {
        uint(to, stage, 0); // only KV connectors fetch
    }
    uint(to, "step_counter", 0);
    uint(to, "current_wave", 0);
    to.str("kv_cache_usage");
    match stats.kv_cache_usage {
        None => to.uint(0), // Python's integer, in vLLM, too
        Some(usage) => to.float(usage),
    }
    nil(to, "iteration_details");
    to.str("prefix_cache_stats");
    prefix_cache_stats(to, &stats.prefix_cache_stats);
    nil(to, "connector_prefix_cache_stats");
    to.str("kv_cache_eviction_events");
    to.array(0);
    to.str("spec_decoding_stats");
    match &stats.spec_decoding_stats {
        None => to.nil(),
        Some(stats) => spec_decoding_stats(to, stats),
    }
    nil(to, "kv_connector_stats");
    nil(to, "ec_connector_stats");
    to.str("waiting_lora_adapters");
    to.map(0);
    to.str("running_lora_adapters");
    to.map(0);
    nil(to, "cudagraph_stats");
    nil(to, "perf_stats");
}

fn prefix_cache_stats(to: &mut Writer, stats: &PrefixCacheStats) {
    to.map(8);
    to.str("reset");
    to.bool(stats.reset);
    uint(to, "requests", stats.requests);
    uint(to, "queries", stats.queries);
    uint(to, "hits", stats.hits);
    uint(to, "preempted_requests", stats.preempted_requests);
    uint(to, "preempted_queries", stats.preempted_queries);
    uint(to, "preempted_hits", stats.preempted_hits);
    to.str("hits_by_source");
    to.map(0);
}

fn spec_decoding_stats(to: &mut Writer, stats: &SpecDecodingStats) {
    to.map(6);
    uint(to, "num_spec_tokens", stats.num_draft_tokens_per_pos.len() as u64);
    uint(to, "num_drafts", stats.num_drafts);
    uint(to, "num_draft_tokens", stats.num_draft_tokens);
    uint(to, "num_accepted_tokens", stats.num_accepted_tokens);
    uints(to, "num_accepted_tokens_per_pos", stats.num_accepted_tokens_per_pos.iter().copied());
    uints(to, "num_draft_tokens_per_pos", stats.num_draft_tokens_per_pos.iter().copied());
}

pub(crate) fn request_spec_stats(to: &mut Writer, stats: &RequestSpecStats) {
    let accepted = stats.per_step.iter().map(|&(accepted, _)| accepted.into());
    let drafted = stats.per_step.iter().map(|&(_, drafted)| drafted.into());
    to.map(5);
    uint(to, "num_spec_tokens", stats.histogram.len() as u64 - 1);
    uints(to, "histogram", stats.histogram.iter().copied());
    uint(to, "num_draft_tokens", stats.num_draft_tokens);
    uints(to, "per_step_accepted", accepted);
    uints(to, "per_step_drafted", drafted);
}

pub(crate) fn prefill_stats(to: &mut Writer, stats: &PrefillStats) {
    to.map(6);
    uint(to, "num_prompt_tokens", stats.num_prompt_tokens.into());
    uint(to, "num_computed_tokens", (stats.num_prompt_tokens - stats.num_cached_tokens()).into());
    uint(to, "num_cached_tokens", stats.num_cached_tokens().into());
    uint(to, "num_local_cached_tokens", stats.num_local_cached_tokens.into());
    to.str("num_external_cached_tokens");
    to.int(stats.num_external_cached_tokens.into());
    uint(to, "num_cache_creation_tokens", stats.num_cache_creation_tokens.into());
}

fn uint(to: &mut Writer, name: &str, value: u64) {
    to.str(name);
    to.uint(value);
}

fn uints(to: &mut Writer, name: &str, values: impl ExactSizeIterator<Item = u64>) {
    to.str(name);
    to.array(values.len());
    values.for_each(|value| to.uint(value));
}

fn nil(to: &mut Writer, name: &str) {
    to.str(name);
    to.nil();
}
