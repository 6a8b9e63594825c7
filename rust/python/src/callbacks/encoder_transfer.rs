//! Hands what the core says of encoder inputs to `sparksched.engine.encoder_transfer`.

use pyo3::intern;
use pyo3::prelude::*;
use sparksched_core::{EcConnector, Request};

use super::PyCallbacks;

impl EcConnector for PyCallbacks<'_, '_> {
    fn has_encoder_outputs(
        &mut self,
        request: &Request,
        num_computed_tokens: i64,
    ) -> PyResult<bool> {
        let arguments = (self.shown(request)?, num_computed_tokens);
        self.encoder_transfer.call(intern!(self.py, "has_outputs"), arguments)?.is_truthy()
    }

    fn end_encoder_transfer(&mut self, request: &Request) -> PyResult<bool> {
        let object = self.shown(request)?;
        let answer = self.encoder_transfer.call(intern!(self.py, "finish_request"), (object,))?;
        let (is_kept, params): (bool, Bound<'_, PyAny>) = answer.extract()?;
        self.encoder_transfer.note(object, params)?;
        Ok(is_kept)
    }
}
