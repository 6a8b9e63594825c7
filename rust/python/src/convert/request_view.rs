//! A `Request` brought up to date, for those who look at it while the core has the state.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use sparksched_core::{BlockHash, GroupId, Request};

use super::{StatusTypes, sync_request_tokens};

/// What is needed to show a request's state.
pub(crate) struct RequestView {
    statuses: StatusTypes,
    /// Bytes of a block hash; `None` if the core computes none.
    digest_len: Option<usize>,
}

impl RequestView {
    /// Looks the members of `RequestStatus` up.
    pub(crate) fn import(py: Python<'_>, digest_len: Option<usize>) -> PyResult<Self> {
        Ok(Self { statuses: StatusTypes::import(py)?, digest_len })
    }

    /// Copies into a `Request` what has changed: tokens, hashes, status and counters. Connectors
    /// keep it, and look at it whenever they are called.
    pub(crate) fn update(&self, request: &Bound<'_, PyAny>, state: &Request) -> PyResult<()> {
        let py = request.py();
        sync_request_tokens(request, state.tokens())?;
        self.update_block_hashes(request, state)?;
        request.setattr(intern!(py, "status"), &self.statuses.of(state.status).member)?;
        request.setattr(intern!(py, "num_computed_tokens"), state.num_computed_tokens)?;
        request.setattr(intern!(py, "num_output_placeholders"), state.num_output_placeholders)?;
        request.setattr(intern!(py, "num_in_flight_tokens"), state.num_in_flight_tokens)?;
        request.setattr(intern!(py, "num_preemptions"), state.num_preemptions)?;
        request.setattr(intern!(py, "is_prefill_chunk"), state.is_prefill_chunk)?;
        request.setattr(intern!(py, "shared_prefix_boundary"), state.shared_prefix_boundary)
    }

    fn update_block_hashes(&self, request: &Bound<'_, PyAny>, state: &Request) -> PyResult<()> {
        let py = request.py();
        if self.digest_len.is_none() {
            // Prefix caching is off, but the engine has given the request a hasher of vLLM's.
            request.call_method0(intern!(py, "update_block_hashes"))?;
            return Ok(());
        }
        let known = request.getattr(intern!(py, "block_hashes"))?;
        let known = known.cast::<PyList>()?;
        for hash in state.block_hashes.iter().skip(known.len()) {
            known.append(PyBytes::new(py, self.digest(hash)))?;
        }
        Ok(())
    }

    fn digest<'a>(&self, hash: &'a BlockHash) -> &'a [u8] {
        &hash.0[..self.digest_len.unwrap_or(0)]
    }

    /// vLLM's `BlockHashWithGroupId`.
    pub(crate) fn hash_with_group<'py>(
        &self,
        py: Python<'py>,
        hash: &BlockHash,
        group: GroupId,
    ) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &[self.digest(hash), &group.0.to_be_bytes()].concat())
    }
}
