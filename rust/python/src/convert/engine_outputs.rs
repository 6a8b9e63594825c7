//! `EngineCoreOutputs` and what hangs from it.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyList, PyModule, PyString, PyTuple};
use sparksched_core::{
    Event, EventKind, PrefillStats, RequestNews, RequestOutput, RequestSpecStats, SchedulerStats,
    SpecDecodingStats, StopReason,
};

use super::runner_output::{slice_of, value_of};
use super::{RareOutputs, SampledTokens, StatusTypes, class};
use crate::entries::Entry;

/// The parts of `SchedulerStats` that the core doesn't know.
#[derive(Default)]
pub(crate) struct OtherStats<'py> {
    /// `kv_cache_eviction_events`.
    pub(crate) evictions: Option<Bound<'py, PyList>>,
    /// The model runner's CUDA graph statistics.
    pub(crate) cudagraph: Option<Bound<'py, PyAny>>,
    pub(crate) perf: Option<Bound<'py, PyAny>>,
    /// `num_kv_fetch_reqs_by_stage`, `connector_prefix_cache_stats` and `kv_connector_stats` of
    /// a KV connector.
    pub(crate) kv_transfer: Option<[Bound<'py, PyAny>; 3]>,
    /// `ec_connector_stats` of an EC connector.
    pub(crate) encoder_transfer: Option<Bound<'py, PyAny>>,
}

impl OtherStats<'_> {
    /// Whether there is nothing to add to what the core knows.
    pub(crate) fn is_empty(&self) -> bool {
        self.cudagraph.is_none()
            && self.perf.is_none()
            && self.kv_transfer.is_none()
            && self.encoder_transfer.is_none()
            && self.evictions.as_ref().is_none_or(PyListMethods::is_empty)
    }
}

/// The classes that a step's outputs are made of.
pub(crate) struct EngineOutputTypes {
    pub(crate) statuses: StatusTypes,
    engine_core_output: Py<PyAny>,
    num_output_fields: usize,
    /// `RequestError`, if this vLLM tells clients why a request has failed.
    request_error: Option<Py<PyAny>>,
    engine_core_outputs: Py<PyAny>,
    engine_core_event: Py<PyAny>,
    queued: Py<PyAny>,
    scheduled: Py<PyAny>,
    preempted: Py<PyAny>,
    scheduler_stats: Py<PyAny>,
    prefix_cache_stats: Py<PyAny>,
    prefill_stats: Py<PyAny>,
    spec_decoding_stats: Py<PyAny>,
    request_spec_decode_metrics: Py<PyAny>,
    /// `num_kv_fetch_reqs_by_stage` without a KV connector: all zero.
    no_kv_fetches: Py<PyDict>,
    kv_fetch_stages: Vec<String>,
    map: Py<PyAny>,
    time: Py<PyModule>,
}

impl EngineOutputTypes {
    /// Looks the classes up.
    pub(crate) fn import(py: Python<'_>) -> PyResult<Self> {
        let engine = "vllm.v1.engine";
        let stats = "vllm.v1.metrics.stats";
        let event_type = class(py, engine, "EngineCoreEventType")?;
        let kv_fetch_stages: Vec<String> = class(py, stats, "KV_FETCH_STAGES")?.extract(py)?;
        let no_kv_fetches = PyDict::new(py);
        for stage in &kv_fetch_stages {
            no_kv_fetches.set_item(stage, 0)?;
        }
        let engine_core_output = class(py, engine, "EngineCoreOutput")?;
        let output_fields = engine_core_output.getattr(py, "__struct_fields__")?.into_bound(py);
        let tells_errors = output_fields.contains("error")?;
        Ok(Self {
            statuses: StatusTypes::import(py)?,
            engine_core_output,
            num_output_fields: output_fields.len()?,
            request_error: if tells_errors {
                Some(class(py, "vllm.outputs", "RequestError")?)
            } else {
                None
            },
            engine_core_outputs: class(py, engine, "EngineCoreOutputs")?,
            engine_core_event: class(py, engine, "EngineCoreEvent")?,
            queued: event_type.getattr(py, "QUEUED")?,
            scheduled: event_type.getattr(py, "SCHEDULED")?,
            preempted: event_type.getattr(py, "PREEMPTED")?,
            scheduler_stats: class(py, stats, "SchedulerStats")?,
            prefix_cache_stats: class(py, stats, "PrefixCacheStats")?,
            prefill_stats: class(py, stats, "PrefillStats")?,
            spec_decoding_stats: class(py, "vllm.v1.spec_decode.metrics", "SpecDecodingStats")?,
            request_spec_decode_metrics: class(py, stats, "RequestSpecDecodeMetrics")?,
            no_kv_fetches: no_kv_fetches.unbind(),
            kv_fetch_stages,
            map: class(py, "builtins", "map")?,
            time: py.import("time")?.unbind(),
        })
    }

