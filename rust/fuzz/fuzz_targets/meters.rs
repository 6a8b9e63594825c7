//! See `src/meters.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_fuzz::meters;

fuzz_target!(|bytes: &[u8]| meters::check(bytes));
