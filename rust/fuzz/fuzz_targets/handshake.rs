//! See `src/handshake.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_fuzz::handshake;

fuzz_target!(|input: handshake::Input| handshake::check(&input));