    /// Fields of `EngineCoreOutput`.
    pub(crate) fn num_output_fields(&self) -> usize {
        self.num_output_fields
    }

    /// Whether this vLLM tells clients why a request has failed.
    pub(crate) fn tells_errors(&self) -> bool {
        self.request_error.is_some()
    }

    /// The keys of `num_kv_fetch_reqs_by_stage`.
    pub(crate) fn kv_fetch_stages(&self) -> &[String] {
        &self.kv_fetch_stages
    }

    /// What `EngineCoreOutputs` takes for its `timestamp`.
    pub(crate) fn monotonic(&self, py: Python<'_>) -> PyResult<f64> {
        self.time.call_method0(py, intern!(py, "monotonic"))?.extract(py)
    }

    /// `EngineCoreOutputs` of one client.
    pub(crate) fn outputs<'py>(&self, outputs: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        let engine_index = 0;
        self.engine_core_outputs.bind(outputs.py()).call1((engine_index, outputs))
    }

    /// `EngineCoreOutput` for each id and its tokens, everything else at its default.
    pub(crate) fn plain_outputs<'py>(
        &self,
        req_ids: &Bound<'py, PyList>,
        new_token_ids: &Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = req_ids.py();
        // One loop in C: a call from here for each output would cost several times as much.
        let class = self.engine_core_output.bind(py);
        let outputs = self.map.bind(py).call1((class, req_ids, new_token_ids))?;
        Ok(py.get_type::<PyList>().call1((outputs,))?.cast_into()?)
    }

    /// `EngineCoreOutput` of one request, everything but its tokens at its default.
    pub(crate) fn plain_output<'py>(
        &self,
        request_id: &Py<PyString>,
        new_token_ids: &Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let class = self.engine_core_output.bind(new_token_ids.py());
        class.call1((request_id, new_token_ids))
    }

    /// Sets the fields of an `EngineCoreOutput` that differ from their defaults.
    pub(crate) fn complete<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        entry: &Entry,
        output: &RequestOutput,
        sampled: &SampledTokens,
        rare: &RareOutputs<'py>,
    ) -> PyResult<()> {
        let py = object.py();
        if let Some(news) = &output.news {
            self.set_news(object, news)?;
        }
        if let Some(headers) = &entry.trace_headers {
            object.setattr(intern!(py, "trace_headers"), headers)?;
        }
        let slice =
            |lists: &Option<_>| slice_of(lists.as_ref(), sampled.row, output.num_new_tokens);
        if entry.wants_logprobs
            && let Some(logprobs) = slice(&rare.logprobs)?
        {
            object.setattr(intern!(py, "new_logprobs"), logprobs)?;
        }
        if output.num_new_tokens > 0
            && let Some(mask) = slice(&rare.sampling_masks)?
        {
            object.setattr(intern!(py, "new_sampling_mask"), mask)?;
        }
        let value = |dict: &Option<_>| value_of(dict.as_ref(), &entry.id);
        if let Some(pooled) = rare.pooled(sampled.row)? {
            object.setattr(intern!(py, "pooling_output"), pooled)?;
        }
        if let Some(logprobs) = value(&rare.prompt_logprobs)? {
            object.setattr(intern!(py, "new_prompt_logprobs_tensors"), logprobs)?;
        }
        if let Some(logprobs) = value(&rare.prompt_token_id_logprobs)? {
            object.setattr(intern!(py, "prompt_token_id_logprobs"), logprobs)?;
        }
        if let Some(experts) = value(&rare.routed_experts)? {
            object.setattr(intern!(py, "routed_experts"), experts)?;
        }
        if entry.num_nans_in_logits != 0 {
            object.setattr(intern!(py, "num_nans_in_logits"), entry.num_nans_in_logits)?;
        }
        Ok(())
    }

    /// Sets what the core knows.
    pub(crate) fn set_news(&self, object: &Bound<'_, PyAny>, news: &RequestNews) -> PyResult<()> {
        let py = object.py();
        self.set_events(object, &news.events)?;
        if let Some(stats) = &news.prefill_stats {
            object.setattr(intern!(py, "prefill_stats"), self.prefill_stats(py, stats)?)?;
        }
        if let Some(stats) = &news.spec_stats {
            let stats = self.request_spec_stats(py, stats)?;
            object.setattr(intern!(py, "spec_decode_metrics"), stats)?;
        }
        object.setattr(intern!(py, "stop_reason"), stop_reason(py, news.stop_reason))?;
        if let Some(status) = news.finished {
            let reason = &self.statuses.of(status).finish_reason;
            object.setattr(intern!(py, "finish_reason"), reason)?;
        }
        Ok(())
    }

    /// The `EngineCoreOutput` of a request that failed without a step.
    pub(crate) fn failure<'py>(
        &self,
        py: Python<'py>,
        entry: &Entry,
        finish_reason: &Py<PyAny>,
        events: &[Event],
    ) -> PyResult<Bound<'py, PyAny>> {
        let output = self.plain_output(&entry.id, &PyList::empty(py))?;
        output.setattr(intern!(py, "finish_reason"), finish_reason)?;
        self.set_events(&output, events)?;
        if let Some(headers) = &entry.trace_headers {
            output.setattr(intern!(py, "trace_headers"), headers)?;
        }
        Ok(output)
    }

    /// Tells in an output why its request's grammar can't be compiled, if this vLLM does.
    pub(crate) fn set_grammar_error(
        &self,
        output: &Bound<'_, PyAny>,
        grammar_error: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = output.py();
        let Some(request_error) = &self.request_error else { return Ok(()) };
        let message = format!("Invalid structured outputs: {}", grammar_error.str()?);
        let error = request_error.bind(py).call1(("validation_error", message))?;
        output.setattr(intern!(py, "error"), error)
    }

    fn set_events(&self, output: &Bound<'_, PyAny>, events: &[Event]) -> PyResult<()> {
        let py = output.py();
        if events.is_empty() {
            return Ok(());
        }
        let list = PyList::empty(py);
        for event in events {
            let kind = match event.kind {
                EventKind::Queued => &self.queued,
                EventKind::Scheduled => &self.scheduled,
                EventKind::Preempted => &self.preempted,
            };
            list.append(self.engine_core_event.bind(py).call1((kind, event.timestamp))?)?;
        }
        output.setattr(intern!(py, "events"), list)
    }

    /// `PrefillStats`.
    fn prefill_stats<'py>(
        &self,
        py: Python<'py>,
        stats: &PrefillStats,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.prefill_stats.bind(py).call1((
            stats.num_prompt_tokens,
            stats.num_prompt_tokens - stats.num_cached_tokens(),
            stats.num_cached_tokens(),
            stats.num_local_cached_tokens,
            stats.num_external_cached_tokens,
            stats.num_cache_creation_tokens,
        ))
    }

    /// `RequestSpecDecodeMetrics`.
    fn request_spec_stats<'py>(
        &self,
        py: Python<'py>,
        stats: &RequestSpecStats,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (accepted, drafted): (Vec<u32>, Vec<u32>) = stats.per_step.iter().copied().unzip();
        self.request_spec_decode_metrics.bind(py).call1((
            stats.histogram.len() - 1,
            PyList::new(py, &stats.histogram)?,
            stats.num_draft_tokens,
            PyList::new(py, accepted)?,
            PyList::new(py, drafted)?,
        ))
    }

    /// `SpecDecodingStats`, or None for a step without drafts.
    fn spec_decoding_stats<'py>(
        &self,
        py: Python<'py>,
        stats: Option<&SpecDecodingStats>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(stats) = stats else { return Ok(py.None().into_bound(py)) };
        self.spec_decoding_stats.bind(py).call1((
            stats.num_draft_tokens_per_pos.len(),
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            PyList::new(py, &stats.num_accepted_tokens_per_pos)?,
            PyList::new(py, &stats.num_draft_tokens_per_pos)?,
        ))
    }

    /// `SchedulerStats`.
    pub(crate) fn scheduler_stats<'py>(
        &self,
        py: Python<'py>,
        stats: &SchedulerStats,
        others: &OtherStats<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let cache = &stats.prefix_cache_stats;
        let prefix_cache_stats = self.prefix_cache_stats.bind(py).call1((
            cache.reset,
            cache.requests,
            cache.queries,
            cache.hits,
            cache.preempted_requests,
            cache.preempted_queries,
            cache.preempted_hits,
        ))?;
        let none = py.None();
        let no_transfer = || -> PyResult<_> {
            let none = none.bind(py);
            Ok([self.no_kv_fetches.bind(py).copy()?.into_any(), none.clone(), none.clone()])
        };
        let [kv_fetches, connector_prefix_cache_stats, kv_connector_stats] =
            others.kv_transfer.clone().map_or_else(no_transfer, Ok)?;
        let [step_counter, current_wave] = [0_u8, 0];
        let values = [
            stats.num_running_reqs.into_pyobject(py)?.into_any(),
            stats.num_waiting_reqs.into_pyobject(py)?.into_any(),
            stats.num_skipped_waiting_reqs.into_pyobject(py)?.into_any(),
            kv_fetches,
            step_counter.into_pyobject(py)?.into_any(),
            current_wave.into_pyobject(py)?.into_any(),
            kv_cache_usage(py, stats.kv_cache_usage),
            none.bind(py).clone(), // iteration_details
            prefix_cache_stats,
            connector_prefix_cache_stats,
            others.evictions.clone().unwrap_or_else(|| PyList::empty(py)).into_any(),
            self.spec_decoding_stats(py, stats.spec_decoding_stats.as_ref())?,
            kv_connector_stats,
            others.encoder_transfer.clone().unwrap_or_else(|| none.bind(py).clone()),
            PyDict::new(py).into_any(), // waiting_lora_adapters
            PyDict::new(py).into_any(), // running_lora_adapters
            others.cudagraph.clone().unwrap_or_else(|| none.bind(py).clone()),
            others.perf.clone().unwrap_or_else(|| none.bind(py).clone()),
        ];
        self.scheduler_stats.bind(py).call1(PyTuple::new(py, values)?)
    }
}

