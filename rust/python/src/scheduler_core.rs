//! `SchedulerCore`: the core scheduler with the Python objects that belong to its requests.

use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySet, PyString};
use sparksched_core::{
    Admission, KvCacheGroupConfig, PauseState, Policy, Request, RequestIndex, RequestOutput,
    RequestStatus, ScheduledOutput, Scheduler, SchedulerConfig, Step,
};

use crate::convert::{self, CachedRequests, ScheduledStep, VllmTypes};
use crate::guard::{Guard, catch_panics};
use crate::hasher::new_block_hasher;
use crate::hooks::{Callbacks, PyHooks};

/// What Python knows of a request that the core does not.
pub(crate) struct Entry {
    /// `request_id`, the very object: dictionaries find it by identity.
    pub(crate) id: Py<PyString>,
    pub(crate) request: Py<PyAny>,
    client_index: i64,
    wants_logprobs: bool,
    trace_headers: Option<Py<PyAny>>,
    num_nans_in_logits: i64,
}

/// Entries by the places of their requests in the core.
#[derive(Default)]
pub(crate) struct Entries(Vec<Option<Entry>>);

impl Entries {
    pub(crate) fn get(&self, index: RequestIndex) -> &Entry {
        self.0[index.index()].as_ref().expect("each request has an entry")
    }

    fn get_mut(&mut self, index: RequestIndex) -> &mut Entry {
        self.0[index.index()].as_mut().expect("each request has an entry")
    }

    fn insert(&mut self, index: RequestIndex, entry: Entry) {
        if index.index() >= self.0.len() {
            self.0.resize_with(index.index() + 1, || None);
        }
        self.0[index.index()] = Some(entry);
    }

    fn take(&mut self, index: RequestIndex) -> Entry {
        self.0[index.index()].take().expect("each request has an entry")
    }
}

/// One request's share of a model runner's output.
struct SampledTokens<'py> {
    index: Option<RequestIndex>,
    num_scheduled_tokens: u32,
    /// Row of the model runner's output.
    row: usize,
    /// The model runner's own list, which the output will share.
    list: Option<Bound<'py, PyList>>,
    /// Where its tokens are in the flat buffer.
    tokens: std::ops::Range<usize>,
    /// What the step brings for the request is looked at: it is still there and waits for it.
    is_delivered: bool,
}

#[pyclass(module = "sparksched._core")]
pub(crate) struct SchedulerCore {
    scheduler: Scheduler,
    entries: Entries,
    types: VllmTypes,
    callbacks: Callbacks,
    guard: Guard,
    /// `request_id` to place.
    places: Py<PyDict>,
    /// `request_id` to `Request`: vLLM's `Scheduler.requests`.
    #[pyo3(get)]
    requests: Py<PyDict>,
    /// Requests that ended since the last step.
    finished_req_ids: Py<PySet>,
    /// The same by client, if the front ends ask for it.
    finished_by_client: Option<Py<PyDict>>,
    /// Requests that were preempted since the last step.
    preempted_req_ids: Py<PySet>,
    grammar_errors: Py<PySet>,
    no_kv_fetches: Py<PyDict>,
    log_stats: bool,
    outputs: Vec<RequestOutput>,
}

#[pymethods]
impl SchedulerCore {
    #[new]
    #[pyo3(signature = (config, *, accept_tokens, hash_first_block, include_finished_set))]
    fn new(
        config: &Bound<'_, PyDict>,
        accept_tokens: Py<PyAny>,
        hash_first_block: Py<PyAny>,
        include_finished_set: bool,
    ) -> PyResult<Self> {
        let py = config.py();
        let config = scheduler_config(config)?;
        let log_stats = config.log_stats;
        let scheduler =
            Scheduler::new(config).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let kv_fetch_stages: Vec<String> =
            py.import("vllm.v1.metrics.stats")?.getattr("KV_FETCH_STAGES")?.extract()?;
        let no_kv_fetches = PyDict::new(py);
        kv_fetch_stages.iter().try_for_each(|stage| no_kv_fetches.set_item(stage, 0))?;
        Ok(Self {
            scheduler,
            entries: Entries::default(),
            types: VllmTypes::import(py)?,
            callbacks: Callbacks { accept_tokens, hash_first_block },
            guard: Guard::default(),
            places: PyDict::new(py).unbind(),
            requests: PyDict::new(py).unbind(),
            finished_req_ids: PySet::empty(py)?.unbind(),
            finished_by_client: include_finished_set.then(|| PyDict::new(py).unbind()),
            preempted_req_ids: PySet::empty(py)?.unbind(),
            grammar_errors: PySet::empty(py)?.unbind(),
            no_kv_fetches: no_kv_fetches.unbind(),
            log_stats,
            outputs: Vec::new(),
        })
    }

