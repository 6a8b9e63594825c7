"""Random weights that are made lively while tokens are compared."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.serving import measure, weights
from bench.serving.remote import RemoteError
from bench.serving.server import ServerError
from bench.serving.splits import fingerprints
from bench.serving.workload import MIXED, Workload

WORKLOAD = Workload(MIXED, 2, 100, (4, 4), (3, 3))


class Model(torch.nn.Module):
    """A model with vLLM's random weights, some of them quantized."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "embed_tokens": (50, 64),
            "norm": (64,),
            "qkv_proj": (96, 64),
            "bias": (4, 64),
            "lm_head": (50, 64),
        }
        for name, shape in shapes.items():
            values = (torch.rand(shape) * 2 - 1) * weights.DUMMY_LIMIT
            self.register_parameter(name, frozen(values.to(torch.bfloat16)))
        self.packed = frozen(torch.full((8, 8), 7, dtype=torch.uint8))
        self.scale = frozen(torch.ones(1))


def frozen(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)


def test_weights_come_back_to_the_bit() -> None:
    module: Any = ModuleType("worker_base")
    module.WorkerBase = type("WorkerBase", (), {})
    weights.install(module)
    model, worker = Model(), module.WorkerBase()
    worker.get_model = lambda: model
    before = {name: it.clone() for name, it in model.named_parameters()}
    assert worker.bench_scale_weights(False) == 5
    assert model.embed_tokens.abs().max() > 0.9
    assert float(model.qkv_proj.std()) == pytest.approx(4 / 64**0.5, rel=0.5)
    assert torch.equal(model.lm_head[1], before["lm_head"][0] * 2**8)
    assert torch.equal(model.packed, before["packed"])
    assert worker.bench_scale_weights(True) == 5
    for name, it in model.named_parameters():
        assert torch.equal(it, before[name]), name


@pytest.mark.parametrize(
    ("name", "shape", "exponent"),
    [
        ("model.embed_tokens.weight", (201088, 2880), 10),
        ("model.norm.weight", (2880,), 10),
        ("model.layers.0.mlp.experts.w13_bias", (128, 5760), 10),
        ("lm_head.weight", (201088, 2880), 5),
        ("model.layers.0.self_attn.qkv_proj.weight", (5120, 2880), 7),
        ("model.layers.0.attn.k_scale", (), 0),
        ("model.layers.0.attn.k_scale", (1,), 0),
    ],
)
def test_each_weight_becomes_what_a_trained_one_is_like(
    name: str, shape: tuple[int, ...], exponent: int
) -> None:
    assert weights.exponent_of(name, shape) == exponent


# ---- when ----


ANSWERS: dict[str, Any] = {
    "scale_weights": 7,
    "count": None,
    "collect": [[1, 2, 3], [4, 4, 5]],
    "counted": [[(1, 4), (2, 5), (0, 0), (2, 2)]],
}

COMPARISON = ["count", "collect", "counted"] * 4
"""Sampled and greedy, each twice."""


class Remote:
    """An API server that answers at once."""

    def __init__(self, fails: str = "", fails_back: bool = False) -> None:
        self.fails, self.fails_back = fails, fails_back
        self.asked: list[str] = []

    def call(self, command: str, timeout_s: float = 0.0, **arguments: Any) -> Any:
        self.asked.append(command)
        if command == self.fails or (arguments.get("is_back") and self.fails_back):
            raise RemoteError("no answer")
        return ANSWERS[command]


def server(remote: Remote, has_dummy_weights: bool = True) -> Any:
    model = SimpleNamespace(has_dummy_weights=has_dummy_weights)
    return SimpleNamespace(remote=remote, start=SimpleNamespace(model=model))


def test_random_weights_are_scaled_while_tokens_are_compared() -> None:
    remote = Remote()
    found = measure.measure_same_streams(server(remote), WORKLOAD)
    assert remote.asked == ["scale_weights", *COMPARISON, "scale_weights"]
    assert found["scaled"] == 7
    assert found["distinct_tokens_median"] == 2
    assert (found["is_sampled"], found["greedy"]["is_sampled"]) == (True, False)
    assert found["digests"][0] == found["digests"][1]
    assert found["batches"] == found["greedy"]["batches"] == [fingerprints(ANSWERS["counted"])] * 2


def test_weights_from_files_are_left_alone() -> None:
    remote = Remote()
    assert measure.measure_same_streams(server(remote, False), WORKLOAD)["scaled"] == 0
    assert "scale_weights" not in remote.asked


def test_they_are_scaled_back_after_a_comparison_that_has_failed() -> None:
    remote = Remote(fails="collect")
    with pytest.raises(RemoteError):
        measure.measure_same_streams(server(remote), WORKLOAD)
    assert remote.asked[-1] == "scale_weights"


def test_tokens_are_compared_also_where_weights_cant_be_scaled() -> None:
    remote = Remote(fails="scale_weights")
    found = measure.measure_same_streams(server(remote), WORKLOAD)
    assert found["scaled"] == {"missing": "no answer"}
    assert remote.asked == ["scale_weights", *COMPARISON]


def test_a_server_whose_weights_stay_changed_is_of_no_use() -> None:
    with pytest.raises(ServerError, match="not what they were"):
        measure.measure_same_streams(server(Remote(fails_back=True)), WORKLOAD)


def test_nothing_heavy_is_imported_into_every_process() -> None:
    """`sitecustomize` comes before all else in each process of a server."""
    root = Path(__file__).resolve().parents[2]
    look = (
        "import sys, bench.serving.injection, bench.serving.weights; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
