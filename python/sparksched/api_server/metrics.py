"""Turns what engines have counted into series, each time somebody asks for vLLM's `/metrics`."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

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

if TYPE_CHECKING:
    from sparksched.compat import Unsupported

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

_HISTOGRAMS: Final = {
    "schedule": "Time in the scheduler's schedule(), once a step.",
    "update_from_output": "Time in the scheduler's update_from_output(), once a step.",
    "step_gap": (
        "Time from the end of update_from_output() to the next schedule(), if it left unfinished "
        "requests."
    ),
}
_REQUESTS: Final = {
    "running": "Requests that the scheduler has in its batch.",
    "waiting": "Requests that wait to be scheduled, for whatever reason.",
}
_WAITING_FOR: Final = (
    "sparksched:waiting_requests",
    "Requests that wait to be scheduled, by what they wait for.",
)
_TENANTS_WAITING: Final = (
    "sparksched:tenant_waiting_requests",
    "Requests that have never been scheduled, of the 20 tenants with the most requests; the rest"
    " have an empty name. With SPARKSCHED_ORDER.",
)
_TENANTS_UNFINISHED: Final = (
    "sparksched:tenant_unfinished_requests",
    "The same, of requests that have not ended.",
)
_QUEUE_TIMEOUTS: Final = (
    "sparksched:queue_timeouts",
    "Requests that ended because they had waited too long to be scheduled.",
)
_PACING: Final = (
    ("chunk_tokens", GaugeMetricFamily, "Tokens of prompts in the last step beside streams."),
    ("longest_stall_s", GaugeMetricFamily, "Longest step with prompts beside streams, lately."),
    ("prompt_s", CounterMetricFamily, "Seconds of steps with prompts while others generated."),
    ("contended_s", CounterMetricFamily, "Seconds in which prompts and decodes had work."),
    ("num_decode_steps", CounterMetricFamily, "Steps of decodes alone that were put in."),
    ("slowdown_p50", GaugeMetricFamily, "Times as late as without pacing: long prompts, lately."),
    ("slowdown_max", GaugeMetricFamily, "The most of these."),
)
_PROMISES: Final = (
    (
        ("sparksched:paced_late_prompts", "Prompts that came later than promised.", "reason"),
        {it: f"num_late_by_{it}" for it in ("preemption", "waiting", "steps")},
    ),
    (
        ("sparksched:paced_steps_over_stall", "Steps that took longer than the stall.", "reason"),
        {
            "ordinary": "num_over_for_ordinary",
            "long": "num_over_for_long",
            "unexpected": "num_over_unexpected",
        },
    ),
)
_RING_GAUGES: Final = {
    "waiting_bytes": ("sparksched:ring_waiting_bytes", "Bytes in the rings that are to be read."),
    "high_water_bytes": (
        "sparksched:ring_high_water_bytes",
        "The most bytes that were seen to wait in one ring.",
    ),
}
_RING_COUNTERS: Final = {
    "num_rescues": (
        "sparksched:rescues",
        "Messages that the engine found by itself because nobody had woken it for them.",
    ),
    "num_clients_lost": (
        "sparksched:clients_lost",
        "API servers whose link ended without a goodbye.",
    ),
}


@dataclass(eq=False)
class ShownEngine:
    """One engine as an API server sees it."""

    model_name: str
    engine: str
    """Its rank."""
    info: Mapping[str, str]
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


def _shown_engines() -> list[ShownEngine]:
    engines = {engine.labels: engine for engine in list(_shown)}
    return [engines[labels] for labels in sorted(engines)]


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


_registering = threading.Lock()
_registered: "list[EngineCollector]" = []
"""One, if the process's registry has it."""


def register() -> None:
    """Have the process's registry collect from engines, too; once."""
    with _registering:
        # Known here, and not looked for in the registry, which others may be changing.
        if not _registered:
            added = EngineCollector()
            REGISTRY.register(added)
            _registered.append(added)


def unregister() -> None:
    """Have the process's registry as it was."""
    with _registering:
        while _registered:
            REGISTRY.unregister(_registered.pop())


class EngineCollector(Collector):
    """The engines that `engines` returns: all that are shown, unless it says otherwise."""

    def __init__(self, engines: Callable[[], list[ShownEngine]] | None = None) -> None:
        self._engines = engines or _shown_engines
        self._is_of_server = engines is None

    def describe(self) -> list[Metric]:
        """Name all series, also those that aren't there yet: a request may ask for some by name."""
        families = (_step_families([]), _tenant_families([]), _ring_families([]))
        return [_info_family(), *itertools.chain(*families)]

    def collect(self) -> Iterator[Metric]:
        """Read each engine's page. An error here must not take vLLM's own metrics away."""
        try:
            engines = self._engines()
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
        family.add_metric(_labels_without_engine(unsupported), 1)
    yield family


def _labels_without_engine(unsupported: "Unsupported") -> list[str]:
    """Return labels where vLLM is not known so well that its engines would be."""
    about = [unsupported.feature, unsupported.reason[:MAX_LABEL_CHARACTERS]]
    return ["", "", "vllm", "zmq", __version__, vllm_version, *about]


