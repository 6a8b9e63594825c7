//! What an engine counts and times, in a page of shared memory that API servers and `sparksched top` read.

// Of what models leave out, parts stay that nothing else calls.
#![cfg_attr(feature = "loom", expect(dead_code))]

mod meters;
#[cfg(not(feature = "loom"))]
mod page;

pub use meters::*;
#[cfg(not(feature = "loom"))]
pub use page::{MeterPage, MeterReader};
