//! `SchedulerOutput`, `NewRequestData` and `CachedRequestData`.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PySet, PyTuple};
use smallvec::SmallVec;
use sparksched_core::{
    Admission, BlockId, Request, RequestIndex, ScheduledRequest, Scheduler, Step,
};

use super::steady_batch::SteadyBatch;
use super::{class, sync_request_tokens};
use crate::entries::Entries;

/// Sets what is known of a step only when it counts as computed.
pub(crate) fn set_structured_output_flags(
    scheduler_output: &Bound<'_, PyAny>,
    step: &Step,
) -> PyResult<()> {
    let py = scheduler_output.py();
    if step.has_structured_output_requests {
        scheduler_output.setattr(intern!(py, "has_structured_output_requests"), true)?;
    }
    if step.pending_structured_output_tokens {
        scheduler_output.setattr(intern!(py, "pending_structured_output_tokens"), true)?;
    }
    Ok(())
}

/// Builds `SchedulerOutput`s.
pub(crate) struct SchedulerOutputBuilder {
    scheduler_output: Py<PyAny>,
    cached_request_data: Py<PyAny>,
    new_request_data: Py<PyAny>,
    strip_covered_mm_data: Py<PyAny>,
    block_copy: Py<PyAny>,
    /// This vLLM has the field `encoder_input_updates`.
    tells_input_updates: bool,
    /// The model has rotary positions of several dimensions.
    uses_mrope: bool,
    steady: SteadyBatch,
}

/// What a step tells besides its requests. Its consumers keep the sets.
pub(crate) struct StepExtras<'py> {
    pub(crate) finished_req_ids: Bound<'py, PySet>,
    pub(crate) preempted_req_ids: Bound<'py, PySet>,
    /// Of multimodal models.
    pub(crate) encoder: Option<EncoderStep<'py>>,
}

pub(crate) struct EncoderStep<'py> {
    /// `sparksched.engine.encoder_inputs.EncoderInputs`.
    pub(crate) inputs: Bound<'py, PyAny>,
    /// `scheduled_encoder_inputs`, `free_encoder_mm_hashes`, `scheduled_encoder_input_stats` and
    /// `ec_manager_metadata`.
    pub(crate) told: [Bound<'py, PyAny>; 4],
}

/// What a step is built from.
struct Source<'a, 'py> {
    py: Python<'py>,
    scheduler: &'a Scheduler,
    entries: &'a Entries,
}

impl SchedulerOutputBuilder {
    /// Looks the classes up.
    pub(crate) fn import(py: Python<'_>, uses_mrope: bool) -> PyResult<Self> {
        let module = "vllm.v1.core.sched.output";
        let scheduler_output = class(py, module, "SchedulerOutput")?;
        let fields = scheduler_output.getattr(py, "__dataclass_fields__")?.into_bound(py);
        Ok(Self {
            scheduler_output,
            tells_input_updates: fields.contains("encoder_input_updates")?,
            cached_request_data: class(py, module, "CachedRequestData")?,
            new_request_data: class(py, module, "NewRequestData")?,
            strip_covered_mm_data: class(py, module, "strip_covered_mm_data")?,
            block_copy: class(py, "vllm.v1.core.kv_cache_utils", "KVCacheBlockCopy")?,
            uses_mrope,
            steady: SteadyBatch::default(),
        })
    }

