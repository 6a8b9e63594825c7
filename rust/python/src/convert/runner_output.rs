//! `ModelRunnerOutput`: what a step sampled, and the parts that few steps have.

use pyo3::exceptions::PyKeyError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use sparksched_core::{RequestIndex, Scheduler};

use super::extend_token_ids;
use crate::entries::Entry;

/// One request's share of a model runner's output.
pub(crate) struct SampledTokens<'py> {
    /// The request, if it still exists.
    pub(crate) index: Option<RequestIndex>,
    /// Tokens that the step was scheduled with.
    pub(crate) num_scheduled_tokens: u32,
    /// Row of the model runner's output.
    pub(crate) row: usize,
    /// The model runner's own list, which the output will share.
    list: Option<Bound<'py, PyList>>,
    /// Where its tokens are in the flat buffer.
    pub(crate) tokens: std::ops::Range<usize>,
    /// What the step brings for the request is looked at: it is still there and waits for it.
    pub(crate) is_delivered: bool,
}

impl<'py> SampledTokens<'py> {
    /// The tokens that go to the client: the model runner's own list, cut after `num_new_tokens`.
    pub(crate) fn new_token_ids(
        &self,
        py: Python<'py>,
        num_new_tokens: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        self.cut(num_new_tokens)?;
        Ok(self.list.clone().unwrap_or_else(|| PyList::empty(py)))
    }

    /// Drops what was sampled after the request had ended; as vLLM does, from the model runner's
    /// own list.
    pub(crate) fn cut(&self, num_new_tokens: usize) -> PyResult<()> {
        match &self.list {
            Some(list) if num_new_tokens < self.tokens.len() => {
                list.del_slice(num_new_tokens, self.tokens.len())
            }
            _ => Ok(()),
        }
    }
}

/// Reads what was sampled for the requests of the step that comes back; their tokens are appended
/// to `tokens`. `place` finds requests by id.
pub(crate) fn sampled_tokens<'py>(
    scheduler_output: &Bound<'py, PyAny>,
    model_runner_output: &Bound<'py, PyAny>,
    scheduler: &Scheduler,
    place: impl Fn(&Bound<'py, PyAny>) -> PyResult<Option<RequestIndex>>,
    tokens: &mut Vec<i32>,
) -> PyResult<Vec<SampledTokens<'py>>> {
    let py = scheduler_output.py();
    let scheduled = scheduler_output.getattr(intern!(py, "num_scheduled_tokens"))?;
    let rows = model_runner_output.getattr(intern!(py, "req_id_to_index"))?;
    let rows = rows.cast::<PyDict>()?;
    let lists = model_runner_output.getattr(intern!(py, "sampled_token_ids"))?;
    // None or empty: a step that samples nothing.
    let lists = if lists.is_truthy()? { Some(lists.cast::<PyList>()?) } else { None };
    let scheduled = scheduled.cast::<PyDict>()?;
    let mut sampled = Vec::with_capacity(scheduled.len());
    for (id, num_scheduled_tokens) in scheduled {
        let index = place(&id)?;
        let is_delivered =
            index.is_some_and(|index| !scheduler.request(index).drops_stale_output());
        let mut share = SampledTokens {
            index,
            num_scheduled_tokens: num_scheduled_tokens.extract()?,
            row: 0,
            list: None,
            tokens: tokens.len()..tokens.len(),
            is_delivered,
        };
        if is_delivered {
            let row = rows.get_item(&id)?;
            share.row = row.ok_or_else(|| PyKeyError::new_err(id.unbind()))?.extract()?;
            if let Some(lists) = lists {
                let list = lists.get_item(share.row)?.cast_into::<PyList>()?;
                extend_token_ids(&list, tokens)?;
                share.tokens.end = tokens.len();
                share.list = Some(list);
            }
        }
        sampled.push(share);
    }
    Ok(sampled)
}

/// Parts of a model runner's output that few steps have.
pub(crate) struct RareOutputs<'py> {
    logprobs: Option<Bound<'py, PyAny>>,
    prompt_logprobs: Option<Bound<'py, PyDict>>,
    prompt_token_id_logprobs: Option<Bound<'py, PyDict>>,
    pub(crate) num_nans_in_logits: Option<Bound<'py, PyDict>>,
}

impl<'py> RareOutputs<'py> {
    /// Reads them.
    pub(crate) fn of(runner: &Bound<'py, PyAny>) -> PyResult<Self> {
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

    /// Whether any request may have prompt logprobs in this step.
    pub(crate) fn has_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.is_some() || self.prompt_token_id_logprobs.is_some()
    }

    /// Whether a request's output has parts that only Python knows.
    pub(crate) fn concern(&self, entry: &Entry) -> PyResult<bool> {
        Ok(entry.trace_headers.is_some()
            || (entry.wants_logprobs && self.logprobs.is_some())
            || (self.has_prompt_logprobs()
                && (self.prompt_logprobs(&entry.id)?.is_some()
                    || self.prompt_token_id_logprobs(&entry.id)?.is_some())))
    }

    /// The sample logprobs of a request that wants them.
    pub(crate) fn logprobs(
        &self,
        row: usize,
        num_tokens: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(logprobs) = &self.logprobs else {
            return Ok(None);
        };
        logprobs.call_method1(intern!(logprobs.py(), "slice_request"), (row, num_tokens)).map(Some)
    }

    pub(crate) fn prompt_logprobs(&self, id: &Py<PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.prompt_logprobs.as_ref().map_or(Ok(None), |dict| dict.get_item(id))
    }

    pub(crate) fn prompt_token_id_logprobs(
        &self,
        id: &Py<PyString>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.prompt_token_id_logprobs.as_ref().map_or(Ok(None), |dict| dict.get_item(id))
    }

    pub(crate) fn num_nans(&self, id: &Py<PyString>) -> PyResult<Option<i64>> {
        let Some(dict) = &self.num_nans_in_logits else {
            return Ok(None);
        };
        dict.get_item(id)?.as_ref().map(PyAnyMethods::extract).transpose()
    }
}
