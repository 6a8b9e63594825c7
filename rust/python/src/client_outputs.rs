//! What a step brings to each client: objects as vLLM's scheduler returns them, or a message for
//! those whose messages are written here.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyList, PySet};
use sparksched_core::{RequestOutput, SchedulerStats};
use sparksched_wire::Output;

use crate::convert::{
    EngineOutputTypes, OtherStats, RareOutputs, SampledTokens, StepOutputs, set_transfer_params,
};
use crate::entries::{Entries, Entry};

/// Room that an output usually needs in a message.
const TYPICAL_OUTPUT_BYTES: usize = 72;

/// What a step brought.
pub(crate) struct StepResult<'a, 'py> {
    pub(crate) sampled: Vec<SampledTokens<'py>>,
    /// All tokens one after the other; `sampled` says which are whose.
    pub(crate) tokens: Vec<i32>,
    pub(crate) rare: RareOutputs<'py>,
    pub(crate) model_runner_output: &'a Bound<'py, PyAny>,
    /// What a KV connector told of requests that end with this step, by request id, if it did.
    pub(crate) transfer_params: Option<Bound<'py, PyDict>>,
}

/// How outputs are written.
pub(crate) struct OutputWriter {
    pub(crate) types: Arc<EngineOutputTypes>,
    /// Clients that get messages.
    encoded_clients: Vec<i64>,
    /// vLLM's encoder, for what only Python knows.
    encode_part: Option<Py<PyAny>>,
}

/// One client's outputs.
enum Written<'py> {
    Objects(Bound<'py, PyList>),
    Message(Box<StepOutputs>),
}

/// Outputs of a step by client, in the order of the clients' first outputs.
#[derive(Default)]
pub(crate) struct ClientOutputs<'py>(Vec<(i64, Written<'py>)>);

impl OutputWriter {
    pub(crate) fn import(py: Python<'_>) -> PyResult<Self> {
        let types = Arc::new(EngineOutputTypes::import(py)?);
        Ok(Self { types, encoded_clients: Vec::new(), encode_part: None })
    }

    /// Has a client get messages from now on.
    pub(crate) fn encode_for(&mut self, client: i64, encode_part: Py<PyAny>) {
        self.encode_part = Some(encode_part);
        if !self.encoded_clients.contains(&client) {
            self.encoded_clients.push(client);
        }
    }

    /// Writes what each client is to be told of its requests.
    pub(crate) fn write<'py>(
        &self,
        py: Python<'py>,
        entries: &Entries,
        result: &StepResult<'_, 'py>,
        outputs: &[RequestOutput],
    ) -> PyResult<ClientOutputs<'py>> {
        let by_client = by_client(entries, outputs);
        let written = by_client.into_iter().map(|(client, outputs)| {
            let written = if self.encoded_clients.contains(&client) {
                Written::Message(Box::new(self.message(py, entries, result, &outputs)?))
            } else {
                Written::Objects(self.objects(py, entries, result, &outputs)?)
            };
            Ok((client, written))
        });
        Ok(ClientOutputs(written.collect::<PyResult<_>>()?))
    }

    fn objects<'py>(
        &self,
        py: Python<'py>,
        entries: &Entries,
        result: &StepResult<'_, 'py>,
        outputs: &[&RequestOutput],
    ) -> PyResult<Bound<'py, PyList>> {
        let entries = || outputs.iter().map(|output| entries.get(output.index));
        let ids = PyList::new(py, entries().map(|entry| &entry.id).collect::<Vec<_>>())?;
        let tokens = PyList::empty(py);
        for output in outputs {
            tokens.append(result.new_token_ids(py, output)?)?;
        }
        let list = self.types.plain_outputs(&ids, &tokens)?;
        for (at, (output, entry)) in outputs.iter().zip(entries()).enumerate() {
            let is_rare =
                entry.is_rare() || result.rare.has_prompt_logprobs() || result.rare.has_pooled();
            if is_rare || !output.is_plain() {
                let sampled = &result.sampled[output.position];
                let object = list.get_item(at)?;
                self.types.complete(&object, entry, output, sampled, &result.rare)?;
                if let Some(params) = result.transfer_params_of(entry)? {
                    set_transfer_params(&object, output, &params)?;
                }
            }
        }
        Ok(list)
    }

    fn message<'py>(
        &self,
        py: Python<'py>,
        entries: &Entries,
        result: &StepResult<'_, 'py>,
        outputs: &[&RequestOutput],
    ) -> PyResult<StepOutputs> {
        let mut message = self.new_message(py, outputs.len())?;
        for output in outputs {
            let entry = entries.get(output.index);
            let params = result.transfer_params_of(entry)?;
            if result.rare.concern(entry)? || params.is_some() {
                let tokens = result.new_token_ids(py, output)?;
                let object = self.types.plain_output(&entry.id, &tokens)?;
                let sampled = &result.sampled[output.position];
                self.types.complete(&object, entry, output, sampled, &result.rare)?;
                if let Some(params) = params {
                    set_transfer_params(&object, output, &params)?;
                }
                message.push_object(&object)?;
            } else {
                message.push(&self.output(entry, result, output)?);
            }
        }
        Ok(message)
    }

    fn output<'a>(
        &self,
        entry: &'a Entry,
        result: &'a StepResult<'_, '_>,
        outcome: &'a RequestOutput,
    ) -> PyResult<Output<'a>> {
        let sampled = &result.sampled[outcome.position];
        sampled.cut(outcome.num_new_tokens)?;
        Ok(Output {
            request_id: &entry.wire_id,
            new_token_ids: &result.tokens[sampled.tokens.clone()][..outcome.num_new_tokens],
            outcome,
            finish_reason: outcome.finished.map(|it| self.types.statuses.finish_reason_value(it)),
            num_nans_in_logits: entry.num_nans_in_logits,
        })
    }

    fn new_message(&self, py: Python<'_>, num_outputs: usize) -> PyResult<StepOutputs> {
        let encode_part = self.encode_part.as_ref().expect("set with the first such client");
        StepOutputs::new(py, &self.types, encode_part, num_outputs * TYPICAL_OUTPUT_BYTES)
    }

    /// Nothing yet, in the form that the client gets.
    fn empty<'py>(&self, py: Python<'py>, client: i64) -> PyResult<Written<'py>> {
        Ok(if self.encoded_clients.contains(&client) {
            Written::Message(Box::new(self.new_message(py, 0)?))
        } else {
            Written::Objects(PyList::empty(py))
        })
    }
}

