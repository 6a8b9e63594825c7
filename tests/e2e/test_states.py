"""A model with recurrent states in real engines: the same tokens and prefix hits as from vLLM's.

Both schedulers get the requests in the same order, and so compose the same steps: what the models
compute is equal to the last bit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testkit import tiny_lfm2
from testkit.server import CPU_ENVIRONMENT, SPARKSCHED_LINE

from .states_program import NUM_REQUESTS, NUM_WAVES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
OURS = {"VLLM_SCHEDULER": "sparksched", "SPARKSCHED_STRICT": "1"}
# By whether there is a prefix cache, blocks that a few requests fill: with it, those of states are
# as long as those of attention; without it, a request has one state.
NUM_BLOCKS = {"1": 24, "0": 20}


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_lfm2.write_model(tmp_path_factory.mktemp("lfm2"))


def run_program(
    model: Path, caching: str, folder: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Run the program with the engine in its own process; fail with what it printed."""
    result = folder / "result.json"
    arguments = (str(model), caching, str(result), str(NUM_BLOCKS[caching]))
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_SCHEDULER"}
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-m", "e2e.states_program", *arguments],
        env=inherited | CPU_ENVIRONMENT | in_process | environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count(SPARKSCHED_LINE) == (1 if environment else 0)
    observed: dict[str, Any] = json.loads(result.read_text())
    return observed


@pytest.mark.parametrize("caching", ["1", "0"])
def test_streams_are_equal(model: Path, caching: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("stock", "ours")]
    for folder in folders:
        folder.mkdir()
    stock = run_program(model, caching, folders[0], {})
    ours = run_program(model, caching, folders[1], OURS)
    assert ours == stock
    assert len(stock["streams"]) == NUM_WAVES * NUM_REQUESTS
    assert len(set(map(tuple, stock["streams"][:NUM_REQUESTS]))) == NUM_REQUESTS
    assert stock["num_preemptions"] > 0
    assert (stock["num_cached"] > 0) == (caching == "1")
