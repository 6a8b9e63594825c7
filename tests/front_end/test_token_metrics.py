"""What is scraped is the same, whether a step's latencies are observed one by one or at once."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from engine.harness import restored_vllm
from prometheus_client import REGISTRY, Histogram
from sparksched import compat, plugin
from sparksched.api_server import token_metrics
from sparksched.compat import patching, seams
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats

from testkit.executor import engine_config, write_model_directory

pytestmark = pytest.mark.release

BOUNDS = [0.01, 0.025, 0.05, 0.1, 1.0]


@pytest.fixture(autouse=True)
def vllm_restored() -> Iterator[None]:
    with restored_vllm():
        yield
    unregister_vllm_metrics()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    with restored_vllm():
        directory = write_model_directory(tmp_path_factory.mktemp("model"))
        return engine_config(directory, async_scheduling=False)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    with mock.patch.object(compat, "warn_or_raise", lambda warning, error: lines.append(warning)):
        yield lines


def is_replaced() -> bool:
    return hasattr(PrometheusStatLogger.record, patching.MARK)


def samples() -> dict[Any, float]:
    """Return all that a scrape would show of vLLM, but for the times of creation."""
    return {
        (sample.name, *sample.labels.items()): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:") and not sample.name.endswith("_created")
    }


def recorded(config: VllmConfig, steps: list[list[float]]) -> dict[Any, float]:
    """Return what is scraped after steps with these latencies, in turns of two engines."""
    logger = PrometheusStatLogger(config, [0, 1])
    for number, latencies in enumerate(steps):
        stats = IterationStats()
        stats.num_generation_tokens = len(latencies) + 1
        stats.time_to_first_tokens_iter.append(0.5)
        stats.inter_token_latencies_iter.extend(latencies)
        logger.record(None, stats, engine_idx=number % 2)
        assert stats.inter_token_latencies_iter == latencies  # the next logger wants them, too
    return samples()


def some_latencies(rng: random.Random) -> list[float]:
    """Return latencies whose sums are exact, so that they may be added in any order."""
    largest = rng.choice([1, 64, 1 << 10, 1 << 16])
    return [rng.randrange(largest) / 1024 for _ in range(rng.choice([0, 1, 2, 30, 300]))]


@pytest.mark.parametrize("seed", range(10))
def test_scrapes_are_equal(seed: int, config: VllmConfig) -> None:
    rng = random.Random(seed)
    steps = [some_latencies(rng) for _ in range(20)]
    stock = recorded(config, steps)
    patching.apply(seams.LATENCIES)
    assert is_replaced()
    ours = recorded(config, steps)
    assert ours == stock
    counted = sum(
        value
        for (name, *_), value in ours.items()
        if name == "vllm:inter_token_latency_seconds_count"
    )
    assert counted == sum(map(len, steps))


@pytest.mark.parametrize("bound", [*BOUNDS, float("inf"), float("nan"), -1.0, 0.0])
def test_values_at_the_bounds(bound: float) -> None:
    one_by_one, at_once = (Histogram("name", "", registry=None, buckets=BOUNDS) for _ in range(2))
    one_by_one.observe(bound)
    token_metrics.observe_all(at_once, [bound])
    values = [
        [it.value for metric in histogram.collect() for it in metric.samples[:-1]]
        for histogram in (one_by_one, at_once)
    ]
    assert str(values[0]) == str(values[1])  # nan is not equal to itself


def test_nothing_to_record(config: VllmConfig) -> None:
    patching.apply(seams.LATENCIES)
    PrometheusStatLogger(config).record(None, None)


def test_other_metrics_are_left_to_vllm(config: VllmConfig) -> None:
    """As with Ray, which has classes of its own."""

    class OtherHistogram(Histogram):
        def observe(self, amount: float, exemplar: Any = None) -> None:
            observed.append(amount)

    observed: list[float] = []
    patching.apply(seams.LATENCIES)
    with mock.patch.object(PrometheusStatLogger, "_histogram_cls", OtherHistogram):
        recorded(config, [[0.1, 0.2]])
    assert [it for it in observed if it in (0.1, 0.2)] == [0.1, 0.2]


# Metrics of several API servers are files, which the library decides on when it is imported.
SHARED = """
from prometheus_client import CollectorRegistry, Histogram, multiprocess
from sparksched.api_server import token_metrics
histogram = Histogram("name", "", ["label"], buckets=[0.5, 1.0]).labels("a")
token_metrics.observe_all(histogram, [0.25, 0.5, 7.0])
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print([it.value for metric in registry.collect() for it in metric.samples])
"""


def test_metrics_of_several_api_servers(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SHARED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[7.75, 2.0, 2.0, 3.0, 3.0]"


@pytest.mark.parametrize("selected", [True, False])
def test_the_plugin_replaces_it_if_it_is_selected(selected: bool) -> None:
    os.environ["VLLM_SCHEDULER"] = "sparksched" if selected else "vllm"
    plugin.register()
    assert is_replaced() == selected


def test_a_foreign_function_stays(warnings: list[str]) -> None:
    def foreign(*args: Any) -> None:
        pass

    with mock.patch.object(PrometheusStatLogger, "record", foreign):
        patching.apply(seams.LATENCIES)
        assert PrometheusStatLogger.record is foreign
    assert warnings == [
        "sparksched: latencies are recorded by vLLM's own code: "
        "PrometheusStatLogger.record is not vLLM's own"
    ]


def test_another_prometheus_client_keeps_vllms_function(warnings: list[str]) -> None:
    def observe(self: Histogram, amount: float, exemplar: Any = None) -> None:
        self._sum.inc(amount)

    with mock.patch.object(Histogram, "observe", observe):
        patching.apply(seams.LATENCIES)
    assert not is_replaced()
    assert warnings == [
        "sparksched: latencies are recorded by vLLM's own code: "
        "prometheus_client.Histogram is not as sparksched knows it"
    ]
