//! See `src/segment.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_fuzz::segment;

fuzz_target!(|input: segment::Input| segment::check(&input));
