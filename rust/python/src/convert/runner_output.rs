//! `ModelRunnerOutput`: what a step sampled, and the parts that few steps have.

use pyo3::exceptions::PyKeyError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use sparksched_core::{RequestIndex, RequestOutput, Scheduler};

use super::extend_token_ids;

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