    fn set_none_hash(&mut self, none_hash: &[u8]) -> PyResult<()> {
        let is_valid = self.scheduler.set_none_hash(none_hash);
        let error = || PyValueError::new_err("NONE_HASH is longer than 32 bytes");
        is_valid.then_some(()).ok_or_else(error)
    }

    fn add_request(&mut self, request: &Bound<'_, PyAny>, now: f64) -> PyResult<()> {
        self.guarded(|this| this.do_add_request(request, now))
    }

    fn schedule<'py>(
        &mut self,
        py: Python<'py>,
        throttle_prefills: bool,
        now: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.guarded(|this| this.do_schedule(py, throttle_prefills, now))
    }

    fn update_from_output<'py>(
        &mut self,
        scheduler_output: &Bound<'py, PyAny>,
        model_runner_output: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        self.guarded(|this| this.do_update_from_output(scheduler_output, model_runner_output))
    }

    fn finish_requests<'py>(
        &mut self,
        request_ids: &Bound<'py, PyAny>,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        if self.guard.is_broken() && request_ids.is_none() {
            return self.finish_all_when_broken(status);
        }
        self.guarded(|this| this.do_finish_requests(request_ids, status))
    }

    fn preempt_running(&mut self, py: Python<'_>, now: f64) -> PyResult<()> {
        self.guarded(|this| {
            for index in this.scheduler.preempt_running(now) {
                this.preempted_req_ids.bind(py).add(&this.entries.get(index).id)?;
            }
            Ok(())
        })
    }

    fn reset_prefix_cache(&mut self) -> PyResult<bool> {
        self.guarded(|this| Ok(this.scheduler.reset_prefix_cache()))
    }

    fn make_stats<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let none = py.None();
        self.take_scheduler_stats(none.bind(py))
    }

    fn has_requests(&self, py: Python<'_>) -> bool {
        self.scheduler.num_unfinished_requests() > 0 || self.has_finished_requests(py)
    }

    fn has_unfinished_requests(&self) -> bool {
        self.scheduler.num_unfinished_requests() > 0
    }

    fn has_finished_requests(&self, py: Python<'_>) -> bool {
        !self.finished_req_ids.bind(py).is_empty()
    }

    fn num_unfinished_requests(&self) -> usize {
        self.scheduler.num_unfinished_requests()
    }

    fn request_counts(&self) -> (usize, usize) {
        (self.scheduler.running().len(), self.scheduler.waiting().len())
    }

    fn running_requests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let requests = self.scheduler.running().iter().map(|&it| &self.entries.get(it).request);
        PyList::new(py, requests)
    }

    fn waiting_requests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let requests = self.scheduler.waiting().in_order().map(|it| &self.entries.get(it).request);
        PyList::new(py, requests.collect::<Vec<_>>())
    }

    fn kv_cache_usage(&self) -> f64 {
        self.scheduler.kv_cache().pool().usage()
    }

    fn num_used_blocks(&self) -> u32 {
        let pool = self.scheduler.kv_cache().pool();
        pool.num_blocks() - 1 - pool.num_free()
    }

    fn pause_state(&self) -> u8 {
        match self.scheduler.pause_state() {
            PauseState::Unpaused => 0,
            PauseState::PausedNew => 1,
            PauseState::PausedAll => 2,
        }
    }

    fn set_pause_state(&mut self, state: u8) -> PyResult<()> {
        self.scheduler.set_pause_state(match state {
            0 => PauseState::Unpaused,
            1 => PauseState::PausedNew,
            2 => PauseState::PausedAll,
            other => {
                return Err(PyValueError::new_err(format!("unknown pause state {other}")));
            }
        });
        Ok(())
    }

    /// Of `request_ids`, those that use structured output and sample a token in their last step.
    fn structured_output_request_ids<'py>(
        &self,
        request_ids: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyList>> {
        let ids = PyList::empty(request_ids.py());
        for (id, _) in request_ids {
            let request = self.place(&id)?.and_then(|index| self.scheduler.get(index));
            if request.is_some_and(|it| it.use_structured_output() && !it.is_prefill_chunk()) {
                ids.append(id)?;
            }
        }
        Ok(ids)
    }

    /// The whole state as plain data.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let requests = PyDict::new(py);
        for (id, _) in self.requests.bind(py) {
            let index = self.place(&id)?.expect("each request has a place");
            requests.set_item(id, self.request_snapshot(py, self.scheduler.request(index))?)?;
        }
        let ids =
            |indices: &mut dyn Iterator<Item = RequestIndex>| -> PyResult<Bound<'py, PyList>> {
                let ids: Vec<&Py<PyString>> =
                    indices.map(|index| &self.entries.get(index).id).collect();
                PyList::new(py, ids)
            };
        let pool = self.scheduler.kv_cache().pool();
        let ref_counts = PyDict::new(py);
        for id in (1..pool.num_blocks()).map(sparksched_core::BlockId) {
            if pool.ref_count(id) > 0 {
                ref_counts.set_item(id.0, pool.ref_count(id))?;
            }
        }
        let digest_len = self.scheduler.config().hasher.as_ref().map_or(0, |it| it.digest_len());
        let cached_blocks = PyDict::new(py);
        for (id, hash, group) in pool.cached_blocks() {
            let key = hash.0[..digest_len].iter().copied().chain(group.0.to_be_bytes());
            let hex: String = key.map(|byte| format!("{byte:02x}")).collect();
            cached_blocks.set_item(id.0, hex)?;
        }
        let snapshot = PyDict::new(py);
        snapshot.set_item("requests", requests)?;
        snapshot.set_item("running", ids(&mut self.scheduler.running().iter().copied())?)?;
        snapshot.set_item("waiting", ids(&mut self.scheduler.waiting().in_order())?)?;
        snapshot.set_item(
            "free_blocks",
            PyList::new(py, pool.free_blocks().map(|id| id.0).collect::<Vec<_>>())?,
        )?;
        snapshot.set_item("ref_counts", ref_counts)?;
        snapshot.set_item("cached_blocks", cached_blocks)?;
        Ok(snapshot)
    }

    /// Walks queues, requests and blocks; raises at the first contradiction.
    fn check_invariants(&mut self) -> PyResult<()> {
        self.guarded(|this| {
            this.scheduler.check_invariants();
            Ok(())
        })
    }
}

