//! `SchedulerCore`: the core scheduler with the Python objects that belong to its requests.

use std::sync::Arc;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySet, PyTuple};
use sparksched_core::{
    BlockHasher, EndedRequest, PauseState, RequestIndex, RequestOutput, RequestStatus,
    ScheduledOutput, Scheduler,
};

use crate::block_observer::BlockObserver;
use crate::client_outputs::{ClientDict, ClientOutputs, OutputWriter, StepResult};
use crate::config::scheduler_config;
use crate::convert::{
    self, EncoderStep, OtherStats, RareOutputs, SchedulerOutputBuilder, StepExtras,
};
use crate::entries::{Entries, Entry};
use crate::guard::{Guard, catch_panics, enter};
use crate::hasher::ExtraKeysReader;
use crate::hooks::{Callbacks, PyHooks};
use crate::kv_transfer::{KvTransfer, LoadFailures, LoadReport};
use crate::snapshot;
use crate::step_timer::{StepSink, StepTimer};

#[pyclass(module = "sparksched._core")]
pub(crate) struct SchedulerCore {
    scheduler: Scheduler,
    entries: Entries,
    scheduler_output_builder: SchedulerOutputBuilder,
    output_writer: OutputWriter,
    callbacks: Callbacks,
    extra_keys: ExtraKeysReader,
    block_observer: BlockObserver,
    kv_transfer: KvTransfer,
    guard: Guard,
    timer: StepTimer,
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
    /// Why the grammars of waiting requests can't be compiled, by id.
    grammar_errors: Py<PyDict>,
    /// A buffer that is reused.
    outputs: Vec<RequestOutput>,
}

