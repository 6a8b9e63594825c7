//! The only place that reads and builds vLLM's objects.
//!
//! Their shapes (names, order and defaults of fields) are compared with what is assumed here by
//! `sparksched.compat` before a scheduler is built, so that positions can be relied upon.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyFloat, PyInt, PyList, PySet, PyString, PyTuple};
use sparksched_core::{
    BlockHash, BlockId, Event, EventKind, NewRequest, PrefillStats, RepetitionDetection, Request,
    RequestStatus, ScheduledRequest, SchedulerStats, StopConditions, StopReason,
};

use crate::hasher::{self, token_out_of_range};

/// vLLM's classes and enum members, looked up once.
pub(crate) struct VllmTypes {
    scheduler_output: Py<PyAny>,
    cached_request_data: Py<PyAny>,
    new_request_data: Py<PyAny>,
    engine_core_output: Py<PyAny>,
    engine_core_outputs: Py<PyAny>,
    engine_core_event: Py<PyAny>,
    scheduler_stats: Py<PyAny>,
    prefix_cache_stats: Py<PyAny>,
    prefill_stats: Py<PyAny>,
    /// By [`EventKind`]: queued, scheduled, preempted.
    event_types: [Py<PyAny>; 3],
    /// `RequestStatus` and `FinishReason` members of the finished states.
    finished: Vec<(RequestStatus, Py<PyAny>, Py<PyAny>)>,
    /// `RequestStatus` values as numbers.
    status_values: Vec<(i64, RequestStatus)>,
    map: Py<PyAny>,
}

/// The finished states by their names in vLLM.
const FINISHED_STATES: [(&str, RequestStatus); 6] = [
    ("FINISHED_STOPPED", RequestStatus::FinishedStopped),
    ("FINISHED_LENGTH_CAPPED", RequestStatus::FinishedLengthCapped),
    ("FINISHED_ABORTED", RequestStatus::FinishedAborted),
    ("FINISHED_IGNORED", RequestStatus::FinishedIgnored),
    ("FINISHED_ERROR", RequestStatus::FinishedError),
    ("FINISHED_REPETITION", RequestStatus::FinishedRepetition),
];

/// The name that vLLM gives a status.
pub(crate) fn status_name(status: RequestStatus) -> &'static str {
    match status {
        RequestStatus::Waiting => "WAITING",
        RequestStatus::WaitingForGrammar => "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        RequestStatus::Running => "RUNNING",
        RequestStatus::Preempted => "PREEMPTED",
        finished => {
            let is_it = |(_, status): &&(&str, RequestStatus)| *status == finished;
            FINISHED_STATES.iter().find(is_it).map_or("FINISHED", |(name, _)| name)
        }
    }
}

impl VllmTypes {
    /// Imports vLLM's modules.
    pub(crate) fn import(py: Python<'_>) -> PyResult<Self> {
        let class = |module: &str, name: &str| -> PyResult<Py<PyAny>> {
            Ok(py.import(module)?.getattr(name)?.unbind())
        };
        let output = "vllm.v1.core.sched.output";
        let engine = "vllm.v1.engine";
        let stats = "vllm.v1.metrics.stats";
        let event_type = class(engine, "EngineCoreEventType")?;
        let event_type = |name: &str| event_type.getattr(py, name);
        let statuses = class("vllm.v1.request", "RequestStatus")?;
        let mut finished = Vec::new();
        let mut status_values = Vec::new();
        for (name, status) in FINISHED_STATES {
            let member = statuses.getattr(py, name)?;
            let reason = statuses.call_method1(py, "get_finished_reason", (&member,))?;
            status_values.push((member.extract(py)?, status));
            finished.push((status, member, reason));
        }
        Ok(Self {
            scheduler_output: class(output, "SchedulerOutput")?,
            cached_request_data: class(output, "CachedRequestData")?,
            new_request_data: class(output, "NewRequestData")?,
            engine_core_output: class(engine, "EngineCoreOutput")?,
            engine_core_outputs: class(engine, "EngineCoreOutputs")?,
            engine_core_event: class(engine, "EngineCoreEvent")?,
            scheduler_stats: class(stats, "SchedulerStats")?,
            prefix_cache_stats: class(stats, "PrefixCacheStats")?,
            prefill_stats: class(stats, "PrefillStats")?,
            event_types: [
                event_type("QUEUED")?,
                event_type("SCHEDULED")?,
                event_type("PREEMPTED")?,
            ],
            finished,
            status_values,
            map: class("builtins", "map")?,
        })
    }