    /// `SchedulerOutput` of the scheduler's last step.
    pub(crate) fn build<'py>(
        &mut self,
        scheduler: &Scheduler,
        entries: &Entries,
        extras: StepExtras<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = extras.finished_req_ids.py();
        let source = Source { py, scheduler, entries };
        let step = scheduler.step();
        self.steady.observe(py, entries, step)?;
        let new_requests = self.new_requests(&source, step)?;
        let input_updates = if self.tells_input_updates {
            Some(source.encoder_input_updates(step, &new_requests, extras.encoder.as_ref())?)
        } else {
            None
        };
        let nothing = || {
            let none = py.None().into_bound(py);
            let (inputs, freed) = (PyDict::new(py).into_any(), PyList::empty(py).into_any());
            [inputs, freed, none.clone(), none]
        };
        let [encoder_inputs, freed_encoder_inputs, encoder_stats, encoder_metadata] =
            extras.encoder.map_or_else(nothing, |encoder| encoder.told);
        let values = [
            new_requests.into_any(),
            self.cached_requests(&source, step)?,
            self.num_scheduled_tokens(&source, step)?.into_any(),
            step.total_num_tokens.into_pyobject(py)?.into_any(),
            source.scheduled_spec_decode_tokens(step)?.into_any(),
            encoder_inputs,
            extras.finished_req_ids.into_any(),
            freed_encoder_inputs,
        ];
        let values_behind = [
            encoder_stats,
            extras.preempted_req_ids.into_any(),
            PyBool::new(py, step.has_structured_output_requests).to_owned().into_any(),
            PyBool::new(py, step.pending_structured_output_tokens).to_owned().into_any(),
        ];
        let values: SmallVec<[_; 13]> =
            values.into_iter().chain(input_updates).chain(values_behind).collect();
        let output = self.scheduler_output.bind(py).call1(PyTuple::new(py, values)?)?;
        if step.has_sync_kv_loads {
            output.setattr(intern!(py, "has_sync_kv_loads"), true)?;
        }
        if !step.blocks_to_zero.is_empty() {
            let ids = PyList::new(py, step.blocks_to_zero.iter().map(|id| id.0))?;
            output.setattr(intern!(py, "new_block_ids_to_zero"), ids)?;
        }
        if !step.block_copies.is_empty() {
            let copies = PyList::empty(py);
            for (from, to) in &step.block_copies {
                copies.append(self.block_copy.bind(py).call1((from.0, to.0))?)?;
            }
            output.setattr(intern!(py, "kv_cache_block_copies"), copies)?;
        }
        if step.num_spec_tokens_to_schedule > 0 {
            let name = intern!(py, "num_spec_tokens_to_schedule");
            output.setattr(name, step.num_spec_tokens_to_schedule)?;
        }
        if scheduler.config().behaviors.can_skip_drafts && !step.needs_drafts {
            output.setattr(intern!(py, "skip_drafts"), true)?;
        }
        if !encoder_metadata.is_none() {
            output.setattr(intern!(py, "ec_manager_metadata"), encoder_metadata)?;
        }
        Ok(output)
    }

    /// `scheduled_new_reqs`: first those that are new, then those that are only told as new.
    fn new_requests<'py>(
        &self,
        source: &Source<'_, 'py>,
        step: &Step,
    ) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(source.py);
        for kind in [Admission::New, Admission::Resumed] {
            for (admission, scheduled) in &step.admitted {
                if *admission == kind && source.is_told_as_new(kind) {
                    list.append(self.new_request(source, scheduled)?)?;
                }
            }
        }
        Ok(list)
    }

    fn new_request<'py>(
        &self,
        source: &Source<'_, 'py>,
        scheduled: &ScheduledRequest,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = source.py;
        let entry = source.entries.get(scheduled.index);
        let request = entry.request.bind(py);
        let state = source.scheduler.request(scheduled.index);
        // Model Runner V2 takes the whole sequence from here, output included.
        let prefill_token_ids = if source.scheduler.config().resume_as_new {
            sync_request_tokens(request, state.tokens())?;
            Some(request.getattr(intern!(py, "_all_token_ids"))?)
        } else {
            None
        };
        self.new_request_data.bind(py).call1((
            &entry.id,
            request.getattr(intern!(py, "prompt_token_ids"))?,
            self.mm_features(request, state, scheduled)?,
            request.getattr(intern!(py, "sampling_params"))?,
            request.getattr(intern!(py, "pooling_params"))?,
            all_block_ids(py, state)?,
            scheduled.num_computed_tokens,
            request.getattr(intern!(py, "lora_request"))?,
            request.getattr(intern!(py, "prompt_embeds"))?,
            request.getattr(intern!(py, "prompt_is_token_ids"))?,
            prefill_token_ids,
        ))
    }

    /// `mm_features`, without the data of items that are computed already.
    fn mm_features<'py>(
        &self,
        request: &Bound<'py, PyAny>,
        state: &Request,
        scheduled: &ScheduledRequest,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = request.py();
        let features = request.getattr(intern!(py, "mm_features"))?;
        if !state.has_encoder_inputs {
            return Ok(features);
        }
        let strip = self.strip_covered_mm_data.bind(py);
        strip.call1((features, scheduled.num_computed_tokens, self.uses_mrope))
    }

    /// `scheduled_cached_reqs`: those that were running, then those that resume.
    fn cached_requests<'py>(
        &self,
        source: &Source<'_, 'py>,
        step: &Step,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = source.py;
        let mut cached: Vec<&ScheduledRequest> = step.running.iter().collect();
        let resumed = step.admitted.iter().filter(|(kind, _)| !source.is_told_as_new(*kind));
        cached.extend(resumed.map(|(_, scheduled)| scheduled));
        let resumed = &cached[step.running.len()..];

        let resumed_req_ids = PySet::empty(py)?;
        for it in resumed {
            resumed_req_ids.add(source.id(it.index))?;
        }
        let (req_ids, new_block_ids) = if let Some(same) = self.steady.objects(py) {
            (same.req_ids(), same.new_block_ids())
        } else {
            let ids: Vec<_> = cached.iter().map(|it| source.id(it.index)).collect();
            (PyList::new(py, ids)?, PyList::new(py, cached.iter().map(|_| py.None()))?)
        };
        for (at, it) in step.running.iter().enumerate().filter(|(_, it)| it.has_new_blocks) {
            let ids = added_block_ids(py, source.scheduler.request(it.index))?;
            new_block_ids.set_item(at, ids)?;
        }
        for (at, it) in resumed.iter().enumerate() {
            let request = source.scheduler.request(it.index);
            // A model without a KV cache has no groups to tell blocks of.
            if !request.groups.is_empty() {
                let ids = all_block_ids(py, request)?;
                new_block_ids.set_item(step.running.len() + at, ids)?;
            }
        }
        self.cached_request_data.bind(py).call1((
            req_ids,
            resumed_req_ids,
            source.new_token_ids(&cached)?,
            source.all_token_ids(&cached)?,
            new_block_ids,
            PyList::new(py, cached.iter().map(|it| it.num_computed_tokens))?,
            PyList::new(py, cached.iter().map(|it| it.num_output_tokens))?,
        ))
    }

    /// In the order in which requests were scheduled.
    fn num_scheduled_tokens<'py>(
        &self,
        source: &Source<'_, 'py>,
        step: &Step,
    ) -> PyResult<Bound<'py, PyDict>> {
        match self.steady.objects(source.py) {
            Some(same) => same.num_scheduled_tokens(),
            None => source.num_scheduled_tokens(step),
        }
    }
}

