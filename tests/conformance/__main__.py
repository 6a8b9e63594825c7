"""Command line: `python -m tests.conformance`, with arguments for pytest behind it.

- `--update` writes the list of what is expected to pass, instead of comparing.
- `--stock` runs the same tests on vLLM's own schedulers: what fails there fails for want of a
  network or a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

from .models import write_models
from .source import ensure_tests

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".conformance"

# The files of `tests/v1/core` that are about the scheduler, or call parts of it. The others are
# about the KV cache manager, its parts and the encoder cache alone, or need a real model.
FILES = (
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_prefix_caching.py",
    "test_deferred_block_free.py",
    "test_output.py",
    "test_prefix_replay.py",
    "test_priority_preemption_bug.py",
    "test_priority_scheduler_random.py",
    "test_repetition_detection.py",
    "test_swa_inflight_window_free.py",
    "test_worker_slot_overflow.py",
    "test_mamba_align_chunk_split.py",
    "prefix_cache/test_mamba_eagle_resume_checkpoint.py",
    "prefix_cache/test_partial_prefix_cache_hits.py",
)


def main(arguments: list[str]) -> int:
    """Run the tests; return pytest's exit status."""
    on_stock = "--stock" in arguments
    for_pytest = [it for it in arguments if it != "--stock"]
    tests = ensure_tests(FOLDER)
    # vLLM looks for models below the working directory before it asks a hub. Each release has its
    # own: two may be tested at a time.
    models = write_models(FOLDER / f"models-{tests.name}")
    command = [sys.executable, "-m", "pytest", *pytest_options(tests), *for_pytest]
    if not on_stock:
        command.append("-pconformance.plugin")
    command += [str(tests / "tests/v1/core" / file) for file in FILES]
    return subprocess.run(command, cwd=models, env=environment(tests), check=False).returncode


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
    ]


def environment(tests: Path) -> dict[str, str]:
    """Return an environment without a network, and without settings of ours."""
    ours = ("VLLM_SCHEDULER", "VLLM_USE_V2_MODEL_RUNNER", "SPARKSCHED_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # The first entry has the package `tests`: it is vLLM's in that process. Last comes what another
    # release of vLLM is found by.
    path = (str(tests), str(ROOT / "tests"), inherited.get("PYTHONPATH", ""))
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
