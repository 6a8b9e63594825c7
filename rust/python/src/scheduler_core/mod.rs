//! `SchedulerCore`: the core scheduler with the Python objects that belong to its requests.

mod ends;
mod update;

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySet, PyString, PyTuple};
use sparksched_core::{
    BlockHasher, NewRequest, OrderSettings, PacingSettings, PauseState, RequestIndex,
    RequestOutput, RequestStatus, Scheduler, StepKnobs,
};
use sparksched_entry_points::entry_points;
use sparksched_meters::MeterPage;

use crate::block_observer::BlockObserver;
use crate::callbacks::{AuxOutputs, PyCallbacks, PythonFunctions};
use crate::config::scheduler_config;
use crate::connector::Connector;
use crate::convert::{
    self, EncoderStep, ExtraKeysReader, OtherStats, RequestView, SchedulerOutputBuilder, StepExtras,
};
use crate::entries::{Entries, Entry};
use crate::guard::{Guard, catch_panics};
use crate::message_writer::MessageWriter;
use crate::pacing::{self, Pacer};
use crate::snapshot;
use crate::step_timer::StepTimer;

/// `max_num_scheduled_tokens`, `long_prefill_token_threshold` and an order, by id.
type ToldKnobs<'py> = (u32, u32, Bound<'py, PyTuple>);

