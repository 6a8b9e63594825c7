//! The block hasher that vLLM's `Request` calls, with the hashing done outside the GIL.
//!
//! The engine runs it in its input thread. What it has read and computed stays with the request as
//! a `HashedPrompt`, so that the engine thread does not read the prompt a second time.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};
use sparksched_core::block_hash::MAX_HASH_LEN;
use sparksched_core::{BlockHash, BlockHasher, HashAlgorithm};
use sparksched_entry_points::entry_points;

use crate::convert::{self, ExtraKeysReader, Prompt};

/// Sequences shorter than this are hashed without giving the GIL away.
const MIN_TOKENS_TO_DETACH: usize = 256;

/// Drop-in for the function that `get_request_block_hasher()` returns.
#[pyclass(module = "sparksched._core", frozen)]
pub(crate) struct NativeBlockHasher {
    hasher: BlockHasher,
    extra_keys: ExtraKeysReader,
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
    if request.hasattr(intern!(py, convert::HASHED_PROMPT))? {
        return Ok(());
    }
    convert::leave_prompt(request, convert::prompt(request, &ExtraKeysReader(extra_keys))?)
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
            convert::leave_prompt(request, Prompt { tokens, block_hashes, extra_keys })?;
        }
        Ok(new)
    }
}