    /// The finished state that a `RequestStatus` member stands for.
    pub(crate) fn finished_status(&self, status: &Bound<'_, PyAny>) -> PyResult<RequestStatus> {
        let value: i64 = status.extract()?;
        let known = self.status_values.iter().find(|(number, _)| *number == value);
        known.map(|(_, status)| *status).ok_or_else(|| {
            PyValueError::new_err(format!("requests can't be finished with the status {status}"))
        })
    }

    fn finished_members(&self, status: RequestStatus) -> &(RequestStatus, Py<PyAny>, Py<PyAny>) {
        let is_it = |(known, ..): &&(RequestStatus, Py<PyAny>, Py<PyAny>)| *known == status;
        self.finished.iter().find(is_it).expect("a finished status")
    }

    /// The `RequestStatus` member of a finished status.
    pub(crate) fn request_status(&self, status: RequestStatus) -> &Py<PyAny> {
        &self.finished_members(status).1
    }

    /// The `FinishReason` member of a finished status.
    pub(crate) fn finish_reason(&self, status: RequestStatus) -> &Py<PyAny> {
        &self.finished_members(status).2
    }

    /// `list[EngineCoreEvent] | None`.
    pub(crate) fn events<'py>(
        &self,
        py: Python<'py>,
        events: &[Event],
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        if events.is_empty() {
            return Ok(None);
        }
        let list = PyList::empty(py);
        for event in events {
            let kind = match event.kind {
                EventKind::Queued => &self.event_types[0],
                EventKind::Scheduled => &self.event_types[1],
                EventKind::Preempted => &self.event_types[2],
            };
            list.append(self.engine_core_event.bind(py).call1((kind, event.timestamp))?)?;
        }
        Ok(Some(list))
    }

    /// `PrefillStats`.
    pub(crate) fn prefill_stats<'py>(
        &self,
        py: Python<'py>,
        stats: &PrefillStats,
    ) -> PyResult<Bound<'py, PyAny>> {
        let num_external_cached_tokens = 0;
        self.prefill_stats.bind(py).call1((
            stats.num_prompt_tokens,
            stats.num_prompt_tokens - stats.num_cached_tokens,
            stats.num_cached_tokens,
            stats.num_cached_tokens,
            num_external_cached_tokens,
            stats.num_cache_creation_tokens,
        ))
    }

    /// `SchedulerStats`, with the model runner's CUDA graph statistics.
    pub(crate) fn scheduler_stats<'py>(
        &self,
        py: Python<'py>,
        stats: &SchedulerStats,
        num_kv_fetch_reqs_by_stage: &Bound<'py, PyDict>,
        cudagraph_stats: &Bound<'py, PyAny>,
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
        let [step_counter, current_wave] = [0_u8, 0];
        let values = [
            stats.num_running_reqs.into_pyobject(py)?.into_any(),
            stats.num_waiting_reqs.into_pyobject(py)?.into_any(),
            stats.num_skipped_waiting_reqs.into_pyobject(py)?.into_any(),
            num_kv_fetch_reqs_by_stage.copy()?.into_any(),
            step_counter.into_pyobject(py)?.into_any(),
            current_wave.into_pyobject(py)?.into_any(),
            PyFloat::new(py, stats.kv_cache_usage).into_any(),
            none.bind(py).clone(), // iteration_details
            prefix_cache_stats,
            none.bind(py).clone(),        // connector_prefix_cache_stats
            PyList::empty(py).into_any(), // kv_cache_eviction_events
            none.bind(py).clone(),        // spec_decoding_stats
            none.bind(py).clone(),        // kv_connector_stats
            none.bind(py).clone(),        // ec_connector_stats
            PyDict::new(py).into_any(),   // waiting_lora_adapters
            PyDict::new(py).into_any(),   // running_lora_adapters
            cudagraph_stats.clone(),
        ];
        self.scheduler_stats.bind(py).call1(PyTuple::new(py, values)?)
    }

    /// `NewRequestData`; `prefill_token_ids` is for Model Runner V2 only.
    pub(crate) fn new_request_data<'py>(
        &self,
        request: &Bound<'py, PyAny>,
        id: &Py<PyString>,
        block_ids: &Bound<'py, PyTuple>,
        num_computed_tokens: u32,
        prefill_token_ids: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = request.py();
        let none = py.None();
        let none = none.bind(py);
        self.new_request_data.bind(py).call1((
            id,
            request.getattr(intern!(py, "prompt_token_ids"))?,
            request.getattr(intern!(py, "mm_features"))?,
            request.getattr(intern!(py, "sampling_params"))?,
            none, // pooling_params
            block_ids,
            num_computed_tokens,
            none, // lora_request
            none, // prompt_embeds
            none, // prompt_is_token_ids
            prefill_token_ids,
        ))
    }

    /// `CachedRequestData`.
    pub(crate) fn cached_request_data<'py>(
        &self,
        py: Python<'py>,
        cached: CachedRequests<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.cached_request_data.bind(py).call1((
            cached.req_ids,
            cached.resumed_req_ids,
            PyList::empty(py), // new_token_ids: for synchronous pipeline parallelism
            cached.all_token_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
        ))
    }

    /// `SchedulerOutput`.
    pub(crate) fn scheduler_output<'py>(
        &self,
        py: Python<'py>,
        output: ScheduledStep<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let none = py.None();
        let none = || none.bind(py).clone();
        let values = [
            output.scheduled_new_reqs.into_any(),
            output.scheduled_cached_reqs,
            output.num_scheduled_tokens.into_any(),
            output.total_num_scheduled_tokens.into_pyobject(py)?.into_any(),
            PyDict::new(py).into_any(), // scheduled_spec_decode_tokens
            PyDict::new(py).into_any(), // scheduled_encoder_inputs
            output.finished_req_ids.into_any(),
            PyList::empty(py).into_any(), // free_encoder_mm_hashes
            none(),                       // scheduled_encoder_input_stats
            output.preempted_req_ids.into_any(),
            bool_object(py, output.has_structured_output_requests),
            bool_object(py, output.pending_structured_output_tokens),
        ];
        self.scheduler_output.bind(py).call1(PyTuple::new(py, values)?)
    }

    /// `EngineCoreOutput` for each id and its tokens, everything else at its default.
    pub(crate) fn engine_core_outputs_plain<'py>(
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

    /// `EngineCoreOutputs` of one client.
    pub(crate) fn engine_core_outputs<'py>(
        &self,
        outputs: &Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let engine_index = 0;
        self.engine_core_outputs.bind(outputs.py()).call1((engine_index, outputs))
    }
}

