#!/usr/bin/env bash
# Runs a built fuzz target on its seeds and then for a while, with other inputs each time: run.sh CARGO_FUZZ
# TARGET SECONDS. Says what it has tried, or what it has found and how to see it again. What it learns stays
# in rust/fuzz/corpus.
set -euo pipefail

cargo_fuzz=$1 target=$2 duration=$3
cd "$(dirname "$0")/../.."

# A hang counts as found, and so does memory that is taken because it was announced. No input needs a
# second; a busy machine may stand still for many.
limits=(-timeout=60 -rss_limit_mb=1024)
run=(rust/fuzz/cargo-fuzz.sh "$cargo_fuzz" run "$target")
corpus=rust/fuzz/corpus/$target seeds=rust/fuzz/seeds/$target log=target/fuzz/$target.log
mkdir -p "$corpus" "$seeds"

if "${run[@]}" "$corpus" "$seeds" -- "${limits[@]}" -max_total_time="$duration" >"$log" 2>&1; then
  awk -v target="$target" '
    /cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") coverage = $(i + 1) }
    /^Done / { runs = $2 }
    END { printf "%-12s %9d inputs, %5d edges covered, nothing found\n", target, runs, coverage }' "$log"
else
  # Without cargo-fuzz's own words, which name other paths.
  sed '/^Reproduce with:/,$d' "$log" | tail -n 60
  found=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
  echo "$target: found something, see $log. To see it again:"
  echo "  ${run[*]#"$PWD/"} ${found#"$PWD/"}"
  exit 1
fi