#[pymethods]
impl SchedulerCore {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "they are named where it is called")]
    #[pyo3(signature = (
        config, *, accept_tokens, validate_tokens, next_turn, encoder_inputs, extra_keys,
        block_observer, kv_transfer, include_finished_set
    ))]
    fn new(
        config: &Bound<'_, PyDict>,
        accept_tokens: Py<PyAny>,
        validate_tokens: Py<PyAny>,
        next_turn: Py<PyAny>,
        encoder_inputs: Py<PyAny>,
        extra_keys: Option<Py<PyAny>>,
        block_observer: Option<Py<PyAny>>,
        kv_transfer: Option<Py<PyAny>>,
        include_finished_set: bool,
    ) -> PyResult<Self> {
        let py = config.py();
        enter("SchedulerCore.__new__", || {
            let uses_mrope = config.as_any().get_item("uses_mrope")?.extract()?;
            let scheduler = Scheduler::new(scheduler_config(config)?)
                .map_err(|error| PyValueError::new_err(error.to_string()))?;
            let digest_len = scheduler.config().hasher.as_ref().map(BlockHasher::digest_len);
            Ok(Self {
                scheduler,
                entries: Entries::default(),
                scheduler_output_builder: SchedulerOutputBuilder::import(py, uses_mrope)?,
                output_writer: OutputWriter::import(py)?,
                callbacks: Callbacks { accept_tokens, validate_tokens, next_turn, encoder_inputs },
                extra_keys: ExtraKeysReader(extra_keys),
                block_observer: BlockObserver(block_observer),
                kv_transfer: KvTransfer::new(py, kv_transfer, digest_len)?,
                guard: Guard::default(),
                timer: StepTimer::default(),
                places: PyDict::new(py).unbind(),
                requests: PyDict::new(py).unbind(),
                finished_req_ids: PySet::empty(py)?.unbind(),
                finished_by_client: include_finished_set.then(|| PyDict::new(py).unbind()),
                preempted_req_ids: PySet::empty(py)?.unbind(),
                grammar_errors: PyDict::new(py).unbind(),
                outputs: Vec::new(),
            })
        })
    }

    fn set_none_hash(&mut self, none_hash: &[u8]) -> PyResult<()> {
        self.stopping("SchedulerCore.set_none_hash", |this| {
            let is_valid = this.scheduler.set_none_hash(none_hash);
            let error = || PyValueError::new_err("NONE_HASH is longer than 32 bytes");
            is_valid.then_some(()).ok_or_else(error)
        })
    }

    fn add_request(&mut self, request: &Bound<'_, PyAny>, now: f64) -> PyResult<()> {
        self.guarded("SchedulerCore.add_request", |this| this.do_add_request(request, now))
    }

    fn is_waiting_for_input(&self, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        enter("SchedulerCore.is_waiting_for_input", || {
            let request = self.place(request_id)?.and_then(|index| self.scheduler.get(index));
            Ok(request.is_some_and(|it| it.status() == RequestStatus::WaitingForInput))
        })
    }

    fn continue_session(
        &mut self,
        request_id: &Bound<'_, PyAny>,
        continue_session: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.guarded("SchedulerCore.continue_session", |this| {
            this.do_continue_session(request_id, continue_session)
        })
    }

    fn schedule<'py>(
        &mut self,
        py: Python<'py>,
        throttle_prefills: bool,
        now: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.guarded("SchedulerCore.schedule", |this| {
            let started = this.timer.start();
            let output = this.do_schedule(py, throttle_prefills, now)?;
            this.timer.note_schedule(started);
            Ok(output)
        })
    }

    fn decide<'py>(
        &mut self,
        py: Python<'py>,
        throttle_prefills: bool,
        now: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.guarded("SchedulerCore.decide", |this| {
            this.timer.begin_decision();
            this.do_decide(py, throttle_prefills, now)
        })
    }

    fn update_after_schedule(&mut self, scheduler_output: &Bound<'_, PyAny>) -> PyResult<()> {
        self.guarded("SchedulerCore.update_after_schedule", |this| {
            this.scheduler.update_after_schedule();
            convert::set_structured_output_flags(scheduler_output, this.scheduler.step())?;
            this.timer.end_decision();
            Ok(())
        })
    }

    fn block_ids<'py>(&self, request_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        enter("SchedulerCore.block_ids", || {
            let place = self.place(request_id)?;
            let unknown = || PyValueError::new_err(format!("there is no request {request_id}"));
            let request = place.and_then(|index| self.scheduler.get(index)).ok_or_else(unknown)?;
            convert::all_block_ids(request_id.py(), request)
        })
    }

    fn update_from_output<'py>(
        &mut self,
        scheduler_output: &Bound<'py, PyAny>,
        model_runner_output: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        self.guarded("SchedulerCore.update_from_output", |this| {
            let started = this.timer.start();
            let outputs = this.do_update_from_output(scheduler_output, model_runner_output)?;
            this.timer.note_update(started);
            Ok(outputs)
        })
    }

    fn update_draft_token_ids(
        &mut self,
        request_ids: &Bound<'_, PyList>,
        draft_token_ids: &Bound<'_, PyList>,
    ) -> PyResult<()> {
        self.guarded("SchedulerCore.update_draft_token_ids", |this| {
            this.do_update_draft_token_ids(request_ids, draft_token_ids)
        })
    }

    fn valid_drafts<'py>(
        &mut self,
        request_id: &Bound<'py, PyAny>,
        draft_token_ids: Bound<'py, PyList>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        self.guarded("SchedulerCore.valid_drafts", |this| {
            let place = this.place(request_id)?;
            place.map(|index| this.without_invalid_drafts(index, draft_token_ids)).transpose()
        })
    }

    fn finish_requests<'py>(
        &mut self,
        request_ids: Option<&Bound<'py, PyAny>>,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        if self.guard.is_broken() && request_ids.is_none() {
            return enter("SchedulerCore.finish_requests", || self.finish_all_when_broken(status));
        }
        self.guarded("SchedulerCore.finish_requests", |this| {
            this.do_finish_requests(request_ids, status)
        })
    }

    fn encode_outputs_for(&mut self, client_index: i64, encode_part: Py<PyAny>) -> PyResult<()> {
        self.stopping("SchedulerCore.encode_outputs_for", |this| {
            this.output_writer.encode_for(client_index, encode_part);
            Ok(())
        })
    }

    fn preempt_running(&mut self, py: Python<'_>, now: f64) -> PyResult<()> {
        self.guarded("SchedulerCore.preempt_running", |this| {
            let (scheduler, mut hooks) = this.split(py);
            let preempted = scheduler.preempt_running(now, &mut hooks);
            for index in this.or_stop(preempted)? {
                let told = this.preempted_req_ids.bind(py).add(&this.entries.get(index).id);
                this.or_stop(told)?;
            }
            Ok(())
        })
    }

    fn reset_prefix_cache(&mut self, py: Python<'_>) -> PyResult<bool> {
        self.guarded("SchedulerCore.reset_prefix_cache", |this| {
            let reset = this.scheduler.reset_prefix_cache();
            this.show_journal(py)?;
            Ok(reset)
        })
    }

    fn make_stats<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.stopping("SchedulerCore.make_stats", |this| this.do_make_stats(py))
    }

    fn has_requests(&self, py: Python<'_>) -> PyResult<bool> {
        enter("SchedulerCore.has_requests", || {
            // The engine asks before each step and before it sleeps: one that can't go on ends at
            // once, and not with the next request that comes.
            self.guard.check()?;
            Ok(self.is_unfinished() || self.has_ends_to_tell(py))
        })
    }

    fn has_unfinished_requests(&self) -> PyResult<bool> {
        enter("SchedulerCore.has_unfinished_requests", || Ok(self.is_unfinished()))
    }

    fn has_finished_requests(&self, py: Python<'_>) -> PyResult<bool> {
        enter("SchedulerCore.has_finished_requests", || Ok(self.has_ends_to_tell(py)))
    }

    fn num_unfinished_requests(&self) -> PyResult<i64> {
        enter("SchedulerCore.num_unfinished_requests", || {
            Ok(self.scheduler.num_unfinished_requests())
        })
    }

    fn request_counts(&self) -> PyResult<(usize, usize)> {
        enter("SchedulerCore.request_counts", || {
            Ok((self.scheduler.running().len(), self.scheduler.num_waiting()))
        })
    }

    fn running_requests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        enter("SchedulerCore.running_requests", || {
            self.requests_at(py, self.scheduler.running().iter().copied())
        })
    }

    fn waiting_requests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        enter("SchedulerCore.waiting_requests", || {
            self.requests_at(py, self.scheduler.waiting().into_iter())
        })
    }

    fn kv_cache_usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        enter("SchedulerCore.kv_cache_usage", || {
            Ok(convert::kv_cache_usage(py, self.scheduler.kv_cache().pool().usage()))
        })
    }

    fn num_used_blocks(&self) -> PyResult<u32> {
        enter("SchedulerCore.num_used_blocks", || {
            let pool = self.scheduler.kv_cache().pool();
            Ok(pool.num_blocks() - 1 - pool.num_free())
        })
    }

    fn pause_state(&self) -> PyResult<u8> {
        enter("SchedulerCore.pause_state", || {
            Ok(match self.scheduler.pause_state() {
                PauseState::Unpaused => 0,
                PauseState::PausedNew => 1,
                PauseState::PausedAll => 2,
            })
        })
    }

    fn set_pause_state(&mut self, state: u8) -> PyResult<()> {
        self.stopping("SchedulerCore.set_pause_state", |this| {
            this.scheduler.set_pause_state(match state {
                0 => PauseState::Unpaused,
                1 => PauseState::PausedNew,
                2 => PauseState::PausedAll,
                other => return Err(PyValueError::new_err(format!("unknown pause state {other}"))),
            });
            Ok(())
        })
    }

    fn structured_output_request_ids<'py>(
        &self,
        request_ids: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyList>> {
        enter("SchedulerCore.structured_output_request_ids", || {
            let ids = PyList::empty(request_ids.py());
            for (id, _) in request_ids {
                let request = self.place(&id)?.and_then(|index| self.scheduler.get(index));
                if request.is_some_and(|it| it.use_structured_output() && !it.is_prefill_chunk()) {
                    ids.append(id)?;
                }
            }
            Ok(ids)
        })
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        enter("SchedulerCore.snapshot", || {
            let requests = PyDict::new(py);
            for (id, _) in self.requests.bind(py) {
                let index = self.place(&id)?.expect("each request has a place");
                let request = self.entries.get(index).request.bind(py);
                let state = self.scheduler.request(index);
                requests.set_item(id, snapshot::request_snapshot(request, state)?)?;
            }
            snapshot::snapshot(py, &self.scheduler, &self.entries, requests)
        })
    }

    fn check_invariants(&mut self) -> PyResult<()> {
        self.guarded("SchedulerCore.check_invariants", |this| {
            this.scheduler.check_invariants();
            Ok(())
        })
    }
}

