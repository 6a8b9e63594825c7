//! Memory that processes of one Linux host share, and the atomics in it.
//!
//! [`order`] lists each memory ordering that the rings and the meters rest on, and [`sync`] has the
//! atomics: the standard library's, or loom's. All `unsafe` is one cast in `memory`.

#[cfg(not(target_os = "linux"))]
compile_error!("sparksched needs Linux: its memory is sealed memfds");

#[cfg(not(feature = "loom"))]
mod memory;
pub mod order;
pub mod sync;

#[cfg(not(feature = "loom"))]
pub use memory::{
    OfAtomics, PAGE_BYTES, ShmError, check, create, create_prepared, first, map, mapping_of,
};

/// A value in cache lines of its own (two: processors fetch them in pairs).
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct Line<T>(pub T);
