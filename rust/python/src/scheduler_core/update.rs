//! What a step brought: taken in by the core, and told to the clients.

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySet};
use sparksched_core::{RequestIndex, RequestOutput, RequestStatus, ScheduledOutput, Scheduler};

use super::SchedulerCore;
use crate::callbacks::{LoadFailures, LoadReport};
use crate::convert::{self, OtherStats, RareOutputs};
use crate::message_writer::{ClientDict, ClientOutputs, StepResult};

impl SchedulerCore {
    /// Has the core take in what the model runner brought; builds what the clients are told.
    pub(super) fn take_in<'py>(
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
            encoder_transfer_params: None,
            perf_stats: self.step_perf_stats(scheduler_output)?,
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
        self.aux_outputs.begin_update(model_runner_output)?;
        let mut outputs = std::mem::take(&mut self.outputs);
        let (scheduler, mut callbacks) = self.split(py);
        let updated = scheduler.update_from_output(scheduled, &mut callbacks, &mut outputs);
        self.or_stop(updated)?;
        result.transfer_params = self.kv_transfer.take_extras(py)?;
        result.encoder_transfer_params = self.encoder_transfer.take_extras(py)?;
        result.rare.routed_experts = self.aux_outputs.end_update(py)?;
        let told = self.tell(py, &result, &outputs, failures.failed_ids, report.as_ref());
        self.outputs = outputs;
        self.or_stop(told)
    }

    /// What vLLM computes of a step for its MFU metrics, if they are on.
    fn step_perf_stats<'py>(
        &self,
        scheduler_output: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let compute = self.functions.step_perf_stats.as_ref();
        compute.map(|it| it.bind(scheduler_output.py()).call1((scheduler_output,))).transpose()
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
        let mut written = self.message_writer.write(py, &self.entries, result, outputs)?;
        self.forget_finished(py, outputs)?;
        self.append_errors(py, failed_ids, &mut written)?;
        let events = report.map(|report| self.settle_transfers(report)).transpose()?;
        if self.encoder_transfer.is_present() {
            let report = result.model_runner_output.getattr(intern!(py, "ec_connector_output"))?;
            self.encoder_transfer.call(intern!(py, "update"), (report,))?;
        }
        self.block_observer.publish(py, events)?;
        let by_client = written.into_dict(py, &self.message_writer)?;
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
            self.kv_transfer.call(intern!(py, "update"), (report,))?;
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
        self.kv_transfer.call(intern!(py, "collect_stats"), (report,))?;
        Ok(self.kv_transfer.call(intern!(py, "take_events"), ())?.cast_into()?)
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

    /// Notes NaNs even for requests without an output in this step: a later one will tell them.
    fn note_nans(&mut self, result: &StepResult<'_, '_>) -> PyResult<()> {
        let Some(num_nans) = &result.rare.num_nans_in_logits else { return Ok(()) };
        let delivered = result.sampled.iter().filter(|it| it.is_delivered);
        for index in delivered.filter_map(|it| it.index) {
            let entry = self.entries.get_mut(index);
            if let Some(count) = num_nans.get_item(&entry.id)? {
                entry.num_nans_in_logits = count.extract()?;
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
            let types = &self.message_writer.types;
            let reason = &types.statuses.of(status).finish_reason;
            let output = types.failure(py, entry, reason, &ended.events)?;
            if let Some(error) = grammar_errors.get_item(&entry.id)? {
                types.set_grammar_error(&output, &error)?;
            }
            written.append(&self.message_writer, entry.client_index, &output)?;
            self.note_end(py, ended.index, status, ended.is_kept)?;
        }
        self.kv_transfer.take_extras(py)?;
        self.encoder_transfer.take_extras(py)?;
        Ok(())
    }

    /// The ids of requests whose grammar could not be compiled: in a set that grows as vLLM's does,
    /// because its order decides who is told first.
    fn ids_of_grammar_errors<'py>(
        &self,
        errors: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let set = errors.py().get_type::<PySet>();
        if self.message_writer.types.tells_errors() {
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
    /// cache, whose loads failed, or whose encoder outputs an EC connector can't bring any more.
    fn ids_of_errors<'py>(
        &self,
        grammar_errors: &Bound<'py, PyDict>,
        failed_loads: Option<Bound<'py, PySet>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = grammar_errors.py();
        let mut others = Vec::new();
        let encoder_inputs = self.functions.encoder_inputs.bind(py);
        if !encoder_inputs.is_none() {
            let mismatches = encoder_inputs.call_method0(intern!(py, "take_mismatches"))?;
            others.extend(mismatches.is_truthy()?.then_some(mismatches));
        }
        others.extend(failed_loads.map(Bound::into_any));
        let unavailable = self.encoder_transfer.call_if_present(intern!(py, "take_unavailable"))?;
        if let Some(ids) = unavailable {
            others.extend(ids.is_truthy()?.then_some(ids));
        }
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
                by_client.set_finished(client.extract()?, ids.cast()?, &self.message_writer)?;
            }
            finished.clear();
        }
        if self.scheduler.config().log_stats {
            let cudagraph = result.model_runner_output.getattr(intern!(py, "cudagraph_stats"))?;
            let others = OtherStats {
                evictions: self.block_observer.evictions(py)?,
                cudagraph: (!cudagraph.is_none()).then_some(cudagraph),
                perf: result.perf_stats.clone(),
                kv_transfer: self.kv_transfer_stats(py)?,
                encoder_transfer: self
                    .encoder_transfer
                    .call_if_present(intern!(py, "take_stats"))?,
            };
            let stats = self.scheduler.take_stats();
            by_client.set_stats(stats, &others, &self.message_writer)?;
        }
        Ok(())
    }
}

/// The ids in a set, in its order; none of None.
fn ids_of<'py>(ids: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if ids.is_none() { Ok(Vec::new()) } else { ids.try_iter()?.collect() }
}
