//! `ModelRunnerOutput`: what a step sampled, and the parts that few steps have.

use pyo3::exceptions::PyKeyError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use sparksched_core::{RequestIndex, Scheduler};

use super::extend_token_ids;
use crate::entries::Entry;

/// One request's share of a model runner's output.
pub(crate) struct SampledTokens {
    /// The request, if it still exists.
    pub(crate) index: Option<RequestIndex>,
    /// Tokens that the step was scheduled with.
    pub(crate) num_scheduled_tokens: u32,
    /// Row of the model runner's output.
    pub(crate) row: usize,
    /// Where its tokens are in the flat buffer.
    pub(crate) tokens: std::ops::Range<usize>,
    /// What the step brings for the request is looked at: it is still there and waits for it.
    pub(crate) is_delivered: bool,
    /// Draft tokens that the step verified.
    pub(crate) num_draft_tokens: u32,
    /// Of these, tokens that a grammar had ruled out.
    pub(crate) num_invalid_drafts: u32,
    /// The step brought the vector that a pooling request is for.
    pub(crate) is_pooled: bool,
    /// What the step brought rests on blocks that could not be filled.
    pub(crate) is_void: bool,
}

/// `sampled_token_ids`: a list for each row, if the step sampled anything.
pub(crate) fn sampled_lists<'py>(
    model_runner_output: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyList>>> {
    let name = intern!(model_runner_output.py(), "sampled_token_ids");
    Ok(present(model_runner_output, name)?.map(Bound::cast_into).transpose()?)
}

/// Reads what was sampled for the requests of the step that comes back; their tokens are appended
/// to `tokens`. `place` finds requests by id; what the step brought for those in `void` does not
/// count.
pub(crate) fn sampled_tokens<'py>(
    scheduler_output: &Bound<'py, PyAny>,
    model_runner_output: &Bound<'py, PyAny>,
    lists: Option<&Bound<'py, PyList>>,
    scheduler: &Scheduler,
    place: impl Fn(&Bound<'py, PyAny>) -> PyResult<Option<RequestIndex>>,
    void: &[RequestIndex],
    tokens: &mut Vec<i32>,
) -> PyResult<Vec<SampledTokens>> {
    let py = scheduler_output.py();
    let scheduled = scheduler_output.getattr(intern!(py, "num_scheduled_tokens"))?;
    let rows = model_runner_output.getattr(intern!(py, "req_id_to_index"))?;
    let rows = rows.cast::<PyDict>()?;
    let scheduled = scheduled.cast::<PyDict>()?;
    let drafts = Drafts::of(scheduler_output)?;
    let mut sampled = Vec::with_capacity(scheduled.len());
    for (id, num_scheduled_tokens) in scheduled {
        let index = place(&id)?;
        let is_void = index.is_some_and(|index| void.contains(&index));
        let is_awaited = |index: RequestIndex| {
            let request = scheduler.request(index);
            !request.drops_stale_output() && !request.status.is_finished()
        };
        let is_delivered = !is_void && index.is_some_and(is_awaited);
        let mut share = SampledTokens {
            index,
            num_scheduled_tokens: num_scheduled_tokens.extract()?,
            row: 0,
            tokens: tokens.len()..tokens.len(),
            is_delivered,
            num_draft_tokens: 0,
            num_invalid_drafts: 0,
            is_pooled: false,
            is_void,
        };
        if is_delivered {
            (share.num_draft_tokens, share.num_invalid_drafts) = drafts.count(&id)?;
            let row = rows.get_item(&id)?;
            share.row = row.ok_or_else(|| PyKeyError::new_err(id.unbind()))?.extract()?;
            if let Some(lists) = lists {
                let list = lists.get_item(share.row)?.cast_into::<PyList>()?;
                extend_token_ids(&list, tokens)?;
                share.tokens.end = tokens.len();
            }
        }
        sampled.push(share);
    }
    Ok(sampled)
}

/// An attribute, unless it is None or empty.
fn present<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let value = object.getattr(name)?;
    Ok(value.is_truthy()?.then_some(value))
}

/// A dictionary among the attributes, unless it is None or empty.
fn present_dict<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    Ok(present(object, name)?.map(Bound::cast_into).transpose()?)
}

/// The draft tokens of a step, as far as it has any.
struct Drafts<'py> {
    scheduled: Option<Bound<'py, PyDict>>,
    num_invalid: Option<Bound<'py, PyDict>>,
}

impl<'py> Drafts<'py> {
    fn of(scheduler_output: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = scheduler_output.py();
        let dict = |name| present_dict(scheduler_output, name);
        Ok(Self {
            scheduled: dict(intern!(py, "scheduled_spec_decode_tokens"))?,
            num_invalid: dict(intern!(py, "num_invalid_spec_tokens"))?,
        })
    }