impl SchedulerCore {
    /// Runs a call that changes state; if it ends in the middle, no other will follow.
    fn guarded<T>(
        &mut self,
        entry: &'static str,
        call: impl FnOnce(&mut Self) -> PyResult<T>,
    ) -> PyResult<T> {
        self.guard.check()?;
        self.stopping(entry, call)
    }

    /// As [`Self::guarded`], but also after a call that ended in the middle.
    fn stopping<T>(
        &mut self,
        entry: &'static str,
        call: impl FnOnce(&mut Self) -> PyResult<T>,
    ) -> PyResult<T> {
        let called = catch_panics(entry, || {
            let called = call(self);
            self.timer.note_requests(&self.scheduler);
            called
        });
        self.or_stop(called)?
    }

    /// Reports the time of each step's calls, and how many requests there are, from now on.
    pub(crate) fn report_steps_to(&mut self, sink: Arc<dyn StepSink>) {
        self.timer.report_to(sink);
        self.timer.note_requests(&self.scheduler);
    }

    /// Whether a request has work to do in the current pause state.
    fn is_unfinished(&self) -> bool {
        self.scheduler.num_unfinished_requests() > 0
    }

    /// Whether the model runner has to be told of ends, or a KV connector keeps blocks.
    fn has_ends_to_tell(&self, py: Python<'_>) -> bool {
        // Requests that are kept until their blocks are sent need steps in which they are.
        !self.finished_req_ids.bind(py).is_empty() || self.scheduler.num_kept_requests() > 0
    }