/// The content of `CachedRequestData`.
pub(crate) struct CachedRequests<'py> {
    pub(crate) req_ids: Bound<'py, PyList>,
    pub(crate) resumed_req_ids: Bound<'py, PySet>,
    pub(crate) all_token_ids: Bound<'py, PyDict>,
    pub(crate) new_block_ids: Bound<'py, PyList>,
    pub(crate) num_computed_tokens: Bound<'py, PyList>,
    pub(crate) num_output_tokens: Bound<'py, PyList>,
}

/// The content of `SchedulerOutput`.
pub(crate) struct ScheduledStep<'py> {
    pub(crate) scheduled_new_reqs: Bound<'py, PyList>,
    pub(crate) scheduled_cached_reqs: Bound<'py, PyAny>,
    pub(crate) num_scheduled_tokens: Bound<'py, PyDict>,
    pub(crate) total_num_scheduled_tokens: u32,
    pub(crate) finished_req_ids: Bound<'py, PySet>,
    pub(crate) preempted_req_ids: Bound<'py, PySet>,
    pub(crate) has_structured_output_requests: bool,
    pub(crate) pending_structured_output_tokens: bool,
}

fn bool_object(py: Python<'_>, value: bool) -> Bound<'_, PyAny> {
    pyo3::types::PyBool::new(py, value).to_owned().into_any()
}

/// Token ids of a list of `int`.
pub(crate) fn token_ids(list: &Bound<'_, PyList>) -> PyResult<Vec<i32>> {
    let mut tokens = Vec::with_capacity(list.len());
    extend_token_ids(list, &mut tokens)?;
    Ok(tokens)
}

/// Appends the token ids of a list of `int`.
pub(crate) fn extend_token_ids(list: &Bound<'_, PyList>, tokens: &mut Vec<i32>) -> PyResult<()> {
    for token in list {
        tokens.push(token.extract().map_err(|error| token_out_of_range(&error))?);
    }
    Ok(())
}

/// A digest of vLLM's hash functions.
pub(crate) fn block_hash(hash: &Bound<'_, PyAny>) -> PyResult<BlockHash> {
    let digest = hash.cast::<PyBytes>()?.as_bytes();
    BlockHash::from_digest(digest)
        .ok_or_else(|| PyValueError::new_err("a block hash is longer than 32 bytes"))
}

/// `Request.block_hashes`.
pub(crate) fn block_hashes(hashes: &Bound<'_, PyAny>) -> PyResult<Vec<BlockHash>> {
    hashes.cast::<PyList>()?.iter().map(|hash| block_hash(&hash)).collect()
}

/// One list of block ids a KV cache group.
pub(crate) fn block_ids<'py, 'a>(
    py: Python<'py>,
    groups: impl ExactSizeIterator<Item = &'a [BlockId]>,
) -> PyResult<Bound<'py, PyTuple>> {
    let lists = groups.map(|ids| PyList::new(py, ids.iter().map(|id| id.0)));
    PyTuple::new(py, lists.collect::<PyResult<Vec<_>>>()?)
}

