//! Whatever reads what another process wrote, fed with anything, and what must be encoded as another
//! program would. A module for each fuzz target: its `check` says what must hold of any input.
//!
//! `tests/seeds.rs` tries inputs that were kept, in each `make test`. `make fuzz` has libFuzzer look for
//! others, by way of `fuzz_targets`.
#![forbid(unsafe_code)]
#![allow(clippy::missing_panics_doc)] // by a panic, a check says what doesn't hold

pub mod block_hashes;
pub mod frames;
pub mod handshake;
pub mod meters;
pub mod outputs;
pub mod packets;
pub mod segment;
pub mod zmtp;