impl<'py> Source<'_, 'py> {
    fn id(&self, index: RequestIndex) -> &Bound<'py, pyo3::types::PyString> {
        self.entries.get(index).id.bind(self.py)
    }

    /// Whether an admitted request is told to the model runner as a new one.
    fn is_told_as_new(&self, admission: Admission) -> bool {
        admission == Admission::New || self.scheduler.config().resume_as_new
    }

    fn num_scheduled_tokens(&self, step: &Step) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(self.py);
        for it in step.scheduled() {
            dict.set_item(self.id(it.index), it.num_tokens)?;
        }
        Ok(dict)
    }

    /// `encoder_input_updates`: what Model Runner V2 is to keep and to forget of the encoder inputs
    /// of the requests in this step.
    fn encoder_input_updates(
        &self,
        step: &Step,
        new_requests: &Bound<'py, PyList>,
        encoder: Option<&EncoderStep<'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let encoder = encoder.filter(|_| self.scheduler.config().resume_as_new);
        let Some(EncoderStep { inputs, told: [scheduled_inputs, ..] }) = encoder else {
            return Ok(PyDict::new(py).into_any());
        };
        let scheduled = PyList::empty(py);
        for it in step.scheduled() {
            let state = self.scheduler.request(it.index);
            if state.has_encoder_inputs {
                let request = self.entries.get(it.index).request.bind(py);
                scheduled.append((request, num_confirmed_tokens(state, it)))?;
            }
        }
        let arguments = (scheduled, new_requests, scheduled_inputs);
        inputs.call_method1(intern!(py, "input_updates"), arguments)
    }

    /// Of the requests that verify draft tokens.
    fn scheduled_spec_decode_tokens(&self, step: &Step) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(self.py);
        for it in step.scheduled().filter(|it| it.num_draft_tokens > 0) {
            dict.set_item(self.id(it.index), PyList::new(self.py, step.draft_tokens(it))?)?;
        }
        Ok(dict)
    }

    /// The tokens to be computed, without drafts, where the model runner doesn't know them: the
    /// first stage of a pipeline does not see what the last one has sampled.
    fn new_token_ids(&self, cached: &[&ScheduledRequest]) -> PyResult<Bound<'py, PyList>> {
        let lists = PyList::empty(self.py);
        if self.scheduler.config().sends_sampled_tokens {
            for it in cached {
                let tokens = self.scheduler.request(it.index).tokens();
                let begin = (it.num_computed_tokens as usize).min(tokens.len());
                let end = begin + it.num_tokens.saturating_sub(it.num_draft_tokens) as usize;
                lists.append(PyList::new(self.py, &tokens[begin..end.min(tokens.len())])?)?;
            }
        }
        Ok(lists)
    }

    /// The sequences that Model Runner V1 does not have from the step before.
    fn all_token_ids(&self, cached: &[&ScheduledRequest]) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(self.py);
        if !self.scheduler.config().resume_as_new {
            for it in cached.iter().filter(|it| it.is_new_to_batch) {
                let tokens = PyList::new(self.py, self.scheduler.request(it.index).tokens())?;
                dict.set_item(self.id(it.index), tokens)?;
            }
        }
        Ok(dict)
    }
}

