"""Command line: `python -m tests.conformance`, with arguments for pytest behind it.

- `--update` writes the list of what is expected to pass, instead of comparing.
- `--stock` runs the same tests on vLLM's own schedulers: what fails there fails for want of a
  network, a GPU or the model that a test names.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from .models import write_models, write_tiny_llamas
from .source import ensure_tests
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
        "test_priority_scheduler_random",
        "test_repetition_detection",
        "test_swa_inflight_window_free",
        "test_worker_slot_overflow",
        "test_mamba_align_chunk_split",
        "prefix_cache/test_mamba_eagle_resume_checkpoint",
        "prefix_cache/test_partial_prefix_cache_hits",
    )
]

# What is replaced around the scheduler, and engines in the process of the test. A process group
# that they leave behind must not be there when an engine is forked: torch crashes on its end.
IN_PROCESS = [
    f"tests/v1/engine/{name}.py"
    for name in (
        "test_engine_core",
        "test_output_processor",
        "test_parallel_sampling",
        "test_admission_control",
        "test_kv_transfer_rejection",
    )
]

# Engines in processes of their own, and servers.
ENGINES = [
    "tests/v1/engine/test_engine_core_client.py",
    "tests/v1/engine/test_async_llm.py",
]
SERVERS = [
    "tests/entrypoints/openai/completion/test_completion.py",
    "tests/entrypoints/openai/chat_completion/test_chat_completion.py",
    "tests/entrypoints/openai/test_return_token_ids.py",
    "tests/entrypoints/openai/test_chunked_prompt.py",
]


def main(arguments: list[str]) -> int:
    """Run the tests; return the first of pytest's exit statuses that is no success."""
    on_stock = "--stock" in arguments
    for_pytest = [it for it in arguments if it != "--stock"]
    tests = ensure_tests(FOLDER)
    ours = {} if on_stock else {"VLLM_SCHEDULER": "sparksched", "SPARKSCHED_STRICT": "1"}
    runs: list[tuple[list[str], dict[str, str]]] = [(SCHEDULER, {})]
    # A release that is unpacked from its sources has no kernels to compute a model with.
    if importlib.util.find_spec("vllm._C"):
        # Each takes minutes: in `make test` engines talk over rings, and servers over ZMQ.
        is_full = os.environ.get("SCALE") == "full" or on_stock or "--update" in arguments
        runs += [(IN_PROCESS, ours), ([*ENGINES, *(SERVERS if is_full else ())], ours)]
        if not on_stock:
            files = [*ENGINES, *SERVERS] if is_full else SERVERS
            runs.append((files, ours | {"SPARKSCHED_TRANSPORT": "zmq"}))
    statuses = []
    for files, variables in runs:
        statuses.append(run(tests, files, variables, for_pytest, on_stock=on_stock))
        # What the rings pass, ZMQ has to pass.
        for_pytest = [
            it for it in for_pytest if it != "--update" or files in (SCHEDULER, IN_PROCESS)
        ]
    page = PAGE.read_text()
    if "--update" in arguments:
        PAGE.write_text(with_table(page))
    elif page != with_table(page):
        print(f"{PAGE.name}: its table is not what the lists say; --update writes it")
        statuses.append(1)
    return next((it for it in statuses if it not in (0, NO_TESTS)), 0)


def run(
    tests: Path,
    files: list[str],
    variables: dict[str, str],
    arguments: list[str],
    *,
    on_stock: bool,
) -> int:
    """Run pytest on these files; return its exit status."""
    # vLLM looks for models below the working directory before it asks a hub. Each release has its
    # own: two may be tested at a time.
    if files is SCHEDULER:
        models, plugins = write_models(FOLDER / f"models-{tests.name}"), []
    else:
        models = write_tiny_llamas(FOLDER / f"llamas-{tests.name}")
        plugins = ["-pconformance.engine", "-ptests.v1.engine.conftest"]
    if not on_stock:
        plugins.append("-pconformance.plugin")
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