impl<'py> StepResult<'_, 'py> {
    fn transfer_params_of(&self, entry: &Entry) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.transfer_params.as_ref().map_or(Ok(None), |params| params.get_item(&entry.id))
    }

    fn new_token_ids(
        &self,
        py: Python<'py>,
        output: &RequestOutput,
    ) -> PyResult<Bound<'py, PyList>> {
        self.sampled[output.position].new_token_ids(py, output.num_new_tokens)
    }
}

fn by_client<'a>(
    entries: &Entries,
    outputs: &'a [RequestOutput],
) -> Vec<(i64, Vec<&'a RequestOutput>)> {
    let mut clients: Vec<(i64, Vec<&RequestOutput>)> = Vec::new();
    for output in outputs {
        let client = entries.get(output.index).client_index;
        match clients.iter_mut().find(|(known, _)| *known == client) {
            Some((_, of_client)) => of_client.push(output),
            None => clients.push((client, vec![output])),
        }
    }
    clients
}

impl<'py> ClientOutputs<'py> {
    /// Adds an `EngineCoreOutput`.
    pub(crate) fn append(
        &mut self,
        writer: &OutputWriter,
        client: i64,
        output: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let known = self.0.iter().position(|(known, _)| *known == client);
        if known.is_none() {
            self.0.push((client, writer.empty(output.py(), client)?));
        }
        let at = known.unwrap_or(self.0.len() - 1);
        match &mut self.0[at].1 {
            Written::Objects(list) => list.append(output),
            Written::Message(message) => message.push_object(output),
        }
    }

    /// `dict[client_index, EngineCoreOutputs | StepOutputs]`.
    pub(crate) fn into_dict(
        self,
        py: Python<'py>,
        writer: &OutputWriter,
    ) -> PyResult<ClientDict<'py>> {
        let dict = ClientDict(PyDict::new(py));
        for (client, written) in self.0 {
            dict.insert(client, written, writer)?;
        }
        Ok(dict)
    }
}

/// What `update_from_output()` returns.
pub(crate) struct ClientDict<'py>(pub(crate) Bound<'py, PyDict>);

impl<'py> ClientDict<'py> {
    fn insert(
        &self,
        client: i64,
        written: Written<'py>,
        writer: &OutputWriter,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = self.0.py();
        let outputs = match written {
            Written::Objects(list) => writer.types.outputs(&list)?,
            Written::Message(mut message) => {
                message.stamp(py)?;
                Bound::new(py, *message)?.into_any()
            }
        };
        self.0.set_item(client, &outputs)?;
        Ok(outputs)
    }

    /// A client's outputs, created if it has none in this step.
    fn outputs_of(&self, client: i64, writer: &OutputWriter) -> PyResult<Bound<'py, PyAny>> {
        match self.0.get_item(client)? {
            Some(outputs) => Ok(outputs),
            None => self.insert(client, writer.empty(self.0.py(), client)?, writer),
        }
    }

    /// Tells a client which of its requests have ended.
    pub(crate) fn set_finished(
        &self,
        client: i64,
        ids: &Bound<'py, PySet>,
        writer: &OutputWriter,
    ) -> PyResult<()> {
        let outputs = self.outputs_of(client, writer)?;
        outputs.setattr(intern!(ids.py(), "finished_requests"), ids)
    }

    /// Tells one front end, even if there is nothing else to tell, the scheduler's state.
    pub(crate) fn set_stats(
        &self,
        stats: SchedulerStats,
        others: &OtherStats<'py>,
        writer: &OutputWriter,
    ) -> PyResult<()> {
        let outputs = match self.0.iter().next() {
            Some((_, outputs)) => outputs,
            None => self.outputs_of(0, writer)?,
        };
        let py = self.0.py();
        if let Ok(message) = outputs.cast::<StepOutputs>() {
            return message.borrow_mut().set_core_stats(py, stats, others);
        }
        let stats = writer.types.scheduler_stats(py, &stats, others)?;
        outputs.setattr(intern!(py, "scheduler_stats"), stats)
    }
}
