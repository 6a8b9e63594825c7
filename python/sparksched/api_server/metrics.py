"""Turns what engines have counted into series, each time somebody asks for vLLM's `/metrics`."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from prometheus_client import REGISTRY
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

from sparksched import __version__, _core, compat
from sparksched.compat import patching

logger = init_logger("vllm.sparksched")

LABELS: Final = ("model_name", "engine")
"""Those of vLLM's series."""

INFO_LABELS: Final = (
    "scheduler",
    "transport",
    "version",
    "vllm_version",
    "fallback_feature",
    "fallback_reason",
)

MAX_LABEL_CHARACTERS: Final = 200
"""A reason may name values of the configuration, however long."""


class Series(NamedTuple):
    """One of our series."""

    family: type[Any]
    name: str
    key: str
    """What it is in a reading: the value, or with a `label` all values by it."""
    text: str
    label: str = ""
    """A label besides `LABELS`."""


_histogram = functools.partial(Series, HistogramMetricFamily)
_gauge = functools.partial(Series, GaugeMetricFamily)
_counter = functools.partial(Series, CounterMetricFamily)

_STEPS: Final = (
    _histogram("schedule_seconds", "schedule", "Time in the scheduler's schedule(), once a step."),
    _histogram(
        "update_from_output_seconds",
        "update_from_output",
        "Time in the scheduler's update_from_output(), once a step.",
    ),
    _histogram(
        "step_gap_seconds",
        "step_gap",
        "Time from the end of update_from_output() to the next schedule(), if it left unfinished "
        "requests.",
    ),
    _gauge("requests_running", "num_running", "Requests that the scheduler has in its batch."),
    _gauge(
        "requests_waiting",
        "num_waiting",
        "Requests that wait to be scheduled, for whatever reason.",
    ),
    _gauge("waiting_requests", "waiting_for", "The same, by what they wait for.", "reason"),
    _counter(
        "queue_timeouts",
        "num_queue_timeouts",
        "Requests that ended because they had waited too long to be scheduled.",
    ),
)
_PACING: Final = (
    _gauge(
        "paced_chunk_tokens", "chunk_tokens", "Tokens of prompts in the last step beside streams."
    ),
    _gauge(
        "paced_longest_stall_seconds",
        "longest_stall_s",
        "Longest step with prompts beside streams, lately.",
    ),
    _counter(
        "paced_prompt_seconds", "prompt_s", "Seconds of steps with prompts while others generated."
    ),
    _counter(
        "paced_contended_seconds", "contended_s", "Seconds in which prompts and decodes had work."
    ),
    _counter("paced_decode_steps", "num_decode_steps", "Steps of decodes alone that were put in."),
    _gauge(
        "paced_slowdown_p50",
        "slowdown_p50",
        "Times as late as without pacing: long prompts, lately.",
    ),
    _gauge("paced_slowdown_max", "slowdown_max", "The most of these."),
    _counter("paced_late_prompts", "late", "Prompts that came later than promised.", "reason"),
    _counter("paced_steps_over_stall", "over", "Steps that took longer than the stall.", "reason"),
)
_TENANTS: Final = (
    _gauge(
        "tenant_waiting_requests",
        "waiting",
        "Requests that have never been scheduled, of the 20 tenants with the most requests; the "
        "rest have an empty name. With SPARKSCHED_ORDER.",
        "tenant",
    ),
    _gauge(
        "tenant_unfinished_requests",
        "unfinished",
        "The same, of requests that have not ended.",
        "tenant",
    ),
)
_RINGS: Final = (
    _gauge(
        "ring_waiting_bytes",
        "waiting_bytes",
        "Bytes in the rings that are to be read.",
        "direction",
    ),
    _gauge(
        "ring_high_water_bytes",
        "high_water_bytes",
        "The most bytes that were seen to wait in one ring.",
        "direction",
    ),
    _counter(
        "back_pressure_events",
        "num_without_room",
        "Messages to API servers that found no room in a ring at once, or only for a part; to "
        "the engine, how often it made room that an API server waited for, several times for a "
        "large message.",
        "direction",
    ),
    _gauge(
        "backlog_bytes",
        "backlog_bytes",
        "Bytes of messages to API servers that wait for room in a ring.",
    ),
    _counter(
        "rescues",
        "num_rescues",
        "Messages that the engine found by itself because nobody had woken it for them.",
    ),
    _counter("clients_lost", "num_clients_lost", "API servers whose link ended without a goodbye."),
)


@dataclass(eq=False)
class ShownEngine:
    """One engine as an API server sees it."""

    model_name: str
    engine: str
    """Its rank."""
    info: Mapping[str, Any]
    """Values of `INFO_LABELS`, and more."""
    meters: "_core.MeterReader | None"
    """What it counts, if it can be read here."""

    @property
    def labels(self) -> tuple[str, str]:
        """The values of `LABELS`."""
        return (self.model_name, self.engine)


# A client that was dropped is ended by the garbage collector, which may run in the midst of what
# this does, in the same thread, and hides the client's engines: no lock could be held meanwhile.
# So there is none, and each access is one operation of the dictionary, which allocates nothing
# that could start a collection and runs no Python. Its keys are compared by identity for the same
# reason: whoever hides its own needs not look whether another has come in its place.
_shown: dict[ShownEngine, None] = {}