impl SchedulerCore {
    /// Runs a call that changes state; if it ends in the middle, no other will follow.
    fn guarded<T>(&mut self, call: impl FnOnce(&mut Self) -> PyResult<T>) -> PyResult<T> {
        self.guard.check()?;
        let (result, panicked) = catch_panics(|| call(self));
        if let (Err(error), true) = (&result, panicked) {
            self.guard.note(error);
        }
        result
    }

    fn place(&self, id: &Bound<'_, PyAny>) -> PyResult<Option<RequestIndex>> {
        let place = self.places.bind(id.py()).get_item(id)?;
        place.map(|place| Ok(RequestIndex(place.extract()?))).transpose()
    }

    fn do_add_request(&mut self, request: &Bound<'_, PyAny>, now: f64) -> PyResult<()> {
        let py = request.py();
        let mut new = convert::new_request(request)?;
        let id = request.getattr(intern!(py, "request_id"))?.cast_into::<PyString>()?;
        if self.places.bind(py).contains(&id)? {
            return Err(PyValueError::new_err(format!("duplicate request id {id}")));
        }
        let first_block = self.scheduler.config().hasher.as_ref().map(|it| it.block_size());
        let hashes_first_block = first_block.is_some_and(|size| new.tokens.len() >= size);
        if new.has_extra_keys && new.block_hashes.is_empty() && hashes_first_block {
            let hash = self.callbacks.hash_first_block.bind(py).call1((request,))?;
            new.block_hashes.push(convert::block_hash(&hash)?);
        }
        let sampling_params = request.getattr(intern!(py, "sampling_params"))?;
        let num_logprobs = sampling_params.getattr(intern!(py, "num_logprobs"))?;
        let trace_headers = request.getattr(intern!(py, "trace_headers"))?;
        let entry = Entry {
            id: id.clone().unbind(),
            request: request.clone().unbind(),
            client_index: request.getattr(intern!(py, "client_index"))?.extract()?,
            wants_logprobs: !num_logprobs.is_none(),
            trace_headers: (!trace_headers.is_none()).then(|| trace_headers.unbind()),
            num_nans_in_logits: request.getattr(intern!(py, "num_nans_in_logits"))?.extract()?,
        };
        let mut hooks = PyHooks {
            py,
            entries: &self.entries,
            callbacks: &self.callbacks,
            grammar_errors: &self.grammar_errors,
        };
        let index = self.scheduler.add_request(new, now, &mut hooks)?;
        self.entries.insert(index, entry);
        self.places.bind(py).set_item(&id, index.0)?;
        self.requests.bind(py).set_item(&id, request)
    }