    /// A request's draft tokens, and how many of them a grammar had ruled out.
    fn count(&self, id: &Bound<'py, PyAny>) -> PyResult<(u32, u32)> {
        let Some(scheduled) = &self.scheduled else { return Ok((0, 0)) };
        let Some(tokens) = scheduled.get_item(id)? else { return Ok((0, 0)) };
        let num_invalid = match &self.num_invalid {
            None => None,
            Some(num_invalid) => num_invalid.get_item(id)?,
        };
        let num_invalid = num_invalid.map_or(Ok(0), |count| count.extract())?;
        Ok((tokens.len()? as u32, num_invalid))
    }
}

/// Parts of a model runner's output that few steps have.
pub(crate) struct RareOutputs<'py> {
    /// By row, what a pooling model makes of a prompt; None while the prompt is not computed.
    pooled: Option<Bound<'py, PyAny>>,
    pub(crate) logprobs: Option<Bound<'py, PyAny>>,
    /// Which tokens could have been sampled, if it is configured.
    pub(crate) sampling_masks: Option<Bound<'py, PyAny>>,
    pub(crate) prompt_logprobs: Option<Bound<'py, PyDict>>,
    pub(crate) prompt_token_id_logprobs: Option<Bound<'py, PyDict>>,
    pub(crate) num_nans_in_logits: Option<Bound<'py, PyDict>>,
    /// By request id, which experts the model routed tokens to, if that is collected. What of it
    /// counts is known only when the core has taken the step in.
    pub(crate) routed_experts: Option<Bound<'py, PyDict>>,
}

impl<'py> RareOutputs<'py> {
    /// Reads them.
    pub(crate) fn of(runner: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = runner.py();
        let present = |name| present(runner, name);
        let dict = |name| present_dict(runner, name);
        Ok(Self {
            pooled: present(intern!(py, "pooler_output"))?,
            logprobs: present(intern!(py, "logprobs"))?,
            sampling_masks: present(intern!(py, "sampling_masks"))?,
            prompt_logprobs: dict(intern!(py, "prompt_logprobs_dict"))?,
            prompt_token_id_logprobs: dict(intern!(py, "prompt_token_id_logprobs_dict"))?,
            num_nans_in_logits: dict(intern!(py, "num_nans_in_logits"))?,
            routed_experts: None,
        })
    }

    /// Whether any request may have prompt logprobs in this step.
    pub(crate) fn has_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.is_some() || self.prompt_token_id_logprobs.is_some()
    }

    /// What a pooling model made of a request's prompt.
    pub(crate) fn pooled(&self, row: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(pooled) = &self.pooled else { return Ok(None) };
        let value = pooled.get_item(row)?;
        Ok((!value.is_none()).then_some(value))
    }

    /// Notes for which requests there is such a value.
    pub(crate) fn note_pooled(&self, sampled: &mut [SampledTokens]) -> PyResult<()> {
        if self.has_pooled() {
            for it in sampled.iter_mut().filter(|it| it.is_delivered) {
                it.is_pooled = self.pooled(it.row)?.is_some();
            }
        }
        Ok(())
    }

    /// Whether this is the step of a pooling model.
    pub(crate) fn has_pooled(&self) -> bool {
        self.pooled.is_some()
    }

    /// Whether all outputs may have parts that only Python knows.
    pub(crate) fn concern_all(&self) -> bool {
        self.has_pooled() || self.sampling_masks.is_some() || self.routed_experts.is_some()
    }

    /// Whether a request's output has parts that only Python knows.
    pub(crate) fn concern(&self, entry: &Entry) -> PyResult<bool> {
        Ok(entry.trace_headers.is_some()
            || self.concern_all()
            || (entry.wants_logprobs && self.logprobs.is_some())
            || (self.has_prompt_logprobs()
                && (value_of(self.prompt_logprobs.as_ref(), &entry.id)?.is_some()
                    || value_of(self.prompt_token_id_logprobs.as_ref(), &entry.id)?.is_some())))
    }
}

/// A request's value in a dictionary that may not be there.
pub(crate) fn value_of<'py>(
    dict: Option<&Bound<'py, PyDict>>,
    id: &Py<PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    dict.map_or(Ok(None), |dict| dict.get_item(id))
}

/// A request's part of vLLM's lists for all, which may not be there.
pub(crate) fn slice_of<'py>(
    lists: Option<&Bound<'py, PyAny>>,
    row: usize,
    num_tokens: usize,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(lists) = lists else { return Ok(None) };
    lists.call_method1(intern!(lists.py(), "slice_request"), (row, num_tokens)).map(Some)
}