def show(engine: ShownEngine) -> None:
    """Show an engine from now on; of several with the same labels the last one is shown."""
    register()
    _shown[engine] = None


def hide(engine: ShownEngine) -> None:
    """Show an engine no longer. Any thread may call this, and so may the garbage collector."""
    _shown.pop(engine, None)


def prepare() -> None:
    """Have whatever vLLM's `/metrics` asks know about engines.

    An error is logged: a server that can't be watched is better than none.
    """
    try:
        register()
    except Exception:
        logger.exception("sparksched: there will be no metrics of engines")


def _with_engines(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def collect(self: MultiProcessCollector) -> Iterator[Metric]:
        yield from original(self)
        yield from EngineCollector().collect()

    return collect


@functools.cache
def register() -> "EngineCollector":
    """Have the process's registry collect from engines, too; once. Return what does that."""
    collector = EngineCollector()
    REGISTRY.register(collector)
    return collector


class EngineCollector(Collector):
    """The engines that `engines` returns: all that are shown, unless it says otherwise."""

    def __init__(self, engines: Callable[[], list[ShownEngine]] | None = None) -> None:
        self._engines = engines or (lambda: list(_shown))
        self._is_of_server = engines is None

    def describe(self) -> list[Metric]:
        """Name all series, also those that aren't there yet: a request may ask for some by name."""
        series = (*_STEPS, *_PACING, *_TENANTS, *_RINGS)
        return [_info_family(), *(_family(it, []) for it in series)]

    def collect(self) -> Iterator[Metric]:
        """Read each engine's page. An error here must not take vLLM's own metrics away."""
        try:
            # Of several with the same labels the last one is shown.
            by_labels = {engine.labels: engine for engine in self._engines()}
            engines = [by_labels[labels] for labels in sorted(by_labels)]
            info = list(_info(engines)) if engines or self._is_of_server else []
            families = [*info, *_families(engines)]
        except Exception:
            logger.exception("sparksched: its metrics can't be shown")
            return
        yield from families


def _info_family() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "sparksched:info",
        "What schedules and carries messages, and why it isn't sparksched where it isn't.",
        labels=(*LABELS, *INFO_LABELS),
    )


def _info(engines: Sequence[ShownEngine]) -> Iterator[Metric]:
    family = _info_family()
    for engine in engines:
        now = engine.info
        values = [now[name][:MAX_LABEL_CHARACTERS] for name in INFO_LABELS]
        family.add_metric([*engine.labels, *values], 1)
    if not engines:
        unsupported = compat.unsupported_version()
        if unsupported is None:
            return
        # vLLM is not known so well that its engines would be.
        about = [unsupported.feature, unsupported.reason[:MAX_LABEL_CHARACTERS]]
        family.add_metric(["", "", "vllm", "zmq", __version__, vllm_version, *about], 1)
    yield family


def _families(engines: Sequence[ShownEngine]) -> Iterator[Metric]:
    meters = [(engine, engine.meters) for engine in engines if engine.meters is not None]
    steps = [(engine, found) for engine, it in meters if (found := it.steps())]
    pacing = [(engine, _pacing(it["pacing"])) for engine, it in steps if it["pacing"]]
    tenants = [(engine, _tenants(text)) for engine, it in meters if (text := it.tenants())]
    rings = [(engine, _rings(found)) for engine, it in meters if (found := it.rings())]
    pages = ((_STEPS, steps), (_PACING, pacing), (_TENANTS, tenants), (_RINGS, rings))
    for series, readings in pages:
        if readings:
            yield from (_family(it, readings) for it in series)


def _family(series: Series, readings: Sequence[tuple[ShownEngine, Any]]) -> Metric:
    labels = (*LABELS, series.label) if series.label else LABELS
    family = series.family(f"sparksched:{series.name}", series.text, labels=labels)
    for engine, reading in readings:
        value = reading[series.key]
        if series.family is HistogramMetricFamily:
            counts, sum_s = value
            bounds = [*map(repr, _core.meter_bounds_s()), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
            family.add_metric(engine.labels, buckets, sum_s)
        elif series.label:
            for name, number in value.items():
                family.add_metric([*engine.labels, name], number)
        else:
            family.add_metric(engine.labels, value)
    return family  # type: ignore[no-any-return]


def _pacing(reading: dict[str, Any]) -> dict[str, Any]:
    late = {it: reading[f"num_late_by_{it}"] for it in ("preemption", "waiting", "steps")}
    over = {it: reading[f"num_over_for_{it}"] for it in ("ordinary", "long")}
    return reading | {"late": late, "over": over | {"unexpected": reading["num_over_unexpected"]}}


def _tenants(text: str) -> dict[str, Any]:
    counters = {"waiting": Counter[str](), "unfinished": Counter[str]()}
    for line in text.split("\n")[:-1]:
        *counts, name = line.split(" ", 2)
        for counter, count in zip(counters.values(), counts, strict=True):
            # Two long names may begin alike, and then are one here.
            counter[name] += int(count)
    return counters


def _rings(reading: dict[str, Any]) -> dict[str, Any]:
    keys = ("waiting_bytes", "high_water_bytes", "num_without_room")
    directions = ("to_engine", "to_client")
    by_direction = {key: {it: reading[it][key] for it in directions} for key in keys}
    return reading | by_direction | {"backlog_bytes": reading["to_client"]["backlog_bytes"]}
