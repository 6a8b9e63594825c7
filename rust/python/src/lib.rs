//! The Python extension `sparksched._core`: the scheduler of `sparksched-core` behind vLLM's
//! objects. Thin: decisions are made in the core, objects are read and built in [`convert`].

mod block_observer;
mod callbacks;
mod config;
mod connector;
mod convert;
mod entries;
mod frames;
mod guard;
mod hasher;
mod links;
mod message_writer;
mod meters;
mod pacing;
mod queue_watch;
mod rings;
mod scheduler_core;
mod snapshot;
mod sockets;
mod step_timer;

use pyo3::prelude::*;

/// Rust side of sparksched; its public face is `sparksched.scheduler`.
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<hasher::NativeBlockHasher>()?;
    module.add_function(wrap_pyfunction!(hasher::read_prompt, module)?)?;
    module.add_class::<scheduler_core::SchedulerCore>()?;
    module.add_class::<queue_watch::PyQueueWatch>()?;
    module.add_class::<callbacks::CachedBlocks>()?;
    module.add_class::<convert::StepOutputs>()?;
    module.add_class::<frames::RingMessage>()?;
    module.add_class::<links::PyEngineLinks>()?;
    rings::add_to(module)?;
    module.add_class::<sockets::PyEngineSockets>()?;
    meters::add_to(module)?;
    Ok(())
}
