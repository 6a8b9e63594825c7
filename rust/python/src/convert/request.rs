//! `Request`: read once when it arrives, and brought up to date for the few that look at it later.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use sparksched_core::{NewRequest, RepetitionDetection, SessionInput, StopConditions};

use super::{ExtraKeysReader, prompt, token_ids};

/// Reads a `Request` as it arrives. `block_hashes` of its prompt are taken as they are.
pub(crate) fn new_request(
    request: &Bound<'_, PyAny>,
    extra_keys: &ExtraKeysReader,
) -> PyResult<NewRequest> {
    let py = request.py();
    let sampling_params = request.getattr(intern!(py, "sampling_params"))?;
    let prompt = prompt(request, extra_keys)?;
    let structured = request.getattr(intern!(py, "structured_output_request"))?;
    let max_tokens = request.getattr(intern!(py, "max_tokens"))?;
    Ok(NewRequest {
        id: request.getattr(intern!(py, "request_id"))?.extract::<String>()?.into(),
        tokens: prompt.tokens,
        num_prompt_tokens: request.getattr(intern!(py, "num_prompt_tokens"))?.extract()?,
        block_hashes: prompt.block_hashes,
        extra_keys: prompt.extra_keys,
        lora_id: lora_id(request)?,
        priority: request.getattr(intern!(py, "priority"))?.extract()?,
        arrival_time: request.getattr(intern!(py, "arrival_time"))?.extract()?,
        stop: if sampling_params.is_none() {
            StopConditions::default()
        } else {
            stop_conditions(&sampling_params, &max_tokens)?
        },
        skip_reading_prefix_cache: request
            .getattr(intern!(py, "skip_reading_prefix_cache"))?
            .is_truthy()?,
        use_structured_output: !structured.is_none(),
        is_pooling: !request.getattr(intern!(py, "pooling_params"))?.is_none(),
        reports_cached_blocks: reports_cached_blocks(request)?,
        is_session: request.getattr(intern!(py, "resumable"))?.is_truthy()?,
        has_encoder_inputs: request.getattr(intern!(py, "mm_features"))?.is_truthy()?,
        expects_remote_prefill: expects_remote_prefill(request)?,
        ..NewRequest::default()
    })
}

fn expects_remote_prefill(request: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = request.py();
    let params = request.getattr(intern!(py, "kv_transfer_params"))?;
    if !params.is_truthy()? {
        return Ok(false);
    }
    params.call_method1(intern!(py, "get"), (intern!(py, "do_remote_prefill"),))?.is_truthy()
}

/// Reads what a session has got behind its first `num_kept_tokens` tokens.
pub(crate) fn session_input(
    request: &Bound<'_, PyAny>,
    num_kept_tokens: usize,
    extra_keys: &ExtraKeysReader,
) -> PyResult<SessionInput> {
    let py = request.py();
    let tokens = request.getattr(intern!(py, "_all_token_ids"))?;
    let tokens = tokens.cast::<PyList>()?;
    let sampling_params = request.getattr(intern!(py, "sampling_params"))?;
    let max_tokens = request.getattr(intern!(py, "max_tokens"))?;
    let time = py.import(intern!(py, "time"))?;
    Ok(SessionInput {
        tokens: token_ids(&tokens.get_slice(num_kept_tokens, tokens.len()))?,
        has_encoder_inputs: request.getattr(intern!(py, "mm_features"))?.is_truthy()?,
        extra_keys: extra_keys.read(request)?,
        stop: stop_conditions(&sampling_params, &max_tokens)?,
        arrival_time: request.getattr(intern!(py, "arrival_time"))?.extract()?,
        now: time.call_method0(intern!(py, "monotonic"))?.extract()?,
    })
}

fn lora_id(request: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    let py = request.py();
    let lora_request = request.getattr(intern!(py, "lora_request"))?;
    if lora_request.is_none() {
        return Ok(None);
    }
    lora_request.getattr(intern!(py, "lora_int_id"))?.extract().map(Some)
}

/// Requests with sampling parameters only have the attribute.
fn reports_cached_blocks(request: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = request.py();
    match request.getattr_opt(intern!(py, "kv_cache_report_mode"))? {
        Some(mode) => mode.eq(intern!(py, "full")),
        None => Ok(false),
    }
}

fn stop_conditions(
    params: &Bound<'_, PyAny>,
    max_tokens: &Bound<'_, PyAny>,
) -> PyResult<StopConditions> {
    let py = params.py();
    // A number that no token id can equal ends nothing.
    let token_id = |number: i128| i32::try_from(number).ok();
    let eos_token_id: Option<i128> = params.getattr(intern!(py, "eos_token_id"))?.extract()?;
    let stop_token_ids: Option<Vec<i128>> =
        params.getattr(intern!(py, "stop_token_ids"))?.extract()?;
    let repetition = params.getattr(intern!(py, "repetition_detection"))?;
    let repetition = (!repetition.is_none()).then(|| repetition_detection(&repetition));
    Ok(StopConditions {
        eos_token_id: eos_token_id.and_then(token_id),
        stop_token_ids: stop_token_ids.into_iter().flatten().filter_map(token_id).collect(),
        min_tokens: count(&params.getattr(intern!(py, "min_tokens"))?)?,
        max_tokens: count(max_tokens)?,
        repetition: repetition.transpose()?.map(Box::new),
    })
}

/// A user's number of tokens: below zero is zero, and above what a machine word holds is as good
/// as the largest.
fn count(number: &Bound<'_, PyAny>) -> PyResult<u64> {
    let number: i128 = number.extract()?;
    Ok(u64::try_from(number.max(0)).unwrap_or(u64::MAX))
}

fn repetition_detection(params: &Bound<'_, PyAny>) -> PyResult<RepetitionDetection> {
    let get = |name: &str| -> PyResult<i64> {
        let number: i128 = params.getattr(name)?.extract()?;
        Ok(number.clamp(i64::MIN.into(), i64::MAX.into()) as i64)
    };
    Ok(RepetitionDetection {
        max_pattern_size: get("max_pattern_size")?,
        min_pattern_size: get("min_pattern_size")?,
        min_count: get("min_count")?,
    })
}

/// Appends to the Python request the tokens that only the core knows so far.
pub(crate) fn sync_request_tokens(request: &Bound<'_, PyAny>, sequence: &[i32]) -> PyResult<()> {
    let py = request.py();
    let all_token_ids = request.getattr(intern!(py, "_all_token_ids"))?;
    let all_token_ids = all_token_ids.cast::<PyList>()?;
    if all_token_ids.len() >= sequence.len() {
        return Ok(());
    }
    let missing = PyList::new(py, &sequence[all_token_ids.len()..])?;
    let end = isize::MAX as usize;
    let output_token_ids = request.getattr(intern!(py, "_output_token_ids"))?;
    for list in [all_token_ids, output_token_ids.cast::<PyList>()?] {
        list.set_slice(end, end, missing.as_any())?;
    }
    Ok(())
}
