//! A request's prompt: its tokens and their hashes, which the hasher leaves with the `Request`.

use std::sync::Mutex;

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use sparksched_core::{BlockHash, ExtraKeys};

use super::{block_hashes, token_ids};

/// What the core takes over of a request's beginning.
#[derive(Clone)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<i32>,
    /// Hashes of its full blocks, as far as there are any.
    pub(crate) block_hashes: Vec<BlockHash>,
    pub(crate) extra_keys: Option<Box<ExtraKeys>>,
}

/// Where a request carries its [`HashedPrompt`].
pub(crate) const HASHED_PROMPT: &str = "_sparksched_hashed_prompt";

/// A prompt until the scheduler takes it over.
#[pyclass(module = "sparksched._core", frozen)]
pub(crate) struct HashedPrompt(Mutex<Option<Prompt>>);

pub(crate) fn leave_prompt(request: &Bound<'_, PyAny>, prompt: Prompt) -> PyResult<()> {
    let py = request.py();
    let prompt = HashedPrompt(Mutex::new(Some(prompt)));
    request.setattr(intern!(py, HASHED_PROMPT), Bound::new(py, prompt)?)
}

/// Takes what the hasher left with a request, if it did and the request has not grown since.
fn take_hashed_prompt(request: &Bound<'_, PyAny>, num_tokens: usize) -> PyResult<Option<Prompt>> {
    let name = intern!(request.py(), HASHED_PROMPT);
    let Some(prompt) = request.getattr_opt(name)? else {
        return Ok(None);
    };
    request.delattr(name)?;
    let prompt = prompt.cast::<HashedPrompt>()?.get();
    let prompt = prompt.0.lock().map_or(None, |mut prompt| prompt.take());
    Ok(prompt.filter(|prompt| prompt.tokens.len() == num_tokens))
}

/// `extra_keys(request) -> tuple[list[bytes], bytes]`, the serialiser of what blocks are hashed
/// with besides their tokens; nothing without prefix caching.
pub(crate) struct ExtraKeysReader(pub(crate) Option<Py<PyAny>>);

impl ExtraKeysReader {
    /// The extra keys of a request, if it has any.
    pub(crate) fn read(&self, request: &Bound<'_, PyAny>) -> PyResult<Option<Box<ExtraKeys>>> {
        let py = request.py();
        let Some(extra_keys) = &self.0 else { return Ok(None) };
        if !has_extra_keys(request)? {
            return Ok(None);
        }
        let keys = extra_keys.bind(py).call1((request,))?;
        let (leading, others): (Vec<Vec<u8>>, Vec<u8>) = keys.extract()?;
        let leading = leading.into_iter().map(Into::into).collect();
        Ok(Some(Box::new(ExtraKeys { leading, others: others.into() })))
    }
}

/// Whether the request's blocks are hashed with more than their tokens.
fn has_extra_keys(request: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = request.py();
    Ok(request.getattr(intern!(py, "cache_salt"))?.is_truthy()?
        || !request.getattr(intern!(py, "lora_request"))?.is_none()
        || !request.getattr(intern!(py, "prompt_embeds"))?.is_none()
        || request.getattr(intern!(py, "mm_features"))?.is_truthy()?)
}

/// The request's tokens, at least one, and the hashes of their blocks that there are.
pub(crate) fn prompt(request: &Bound<'_, PyAny>, extra_keys: &ExtraKeysReader) -> PyResult<Prompt> {
    let py = request.py();
    let tokens = request.getattr(intern!(py, "_all_token_ids"))?;
    let tokens = tokens.cast::<PyList>()?;
    if let Some(prompt) = take_hashed_prompt(request, tokens.len())? {
        return Ok(prompt);
    }
    if tokens.is_empty() {
        let id = request.getattr(intern!(py, "request_id"))?;
        return Err(PyValueError::new_err(format!("request {id} has an empty prompt")));
    }
    let hashes = request.getattr(intern!(py, "block_hashes"))?;
    Ok(Prompt {
        tokens: token_ids(tokens)?,
        block_hashes: block_hashes(&hashes)?,
        extra_keys: extra_keys.read(request)?,
    })
}
