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
    value_of,
};
use crate::entries::{Entries, Entry};

/// Room that an output usually needs in a message.
const TYPICAL_OUTPUT_BYTES: usize = 72;

pub(crate) struct StepResult<'a, 'py> {
    pub(crate) sampled: Vec<SampledTokens>,
    /// The model runner's own lists of tokens by row, if the step sampled; outputs share them.
    pub(crate) sampled_lists: Option<Bound<'py, PyList>>,
    /// All tokens one after the other; `sampled` says which are whose.
    pub(crate) tokens: Vec<i32>,
    pub(crate) rare: RareOutputs<'py>,
    pub(crate) model_runner_output: &'a Bound<'py, PyAny>,
    /// What a KV connector told of requests that end with this step, by request id, if it did.
    pub(crate) transfer_params: Option<Bound<'py, PyDict>>,
    /// The same of an EC connector.
    pub(crate) encoder_transfer_params: Option<Bound<'py, PyDict>>,
    /// vLLM's estimate of the work that the model did, if it is wanted.
    pub(crate) perf_stats: Option<Bound<'py, PyAny>>,
}

/// What a KV connector and an EC connector told of one request that ends.
type TransferParams<'py> = [Option<Bound<'py, PyAny>>; 2];

/// How outputs are written.
pub(crate) struct MessageWriter {
    pub(crate) types: Arc<EngineOutputTypes>,
    /// Clients that get messages.
    encoded_clients: Vec<i64>,
    /// vLLM's encoder, for what only Python knows.
    encode_part: Py<PyAny>,
}

/// One client's outputs.
enum Written<'py> {
    Objects(Bound<'py, PyList>),
    Message(Box<StepOutputs>),
}

/// One client's outputs while they are gathered.
enum Pending<'a> {
    Objects(Vec<(&'a Entry, &'a RequestOutput)>),
    Message(Box<StepOutputs>),
}

/// Outputs of a step by client, in the order of the clients' first outputs.
#[derive(Default)]
pub(crate) struct ClientOutputs<'py>(Vec<(i64, Written<'py>)>);

impl MessageWriter {
    pub(crate) fn import(py: Python<'_>, encode_part: Py<PyAny>) -> PyResult<Self> {
        let types = Arc::new(EngineOutputTypes::import(py)?);
        Ok(Self { types, encoded_clients: Vec::new(), encode_part })
    }

