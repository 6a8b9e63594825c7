//! Writes given `EngineCoreOutputs` as a step's would be: to compare the result with that of
//! vLLM's encoder.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};
use sparksched_core::{
    Event, EventKind, PrefillStats, PrefixCacheStats, RequestNews, SchedulerStats, StopReason,
};
use sparksched_entry_points::entry_points;
use sparksched_wire::{Output, RequestId};

use super::{EngineOutputTypes, OtherStats, StepOutputs, token_ids};

#[entry_points]
#[pyfunction]
pub(crate) fn encode_like_scheduler(
    outputs: &Bound<'_, PyAny>,
    encode_part: &Bound<'_, PyAny>,
) -> PyResult<(StepOutputs, usize)> {
    encode(outputs, encode_part)
}

fn encode(
    outputs: &Bound<'_, PyAny>,
    encode_part: &Bound<'_, PyAny>,
) -> PyResult<(StepOutputs, usize)> {
    let py = outputs.py();
    let types = Arc::new(EngineOutputTypes::import(py)?);
    let list = outputs.getattr(intern!(py, "outputs"))?.cast_into::<PyList>()?;
    let mut step = StepOutputs::new(py, &types, encode_part.as_unbound(), 0)?;
    let mut num_native = 0;
    for object in &list {
        if push_native(&mut step, &types, &object)? {
            num_native += 1;
        } else {
            step.push_object(&object)?;
        }
    }
    set_stats(&mut step, &types, &outputs.getattr(intern!(py, "scheduler_stats"))?)?;
    step.set_common_fields(outputs)?;
    Ok((step, num_native))
}

/// Adds an output unless it carries something that the core doesn't know: what the core knows of
/// it would make another object then.
fn push_native(
    step: &mut StepOutputs,
    types: &EngineOutputTypes,
    object: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    let py = object.py();
    let id = object.getattr(intern!(py, "request_id"))?.cast_into::<PyString>()?;
    let tokens = object.getattr(intern!(py, "new_token_ids"))?.cast_into::<PyList>()?;
    let num_nans = object.getattr(intern!(py, "num_nans_in_logits"))?;
    let Ok(news) = news(types, object) else {
        return Ok(false);
    };
    let native = types.plain_output(&id.clone().unbind(), &tokens)?;
    types.set_news(&native, &news)?;
    native.setattr(intern!(py, "num_nans_in_logits"), &num_nans)?;
    // Arrays refuse to be compared as a whole.
    if !native.eq(object).unwrap_or(false) {
        return Ok(false);
    }
    step.push(&Output {
        request_id: &RequestId::new(id.to_cow()?.as_ref()),
        new_token_ids: &token_ids(&tokens)?,
        news: (news != RequestNews::default()).then_some(&news),
        finish_reason: news.finished.map(|it| types.statuses.finish_reason_value(it)),
        num_nans_in_logits: num_nans.extract()?,
    });
    Ok(true)
}

/// What the core would know of an output; an error if that can't be.
fn news(types: &EngineOutputTypes, object: &Bound<'_, PyAny>) -> PyResult<RequestNews> {
    let py = object.py();
    let stop_reason = object.getattr(intern!(py, "stop_reason"))?;
    let events = object.getattr(intern!(py, "events"))?;
    let prefill_stats = object.getattr(intern!(py, "prefill_stats"))?;
    Ok(RequestNews {
        is_over: false,
        is_kept: false,
        finished: types.statuses.with_finish_reason(&object.getattr(intern!(py, "finish_reason"))?),
        stop_reason: if stop_reason.is_none() {
            StopReason::None
        } else if stop_reason.is_instance_of::<PyString>() {
            StopReason::Repetition
        } else {
            StopReason::Token(stop_reason.extract()?)
        },
        events: if events.is_none() { Vec::new() } else { read_events(&events)? },
        prefill_stats: if prefill_stats.is_none() {
            None
        } else {
            let count = |name: &Bound<'_, PyString>| prefill_stats.getattr(name)?.extract();
            let num_prompt_tokens = count(intern!(py, "num_prompt_tokens"))?;
            let num_local_cached_tokens: u32 = count(intern!(py, "num_local_cached_tokens"))?;
            let num_local_cached_tokens = num_local_cached_tokens.min(num_prompt_tokens);
            let num_others = num_prompt_tokens - num_local_cached_tokens;
            let num_external: u32 = count(intern!(py, "num_external_cached_tokens"))?;
            Some(PrefillStats {
                num_prompt_tokens,
                num_local_cached_tokens,
                num_external_cached_tokens: i32::try_from(num_external.min(num_others))?,
                num_cache_creation_tokens: count(intern!(py, "num_cache_creation_tokens"))?,
            })
        },
        spec_stats: None,
    })
}

fn read_events(events: &Bound<'_, PyAny>) -> PyResult<Vec<Event>> {
    let py = events.py();
    let read = |event: PyResult<Bound<'_, PyAny>>| -> PyResult<Event> {
        let event = event?;
        Ok(Event {
            kind: match event.getattr(intern!(py, "type"))?.extract()? {
                1 => EventKind::Queued,
                2 => EventKind::Scheduled,
                _ => EventKind::Preempted,
            },
            timestamp: event.getattr(intern!(py, "timestamp"))?.extract()?,
        })
    };
    events.try_iter()?.map(read).collect()
}

fn set_stats(
    step: &mut StepOutputs,
    types: &EngineOutputTypes,
    object: &Bound<'_, PyAny>,
) -> PyResult<()> {
    if object.is_none() {
        return Ok(());
    }
    let py = object.py();
    let none = OtherStats::default();
    match scheduler_stats(object) {
        Ok(stats) if types.scheduler_stats(py, &stats, &none)?.eq(object)? => {
            step.set_core_stats(py, stats, &none)
        }
        _ => {
            step.set_scheduler_stats(Some(object.clone().unbind()));
            Ok(())
        }
    }
}

fn scheduler_stats(object: &Bound<'_, PyAny>) -> PyResult<SchedulerStats> {
    let py = object.py();
    let cache = object.getattr(intern!(py, "prefix_cache_stats"))?;
    let count = |name: &Bound<'_, PyString>| object.getattr(name)?.extract();
    let cached = |name: &Bound<'_, PyString>| cache.getattr(name)?.extract();
    Ok(SchedulerStats {
        num_running_reqs: count(intern!(py, "num_running_reqs"))?,
        num_waiting_reqs: count(intern!(py, "num_waiting_reqs"))?,
        num_skipped_waiting_reqs: count(intern!(py, "num_skipped_waiting_reqs"))?,
        kv_cache_usage: Some(object.getattr(intern!(py, "kv_cache_usage"))?.extract()?),
        prefix_cache_stats: PrefixCacheStats {
            reset: cache.getattr(intern!(py, "reset"))?.extract()?,
            requests: cached(intern!(py, "requests"))?,
            queries: cached(intern!(py, "queries"))?,
            hits: cached(intern!(py, "hits"))?,
            preempted_requests: cached(intern!(py, "preempted_requests"))?,
            preempted_queries: cached(intern!(py, "preempted_queries"))?,
            preempted_hits: cached(intern!(py, "preempted_hits"))?,
        },
        spec_decoding_stats: None,
    })
}