    fn do_schedule<'py>(
        &mut self,
        py: Python<'py>,
        throttle_prefills: bool,
        now: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut hooks = PyHooks {
            py,
            entries: &self.entries,
            callbacks: &self.callbacks,
            grammar_errors: &self.grammar_errors,
        };
        let step = self.scheduler.schedule(throttle_prefills, now, &mut hooks);
        if let Err(error) = step {
            self.guard.note(&error);
            return Err(error);
        }
        let step = self.scheduler.step();
        for &index in &step.preempted {
            self.preempted_req_ids.bind(py).add(&self.entries.get(index).id)?;
        }
        let output = ScheduledStep {
            scheduled_new_reqs: self.new_requests(py, step)?,
            scheduled_cached_reqs: self.cached_requests(py, step)?,
            num_scheduled_tokens: convert::num_scheduled_tokens(
                py,
                step.scheduled().map(|it| (&self.entries.get(it.index).id, it)),
            )?,
            total_num_scheduled_tokens: step.total_num_tokens,
            // The step's consumers keep the sets: each step gets its own.
            finished_req_ids: std::mem::replace(
                &mut self.finished_req_ids,
                PySet::empty(py)?.unbind(),
            )
            .into_bound(py),
            preempted_req_ids: std::mem::replace(
                &mut self.preempted_req_ids,
                PySet::empty(py)?.unbind(),
            )
            .into_bound(py),
            has_structured_output_requests: step.has_structured_output_requests,
            pending_structured_output_tokens: step.pending_structured_output_tokens,
        };
        self.types.scheduler_output(py, output)
    }

    /// Whether an admitted request is told to the model runner as a new one.
    fn is_told_as_new(&self, admission: Admission) -> bool {
        admission == Admission::New || self.scheduler.config().resume_as_new
    }

    /// `scheduled_new_reqs`: first those that are new, then those that only look new.
    fn new_requests<'py>(&self, py: Python<'py>, step: &Step) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for told in [Admission::New, Admission::Resumed] {
            for (admission, scheduled) in &step.admitted {
                if *admission != told || !self.is_told_as_new(told) {
                    continue;
                }
                let entry = self.entries.get(scheduled.index);
                let request = self.scheduler.request(scheduled.index);
                let python_request = entry.request.bind(py);
                let prefill_token_ids = if self.scheduler.config().resume_as_new {
                    convert::sync_request_tokens(python_request, request.tokens())?;
                    Some(python_request.getattr(intern!(py, "_all_token_ids"))?)
                } else {
                    None
                };
                list.append(self.types.new_request_data(
                    python_request,
                    &entry.id,
                    &convert::all_block_ids(py, request)?,
                    scheduled.num_computed_tokens,
                    prefill_token_ids.as_ref(),
                )?)?;
            }
        }
        Ok(list)
    }

    /// `scheduled_cached_reqs`: those that were running, then those that resume.
    fn cached_requests<'py>(&self, py: Python<'py>, step: &Step) -> PyResult<Bound<'py, PyAny>> {
        let resumed: Vec<_> = step
            .admitted
            .iter()
            .filter(|(admission, _)| !self.is_told_as_new(*admission))
            .map(|(_, scheduled)| scheduled)
            .collect();
        let cached = || step.running.iter().chain(resumed.iter().copied());
        let count = step.running.len() + resumed.len();

        let all_token_ids = PyDict::new(py);
        if !self.scheduler.config().resume_as_new {
            for it in cached().filter(|it| it.is_new_to_batch) {
                let tokens = self.scheduler.request(it.index).tokens();
                all_token_ids.set_item(&self.entries.get(it.index).id, tokens.to_vec())?;
            }
        }
        let resumed_req_ids = PySet::empty(py)?;
        for it in &resumed {
            resumed_req_ids.add(&self.entries.get(it.index).id)?;
        }
        let new_block_ids = PyList::empty(py);
        for it in &step.running {
            new_block_ids.append(convert::new_block_ids(py, self.scheduler.request(it.index))?)?;
        }
        for it in &resumed {
            let ids = convert::all_block_ids(py, self.scheduler.request(it.index))?;
            new_block_ids.append(ids)?;
        }
        let list = |values: Vec<u32>| PyList::new(py, values);
        let ids: Vec<&Py<PyString>> = cached().map(|it| &self.entries.get(it.index).id).collect();
        debug_assert_eq!(ids.len(), count);
        self.types.cached_request_data(
            py,
            CachedRequests {
                req_ids: PyList::new(py, ids)?,
                resumed_req_ids,
                all_token_ids,
                new_block_ids,
                num_computed_tokens: list(cached().map(|it| it.num_computed_tokens).collect())?,
                num_output_tokens: list(cached().map(|it| it.num_output_tokens).collect())?,
            },
        )
    }

    fn do_update_from_output<'py>(
        &mut self,
        scheduler_output: &Bound<'py, PyAny>,
        model_runner_output: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = scheduler_output.py();
        let mut tokens = Vec::new();
        let sampled = self.sampled_tokens(scheduler_output, model_runner_output, &mut tokens)?;
        let scheduled = sampled.iter().map(|it| ScheduledOutput {
            index: it.index,
            num_scheduled_tokens: it.num_scheduled_tokens,
            sampled_tokens: &tokens[it.tokens.clone()],
        });
        let mut hooks = PyHooks {
            py,
            entries: &self.entries,
            callbacks: &self.callbacks,
            grammar_errors: &self.grammar_errors,
        };
        let mut outputs = std::mem::take(&mut self.outputs);
        let updated = self.scheduler.update_from_output(scheduled, &mut hooks, &mut outputs);
        if let Err(error) = updated {
            self.guard.note(&error);
            return Err(error);
        }
        let by_client = self.engine_core_outputs(&sampled, &outputs, model_runner_output)?;
        self.outputs = outputs;
        Ok(by_client)
    }

    /// Reads what the model runner sampled for the requests of the step that comes back.
    fn sampled_tokens<'py>(
        &self,
        scheduler_output: &Bound<'py, PyAny>,
        model_runner_output: &Bound<'py, PyAny>,
        tokens: &mut Vec<i32>,
    ) -> PyResult<Vec<SampledTokens<'py>>> {
        let py = scheduler_output.py();
        let scheduled = scheduler_output.getattr(intern!(py, "num_scheduled_tokens"))?;
        let rows = model_runner_output.getattr(intern!(py, "req_id_to_index"))?;
        let rows = rows.cast::<PyDict>()?;
        let lists = model_runner_output.getattr(intern!(py, "sampled_token_ids"))?;
        let lists = lists.cast::<PyList>()?;
        let scheduled = scheduled.cast::<PyDict>()?;
        let mut sampled = Vec::with_capacity(scheduled.len());
        for (id, num_scheduled_tokens) in scheduled {
            let mut share = SampledTokens {
                index: self.place(&id)?,
                num_scheduled_tokens: num_scheduled_tokens.extract()?,
                row: 0,
                list: None,
                tokens: tokens.len()..tokens.len(),
                is_delivered: false,
            };
            share.is_delivered = share
                .index
                .is_some_and(|index| !self.scheduler.request(index).drops_stale_output());
            if share.is_delivered {
                let row = rows.get_item(&id)?;
                let row = row.ok_or_else(|| PyKeyError::new_err(id.unbind()))?;
                share.row = row.extract()?;
                if !lists.is_empty() {
                    let list = lists.get_item(share.row)?.cast_into::<PyList>()?;
                    convert::extend_token_ids(&list, tokens)?;
                    share.tokens.end = tokens.len();
                    share.list = Some(list);
                }
            }
            sampled.push(share);
        }
        Ok(sampled)
    }

    /// Notes NaNs even for requests without an output in this step: a later one will tell them.
    fn note_nans(&mut self, sampled: &[SampledTokens<'_>], rare: &RareOutputs<'_>) -> PyResult<()> {
        if rare.num_nans_in_logits.is_none() {
            return Ok(());
        }
        for index in sampled.iter().filter(|it| it.is_delivered).filter_map(|it| it.index) {
            let entry = self.entries.get_mut(index);
            if let Some(count) = rare.num_nans(&entry.id)? {
                entry.num_nans_in_logits = count;
            }
        }
        Ok(())
    }

    /// `dict[client_index, EngineCoreOutputs]`, in the order in which the clients' first outputs
    /// come.
    fn engine_core_outputs<'py>(
        &mut self,
        sampled: &[SampledTokens<'py>],
        outputs: &[RequestOutput],
        runner: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = runner.py();
        let lists = self.output_lists(sampled, outputs, runner)?;
        self.append_grammar_errors(py, &lists)?;

        let by_client = PyDict::new(py);
        for (client, list) in &lists {
            let list = list.cast::<PyList>()?;
            by_client.set_item(client, self.types.engine_core_outputs(list)?)?;
        }
        if let Some(finished) = &self.finished_by_client {
            let finished = finished.bind(py);
            for (client, ids) in finished.iter() {
                let outputs = self.outputs_of(&by_client, &client)?;
                outputs.setattr(intern!(py, "finished_requests"), ids)?;
            }
            finished.clear();
        }
        let cudagraph_stats = runner.getattr(intern!(py, "cudagraph_stats"))?;
        if let Some(stats) = self.take_scheduler_stats(&cudagraph_stats)? {
            // One front end gets them, even if there is nothing else to tell.
            let first = by_client.values().iter().next();
            let first = match first {
                Some(outputs) => outputs,
                None => self.outputs_of(&by_client, 0_i64.into_pyobject(py)?.as_any())?,
            };
            first.setattr(intern!(py, "scheduler_stats"), stats)?;
        }
        Ok(by_client)
    }

    fn outputs_of<'py>(
        &self,
        by_client: &Bound<'py, PyDict>,
        client: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(outputs) = by_client.get_item(client)? {
            return Ok(outputs);
        }
        let outputs = self.types.engine_core_outputs(&PyList::empty(client.py()))?;
        by_client.set_item(client, &outputs)?;
        Ok(outputs)
    }

    /// `dict[client_index, list[EngineCoreOutput]]`.
    fn output_lists<'py>(
        &mut self,
        sampled: &[SampledTokens<'py>],
        outputs: &[RequestOutput],
        runner: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = runner.py();
        let rare = RareOutputs::of(runner)?;
        self.note_nans(sampled, &rare)?;
        let mut clients: Vec<(i64, Vec<usize>)> = Vec::new();
        for (at, output) in outputs.iter().enumerate() {
            let client = self.entries.get(output.index).client_index;
            match clients.iter_mut().find(|(known, _)| *known == client) {
                Some((_, positions)) => positions.push(at),
                None => clients.push((client, vec![at])),
            }
        }
        let lists = PyDict::new(py);
        for (client, positions) in clients {
            let of_client = || positions.iter().map(|&at| &outputs[at]);
            let ids: Vec<&Py<PyString>> =
                of_client().map(|output| &self.entries.get(output.index).id).collect();
            let tokens = PyList::empty(py);
            for output in of_client() {
                tokens.append(new_token_ids(py, &sampled[output.position], output)?)?;
            }
            let list = self.types.engine_core_outputs_plain(&PyList::new(py, ids)?, &tokens)?;
            lists.set_item(client, &list)?;
            for (at, output) in of_client().enumerate() {
                let entry = self.entries.get(output.index);
                if !output.is_plain() || entry.is_rare() || rare.any() {
                    let object = list.get_item(at)?;
                    self.complete_output(&object, output, &sampled[output.position], &rare)?;
                }
            }
        }
        // In the order of the step, whichever client they belong to.
        for output in outputs {
            if let Some(status) = output.finished {
                self.forget(py, output.index, status)?;
            }
        }
        Ok(lists)
    }

    /// Sets the fields of an `EngineCoreOutput` that differ from their defaults.
    fn complete_output<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        output: &RequestOutput,
        sampled: &SampledTokens<'py>,
        rare: &RareOutputs<'py>,
    ) -> PyResult<()> {
        let py = object.py();
        let entry = self.entries.get(output.index);
        if let Some(events) = self.types.events(py, &output.events)? {
            object.setattr(intern!(py, "events"), events)?;
        }
        if let Some(stats) = &output.prefill_stats {
            object.setattr(intern!(py, "prefill_stats"), self.types.prefill_stats(py, stats)?)?;
        }
        let stop_reason = convert::stop_reason(py, output.stop_reason)?;
        object.setattr(intern!(py, "stop_reason"), stop_reason)?;
        if let Some(status) = output.finished {
            object.setattr(intern!(py, "finish_reason"), self.types.finish_reason(status))?;
        }
        if let Some(headers) = &entry.trace_headers {
            object.setattr(intern!(py, "trace_headers"), headers)?;
        }
        if entry.wants_logprobs {
            if let Some(logprobs) = rare.logprobs(sampled.row, output.num_new_tokens)? {
                object.setattr(intern!(py, "new_logprobs"), logprobs)?;
            }
        }
        if let Some(logprobs) = rare.prompt_logprobs(&entry.id)? {
            object.setattr(intern!(py, "new_prompt_logprobs_tensors"), logprobs)?;
        }
        if let Some(logprobs) = rare.prompt_token_id_logprobs(&entry.id)? {
            object.setattr(intern!(py, "prompt_token_id_logprobs"), logprobs)?;
        }
        if entry.num_nans_in_logits != 0 {
            object.setattr(intern!(py, "num_nans_in_logits"), entry.num_nans_in_logits)?;
        }
        Ok(())
    }

    /// Ends the requests whose grammar could not be compiled and tells their clients.
    fn append_grammar_errors<'py>(
        &mut self,
        py: Python<'py>,
        lists: &Bound<'py, PyDict>,
    ) -> PyResult<()> {
        let errors = self.grammar_errors.bind(py);
        if errors.is_empty() {
            return Ok(());
        }
        // Sets of sets, as vLLM makes them: their order decides which blocks are free first.
        let set = py.get_type::<PySet>();
        let failed = set.call1((set.call1((errors,))?,))?;
        errors.clear();
        let status = RequestStatus::FinishedError;
        for (index, request) in self.end_requests(&failed, status)? {
            let entry = self.entries.get(index);
            let client = entry.client_index.into_pyobject(py)?;
            let ids = PyList::new(py, [&entry.id])?;
            let tokens = PyList::new(py, [PyList::empty(py)])?;
            let output = self.types.engine_core_outputs_plain(&ids, &tokens)?.get_item(0)?;
            output.setattr(intern!(py, "finish_reason"), self.types.finish_reason(status))?;
            if let Some(events) = self.types.events(py, request.events())? {
                output.setattr(intern!(py, "events"), events)?;
            }
            if let Some(headers) = &entry.trace_headers {
                output.setattr(intern!(py, "trace_headers"), headers)?;
            }
            match lists.get_item(&client)? {
                Some(list) => list.cast::<PyList>()?.append(output)?,
                None => lists.set_item(&client, PyList::new(py, [output])?)?,
            }
            self.forget(py, index, status)?;
        }
        Ok(())
    }

    fn take_scheduler_stats<'py>(
        &mut self,
        cudagraph_stats: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !self.log_stats {
            return Ok(None);
        }
        let py = cudagraph_stats.py();
        let stats = self.scheduler.take_stats();
        let no_kv_fetches = self.no_kv_fetches.bind(py);
        self.types.scheduler_stats(py, &stats, no_kv_fetches, cudagraph_stats).map(Some)
    }

    fn do_finish_requests<'py>(
        &mut self,
        request_ids: &Bound<'py, PyAny>,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = status.py();
        let status = self.types.finished_status(status)?;
        let ended = if request_ids.is_none() {
            self.end_requests(self.requests.clone_ref(py).bind(py), status)?
        } else if request_ids.is_instance_of::<PyString>() {
            self.end_requests(PyList::new(py, [request_ids])?.as_any(), status)?
        } else {
            // vLLM goes through a set of the ids, and so in the set's order.
            let set = py.get_type::<PySet>().call1((request_ids,))?;
            self.end_requests(&set, status)?
        };
        let requests = PyList::empty(py);
        for (index, _) in ended {
            requests.append(&self.entries.get(index).request)?;
            self.forget(py, index, status)?;
        }
        Ok(requests)
    }

    /// Ends the requests with these ids in the core, in the order of the ids.
    fn end_requests(
        &mut self,
        ids: &Bound<'_, PyAny>,
        status: RequestStatus,
    ) -> PyResult<Vec<(RequestIndex, Request)>> {
        let mut indices = Vec::new();
        for id in ids.try_iter()? {
            indices.extend(self.place(&id?)?);
        }
        Ok(self.scheduler.finish_requests(&indices, status))
    }

    /// Drops what belongs to a request that the core has ended, and notes its id for the next step
    /// and for its client.
    fn forget(
        &mut self,
        py: Python<'_>,
        index: RequestIndex,
        status: RequestStatus,
    ) -> PyResult<()> {
        let entry = self.entries.take(index);
        entry.request.bind(py).setattr(intern!(py, "status"), self.types.request_status(status))?;
        self.places.bind(py).del_item(&entry.id)?;
        self.requests.bind(py).del_item(&entry.id)?;
        self.finished_req_ids.bind(py).add(&entry.id)?;
        if let Some(by_client) = &self.finished_by_client {
            let by_client = by_client.bind(py);
            match by_client.get_item(entry.client_index)? {
                Some(ids) => ids.cast::<PySet>()?.add(&entry.id)?,
                None => by_client.set_item(entry.client_index, PySet::new(py, [&entry.id])?)?,
            }
        }
        Ok(())
    }

    /// After an internal error the core is not to be trusted, but clients have to be told.
    fn finish_all_when_broken<'py>(
        &mut self,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = status.py();
        let requests = self.requests.bind(py).values();
        for request in &requests {
            request.setattr(intern!(py, "status"), status)?;
        }
        self.requests.bind(py).clear();
        self.places.bind(py).clear();
        Ok(requests)
    }

    fn request_snapshot<'py>(
        &self,
        py: Python<'py>,
        request: &Request,
    ) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = PyDict::new(py);
        snapshot.set_item("status", convert::status_name(request.status()))?;
        snapshot.set_item("num_computed_tokens", request.num_computed_tokens())?;
        snapshot.set_item("num_output_placeholders", request.num_output_placeholders())?;
        snapshot.set_item("num_in_flight_tokens", request.num_in_flight_tokens())?;
        snapshot.set_item("num_stale_output_tokens", request.num_stale_output_tokens())?;
        snapshot.set_item("num_tokens", request.num_tokens())?;
        snapshot.set_item("num_preemptions", request.num_preemptions())?;
        let tables = request
            .groups()
            .iter()
            .map(|blocks| PyList::new(py, blocks.table.iter().map(|id| id.0)));
        snapshot.set_item("block_ids", tables.collect::<PyResult<Vec<_>>>()?)?;
        Ok(snapshot)
    }
}

