//! Atomics and cells: the standard library's, or loom's when its models are checked.

#[cfg(feature = "loom")]
pub use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, fence},
};
#[cfg(not(feature = "loom"))]
pub use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, fence},
};
