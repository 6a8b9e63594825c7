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
use sparksched_core::{BlockHash, BlockHasher, ExtraKeys, HashAlgorithm};
use sparksched_entry_points::entry_points;

use crate::convert;

/// Sequences shorter than this are hashed without giving the GIL away.
const MIN_TOKENS_TO_DETACH: usize = 256;

/// Drop-in for the function that `get_request_block_hasher()` returns.
#[pyclass(module = "sparksched._core", frozen)]
pub(crate) struct NativeBlockHasher {
    hasher: BlockHasher,
    extra_keys: ExtraKeysReader,
}

/// What the core takes over of a request's beginning.
#[derive(Clone)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<i32>,
    /// Hashes of its full blocks, as far as there are any.
    pub(crate) block_hashes: Vec<BlockHash>,
    pub(crate) extra_keys: Option<Box<ExtraKeys>>,
}

/// Where a request carries its [`HashedPrompt`].
const HASHED_PROMPT: &str = "_sparksched_hashed_prompt";

/// A prompt until the scheduler takes it over.
#[pyclass(module = "sparksched._core", frozen)]
pub(crate) struct HashedPrompt(Mutex<Option<Prompt>>);

fn leave_prompt(request: &Bound<'_, PyAny>, prompt: Prompt) -> PyResult<()> {
    let py = request.py();
    let prompt = HashedPrompt(Mutex::new(Some(prompt)));
    request.setattr(intern!(py, HASHED_PROMPT), Bound::new(py, prompt)?)
}

/// Reads the prompt of a request that had nothing to be hashed, so that an error in it is found
/// where it concerns this request alone.
#[entry_points]
#[pyfunction]
#[pyo3(signature = (request, *, extra_keys))]
pub(crate) fn read_prompt(
    request: &Bound<'_, PyAny>,
    extra_keys: Option<Py<PyAny>>,
) -> PyResult<()> {
    let py = request.py();
    // Python's strings may hold what no text has; the core's can't.
    request.getattr(intern!(py, "request_id"))?.cast::<PyString>()?.to_str()?;
    if request.hasattr(intern!(py, HASHED_PROMPT))? {
        return Ok(());
    }
    leave_prompt(request, convert::prompt(request, &ExtraKeysReader(extra_keys))?)
}

/// Takes what the hasher left with a request, if it did and the request has not grown since.
pub(crate) fn take_hashed_prompt(
    request: &Bound<'_, PyAny>,
    num_tokens: usize,
) -> PyResult<Option<Prompt>> {
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

/// Builds the core's hasher, or says why it can't be built.
pub(crate) fn new_block_hasher(
    algorithm: &str,
    block_size: u32,
    none_hash: &[u8],
    num_lookahead_tokens: u32,
) -> PyResult<BlockHasher> {
    let algorithm = HashAlgorithm::from_name(algorithm)
        .ok_or_else(|| PyValueError::new_err(format!("unknown hash algorithm {algorithm:?}")))?;
    if none_hash.len() > MAX_HASH_LEN {
        return Err(PyValueError::new_err("NONE_HASH is longer than 32 bytes"));
    }
    let hasher = BlockHasher::new(algorithm, block_size, none_hash);
    hasher.and_then(|hasher| hasher.with_lookahead(num_lookahead_tokens)).ok_or_else(|| {
        PyValueError::new_err(format!("blocks of {block_size} tokens can't be hashed"))
    })
}

#[entry_points(NativeBlockHasher)]
#[pymethods]
impl NativeBlockHasher {
    #[new]
    #[pyo3(signature = (algorithm, block_size, none_hash, *, extra_keys, num_lookahead_tokens=0))]
    fn new(
        algorithm: &str,
        block_size: u32,
        none_hash: &[u8],
        extra_keys: Py<PyAny>,
        num_lookahead_tokens: u32,
    ) -> PyResult<Self> {
        let hasher = new_block_hasher(algorithm, block_size, none_hash, num_lookahead_tokens)?;
        Ok(Self { hasher, extra_keys: ExtraKeysReader(Some(extra_keys)) })
    }

    fn __call__<'py>(&self, request: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        self.hash_new_blocks(request)
    }
}

impl NativeBlockHasher {
    fn hash_new_blocks<'py>(&self, request: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = request.py();
        let known = request.getattr(intern!(py, "block_hashes"))?;
        let mut block_hashes = convert::block_hashes(&known)?;
        let num_known = block_hashes.len();
        let all_token_ids = request.getattr(intern!(py, "_all_token_ids"))?;
        let all_token_ids = all_token_ids.cast::<PyList>()?;
        if self.hasher.num_hashable_blocks(all_token_ids.len()) <= num_known {
            return Ok(PyList::empty(py));
        }
        let tokens = convert::token_ids(all_token_ids)?;
        let extra_keys = self.extra_keys.read(request)?;
        let mut hash = || {
            self.hasher.extend_hashes(&tokens, extra_keys.as_deref(), &mut block_hashes);
        };
        if tokens.len() < MIN_TOKENS_TO_DETACH {
            hash();
        } else {
            py.detach(hash);
        }
        let digest = |hash: &BlockHash| PyBytes::new(py, &hash.0[..self.hasher.digest_len()]);
        let new = PyList::new(py, block_hashes[num_known..].iter().map(digest))?;
        if num_known == 0 {
            leave_prompt(request, Prompt { tokens, block_hashes, extra_keys })?;
        }
        Ok(new)
    }
}
