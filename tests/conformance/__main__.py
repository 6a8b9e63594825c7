"""Command line: `python -m tests.conformance`, with arguments for pytest behind it.

- `--update` writes the list of what is expected to pass, instead of comparing.
- `--stock` runs the same tests with vLLM's own scheduler: what passes with ours has to pass, and
  what "needs" something that isn't here has to fail.
- `--short` leaves out what starts an engine, takes a minute, or says nothing about sparksched; and
  of the release that is not installed, what is not the scheduler.
- Names of files choose those.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from . import not_applicable
from .models import write_models
from .source import ensure_tests, installed_version
from .table import PAGE, with_table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".conformance"
NO_TESTS = 5
"""pytest's exit status if `-k` chooses no test."""

# The files of `tests/v1/core` that are about the scheduler, or call parts of it. The others are
# about the KV cache manager, its parts and the encoder cache alone, or need a real model.
SCHEDULER = [
    f"tests/v1/core/{name}.py"
    for name in (
        "test_scheduler",
        "test_async_scheduler",
        "test_prefix_caching",
        "test_deferred_block_free",
        "test_output",
        "test_prefix_replay",
        "test_priority_preemption_bug",
        "test_repetition_detection",
        "test_swa_inflight_window_free",
        "test_worker_slot_overflow",
        "test_mamba_align_chunk_split",
        "prefix_cache/test_mamba_eagle_resume_checkpoint",
        "prefix_cache/test_partial_prefix_cache_hits",
    )
]

LONG = ["tests/v1/core/test_priority_scheduler_random.py"]

# What is replaced around the scheduler.
FRONT_END = [
    f"tests/v1/engine/{name}.py"
    for name in (
        "test_output_processor",
        "test_parallel_sampling",
        "test_admission_control",
        "test_kv_transfer_rejection",
    )
]

# An engine in the process of the test. It comes last: of a process group that it leaves behind,
# torch crashes at the end of an engine that is forked then.
IN_PROCESS = ["tests/v1/engine/test_engine_core.py"]

# Engines in processes of their own.
ENGINES = [
    "tests/v1/engine/test_engine_core_client.py",
    "tests/v1/engine/test_async_llm.py",
]

FIXTURES = [
    "-ptests.v1.engine.conftest",
    "-ptests.entrypoints.conftest",
    "-ptests.entrypoints.openai.responses.conftest",
]

SERVERS = "tests/entrypoints/openai"


def main(arguments: list[str]) -> int:
    """Run the tests; return the first of pytest's exit statuses that is no success."""
    chosen = [it for it in arguments if it.endswith(".py")]
    is_short, on_stock, updates = (it in arguments for it in ("--short", "--stock", "--update"))
    for_pytest = [it for it in arguments if it not in chosen]
    tests = ensure_tests(FOLDER)
    ours = {} if on_stock else {"VLLM_SCHEDULER": "sparksched", "SPARKSCHED_STRICT": "1"}
    schedulers = SCHEDULER if is_short else [*SCHEDULER, *LONG]
    runs: list[tuple[list[str], dict[str, str]]] = [(schedulers, {})]
    # A release that is unpacked from its sources has no kernels to compute a model with.
    is_whole = importlib.util.find_spec("vllm._C") is not None
    if is_whole and not is_short:
        engines = [*ENGINES, *all_servers(tests)]
        runs.append(([*FRONT_END, *engines, *IN_PROCESS], ours))
        # What the rings pass, ZMQ has to pass.
        if os.environ.get("SCALE") == "full" and not (on_stock or updates):
            runs.append((engines, ours | {"SPARKSCHED_TRANSPORT": "zmq"}))
    elif is_whole or not is_short:
        runs.append((FRONT_END, ours))
    statuses = []
    for files, variables in runs:
        wanted = [it for it in files if it in chosen or not chosen]
        in_engines = files is not schedulers
        if wanted:
            statuses.append(run(tests, wanted, variables, for_pytest, in_engines=in_engines))
    page = PAGE.read_text()
    if updates:
        PAGE.write_text(with_table(page))
    elif page != with_table(page):
        print(f"{PAGE.name}: its table is not what the lists say; --update writes it")
        statuses.append(1)
    return next((it for it in statuses if it not in (0, NO_TESTS)), 0)


def all_servers(tests: Path) -> list[str]:
    """Return the files that start a server, but those that can't run at all."""
    paths = sorted((tests / SERVERS).rglob("test_*.py"))
    names = [
        str(path.relative_to(tests))
        for path in paths
        if any(sign in path.read_text() for sign in ("RemoteOpenAIServer", "client: "))
    ]
    table = not_applicable.read(installed_version())
    return [name for name in names if not table.reason(f"{name}::")]


def run(
    tests: Path,
    files: list[str],
    variables: dict[str, str],
    arguments: list[str],
    *,
    in_engines: bool,
) -> int:
    """Run pytest on these files; return its exit status."""
    # vLLM looks for models below the working directory before it asks a hub. Each release has its
    # own: two may be tested at a time.
    models = FOLDER / f"{'llamas' if in_engines else 'models'}-{tests.name}"
    plugins = ["-pconformance.plugin"]
    if in_engines:
        models.mkdir(exist_ok=True)
        plugins = ["-pconformance.engine", *FIXTURES, *plugins]
    else:
        write_models(models)
    command = [sys.executable, "-m", "pytest", *pytest_options(tests), *arguments, *plugins]
    command += [str(tests / file) for file in files]
    variables = environment(tests) | variables
    return subprocess.run(command, cwd=models, env=variables, check=False).returncode


def pytest_options(tests: Path) -> list[str]:
    """Return what keeps vLLM's configuration of pytest and our own away."""
    return [
        "-qq",
        "--tb=short",
        "--timeout=300",
        "--disable-warnings",
        f"-c={os.devnull}",
        f"--rootdir={tests}",
        # vLLM's is for tests with models and GPUs, and slow to import.
        "--noconftest",
        "-pno:cacheprovider",
        "-pconformance.fixtures",
        "--override-ini=asyncio_default_fixture_loop_scope=function",
    ]


def environment(tests: Path) -> dict[str, str]:
    """Return an environment without a network, and without settings of ours."""
    ours = ("VLLM_SCHEDULER", "VLLM_USE_V2_MODEL_RUNNER", "SPARKSCHED_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # The first entry has the package `tests`: it is vLLM's in that process. Last comes what another
    # release of vLLM is found by.
    path = (str(tests), str(ROOT / "tests"), str(ROOT), inherited.get("PYTHONPATH", ""))
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
