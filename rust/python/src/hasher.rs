//! The block hasher that vLLM's `Request` calls, with the hashing done outside the GIL.
//!
//! The engine runs it in its input thread. What it has read and computed stays with the request as
//! a [`HashedPrompt`], so that the engine thread does not read the prompt a second time.

use std::sync::Mutex;

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};
use sparksched_core::block_hash::MAX_HASH_LEN;
use sparksched_core::{BlockHash, BlockHasher, HashAlgorithm};

use crate::convert;

/// Sequences shorter than this are hashed without giving the GIL away.
const MIN_TOKENS_TO_DETACH: usize = 256;

/// Drop-in for the function that `get_request_block_hasher()` returns, for requests without
/// `LoRA`, multimodal features or prompt embeddings.
#[pyclass(module = "sparksched._core", frozen)]
pub(crate) struct NativeBlockHasher {
    hasher: BlockHasher,
    hash_first_block: Py<PyAny>,
    fallback: Py<PyAny>,
}

/// Where a request carries its [`HashedPrompt`].
const HASHED_PROMPT: &str = "_sparksched_hashed_prompt";

/// A prompt's tokens and the hashes of its full blocks, until the scheduler takes them over.
#[pyclass(module = "sparksched._core", frozen)]
pub(crate) struct HashedPrompt(Mutex<Option<(Vec<i32>, Vec<BlockHash>)>>);

fn leave_prompt(
    request: &Bound<'_, PyAny>,
    tokens: Vec<i32>,
    hashes: Vec<BlockHash>,
) -> PyResult<()> {
    let py = request.py();
    let prompt = HashedPrompt(Mutex::new(Some((tokens, hashes))));
    request.setattr(intern!(py, HASHED_PROMPT), Bound::new(py, prompt)?)
}

/// Reads the prompt of a request that had nothing to be hashed, so that an error in it is found
/// where it concerns this request alone.
#[pyfunction]
pub(crate) fn read_prompt(request: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = request.py();
    // Python's strings may hold what no text has; the core's can't.
    request.getattr(intern!(py, "request_id"))?.cast::<PyString>()?.to_str()?;
    if request.hasattr(intern!(py, HASHED_PROMPT))? {
        return Ok(());
    }
    let (tokens, hashes) = convert::prompt(request)?;
    leave_prompt(request, tokens, hashes)
}

/// Takes what the hasher left with a request, if it did and the request has not grown since.
pub(crate) fn take_hashed_prompt(
    request: &Bound<'_, PyAny>,
    num_tokens: usize,
) -> PyResult<Option<(Vec<i32>, Vec<BlockHash>)>> {
    let name = intern!(request.py(), HASHED_PROMPT);
    let Some(prompt) = request.getattr_opt(name)? else {
        return Ok(None);
    };
    request.delattr(name)?;
    let prompt = prompt.cast::<HashedPrompt>()?.get();
    let prompt = prompt.0.lock().map_or(None, |mut prompt| prompt.take());
    Ok(prompt.filter(|(tokens, _)| tokens.len() == num_tokens))
}

/// Builds the core's hasher, or says why it can't be built.
pub(crate) fn new_block_hasher(
    algorithm: &str,
    block_size: u32,
    none_hash: &[u8],
) -> PyResult<BlockHasher> {
    let algorithm = HashAlgorithm::from_name(algorithm)
        .ok_or_else(|| PyValueError::new_err(format!("unknown hash algorithm {algorithm:?}")))?;
    if none_hash.len() > MAX_HASH_LEN {
        return Err(PyValueError::new_err("NONE_HASH is longer than 32 bytes"));
    }
    BlockHasher::new(algorithm, block_size, none_hash).ok_or_else(|| {
        PyValueError::new_err(format!("blocks of {block_size} tokens can't be hashed"))
    })
}

#[pymethods]
impl NativeBlockHasher {
    #[new]
    #[pyo3(signature = (algorithm, block_size, none_hash, *, hash_first_block, fallback))]
    fn new(
        algorithm: &str,
        block_size: u32,
        none_hash: &[u8],
        hash_first_block: Py<PyAny>,
        fallback: Py<PyAny>,
    ) -> PyResult<Self> {
        let hasher = new_block_hasher(algorithm, block_size, none_hash)?;
        Ok(Self { hasher, hash_first_block, fallback })
    }

    fn __call__<'py>(&self, request: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = request.py();
        if has_keys_in_every_block(request)? {
            return self.fallback.bind(py).call1((request,));
        }
        let known = request.getattr(intern!(py, "block_hashes"))?;
        let mut hashes = convert::block_hashes(&known)?;
        let num_known = hashes.len();
        let all_token_ids = request.getattr(intern!(py, "_all_token_ids"))?;
        let all_token_ids = all_token_ids.cast::<PyList>()?;
        if all_token_ids.len() / self.hasher.block_size() <= num_known {
            return Ok(PyList::empty(py).into_any());
        }
        let tokens = convert::token_ids(all_token_ids)?;
        let has_extra_keys = request.getattr(intern!(py, "cache_salt"))?.is_truthy()?;
        if num_known == 0 && has_extra_keys {
            let first = self.hash_first_block.bind(py).call1((request,))?;
            hashes.push(convert::block_hash(&first)?);
        }
        if tokens.len() < MIN_TOKENS_TO_DETACH {
            self.hasher.extend_hashes(&tokens, &mut hashes);
        } else {
            py.detach(|| self.hasher.extend_hashes(&tokens, &mut hashes));
        }
        if num_known == 0 {
            leave_prompt(request, tokens, hashes.clone())?;
        }
        let digest = |hash: &BlockHash| PyBytes::new(py, &hash.0[..self.hasher.digest_len()]);
        Ok(PyList::new(py, hashes[num_known..].iter().map(digest))?.into_any())
    }
}

/// Whether the request's blocks are hashed with more than their tokens.
fn has_keys_in_every_block(request: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = request.py();
    Ok(!request.getattr(intern!(py, "lora_request"))?.is_none()
        || !request.getattr(intern!(py, "prompt_embeds"))?.is_none()
        || request.getattr(intern!(py, "mm_features"))?.is_truthy()?)
}
