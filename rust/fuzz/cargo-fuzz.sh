#!/usr/bin/env bash
# cargo-fuzz as it is used here: cargo-fuzz.sh CARGO_FUZZ build [TARGET], or CARGO_FUZZ run TARGET ...
set -euo pipefail

cargo_fuzz=$1 command=$2
cd "$(dirname "$0")/../.."

# cargo-fuzz can't be told to leave Cargo.lock as it is: a stale one is an error here.
cargo fetch --locked --quiet

# The product's release profile optimises a program as a whole: for eight of them that takes minutes. With
# line tables a crash says where.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_DEBUG=line-tables-only
exec "$cargo_fuzz" "$command" --fuzz-dir rust/fuzz --target-dir target/fuzz -s none --features libfuzzer "${@:3}"
