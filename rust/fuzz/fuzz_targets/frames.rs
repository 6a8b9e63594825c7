//! See `src/frames.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_fuzz::frames;

fuzz_target!(|input: frames::Input| frames::check(&input));