/// Block ids that a running request got in this step, or `None` if it got none at all.
pub(crate) fn new_block_ids<'py>(
    py: Python<'py>,
    request: &Request,
) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let groups = request.groups();
    if groups.iter().all(|blocks| blocks.new_blocks().is_empty()) {
        return Ok(None);
    }
    block_ids(py, groups.iter().map(|blocks| blocks.new_blocks())).map(Some)
}

/// All block ids of a request.
pub(crate) fn all_block_ids<'py>(
    py: Python<'py>,
    request: &Request,
) -> PyResult<Bound<'py, PyTuple>> {
    block_ids(py, request.groups().iter().map(|blocks| blocks.table.as_slice()))
}

/// `dict[str, int]` of the step, in the order in which requests were scheduled.
pub(crate) fn num_scheduled_tokens<'py, 'a>(
    py: Python<'py>,
    scheduled: impl Iterator<Item = (&'a Py<PyString>, &'a ScheduledRequest)>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (id, request) in scheduled {
        dict.set_item(id, request.num_tokens)?;
    }
    Ok(dict)
}

/// Appends to the Python request the tokens that only the core knows so far.
pub(crate) fn sync_request_tokens(request: &Bound<'_, PyAny>, sequence: &[i32]) -> PyResult<()> {
    let py = request.py();
    let all_token_ids = request.getattr(intern!(py, "_all_token_ids"))?;
    let all_token_ids = all_token_ids.cast::<PyList>()?;
    if all_token_ids.len() >= sequence.len() {
        return Ok(());
    }
    let missing = PyList::new(py, &sequence[all_token_ids.len()..])?;
    let end = isize::MAX as usize;
    let output_token_ids = request.getattr(intern!(py, "_output_token_ids"))?;
    for list in [all_token_ids, output_token_ids.cast::<PyList>()?] {
        list.set_slice(end, end, missing.as_any())?;
    }
    Ok(())
}

