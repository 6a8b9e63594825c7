//! Panics become exceptions that vLLM's engine understands.
//!
//! `PyO3`'s own `PanicException` is a `BaseException`: the engine would not catch it and its clients
//! would never be told. So `#[entry_points]` runs each function that Python calls in [`enter`] or in a
//! method that calls [`catch_panics`]. Not guarded: fields that `PyO3` reads and writes by itself, the
//! end of an object, whose panic `PyO3` reports as Python does an error in `__del__`, and the import of
//! the module. A panic or a failed callback in the middle of a step leaves the scheduler in an unknown
//! state, so it refuses to go on after one; requests can still be ended.

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

/// Runs what Python has called by the name `entry`; a panic becomes a `RuntimeError` that says where.
///
/// For functions that leave nothing in the middle, whatever happens.
pub(crate) fn enter<T>(entry: &'static str, call: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_panics(entry, call)?
}

/// As [`enter`], but a panic is the outer error: something may have to be done about it.
pub(crate) fn catch_panics<T>(
    entry: &'static str,
    call: impl FnOnce() -> PyResult<T>,
) -> PyResult<PyResult<T>> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        PyRuntimeError::new_err(format!(
            "sparksched found itself in an impossible state in {entry}: {text}. This is a bug in \
             sparksched; VLLM_SCHEDULER=vllm goes on without it"
        ))
    })
}
