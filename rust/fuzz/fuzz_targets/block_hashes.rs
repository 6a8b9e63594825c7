//! See `src/block_hashes.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_fuzz::block_hashes;

fuzz_target!(|input: block_hashes::Input| block_hashes::check(&input));