/// `Request.stop_reason` as the client is told.
pub(crate) fn stop_reason(py: Python<'_>, reason: StopReason) -> PyResult<Bound<'_, PyAny>> {
    Ok(match reason {
        StopReason::None => py.None().into_bound(py),
        StopReason::Token(token) => PyInt::new(py, token).into_any(),
        StopReason::Repetition => intern!(py, "repetition_detected").clone().into_any(),
    })
}

/// Reads a `Request` as it arrives. `block_hashes` of its prompt are taken as they are.
pub(crate) fn new_request(request: &Bound<'_, PyAny>) -> PyResult<NewRequest> {
    let py = request.py();
    refuse_unsupported(request)?;
    let sampling_params = request.getattr(intern!(py, "sampling_params"))?;
    let (tokens, block_hashes) = prompt(request)?;
    let structured = request.getattr(intern!(py, "structured_output_request"))?;
    Ok(NewRequest {
        id: request.getattr(intern!(py, "request_id"))?.extract::<String>()?.into(),
        tokens,
        num_prompt_tokens: request.getattr(intern!(py, "num_prompt_tokens"))?.extract()?,
        block_hashes,
        has_extra_keys: request.getattr(intern!(py, "cache_salt"))?.is_truthy()?,
        priority: request.getattr(intern!(py, "priority"))?.extract()?,
        arrival_time: request.getattr(intern!(py, "arrival_time"))?.extract()?,
        stop: stop_conditions(&sampling_params, &request.getattr(intern!(py, "max_tokens"))?)?,
        skip_reading_prefix_cache: request
            .getattr(intern!(py, "skip_reading_prefix_cache"))?
            .is_truthy()?,
        use_structured_output: !structured.is_none(),
    })
}

/// The request's tokens and the hashes of their blocks that there are.
fn prompt(request: &Bound<'_, PyAny>) -> PyResult<(Vec<i32>, Vec<BlockHash>)> {
    let py = request.py();
    let tokens = request.getattr(intern!(py, "_all_token_ids"))?;
    let tokens = tokens.cast::<PyList>()?;
    if let Some(prompt) = hasher::take_hashed_prompt(request, tokens.len())? {
        return Ok(prompt);
    }
    let hashes = request.getattr(intern!(py, "block_hashes"))?;
    Ok((token_ids(tokens)?, block_hashes(&hashes)?))
}

/// The backstop behind `sparksched.compat`, which keeps such requests from arriving.
fn refuse_unsupported(request: &Bound<'_, PyAny>) -> PyResult<()> {
    let kinds = [
        ("resumable", "a streaming-input session"),
        ("pooling_params", "a pooling request"),
        ("lora_request", "a LoRA request"),
        ("mm_features", "a multimodal request"),
    ];
    for (attribute, kind) in kinds {
        if request.getattr(attribute)?.is_truthy()? {
            let id = request.getattr("request_id")?;
            return Err(PyValueError::new_err(format!(
                "request {id} is {kind}, which sparksched does not support; \
                 VLLM_SCHEDULER=vllm does"
            )));
        }
    }
    Ok(())
}

fn stop_conditions(
    params: &Bound<'_, PyAny>,
    max_tokens: &Bound<'_, PyAny>,
) -> PyResult<StopConditions> {
    let py = params.py();
    // A number that no token id can equal ends nothing.
    let token_id = |number: i128| i32::try_from(number).ok();
    let eos_token_id: Option<i128> = params.getattr(intern!(py, "eos_token_id"))?.extract()?;
    let stop_token_ids: Option<Vec<i128>> =
        params.getattr(intern!(py, "stop_token_ids"))?.extract()?;
    let repetition = params.getattr(intern!(py, "repetition_detection"))?;
    let repetition = (!repetition.is_none()).then(|| repetition_detection(&repetition));
    Ok(StopConditions {
        eos_token_id: eos_token_id.and_then(token_id),
        stop_token_ids: stop_token_ids.into_iter().flatten().filter_map(token_id).collect(),
        min_tokens: count(&params.getattr(intern!(py, "min_tokens"))?)?,
        max_tokens: count(max_tokens)?,
        repetition: repetition.transpose()?,
    })
}

/// A user's number of tokens: below zero is zero, and above what a machine word holds is as good
/// as the largest.
fn count(number: &Bound<'_, PyAny>) -> PyResult<u64> {
    let number: i128 = number.extract()?;
    Ok(u64::try_from(number.max(0)).unwrap_or(u64::MAX))
}

fn repetition_detection(params: &Bound<'_, PyAny>) -> PyResult<RepetitionDetection> {
    let get = |name: &str| -> PyResult<i64> {
        let number: i128 = params.getattr(name)?.extract()?;
        Ok(number.clamp(i64::MIN.into(), i64::MAX.into()) as i64)
    };
    Ok(RepetitionDetection {
        max_pattern_size: get("max_pattern_size")?,
        min_pattern_size: get("min_pattern_size")?,
        min_count: get("min_count")?,
    })
}