    /// Has a client get messages from now on.
    pub(crate) fn encode_for(&mut self, client: i64) {
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
        let mut clients: Vec<(i64, Pending<'_>)> = Vec::new();
        for output in outputs {
            let entry = entries.get(output.index);
            let client = entry.client_index;
            let known = clients.iter().position(|(known, _)| *known == client);
            let at = known.unwrap_or(clients.len());
            if known.is_none() {
                clients.push((client, self.pending(py, client, outputs.len())?));
            }
            match &mut clients[at].1 {
                Pending::Objects(pending) => pending.push((entry, output)),
                Pending::Message(message) => self.add_to(message, entry, result, output)?,
            }
        }
        let written = clients.into_iter().map(|(client, pending)| {
            let written = match pending {
                Pending::Message(message) => Written::Message(message),
                Pending::Objects(pending) => Written::Objects(self.objects(py, result, &pending)?),
            };
            Ok((client, written))
        });
        Ok(ClientOutputs(written.collect::<PyResult<_>>()?))
    }

    fn pending<'a>(
        &self,
        py: Python<'_>,
        client: i64,
        num_outputs: usize,
    ) -> PyResult<Pending<'a>> {
        Ok(if self.encoded_clients.contains(&client) {
            Pending::Message(Box::new(self.new_message(py, num_outputs)?))
        } else {
            Pending::Objects(Vec::new())
        })
    }

    /// One loop in C makes all objects; what few of them have is set afterwards.
    fn objects<'py>(
        &self,
        py: Python<'py>,
        result: &StepResult<'_, 'py>,
        outputs: &[(&Entry, &RequestOutput)],
    ) -> PyResult<Bound<'py, PyList>> {
        let ids = PyList::new(py, outputs.iter().map(|(entry, _)| &entry.id))?;
        let tokens = PyList::empty(py);
        for (_, output) in outputs {
            tokens.append(result.new_token_ids(py, output)?)?;
        }
        let list = self.types.plain_outputs(&ids, &tokens)?;
        for (at, (entry, output)) in outputs.iter().enumerate() {
            let is_rare =
                entry.is_rare() || result.rare.has_prompt_logprobs() || result.rare.concern_all();
            if is_rare || output.news.is_some() {
                let params = result.transfer_params_of(entry)?;
                self.complete(&list.get_item(at)?, entry, result, output, params)?;
            }
        }
        Ok(list)
    }

    fn add_to(
        &self,
        message: &mut StepOutputs,
        entry: &Entry,
        result: &StepResult<'_, '_>,
        output: &RequestOutput,
    ) -> PyResult<()> {
        let params = result.transfer_params_of(entry)?;
        if !result.rare.concern(entry)? && params.iter().all(Option::is_none) {
            message.push(&self.output(entry, result, output)?);
            return Ok(());
        }
        let py = result.model_runner_output.py();
        let object = self.types.plain_output(&entry.id, &result.new_token_ids(py, output)?)?;
        self.complete(&object, entry, result, output, params)?;
        message.push_object(&object)
    }

    fn complete<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        entry: &Entry,
        result: &StepResult<'_, 'py>,
        output: &RequestOutput,
        [kv_params, encoder_params]: TransferParams<'py>,
    ) -> PyResult<()> {
        let sampled = &result.sampled[output.position];
        self.types.complete(object, entry, output, sampled, &result.rare)?;
        if let Some(params) = kv_params {
            set_transfer_params(object, output.news.as_deref(), &params)?;
        }
        if let Some(params) = encoder_params {
            object.setattr(intern!(object.py(), "ec_transfer_params"), params)?;
        }
        Ok(())
    }

    fn output<'a>(
        &self,
        entry: &'a Entry,
        result: &'a StepResult<'_, '_>,
        output: &'a RequestOutput,
    ) -> PyResult<Output<'a>> {
        let sampled = &result.sampled[output.position];
        result.cut(output)?;
        let news = output.news.as_deref();
        let finished = news.and_then(|news| news.finished);
        Ok(Output {
            request_id: &entry.wire_id,
            new_token_ids: &result.tokens[sampled.tokens.clone()][..output.num_new_tokens],
            news,
            finish_reason: finished.and_then(|it| self.types.statuses.of(it).finish_reason_value),
            num_nans_in_logits: entry.num_nans_in_logits,
        })
    }

    fn new_message(&self, py: Python<'_>, num_outputs: usize) -> PyResult<StepOutputs> {
        StepOutputs::new(py, &self.types, &self.encode_part, num_outputs * TYPICAL_OUTPUT_BYTES)
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
    fn transfer_params_of(&self, entry: &Entry) -> PyResult<TransferParams<'py>> {
        let of_entry = |params: &Option<_>| value_of(params.as_ref(), &entry.id);
        Ok([of_entry(&self.transfer_params)?, of_entry(&self.encoder_transfer_params)?])
    }

    /// The tokens that go to the client: the model runner's own list, cut where the request ended.
    fn new_token_ids(
        &self,
        py: Python<'py>,
        output: &RequestOutput,
    ) -> PyResult<Bound<'py, PyList>> {
        self.cut(output)?;
        let list = self.list_of(output)?;
        Ok(list.unwrap_or_else(|| PyList::empty(py)))
    }

    /// Drops what was sampled after the request had ended; as vLLM does, from the model runner's
    /// own list.
    fn cut(&self, output: &RequestOutput) -> PyResult<()> {
        let num_sampled = self.sampled[output.position].tokens.len();
        if output.num_new_tokens < num_sampled
            && let Some(list) = self.list_of(output)?
        {
            list.del_slice(output.num_new_tokens, num_sampled)?;
        }
        Ok(())
    }

    fn list_of(&self, output: &RequestOutput) -> PyResult<Option<Bound<'py, PyList>>> {
        let Some(lists) = &self.sampled_lists else { return Ok(None) };
        let list = lists.get_item(self.sampled[output.position].row)?;
        Ok(Some(list.cast_into()?))
    }
}

impl<'py> ClientOutputs<'py> {
    /// Adds an `EngineCoreOutput`.
    pub(crate) fn append(
        &mut self,
        writer: &MessageWriter,
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
        writer: &MessageWriter,
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
        writer: &MessageWriter,
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
    fn outputs_of(&self, client: i64, writer: &MessageWriter) -> PyResult<Bound<'py, PyAny>> {
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
        writer: &MessageWriter,
    ) -> PyResult<()> {
        let outputs = self.outputs_of(client, writer)?;
        outputs.setattr(intern!(ids.py(), "finished_requests"), ids)
    }

    /// Tells one front end, even if there is nothing else to tell, the scheduler's state.
    pub(crate) fn set_stats(
        &self,
        stats: SchedulerStats,
        others: &OtherStats<'py>,
        writer: &MessageWriter,
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
