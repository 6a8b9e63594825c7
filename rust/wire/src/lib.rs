//! What a step brought, as the messages that vLLM's engine sends to its clients: the bytes that
//! vLLM's own encoder writes for the same content.
//!
//! Mirrors `EngineCoreOutputs` and what hangs from it (vLLM's `v1/engine/__init__.py` and
//! `v1/metrics/stats.py`) as `msgspec` writes them: structures with `array_like` as arrays of all
//! their fields, other structures and dataclasses as maps. What the scheduler's core doesn't know,
//! such as logprobs, comes encoded already. Left out: fields that only other senders set
//! (`utility_output`, `wave_complete`, `start_wave`), which are nil here.
#![forbid(unsafe_code)]

mod message;
mod msgpack;
mod stats;

pub use message::{Envelope, Message, Output, RequestId};
pub use stats::Stats;