/// Tokens that were computed before this step, without those of steps in flight.
fn num_confirmed_tokens(state: &Request, scheduled: &ScheduledRequest) -> i64 {
    let num_placeholders = scheduled.num_output_tokens - state.num_output_tokens() as u32;
    let num_in_flight = scheduled.num_in_flight_tokens;
    i64::from(scheduled.num_computed_tokens) - i64::from(num_placeholders).max(num_in_flight)
}

/// All block ids of a request: one list a KV cache group.
pub(crate) fn all_block_ids<'py>(
    py: Python<'py>,
    request: &Request,
) -> PyResult<Bound<'py, PyTuple>> {
    block_ids(py, request.groups.iter().map(|blocks| blocks.table.as_slice()))
}

/// Block ids that a running request got in this step.
fn added_block_ids<'py>(py: Python<'py>, request: &Request) -> PyResult<Bound<'py, PyTuple>> {
    block_ids(py, request.groups.iter().map(sparksched_core::request::GroupBlocks::new_blocks))
}

fn block_ids<'py, 'a>(
    py: Python<'py>,
    groups: impl Iterator<Item = &'a [BlockId]>,
) -> PyResult<Bound<'py, PyTuple>> {
    let lists = groups.map(|ids| PyList::new(py, ids.iter().map(|id| id.0)));
    PyTuple::new(py, lists.collect::<PyResult<Vec<_>>>()?)
}
