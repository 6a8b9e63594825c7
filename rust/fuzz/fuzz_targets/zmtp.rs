//! See `src/zmtp.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_fuzz::zmtp;

fuzz_target!(|input: zmtp::Input<'_>| zmtp::check(&input));
