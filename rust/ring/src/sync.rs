//! Atomics and cells: the standard library's, or loom's when its models are checked.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, fence},
};
#[cfg(not(loom))]
pub(crate) use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, fence},
};
