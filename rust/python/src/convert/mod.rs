//! The only place that reads and builds vLLM's objects.
//!
//! Their shapes (names, order and defaults of fields) are compared with what is assumed here by
//! `sparksched.compat` before a scheduler is built, so that positions can be relied upon.

mod engine_outputs;
mod prompt;
mod request;
mod request_view;
mod runner_output;
mod scheduler_output;
mod steady_batch;
mod step_outputs;

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use sparksched_core::{BlockHash, RequestStatus};

pub(crate) use engine_outputs::{
    EngineOutputTypes, OtherStats, kv_cache_usage, set_transfer_params,
};
pub(crate) use prompt::{ExtraKeysReader, HASHED_PROMPT, Prompt, leave_prompt, prompt};
pub(crate) use request::{new_request, session_input, sync_request_tokens};
pub(crate) use request_view::RequestView;
pub(crate) use runner_output::{
    RareOutputs, SampledTokens, sampled_lists, sampled_tokens, value_of,
};
pub(crate) use scheduler_output::{
    EncoderStep, SchedulerOutputBuilder, StepExtras, all_block_ids, set_structured_output_flags,
};
pub(crate) use step_outputs::StepOutputs;

/// The states by their names in vLLM.
const STATES: [(&str, RequestStatus); 12] = [
    ("WAITING", RequestStatus::Waiting),
    ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", RequestStatus::WaitingForGrammar),
    ("WAITING_FOR_STREAMING_REQ", RequestStatus::WaitingForInput),
    ("WAITING_FOR_REMOTE_KVS", RequestStatus::WaitingForRemoteKvs),
    ("RUNNING", RequestStatus::Running),
    ("PREEMPTED", RequestStatus::Preempted),
    ("FINISHED_STOPPED", RequestStatus::FinishedStopped),
    ("FINISHED_LENGTH_CAPPED", RequestStatus::FinishedLengthCapped),
    ("FINISHED_ABORTED", RequestStatus::FinishedAborted),
    ("FINISHED_IGNORED", RequestStatus::FinishedIgnored),
    ("FINISHED_ERROR", RequestStatus::FinishedError),
    ("FINISHED_REPETITION", RequestStatus::FinishedRepetition),
];

/// The name that vLLM gives a status.
pub(crate) fn status_name(status: RequestStatus) -> &'static str {
    STATES.iter().find(|(_, it)| *it == status).expect("each status has a name").0
}

/// `RequestStatus` and what it means to a client.
pub(crate) struct StatusTypes(Vec<StatusType>);

pub(crate) struct StatusType {
    status: RequestStatus,
    value: i64,
    /// The member of `RequestStatus`.
    pub(crate) member: Py<PyAny>,
    /// The member of `FinishReason`, and its number; None of a state that is not finished.
    pub(crate) finish_reason: Py<PyAny>,
    pub(crate) finish_reason_value: Option<u8>,
}

impl StatusTypes {
    /// Looks the members up.
    pub(crate) fn import(py: Python<'_>) -> PyResult<Self> {
        let statuses = class(py, "vllm.v1.request", "RequestStatus")?;
        let states = STATES.into_iter().map(|(name, status)| -> PyResult<StatusType> {
            let member = statuses.getattr(py, name)?;
            let finish_reason = statuses.call_method1(py, "get_finished_reason", (&member,))?;
            Ok(StatusType {
                status,
                value: member.extract(py)?,
                member,
                finish_reason_value: finish_reason.extract(py)?,
                finish_reason,
            })
        });
        Ok(Self(states.collect::<PyResult<_>>()?))
    }

    /// The finished state that a `RequestStatus` member stands for.
    pub(crate) fn parse(&self, status: &Bound<'_, PyAny>) -> PyResult<RequestStatus> {
        let value: i64 = status.extract()?;
        let known = self.0.iter().find(|it| it.value == value && it.status.is_finished());
        known.map(|it| it.status).ok_or_else(|| {
            PyValueError::new_err(format!("requests can't be finished with the status {status}"))
        })
    }

    pub(crate) fn of(&self, status: RequestStatus) -> &StatusType {
        self.0.iter().find(|it| it.status == status).expect("all states are there")
    }
}

/// A class of vLLM's.
fn class(py: Python<'_>, module: &str, name: &str) -> PyResult<Py<PyAny>> {
    Ok(py.import(module)?.getattr(name)?.unbind())
}

pub(crate) fn token_ids(list: &Bound<'_, PyList>) -> PyResult<Vec<i32>> {
    let mut tokens = Vec::with_capacity(list.len());
    extend_token_ids(list, &mut tokens)?;
    Ok(tokens)
}

/// Appends the token ids of a list of `int`.
pub(crate) fn extend_token_ids(list: &Bound<'_, PyList>, tokens: &mut Vec<i32>) -> PyResult<()> {
    for token in list {
        tokens.push(token.extract().map_err(|error| token_out_of_range(&token, &error))?);
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

/// vLLM's model runners hold token ids in 32 bits, too. Which id it is stays unsaid: errors are
/// logged, and it may be of a prompt.
fn token_out_of_range(token: &Bound<'_, PyAny>, error: &PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(token.py()) {
        PyOverflowError::new_err("a token id does not fit into 32 bits")
    } else {
        error.clone_ref(token.py())
    }
}