def _families(engines: Sequence[ShownEngine]) -> Iterator[Metric]:
    readings = [(engine, engine.meters) for engine in engines]
    steps = [(engine, found) for engine, it in readings if it is not None and (found := it.steps())]
    rings = [(engine, found) for engine, it in readings if it is not None and (found := it.rings())]
    if steps:
        yield from _step_families(steps)
    tenants = [
        (engine, counts) for engine, it in readings if it is not None and (counts := it.tenants())
    ]
    if tenants:
        yield from _tenant_families(tenants)
    if rings:
        yield from _ring_families(rings)


_Readings = Sequence[tuple[ShownEngine, Any]]


def _step_families(readings: _Readings) -> Iterator[Metric]:
    # An extension that has no meters has none of their bounds either.
    bounds = [repr(bound) for bound in _core.meter_bounds_s()] if readings else []
    for name, text in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"sparksched:{name}_seconds", text, labels=LABELS)
        for engine, reading in readings:
            counts, sum_s = reading[name]
            buckets = list(zip([*bounds, "+Inf"], itertools.accumulate(counts), strict=True))
            histogram.add_metric(engine.labels, buckets, sum_s)
        yield histogram
    for name, text in _REQUESTS.items():
        gauge = GaugeMetricFamily(f"sparksched:requests_{name}", text, labels=LABELS)
        for engine, reading in readings:
            gauge.add_metric(engine.labels, reading[f"num_{name}"])
        yield gauge
    yield from _queue_families(readings)
    yield from _pacing_families(readings)


def _queue_families(readings: _Readings) -> Iterator[Metric]:
    gauge = GaugeMetricFamily(*_WAITING_FOR, labels=(*LABELS, "reason"))
    counter = CounterMetricFamily(*_QUEUE_TIMEOUTS, labels=LABELS)
    for engine, reading in readings:
        for reason, count in reading["waiting_for"].items():
            gauge.add_metric([*engine.labels, reason], count)
        counter.add_metric(engine.labels, reading["num_queue_timeouts"])
    yield gauge
    yield counter


def _tenant_families(readings: _Readings) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(*_TENANTS_WAITING, labels=(*LABELS, "tenant"))
    unfinished = GaugeMetricFamily(*_TENANTS_UNFINISHED, labels=(*LABELS, "tenant"))
    for engine, tenants in readings:
        # Two long names may begin alike, and then are one here.
        sums: dict[str, tuple[int, int]] = {}
        for name, num_waiting, num_unfinished in tenants:
            before = sums.get(name, (0, 0))
            sums[name] = (before[0] + num_waiting, before[1] + num_unfinished)
        for name, (num_waiting, num_unfinished) in sums.items():
            waiting.add_metric([*engine.labels, name], num_waiting)
            unfinished.add_metric([*engine.labels, name], num_unfinished)
    yield waiting
    yield unfinished


def _pacing_families(readings: _Readings) -> Iterator[Metric]:
    for key, family_class, text in _PACING:
        name = key.removeprefix("num_").removesuffix("_s")
        unit = "_seconds" if key.endswith("_s") else ""
        family = family_class(f"sparksched:paced_{name}{unit}", text, labels=LABELS)
        for engine, reading in readings:
            if (pacing := reading["pacing"]) is not None:
                family.add_metric(engine.labels, pacing[key])
        if family.samples or not readings:
            yield family
    for (metric, text, label), keys in _PROMISES:
        counter = CounterMetricFamily(metric, text, labels=(*LABELS, label))
        for view, reading in readings:
            for reason, key in keys.items() if reading["pacing"] is not None else ():
                counter.add_metric([*view.labels, reason], reading["pacing"][key])
        if counter.samples or not readings:
            yield counter


def _ring_families(readings: _Readings) -> Iterator[Metric]:
    labels = (*LABELS, "direction")
    directions = ("to_engine", "to_client")
    for key, (name, text) in _RING_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for engine, reading in readings:
            for direction in directions:
                gauge.add_metric([*engine.labels, direction], reading[direction][key])
        yield gauge
    counter = CounterMetricFamily(
        "sparksched:back_pressure_events",
        "Messages to API servers that found no room in a ring at once, or only for a part; to "
        "the engine, how often it made room that an API server waited for, several times for a "
        "large message.",
        labels=labels,
    )
    for engine, reading in readings:
        for direction in directions:
            count = reading[direction]["num_without_room"]
            counter.add_metric([*engine.labels, direction], count)
    yield counter
    gauge = GaugeMetricFamily(
        "sparksched:backlog_bytes",
        "Bytes of messages to API servers that wait for room in a ring.",
        labels=LABELS,
    )
    for engine, reading in readings:
        gauge.add_metric(engine.labels, reading["to_client"]["backlog_bytes"])
    yield gauge
    for key, (name, text) in _RING_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=LABELS)
        for engine, reading in readings:
            counter.add_metric(engine.labels, reading[key])
        yield counter
