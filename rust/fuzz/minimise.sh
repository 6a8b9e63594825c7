#!/usr/bin/env bash
# Makes the seeds of a built fuzz target anew: minimise.sh TARGET. Of them and of what rust/fuzz/corpus has
# learned, it keeps the fewest and smallest inputs that reach all the code that these reach.
set -euo pipefail

target=$1
cd "$(dirname "$0")/../.."

seeds=rust/fuzz/seeds/$target corpus=rust/fuzz/corpus/$target
kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT
mkdir -p "$seeds" "$corpus"
"target/fuzz/$(rustc -vV | sed -n 's/^host: //p')/release/$target" \
  -set_cover_merge=1 -use_counters=0 -max_len=4096 "$kept" "$seeds" "$corpus" 2>/dev/null
rm -rf "$seeds"
cp -r "$kept" "$seeds"
chmod 755 "$seeds"
printf '%-12s %4d seeds, %6d bytes\n' "$target" "$(ls "$seeds" | wc -l)" "$(cat "$seeds"/* | wc -c)"
