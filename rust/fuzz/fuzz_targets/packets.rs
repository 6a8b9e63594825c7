//! See `src/packets.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_fuzz::packets;

fuzz_target!(|bytes: &[u8]| packets::check(bytes));