/// Sets what a KV connector told of a request that has ended.
pub(crate) fn set_transfer_params(
    object: &Bound<'_, PyAny>,
    news: Option<&RequestNews>,
    params: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let py = object.py();
    let name = intern!(py, "do_remote_prefill");
    if let Some(stats) = news.and_then(|news| news.prefill_stats.as_ref())
        && params.call_method1(intern!(py, "get"), (name,))?.is_truthy()?
    {
        // The engine that goes on with the prompt reports these rather than its own.
        let name = intern!(py, "remote_prefill_cached_tokens");
        params.set_item(name, stats.num_cached_tokens())?;
    }
    object.setattr(intern!(py, "kv_transfer_params"), params)
}

/// The share of blocks in use; Python's integer 0 if there are no blocks, as with vLLM.
pub(crate) fn kv_cache_usage(py: Python<'_>, usage: Option<f64>) -> Bound<'_, PyAny> {
    match usage {
        None => PyInt::new(py, 0).into_any(),
        Some(usage) => PyFloat::new(py, usage).into_any(),
    }
}

/// `Request.stop_reason` as the client is told.
fn stop_reason(py: Python<'_>, reason: StopReason) -> Bound<'_, PyAny> {
    match reason {
        StopReason::None => py.None().into_bound(py),
        StopReason::Token(token) => PyInt::new(py, token).into_any(),
        StopReason::Repetition => PyString::intern(py, "repetition_detected").into_any(),
    }
}