impl Entry {
    /// Whether its outputs carry something that most don't.
    fn is_rare(&self) -> bool {
        self.wants_logprobs || self.trace_headers.is_some() || self.num_nans_in_logits != 0
    }
}

/// The list of new tokens that goes to the client: the model runner's own, cut at a stop.
fn new_token_ids<'py>(
    py: Python<'py>,
    sampled: &SampledTokens<'py>,
    output: &RequestOutput,
) -> PyResult<Bound<'py, PyList>> {
    let Some(list) = &sampled.list else {
        return Ok(PyList::empty(py));
    };
    if output.num_new_tokens < sampled.tokens.len() {
        list.del_slice(output.num_new_tokens, sampled.tokens.len())?;
    }
    Ok(list.clone())
}

/// Parts of a model runner's output that few steps have.
struct RareOutputs<'py> {
    logprobs: Option<Bound<'py, PyAny>>,
    prompt_logprobs: Option<Bound<'py, PyDict>>,
    prompt_token_id_logprobs: Option<Bound<'py, PyDict>>,
    num_nans_in_logits: Option<Bound<'py, PyDict>>,
}

impl<'py> RareOutputs<'py> {
    fn of(runner: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = runner.py();
        let present = |name: &Bound<'py, PyString>| -> PyResult<Option<Bound<'py, PyAny>>> {
            let value = runner.getattr(name)?;
            Ok(value.is_truthy()?.then_some(value))
        };
        let dict = |name: &Bound<'py, PyString>| -> PyResult<Option<Bound<'py, PyDict>>> {
            Ok(present(name)?.map(Bound::cast_into).transpose()?)
        };
        Ok(Self {
            logprobs: present(intern!(py, "logprobs"))?,
            prompt_logprobs: dict(intern!(py, "prompt_logprobs_dict"))?,
            prompt_token_id_logprobs: dict(intern!(py, "prompt_token_id_logprobs_dict"))?,
            num_nans_in_logits: dict(intern!(py, "num_nans_in_logits"))?,
        })
    }

    fn any(&self) -> bool {
        self.prompt_logprobs.is_some() || self.prompt_token_id_logprobs.is_some()
    }

    fn logprobs(&self, row: usize, num_tokens: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(logprobs) = &self.logprobs else {
            return Ok(None);
        };
        logprobs.call_method1(intern!(logprobs.py(), "slice_request"), (row, num_tokens)).map(Some)
    }

    fn prompt_logprobs(&self, id: &Py<PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.prompt_logprobs.as_ref().map_or(Ok(None), |dict| dict.get_item(id))
    }

    fn prompt_token_id_logprobs(&self, id: &Py<PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.prompt_token_id_logprobs.as_ref().map_or(Ok(None), |dict| dict.get_item(id))
    }

    fn num_nans(&self, id: &Py<PyString>) -> PyResult<Option<i64>> {
        let Some(dict) = &self.num_nans_in_logits else {
            return Ok(None);
        };
        dict.get_item(id)?.map(|count| count.extract()).transpose()
    }
}

/// Reads the dictionary that `sparksched.scheduler` makes of vLLM's configuration.
fn scheduler_config(config: &Bound<'_, PyDict>) -> PyResult<SchedulerConfig> {
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