#[pyclass(module = "sparksched._core")]
pub(crate) struct SchedulerCore {
    scheduler: Scheduler,
    entries: Entries,
    scheduler_output_builder: SchedulerOutputBuilder,
    message_writer: MessageWriter,
    functions: PythonFunctions,
    extra_keys: ExtraKeysReader,
    block_observer: BlockObserver,
    /// `KVTransfer` and `EncoderTransfer`.
    kv_transfer: Connector,
    encoder_transfer: Connector,
    aux_outputs: AuxOutputs,
    request_view: RequestView,
    guard: Guard,
    timer: StepTimer,
    /// Chooses the knobs of each step, if prompts are paced.
    pacer: Option<Pacer>,
    /// The knobs of the last step.
    knobs: StepKnobs,
    /// Of these, the ids of the requests that were put in another order.
    order: Py<PyTuple>,
    /// They were chosen for it, by whom ever, and are not just those that are configured.
    are_knobs_chosen: bool,
    /// `request_id` to place.
    places: Py<PyDict>,
    /// `request_id` to `Request`: vLLM's `Scheduler.requests`.
    #[pyo3(get)]
    requests: Py<PyDict>,
    /// Requests that ended since the last step; each step takes this set with it.
    #[pyo3(get)]
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

#[entry_points(SchedulerCore)]
#[pymethods]
impl SchedulerCore {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "they are named where it is called")]
    #[pyo3(signature = (
        config, *, accept_tokens, validate_tokens, next_turn, encoder_inputs, extra_keys,
        block_observer, kv_transfer, encoder_transfer, aux_outputs, step_perf_stats, encode_part,
        include_finished_set
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
        encoder_transfer: Option<Py<PyAny>>,
        aux_outputs: Option<Py<PyAny>>,
        step_perf_stats: Option<Py<PyAny>>,
        encode_part: Py<PyAny>,
        include_finished_set: bool,
    ) -> PyResult<Self> {
        let py = config.py();
        let uses_mrope = config.as_any().get_item("uses_mrope")?.extract()?;
        let scheduler = Scheduler::new(scheduler_config(config)?);
        let knobs = scheduler.config().step_knobs(false);
        let digest_len = scheduler.config().hasher.as_ref().map(BlockHasher::digest_len);
        let request_view = RequestView::import(py, digest_len)?;
        Ok(Self {
            scheduler,
            entries: Entries::default(),
            scheduler_output_builder: SchedulerOutputBuilder::import(py, uses_mrope)?,
            message_writer: MessageWriter::import(py, encode_part)?,
            functions: PythonFunctions {
                accept_tokens,
                validate_tokens,
                next_turn,
                encoder_inputs,
                step_perf_stats,
            },
            extra_keys: ExtraKeysReader(extra_keys),
            block_observer: BlockObserver(block_observer),
            kv_transfer: Connector::new(py, kv_transfer),
            encoder_transfer: Connector::new(py, encoder_transfer),
            aux_outputs: AuxOutputs::new(py, aux_outputs)?,
            request_view,
            guard: Guard::default(),
            timer: StepTimer::default(),
            pacer: None,
            knobs,
            order: PyTuple::empty(py).unbind(),
            are_knobs_chosen: false,
            places: PyDict::new(py).unbind(),
            requests: PyDict::new(py).unbind(),
            finished_req_ids: PySet::empty(py)?.unbind(),
            finished_by_client: include_finished_set.then(|| PyDict::new(py).unbind()),
            preempted_req_ids: PySet::empty(py)?.unbind(),
            grammar_errors: PyDict::new(py).unbind(),
            outputs: Vec::new(),
        })
    }

    #[by(stopping)]
    fn set_none_hash(&mut self, none_hash: &[u8]) -> PyResult<()> {
        let is_valid = self.scheduler.set_none_hash(none_hash);
        let error = || PyValueError::new_err("NONE_HASH is longer than 32 bytes");
        is_valid.then_some(()).ok_or_else(error)
    }

    #[by(guarded)]
    #[pyo3(signature = (request, now, queue_timeout_s=None, tenant="", ttft_s=None))]
    fn add_request(
        &mut self,
        request: &Bound<'_, PyAny>,
        now: f64,
        queue_timeout_s: Option<f64>,
        tenant: &str,
        ttft_s: Option<f64>,
    ) -> PyResult<()> {
        let py = request.py();
        let new = convert::new_request(request, &self.extra_keys)?;
        let new = NewRequest { tenant: tenant.into(), ttft_s, ..new };
        let entry = Entry::of(request)?;
        let id = entry.id.clone_ref(py);
        if self.places.bind(py).contains(&id)? {
            return Err(PyValueError::new_err(format!("duplicate request id {id}")));
        }
        let index = self.scheduler.add_request(new, now);
        if let Some(seconds) = queue_timeout_s {
            self.scheduler.set_queue_deadline(index, now + seconds);
        }
        if self.scheduler.is_ordered() {
            // So that others decide with it, too.
            let priority = self.scheduler.request(index).priority;
            request.setattr(intern!(py, "priority"), priority)?;
        }
        self.entries.insert(index, entry);
        let noted = self.places.bind(py).set_item(&id, index.0);
        let noted = noted.and_then(|()| self.requests.bind(py).set_item(&id, request));
        self.or_stop(noted)
    }

    #[by(guarded)]
    fn take_expired<'py>(&mut self, py: Python<'py>, now: f64) -> PyResult<Bound<'py, PyList>> {
        let expired = self.scheduler.take_expired(now);
        self.requests_at(py, expired.into_iter())
    }

    fn is_waiting_for_input(&self, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let request = self.place(request_id)?.and_then(|index| self.scheduler.get(index));
        Ok(request.is_some_and(|it| it.status == RequestStatus::WaitingForInput))
    }

    #[by(guarded)]
    fn continue_session(
        &mut self,
        request_id: &Bound<'_, PyAny>,
        continue_session: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = request_id.py();
        let unknown = || PyValueError::new_err(format!("there is no session {request_id}"));
        let index = self.place(request_id)?.ok_or_else(unknown)?;
        let state = self.scheduler.request(index);
        if state.status != RequestStatus::WaitingForInput {
            return Err(unknown());
        }
        let num_kept_tokens = state.num_kept_tokens();
        let request = self.entries.get(index).request.bind(py);
        convert::sync_request_tokens(request, state.tokens())?;
        continue_session.call1((request, num_kept_tokens))?;
        let input = convert::session_input(request, num_kept_tokens, &self.extra_keys)?;
        self.scheduler.continue_session(index, input);
        let refreshed = self.entries.get_mut(index).refresh(py);
        self.or_stop(refreshed)
    }

    #[by(stopping)]
    #[pyo3(signature = (max_stall_s, max_slowdown, max_graph_tokens, log))]
    fn pace(
        &mut self,
        max_stall_s: f64,
        max_slowdown: f64,
        max_graph_tokens: u32,
        log: Option<&str>,
    ) -> PyResult<()> {
        let settings = PacingSettings { max_stall_s, max_slowdown, max_graph_tokens };
        self.pacer = Some(Pacer::new(settings, log, &self.scheduler)?);
        Ok(())
    }

    #[by(stopping)]
    #[pyo3(signature = (order, *, weights, seconds))]
    fn order_by(
        &mut self,
        order: &str,
        weights: BTreeMap<String, f64>,
        seconds: f64,
    ) -> PyResult<()> {
        self.scheduler.order_by(match order {
            "fair" => OrderSettings::Fair(weights),
            "deadline" => OrderSettings::Deadline(seconds),
            "aging" => OrderSettings::Aging(seconds),
            _ => return Err(PyValueError::new_err(format!("there is no order {order:?}"))),
        });
        Ok(())
    }

    #[by(stopping)]
    fn warm_up_pacing(&mut self, goes_on: bool) -> PyResult<()> {
        if let Some(pacer) = &mut self.pacer {
            pacer.pacing.warm_up(goes_on);
            self.timer.note_pacing(&pacer.pacing.report());
        }
        Ok(())
    }

    #[by(stopping)]
    fn learn_pacing_size(&mut self, num_tokens: u32, extra_s: f64) -> PyResult<()> {
        if let Some(pacer) = &mut self.pacer {
            pacer.pacing.learn_size(num_tokens, extra_s);
        }
        Ok(())
    }

    #[by(stopping)]
    fn set_pacing_time(&mut self, seconds: f64) -> PyResult<()> {
        if let Some(pacer) = &mut self.pacer {
            pacer.set_time(seconds);
        }
        Ok(())
    }

    fn pacing<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(pacer) = &self.pacer else { return Ok(None) };
        let dict = pacing::named(py, &pacer.pacing.report().values())?;
        dict.set_item("sizes", pacer.pacing.sizes())?;
        Ok(Some(dict))
    }

    fn knobs<'py>(&self, py: Python<'py>) -> PyResult<(u32, u32, bool, Bound<'py, PyTuple>)> {
        let knobs = &self.knobs;
        Ok((
            knobs.max_num_scheduled_tokens,
            knobs.long_prefill_token_threshold,
            knobs.throttle_prefills,
            self.order.bind(py).clone(),
        ))
    }

    fn are_knobs_chosen(&self) -> PyResult<bool> {
        Ok(self.are_knobs_chosen)
    }

    #[by(guarded)]
    #[pyo3(signature = (throttle_prefills, now, knobs=None))]
    fn schedule<'py>(
        &mut self,
        py: Python<'py>,
        throttle_prefills: bool,
        now: f64,
        knobs: Option<ToldKnobs<'_>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let started = self.timer.start();
        self.choose_knobs(py, throttle_prefills, knobs)?;
        let chosen = self.knobs.clone();
        let (scheduler, mut callbacks) = self.split(py);
        let decided = scheduler.schedule(&chosen, now, &mut callbacks).map(|_| ());
        let output = self.tell_step(py, decided)?;
        self.timer.note_schedule(started);
        Ok(output)
    }

    #[by(guarded)]
    #[pyo3(signature = (throttle_prefills, now, knobs=None))]
    fn decide<'py>(
        &mut self,
        py: Python<'py>,
        throttle_prefills: bool,
        now: f64,
        knobs: Option<ToldKnobs<'_>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.timer.begin_decision();
        self.choose_knobs(py, throttle_prefills, knobs)?;
        let chosen = self.knobs.clone();
        let (scheduler, mut callbacks) = self.split(py);
        let decided = scheduler.decide(&chosen, now, &mut callbacks);
        let output = self.tell_step(py, decided)?;
        // Requests as they are before the step counts as computed. Last: the encoder's side leaves
        // counters of its own in `Request` objects.
        let shown = self.show_requests(py);
        self.or_stop(shown)?;
        Ok(output)
    }

    #[by(guarded)]
    fn update_after_schedule(&mut self, scheduler_output: &Bound<'_, PyAny>) -> PyResult<()> {
        self.scheduler.update_after_schedule();
        convert::set_structured_output_flags(scheduler_output, self.scheduler.step())?;
        self.timer.end_decision();
        Ok(())
    }

    fn block_ids<'py>(&self, request_id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let place = self.place(request_id)?;
        let unknown = || PyValueError::new_err(format!("there is no request {request_id}"));
        let request = place.and_then(|index| self.scheduler.get(index)).ok_or_else(unknown)?;
        convert::all_block_ids(request_id.py(), request)
    }

    #[by(guarded)]
    fn update_from_output<'py>(
        &mut self,
        scheduler_output: &Bound<'py, PyAny>,
        model_runner_output: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let started = self.timer.start();
        if let Some(pacer) = &mut self.pacer {
            pacer.note_result(scheduler_output);
            self.timer.note_pacing(&pacer.pacing.report());
        }
        let outputs = self.take_in(scheduler_output, model_runner_output)?;
        self.timer.note_update(started);
        Ok(outputs)
    }

    #[by(guarded)]
    fn update_draft_token_ids(
        &mut self,
        request_ids: &Bound<'_, PyList>,
        draft_token_ids: &Bound<'_, PyList>,
    ) -> PyResult<()> {
        let mut drafts = Vec::new();
        for (id, tokens) in request_ids.iter().zip(draft_token_ids) {
            // The request may have ended since.
            let Some(index) = self.place(&id)? else { continue };
            if self.scheduler.request(index).status.is_finished() {
                continue;
            }
            drafts.clear();
            if !self.scheduler.request(index).is_prefill_chunk {
                let tokens = self.without_invalid_drafts(index, tokens.cast_into()?)?;
                convert::extend_token_ids(&tokens, &mut drafts)?;
            }
            self.scheduler.set_drafts(index, &drafts);
        }
        Ok(())
    }

    #[by(guarded)]
    fn valid_drafts<'py>(
        &mut self,
        request_id: &Bound<'py, PyAny>,
        draft_token_ids: Bound<'py, PyList>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let place = self.place(request_id)?;
        place.map(|index| self.without_invalid_drafts(index, draft_token_ids)).transpose()
    }

    #[by(stopping)]
    fn finish_requests<'py>(
        &mut self,
        request_ids: Option<&Bound<'py, PyAny>>,
        status: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let Some(request_ids) = request_ids else {
            return if self.guard.is_broken() {
                self.finish_all_when_broken(status)
            } else {
                self.finish(self.requests.clone_ref(status.py()).bind(status.py()), status)
            };
        };
        self.guard.check()?;
        self.finish(request_ids, status)
    }

    #[by(stopping)]
    fn encode_outputs_for(&mut self, client_index: i64) -> PyResult<()> {
        self.message_writer.encode_for(client_index);
        Ok(())
    }

    #[by(guarded)]
    fn preempt_running(&mut self, py: Python<'_>, now: f64) -> PyResult<()> {
        let (scheduler, mut callbacks) = self.split(py);
        let preempted = scheduler.preempt_running(now, &mut callbacks);
        for index in self.or_stop(preempted)? {
            let told = self.preempted_req_ids.bind(py).add(&self.entries.get(index).id);
            self.or_stop(told)?;
        }
        Ok(())
    }

    #[by(guarded)]
    fn reset_prefix_cache(&mut self, py: Python<'_>) -> PyResult<bool> {
        let reset = self.scheduler.reset_prefix_cache();
        self.show_journal(py)?;
        Ok(reset)
    }

    #[by(stopping)]
    fn make_stats<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !self.scheduler.config().log_stats {
            return Ok(None);
        }
        let stats = self.scheduler.take_stats();
        let others = OtherStats {
            evictions: self.block_observer.evictions(py)?,
            cudagraph: None,
            perf: None,
            kv_transfer: self.kv_transfer_stats(py)?,
            encoder_transfer: None,
        };
        let types = &self.message_writer.types;
        types.scheduler_stats(py, &stats, &others).map(Some)
    }

    fn has_requests(&self, py: Python<'_>) -> PyResult<bool> {
        // The engine asks before each step and before it sleeps: one that can't go on ends at
        // once, and not with the next request that comes.
        self.guard.check()?;
        Ok(self.is_unfinished() || self.has_ends_to_tell(py))
    }

    fn has_unfinished_requests(&self) -> PyResult<bool> {
        Ok(self.is_unfinished())
    }

    fn has_finished_requests(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.has_ends_to_tell(py))
    }

    fn num_unfinished_requests(&self) -> PyResult<i64> {
        Ok(self.scheduler.num_unfinished_requests())
    }

    fn request_counts(&self) -> PyResult<(usize, usize)> {
        Ok((self.scheduler.running().len(), self.scheduler.num_waiting()))
    }

    fn running_requests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.requests_at(py, self.scheduler.running().iter().copied())
    }

    fn waiting_requests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.requests_at(py, self.scheduler.waiting().into_iter())
    }

    fn kv_cache_usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(convert::kv_cache_usage(py, self.scheduler.kv_cache().pool().usage()))
    }

    fn num_used_blocks(&self) -> PyResult<u32> {
        let pool = self.scheduler.kv_cache().pool();
        Ok(pool.num_blocks() - 1 - pool.num_free())
    }

    fn pause_state(&self) -> PyResult<u8> {
        Ok(match self.scheduler.pause_state() {
            PauseState::Unpaused => 0,
            PauseState::PausedNew => 1,
            PauseState::PausedAll => 2,
        })
    }

    #[by(stopping)]
    fn set_pause_state(&mut self, state: u8) -> PyResult<()> {
        self.scheduler.set_pause_state(match state {
            0 => PauseState::Unpaused,
            1 => PauseState::PausedNew,
            2 => PauseState::PausedAll,
            other => return Err(PyValueError::new_err(format!("unknown pause state {other}"))),
        });
        Ok(())
    }

    fn structured_output_request_ids<'py>(
        &self,
        request_ids: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyList>> {
        let ids = PyList::empty(request_ids.py());
        for (id, _) in request_ids {
            let request = self.place(&id)?.and_then(|index| self.scheduler.get(index));
            if request.is_some_and(|it| it.use_structured_output && !it.is_prefill_chunk) {
                ids.append(id)?;
            }
        }
        Ok(ids)
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let requests = PyDict::new(py);
        for (id, _) in self.requests.bind(py) {
            let index = self.place(&id)?.expect("each request has a place");
            let request = self.entries.get(index).request.bind(py);
            let state = self.scheduler.request(index);
            requests.set_item(id, snapshot::request_snapshot(request, state)?)?;
        }
        snapshot::snapshot(py, &self.scheduler, &self.entries, requests)
    }

    #[by(guarded)]
    fn check_invariants(&mut self) -> PyResult<()> {
        self.scheduler.check_invariants();
        Ok(())
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
    pub(crate) fn report_steps_to(&mut self, page: Arc<MeterPage>) {
        self.timer.report_to(page);
        self.timer.note_requests(&self.scheduler);
    }

    /// `num_kv_fetch_reqs_by_stage`, `connector_prefix_cache_stats` and `kv_connector_stats`, if
    /// there is a KV connector.
    fn kv_transfer_stats<'py>(&self, py: Python<'py>) -> PyResult<Option<[Bound<'py, PyAny>; 3]>> {
        if !self.kv_transfer.is_present() {
            return Ok(None);
        }
        let arguments = (self.scheduler.num_fetches(),);
        self.kv_transfer.call(intern!(py, "take_stats"), arguments)?.extract().map(Some)
    }

    /// The core, for those who only look.
    pub(crate) fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The id of the request at a place.
    pub(crate) fn id_of(&self, index: RequestIndex) -> &Py<PyString> {
        &self.entries.get(index).id
    }

    /// Whether a request has work to do in the current pause state.
    fn is_unfinished(&self) -> bool {
        self.scheduler.num_unfinished_requests() > 0
    }

    /// Whether the model runner has to be told of ends, or a KV connector keeps blocks.
    fn has_ends_to_tell(&self, py: Python<'_>) -> bool {
        // Requests that are kept until their blocks are sent need steps in which they are. Those
        // that an EC connector keeps need none by themselves: no worker says that they may go.
        !self.finished_req_ids.bind(py).is_empty()
            || (self.kv_transfer.is_present() && self.scheduler.num_kept_requests() > 0)
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

    /// `SchedulerOutput` of the step, if it could be decided on.
    fn tell_step<'py>(
        &mut self,
        py: Python<'py>,
        decided: PyResult<()>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.or_stop(decided)?;
        let number = self.pacer.as_mut().and_then(|it| it.note_step(&mut self.scheduler));
        let told = self.show_journal(py).and_then(|()| self.scheduler_output(py));
        let output = self.or_stop(told)?;
        if let (Some(pacer), Some(number)) = (&mut self.pacer, number) {
            pacer.await_result(number, &output);
        }
        Ok(output)
    }

    /// Chooses what the next step is decided with: what it is told, or what paces prompts, or what
    /// is configured.
    fn choose_knobs(
        &mut self,
        py: Python<'_>,
        throttle_prefills: bool,
        told: Option<ToldKnobs<'_>>,
    ) -> PyResult<()> {
        let configured = self.scheduler.config().step_knobs(throttle_prefills);
        let most = configured.max_num_scheduled_tokens;
        self.are_knobs_chosen = told.is_some() || self.pacer.is_some();
        self.knobs = match (told, &mut self.pacer) {
            (Some((max_num_scheduled_tokens, long_prefill_token_threshold, order)), _) => {
                let order = self.places_of(&order)?;
                StepKnobs {
                    max_num_scheduled_tokens,
                    long_prefill_token_threshold,
                    throttle_prefills,
                    order,
                }
            }
            (None, Some(pacer)) if !throttle_prefills => pacer.choose(&mut self.scheduler),
            (None, _) => configured,
        };
        if self.knobs.max_num_scheduled_tokens > most {
            return Err(PyValueError::new_err(format!(
                "a step may have {most} tokens at most, not {}",
                self.knobs.max_num_scheduled_tokens
            )));
        }
        let ids = self.knobs.order.iter().map(|&it| &self.entries.get(it).id);
        self.order = PyTuple::new(py, ids)?.unbind();
        Ok(())
    }

    /// Where these requests are, each once; those that have ended aside.
    fn places_of(&self, ids: &Bound<'_, PyTuple>) -> PyResult<Vec<RequestIndex>> {
        let mut places = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(place) = self.place(&id)?.filter(|it| !places.contains(it)) {
                places.push(place);
            }
        }
        Ok(places)
    }

    /// Brings all `Request` objects up to date.
    fn show_requests(&self, py: Python<'_>) -> PyResult<()> {
        for (_, place) in self.places.bind(py) {
            let index = RequestIndex(place.extract()?);
            let request = self.entries.get(index).request.bind(py);
            self.request_view.update(request, self.scheduler.request(index))?;
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
        let encoder_inputs = self.functions.encoder_inputs.bind(py);
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

    /// The draft tokens before the first that the request's grammar rejects, if it has one.
    fn without_invalid_drafts<'py>(
        &self,
        index: RequestIndex,
        draft_token_ids: Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyList>> {
        let state = self.scheduler.request(index);
        if !state.use_structured_output {
            return Ok(draft_token_ids);
        }
        let request = self.entries.get(index).request.bind(draft_token_ids.py());
        convert::sync_request_tokens(request, state.tokens())?;
        let validate = self.functions.validate_tokens.bind(request.py());
        Ok(validate.call1((request, draft_token_ids))?.cast_into()?)
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
    fn split<'a, 'py>(&'a mut self, py: Python<'py>) -> (&'a mut Scheduler, PyCallbacks<'a, 'py>) {
        let callbacks = PyCallbacks {
            py,
            entries: &self.entries,
            functions: &self.functions,
            extra_keys: &self.extra_keys,
            kv_transfer: &self.kv_transfer,
            encoder_transfer: &self.encoder_transfer,
            aux_outputs: &self.aux_outputs,
            view: &self.request_view,
            grammar_errors: &self.grammar_errors,
        };
        (&mut self.scheduler, callbacks)
    }

    /// An error that leaves the core and what is known of it apart is the last one.
    fn or_stop<T>(&mut self, result: PyResult<T>) -> PyResult<T> {
        if let Err(error) = &result {
            self.guard.note(error);
        }
        result
    }
}