    fn do_make_stats<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !self.scheduler.config().log_stats {
            return Ok(None);
        }
        let stats = self.scheduler.take_stats();
        let others = OtherStats {
            evictions: self.block_observer.evictions(py)?,
            cudagraph: None,
            kv_transfer: self.kv_transfer.take_stats(py, &self.scheduler)?,
        };
        let types = &self.output_writer.types;
        types.scheduler_stats(py, &stats, &others).map(Some)
    }

    /// The `Request` objects at these places.
    fn requests_at<'py>(
        &self,
        py: Python<'py>,
        places: impl Iterator<Item = RequestIndex>,
    ) -> PyResult<Bound<'py, PyList>> {
        let requests: Vec<_> = places.map(|it| &self.entries.get(it).request).collect();
        PyList::new(py, requests)
    }

    fn place(&self, id: &Bound<'_, PyAny>) -> PyResult<Option<RequestIndex>> {
        let place = self.places.bind(id.py()).get_item(id)?;
        place.map(|place| Ok(RequestIndex(place.extract()?))).transpose()
    }

    fn do_add_request(&mut self, request: &Bound<'_, PyAny>, now: f64) -> PyResult<()> {
        let py = request.py();
        let new = convert::new_request(request, &self.extra_keys)?;
        if new.has_encoder_inputs && self.callbacks.encoder_inputs.bind(py).is_none() {
            let message =
                format!("request {} has images or the like: this model takes text", new.id);
            return Err(PyValueError::new_err(message));
        }
        let entry = Entry::of(request)?;
        let id = entry.id.clone_ref(py);
        if self.places.bind(py).contains(&id)? {
            return Err(PyValueError::new_err(format!("duplicate request id {id}")));
        }
        let index = self.scheduler.add_request(new, now);
        self.entries.insert(index, entry);
        self.places.bind(py).set_item(&id, index.0)?;
        self.requests.bind(py).set_item(&id, request)
    }

    fn do_continue_session(
        &mut self,
        request_id: &Bound<'_, PyAny>,
        continue_session: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = request_id.py();
        let unknown = || PyValueError::new_err(format!("there is no session {request_id}"));
        let index = self.place(request_id)?.ok_or_else(unknown)?;
        let state = self.scheduler.request(index);
        if state.status() != RequestStatus::WaitingForInput {
            return Err(unknown());
        }
        let num_kept_tokens = state.num_kept_tokens();
        let request = self.entries.get(index).request.bind(py);
        convert::sync_request_tokens(request, state.tokens())?;
        continue_session.call1((request, num_kept_tokens))?;
        let input = convert::session_input(request, num_kept_tokens, &self.extra_keys)?;
        self.scheduler.continue_session(index, input);
        self.entries.get_mut(index).refresh(py)
    }

    fn do_schedule<'py>(
        &mut self,
        py: Python<'py>,
        throttle_prefills: bool,
        now: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (scheduler, mut hooks) = self.split(py);
        let decided = scheduler.schedule(throttle_prefills, now, &mut hooks).map(|_| ());
        self.tell_step(py, decided)
    }

    /// Decides on a step and shows it to the KV connector's side: requests as they are before the
    /// step counts as computed.
    fn do_decide<'py>(
        &mut self,
        py: Python<'py>,
        throttle_prefills: bool,
        now: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (scheduler, mut hooks) = self.split(py);
        let decided = scheduler.decide(throttle_prefills, now, &mut hooks);
        let output = self.tell_step(py, decided)?;
        // Last: the encoder's side leaves counters of its own in `Request` objects.
        let shown = self.show_requests(py);
        self.or_stop(shown)?;
        Ok(output)
    }

    /// `SchedulerOutput` of the step, if it could be decided on.
    fn tell_step<'py>(
        &mut self,
        py: Python<'py>,
        decided: PyResult<()>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.or_stop(decided)?;
        let told = self.show_journal(py).and_then(|()| self.scheduler_output(py));
        self.or_stop(told)
    }

    /// Brings all `Request` objects up to date.
    fn show_requests(&self, py: Python<'_>) -> PyResult<()> {
        for (_, place) in self.places.bind(py) {
            let index = RequestIndex(place.extract()?);
            let request = self.entries.get(index).request.bind(py);
            self.kv_transfer.show(request, self.scheduler.request(index))?;
        }
        Ok(())
    }

    fn scheduler_output<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        for &index in &self.scheduler.step().preempted {
            self.preempted_req_ids.bind(py).add(&self.entries.get(index).id)?;
        }
        let take = |set: &mut Py<PySet>| -> PyResult<Bound<'py, PySet>> {
            Ok(std::mem::replace(set, PySet::empty(py)?.unbind()).into_bound(py))
        };
        let encoder_inputs = self.callbacks.encoder_inputs.bind(py);
        let encoder = if encoder_inputs.is_none() {
            None
        } else {
            let log_stats = self.scheduler.config().log_stats;
            let told = encoder_inputs.call_method1(intern!(py, "end_step"), (log_stats,))?;
            Some(EncoderStep { inputs: encoder_inputs.clone(), told: told.extract()? })
        };
        let extras = StepExtras {
            finished_req_ids: take(&mut self.finished_req_ids)?,
            preempted_req_ids: take(&mut self.preempted_req_ids)?,
            encoder,
        };
        self.scheduler_output_builder.build(&self.scheduler, &self.entries, extras)
    }

    fn do_update_from_output<'py>(
        &mut self,
        scheduler_output: &Bound<'py, PyAny>,
        model_runner_output: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = scheduler_output.py();
        let report = self.transfer_report(model_runner_output)?;
        let failures = self.take_in_load_failures(report.as_ref(), scheduler_output)?;
        let mut tokens = Vec::new();
        let place = |id: &Bound<'py, PyAny>| self.place(id);
        let sampled_lists = convert::sampled_lists(model_runner_output)?;
        let mut sampled = convert::sampled_tokens(
            scheduler_output,
            model_runner_output,
            sampled_lists.as_ref(),
            &self.scheduler,
            place,
            &failures.void,
            &mut tokens,
        )?;
        let rare = RareOutputs::of(model_runner_output)?;
        rare.note_pooled(&mut sampled)?;
        let mut result = StepResult {
            sampled,
            sampled_lists,
            tokens,
            rare,
            model_runner_output,
            transfer_params: None,
        };
        self.note_nans(&result)?;

        let scheduled = result.sampled.iter().map(|it| ScheduledOutput {
            index: it.index,
            num_scheduled_tokens: it.num_scheduled_tokens,
            sampled_tokens: &result.tokens[it.tokens.clone()],
            num_draft_tokens: it.num_draft_tokens,
            num_invalid_drafts: it.num_invalid_drafts,
            is_pooled: it.is_pooled,
            is_void: it.is_void,
        });
        let mut outputs = std::mem::take(&mut self.outputs);
        let (scheduler, mut hooks) = self.split(py);
        let updated = scheduler.update_from_output(scheduled, &mut hooks, &mut outputs);
        self.or_stop(updated)?;
        result.transfer_params = self.kv_transfer.take_params(py)?;
        let told = self.tell(py, &result, &outputs, failures.failed_ids, report.as_ref());
        self.outputs = outputs;
        self.or_stop(told)
    }

    /// `kv_connector_output`, None or not, if there is a KV connector.
    fn transfer_report<'py>(
        &self,
        model_runner_output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let name = intern!(model_runner_output.py(), "kv_connector_output");
        let is_present = self.kv_transfer.is_present();
        is_present.then(|| model_runner_output.getattr(name)).transpose()
    }

    /// Cuts what counts as computed where blocks could not be filled.
    fn take_in_load_failures<'py>(
        &mut self,
        report: Option<&Bound<'py, PyAny>>,
        scheduler_output: &Bound<'py, PyAny>,
    ) -> PyResult<LoadFailures<'py>> {
        let Some(report) = report.filter(|report| !report.is_none()) else {
            return Ok(LoadFailures::default());
        };
        let py = report.py();
        let num_scheduled_tokens =
            scheduler_output.getattr(intern!(py, "num_scheduled_tokens"))?.cast_into()?;
        let load_report = LoadReport {
            report,
            num_scheduled_tokens,
            places: self.places.bind(py),
            entries: &self.entries,
        };
        let failures = load_report.take_in(&mut self.scheduler, &self.kv_transfer);
        self.or_stop(failures)
    }

    fn do_update_draft_token_ids(
        &mut self,
        request_ids: &Bound<'_, PyList>,
        draft_token_ids: &Bound<'_, PyList>,
    ) -> PyResult<()> {
        let mut drafts = Vec::new();
        for (id, tokens) in request_ids.iter().zip(draft_token_ids) {
            // The request may have ended since.
            let Some(index) = self.place(&id)? else { continue };
            if self.scheduler.request(index).status().is_finished() {
                continue;
            }
            drafts.clear();
            if !self.scheduler.request(index).is_prefill_chunk() {
                let tokens = self.without_invalid_drafts(index, tokens.cast_into()?)?;
                convert::extend_token_ids(&tokens, &mut drafts)?;
            }
            self.scheduler.set_drafts(index, &drafts);
        }
        Ok(())
    }

    /// The draft tokens before the first that the request's grammar rejects, if it has one.
    fn without_invalid_drafts<'py>(
        &self,
        index: RequestIndex,
        draft_token_ids: Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyList>> {
        let state = self.scheduler.request(index);
        if !state.use_structured_output() {
            return Ok(draft_token_ids);
        }
        let request = self.entries.get(index).request.bind(draft_token_ids.py());
        convert::sync_request_tokens(request, state.tokens())?;
        let validate = self.callbacks.validate_tokens.bind(request.py());
        Ok(validate.call1((request, draft_token_ids))?.cast_into()?)
    }

    /// Builds what the clients are told of a step that the core has taken in.
    fn tell<'py>(
        &mut self,
        py: Python<'py>,
        result: &StepResult<'_, 'py>,
        outputs: &[RequestOutput],
        failed_ids: Option<Bound<'py, PySet>>,
        report: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        self.show_journal(py)?;
        let mut written = self.output_writer.write(py, &self.entries, result, outputs)?;
        self.forget_finished(py, outputs)?;
        self.append_errors(py, failed_ids, &mut written)?;
        let events = report.map(|report| self.settle_transfers(report)).transpose()?;
        self.block_observer.publish(py, events)?;
        let by_client = written.into_dict(py, &self.output_writer)?;
        self.add_common_fields(&by_client, result)?;
        Ok(by_client.0)
    }

    /// Takes in what a KV connector's workers report. Returns the connector's KV cache events.
    fn settle_transfers<'py>(
        &mut self,
        report: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = report.py();
        if report.is_truthy()? {
            self.show_requests(py)?;
            self.kv_transfer.update(report)?;
            for id in ids_of(&report.getattr(intern!(py, "finished_recving"))?)? {
                let index = self.transferred(&id, Scheduler::is_receiving_or_kept)?;
                if self.scheduler.end_receiving(index) {
                    self.drop_entry(py, index)?;
                }
            }
            for id in ids_of(&report.getattr(intern!(py, "finished_sending"))?)? {
                let index = self.transferred(&id, Scheduler::is_kept)?;
                self.scheduler.end_sending(index);
                self.drop_entry(py, index)?;
            }
        }
        self.kv_transfer.collect_stats(report)?;
        self.kv_transfer.take_events(py)
    }

    /// The request that a KV connector's workers report, if it can be.
    fn transferred(
        &self,
        id: &Bound<'_, PyAny>,
        can_be: impl Fn(&Scheduler, RequestIndex) -> bool,
    ) -> PyResult<RequestIndex> {
        let index = self.place(id)?;
        index.filter(|&index| can_be(&self.scheduler, index)).ok_or_else(|| {
            PyRuntimeError::new_err(format!(
                "the KV connector reports the end of a transfer for request {id}, which has none"
            ))
        })
    }

    /// Shows what has happened to blocks to those who asked. Before the entries of ended requests
    /// are dropped.
    fn show_journal(&mut self, py: Python<'_>) -> PyResult<()> {
        if !self.block_observer.is_present() {
            return Ok(());
        }
        let entries = self.scheduler.take_journal();
        let hasher = self.scheduler.config().hasher.as_ref();
        let digest_len = hasher.map_or(0, BlockHasher::digest_len);
        self.block_observer.observe(py, entries, &self.entries, digest_len)
    }

    /// The core, and the answers to its questions.
    fn split<'a, 'py>(&'a mut self, py: Python<'py>) -> (&'a mut Scheduler, PyHooks<'a, 'py>) {
        let hooks = PyHooks {
            py,
            entries: &self.entries,
            callbacks: &self.callbacks,
            extra_keys: &self.extra_keys,
            kv_transfer: &self.kv_transfer,
            grammar_errors: &self.grammar_errors,
        };
        (&mut self.scheduler, hooks)
    }

    /// An error that leaves the core and what is known of it apart is the last one.
    fn or_stop<T>(&mut self, result: PyResult<T>) -> PyResult<T> {
        if let Err(error) = &result {
            self.guard.note(error);
        }
        result
    }

    /// Notes NaNs even for requests without an output in this step: a later one will tell them.
    fn note_nans(&mut self, result: &StepResult<'_, '_>) -> PyResult<()> {
        if result.rare.num_nans_in_logits.is_none() {
            return Ok(());
        }
        let delivered = result.sampled.iter().filter(|it| it.is_delivered);
        for index in delivered.filter_map(|it| it.index) {
            let entry = self.entries.get_mut(index);
            if let Some(count) = result.rare.num_nans(&entry.id)? {
                entry.num_nans_in_logits = count;
            }
        }
        Ok(())
    }

    /// In the order of the step, whichever client they belong to.
    fn forget_finished(&mut self, py: Python<'_>, outputs: &[RequestOutput]) -> PyResult<()> {
        let news = outputs.iter().filter_map(|it| Some((it.index, it.news.as_deref()?)));
        for (index, news) in news {
            match news.finished {
                Some(status) if news.is_over => self.note_end(py, index, status, news.is_kept)?,
                Some(_) => self.entries.get_mut(index).refresh(py)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Ends the requests that can't go on and tells their clients.
    fn append_errors<'py>(
        &mut self,
        py: Python<'py>,
        failed_loads: Option<Bound<'py, PySet>>,
        written: &mut ClientOutputs<'py>,
    ) -> PyResult<()> {
        let grammar_errors = self.grammar_errors.bind(py).copy()?;
        self.grammar_errors.bind(py).clear();
        let errors = self.ids_of_errors(&grammar_errors, failed_loads)?;
        let Some(errors) = errors else { return Ok(()) };
        let status = RequestStatus::FinishedError;
        for ended in self.end_requests(&errors, status)? {
            let entry = self.entries.get(ended.index);
            let types = &self.output_writer.types;
            let reason = types.statuses.finish_reason(status);
            let output = types.failure(py, entry, reason, &ended.events)?;
            if let Some(error) = grammar_errors.get_item(&entry.id)? {
                types.set_grammar_error(&output, &error)?;
            }
            written.append(&self.output_writer, entry.client_index, &output)?;
            self.note_end(py, ended.index, status, ended.is_kept)?;
        }
        self.kv_transfer.take_params(py)?;
        Ok(())
    }

    /// The ids of requests whose grammar could not be compiled: in a set that grows as vLLM's does,
    /// because its order decides who is told first.
    fn ids_of_grammar_errors<'py>(
        &self,
        errors: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let set = errors.py().get_type::<PySet>();
        if self.output_writer.types.tells_errors() {
            // They are kept in a dictionary.
            return set.call1((errors,));
        }
        let added = PySet::empty(errors.py())?;
        for id in errors.keys() {
            added.add(id)?;
        }
        set.call1((added,))
    }

    /// The ids of requests whose grammar can't be compiled, whose items contradict the encoder
    /// cache, or whose loads failed.
    fn ids_of_errors<'py>(
        &self,
        grammar_errors: &Bound<'py, PyDict>,
        failed_loads: Option<Bound<'py, PySet>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = grammar_errors.py();
        let mut others = Vec::new();
        let encoder_inputs = self.callbacks.encoder_inputs.bind(py);
        if !encoder_inputs.is_none() {
            let mismatches = encoder_inputs.call_method0(intern!(py, "take_mismatches"))?;
            others.extend(mismatches.is_truthy()?.then_some(mismatches));
        }
        others.extend(failed_loads.map(Bound::into_any));
        if grammar_errors.is_empty() && others.is_empty() {
            return Ok(None);
        }
        let errors = self.ids_of_grammar_errors(grammar_errors)?;
        for ids in others {
            errors.call_method1(intern!(py, "update"), (ids,))?;
        }
        // Once more as a set: that is how vLLM hands them on.
        py.get_type::<PySet>().call1((errors,)).map(Some)
    }

    /// Adds what concerns no single request.
    fn add_common_fields<'py>(
        &mut self,
        by_client: &ClientDict<'py>,
        result: &StepResult<'_, 'py>,
    ) -> PyResult<()> {
        let py = by_client.0.py();
        if let Some(finished) = &self.finished_by_client {
            let finished = finished.bind(py);
            for (client, ids) in finished.iter() {
                by_client.set_finished(client.extract()?, ids.cast()?, &self.output_writer)?;
            }
            finished.clear();
        }
        if self.scheduler.config().log_stats {
            let cudagraph = result.model_runner_output.getattr(intern!(py, "cudagraph_stats"))?;
            let others = OtherStats {
                evictions: self.block_observer.evictions(py)?,
                cudagraph: (!cudagraph.is_none()).then_some(cudagraph),
                kv_transfer: self.kv_transfer.take_stats(py, &self.scheduler)?,
            };
            let stats = self.scheduler.take_stats();
            by_client.set_stats(stats, &others, &self.output_writer)?;
        }
        Ok(())
    }

    fn do_finish_requests<'py>(
        &mut self,
        request_ids: Option<&Bound<'py, PyAny>>,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = status.py();
        let status = self.output_writer.types.statuses.parse(status)?;
        let ended = match request_ids {
            None => self.end_requests(self.requests.clone_ref(py).bind(py), status)?,
            Some(ids) => self.end_requests(ids, status)?,
        };
        let requests = PyList::empty(py);
        for ended in ended {
            let told = requests.append(&self.entries.get(ended.index).request);
            let noted = told.and_then(|()| self.note_end(py, ended.index, status, ended.is_kept));
            self.or_stop(noted)?;
        }
        self.kv_transfer.take_params(py)?;
        Ok(requests)
    }

    /// Ends the requests with these ids in the core, in the order of the ids.
    fn end_requests(
        &mut self,
        ids: &Bound<'_, PyAny>,
        status: RequestStatus,
    ) -> PyResult<Vec<EndedRequest>> {
        let mut indices = Vec::new();
        for id in ids.try_iter()? {
            indices.extend(self.place(&id?)?);
        }
        let (scheduler, mut hooks) = self.split(ids.py());
        let ended = scheduler.finish_requests(&indices, status, &mut hooks);
        self.or_stop(ended)
    }

    /// Notes for the next step and for its client that the core has ended a request, and drops what
    /// belongs to it unless it is kept.
    fn note_end(
        &mut self,
        py: Python<'_>,
        index: RequestIndex,
        status: RequestStatus,
        is_kept: bool,
    ) -> PyResult<()> {
        let entry = self.entries.get(index);
        let member = self.output_writer.types.statuses.member(status);
        entry.request.bind(py).setattr(intern!(py, "status"), member)?;
        self.finished_req_ids.bind(py).add(&entry.id)?;
        if let Some(by_client) = &self.finished_by_client {
            let by_client = by_client.bind(py);
            match by_client.get_item(entry.client_index)? {
                Some(ids) => ids.cast::<PySet>()?.add(&entry.id)?,
                None => by_client.set_item(entry.client_index, PySet::new(py, [&entry.id])?)?,
            }
        }
        if is_kept { Ok(()) } else { self.drop_entry(py, index) }
    }

    /// Drops what belongs to a request that is gone.
    fn drop_entry(&mut self, py: Python<'_>, index: RequestIndex) -> PyResult<()> {
        let entry = self.entries.take(index);
        self.places.bind(py).del_item(&entry.id)?;
        self.requests.bind(py).del_item(&entry.id)
    }

    /// After an internal error the core is not to be trusted, but clients have to be told. What is
    /// left has nothing to do and still refuses to go on.
    fn finish_all_when_broken<'py>(
        &mut self,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let py = status.py();
        self.output_writer.types.statuses.parse(status)?;
        let requests = self.requests.bind(py).values();
        for request in &requests {
            request.setattr(intern!(py, "status"), status)?;
        }
        self.scheduler = Scheduler::new(self.scheduler.config().clone())
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        self.entries = Entries::default();
        self.requests.bind(py).clear();
        self.places.bind(py).clear();
        Ok(requests)
    }
}

/// The ids in a set, in its order; none of None.
fn ids_of<'py>(ids: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if ids.is_none() { Ok(Vec::new()) } else { ids.try_iter()?.collect() }
}
