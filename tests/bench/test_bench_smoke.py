"""Each benchmark runs from end to end, in the smallest size: what it measures means nothing."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from testkit import vllm_rs

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]


def run(folder: Path, module: str, *arguments: str) -> pd.DataFrame:
    command = [sys.executable, "-m", module, *arguments, f"--out={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (path,) = folder.glob("*.csv")
    return pd.read_csv(path)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("bench.micro.host_path", ("--quick", "--streams=1", "--step-ms=0")),
        ("bench.micro.steps", ("--quick",)),
        ("bench.micro.recording", ("--requests=4", "--steps=50")),
        ("bench.micro.mixed", ("--quick",)),
    ],
)
def test_micro(module: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    rows = run(tmp_path, module, *arguments)
    assert len(set(rows["side"])) > 1
    assert rows["value"].notna().all()


SERVING = ("--rounds=1", "--work-dir")
# The client can't make some of the tiny tokenizer's prompts: the third one here.
SMALL = '--set=client={"max-concurrency": 2, "num-prompts": 2, "random-input-len": 16}'


def serve(folder: Path, case: str, *arguments: str) -> pd.DataFrame:
    return run(folder / "out", "bench.serving", case, *SERVING, str(folder), *arguments)


@pytest.mark.skipif(vllm_rs.binary() is None, reason="make vllm-rs")
def test_both_servers_of_a_case_are_measured_in_turn(tmp_path: Path) -> None:
    sides = "--sides=vllm,sparksched-rust"
    rows = serve(tmp_path, "decode", "--model=tiny", sides, "--points=1 stream", SMALL)
    of_sides = rows.pivot_table(index="metric", columns="side", values="value")
    assert (of_sides.loc["tokens_per_s"] > 0).all()
    assert (of_sides.loc["cpu_engine_us_per_token"] > 0).all()


def test_our_filler_spreads_tokens_over_experts_and_vllms_does_not(tmp_path: Path) -> None:
    rows = serve(tmp_path, "experts", "--model=moe-small", "--points=16")
    found = rows[rows["metric"] == "experts"].set_index("filler")["value"]
    # 16 tokens by chance: 28.2 of 32
    assert found["bench"] > 25
    assert found["vllm"] < 8
