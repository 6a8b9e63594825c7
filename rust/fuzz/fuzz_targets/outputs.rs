//! See `src/outputs.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_fuzz::outputs;

fuzz_target!(|input: outputs::Input| outputs::check(&input));
