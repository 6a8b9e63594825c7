//! Panics become exceptions that vLLM's engine understands.
//!
//! `PyO3`'s own `PanicException` is a `BaseException`: the engine would not catch it and its clients
//! would never be told. A panic or a failed callback in the middle of a step leaves the scheduler
//! in an unknown state, so after one it refuses to go on; requests can still be ended.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Remembers what broke the scheduler.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    broken_by: Option<String>,
}

impl Guard {
    /// Whether an earlier call ended in the middle.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken_by.is_some()
    }

    /// An error if an earlier call ended in the middle.
    pub(crate) fn check(&self) -> PyResult<()> {
        match &self.broken_by {
            None => Ok(()),
            Some(cause) => Err(PyRuntimeError::new_err(format!(
                "the sparksched scheduler stopped after an earlier error and can't go on: {cause}"
            ))),
        }
    }

    /// Notes an error that left the scheduler in the middle of a step.
    pub(crate) fn note(&mut self, error: &PyErr) {
        self.broken_by.get_or_insert_with(|| error.to_string());
    }
}

/// Runs `call`; a panic becomes the outer error, a `RuntimeError` with its message.
pub(crate) fn catch_panics<T>(call: impl FnOnce() -> PyResult<T>) -> PyResult<PyResult<T>> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        PyRuntimeError::new_err(format!(
            "sparksched found itself in an impossible state: {text}. This is a bug in \
             sparksched; VLLM_SCHEDULER=vllm goes on without it"
        ))
    })
}
