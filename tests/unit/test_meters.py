"""What a scheduler counts, what others read of it, and the series that are made of that."""

import fcntl
import gc
import os
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from logs import collected
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from sparksched import _core, compat
from sparksched.api_server import metrics as collector
from sparksched.api_server.metrics import EngineCollector, ShownEngine
from unit.bare_core import build_core, build_request, step
from vllm.v1.request import RequestStatus

ID = 1 << 127 | 5
PAGE_BYTES = 4096
INFO = dict.fromkeys(collector.INFO_LABELS, "") | {"scheduler": "sparksched"}


@pytest.fixture
def meters() -> Any:
    return _core.EngineMeters(ID)


def reader_of(meters: Any) -> Any:
    return _core.MeterReader(pid=os.getpid(), fd=meters.fileno(), id=ID)


def counts(reading: dict[str, Any]) -> list[int]:
    return [sum(reading[name][0]) for name in ("schedule", "update_from_output", "step_gap")]


@pytest.fixture
def shown() -> Iterator[list[ShownEngine]]:
    """Hide what is shown meanwhile."""
    views: list[ShownEngine] = []
    yield views
    for view in views:
        collector.hide(view)
    if collector.register.cache_info().currsize:
        REGISTRY.unregister(collector.register())
        collector.register.cache_clear()


def registry_with(view: ShownEngine) -> CollectorRegistry:
    registry = CollectorRegistry()
    collector.show(view)
    registry.register(EngineCollector())
    return registry


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    return {
        (it.name, *(f"{name}={value}" for name, value in sorted(it.labels.items()))): it.value
        for family in text_string_to_metric_families(text)
        for it in family.samples
    }


# ----------------------------------------------------------------------------------------
# Counting
# ----------------------------------------------------------------------------------------


def test_steps_and_requests_are_counted(meters: Any) -> None:
    core, reader = build_core(), reader_of(meters)
    assert reader.steps() is None
    core.add_request(build_request("early"), 1.0)
    meters.time_steps(core)
    reading = reader.steps()
    assert (reading["num_running"], reading["num_waiting"]) == (0, 1)
    for _ in range(3):
        step(core)
    reading = reader.steps()
    assert counts(reading) == [3, 3, 2]
    assert (reading["num_running"], reading["num_waiting"]) == (1, 0)
    assert all(0 < reading[name][1] < 60 for name in ("schedule", "update_from_output"))
    core.finish_requests(["early"], RequestStatus.FINISHED_ABORTED)
    reading = reader.steps()
    assert (reading["num_running"], reading["num_waiting"]) == (0, 0)


# ----------------------------------------------------------------------------------------
# Reading
# ----------------------------------------------------------------------------------------


def hostile_page(content: bytes) -> int:
    """Return a descriptor of memory that is like a page, with any content."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


@pytest.mark.parametrize("fill", [0, 1, 0x7F, 0xFF])
def test_whatever_a_page_says_becomes_numbers(fill: int, shown: list[ShownEngine]) -> None:
    halves = struct.pack("<QQ", ID & (1 << 64) - 1, ID >> 64)
    content = bytearray([fill] * PAGE_BYTES)
    content[:16] = halves
    for word in range(16, PAGE_BYTES, 8):  # where it says that something is there
        if fill and struct.unpack_from("<Q", content, word)[0] and word % 128 == 0:
            struct.pack_into("<Q", content, word, 1)
    fd = hostile_page(bytes(content))
    try:
        reader = _core.MeterReader(pid=os.getpid(), fd=fd, id=ID)
        assert (reader.steps() is None) == (fill == 0)
        shown.append(ShownEngine("m", "0", INFO, reader))
        text = generate_latest(registry_with(shown[0])).decode()
    finally:
        os.close(fd)
    assert list(text_string_to_metric_families(text))
    assert ("sparksched:clients_lost_total" in text) == bool(fill)
    assert len(text) < 64 << 10


def test_what_is_no_page_is_refused(meters: Any) -> None:
    own = os.getpid()
    for pid, fd, page_id in (
        (own, meters.fileno(), ID + 1),
        (own, 1 << 20, ID),
        (1 << 30, meters.fileno(), ID),
        (own, os.open("/dev/null", os.O_RDONLY), ID),
    ):
        with pytest.raises(ConnectionError):
            _core.MeterReader(pid=pid, fd=fd, id=page_id)
    for numbers in ({"pid": -1}, {"fd": -1}, {"id": -1}, {"id": 1 << 128}):
        with pytest.raises(OverflowError):
            _core.MeterReader(**{"pid": own, "fd": meters.fileno(), "id": ID, **numbers})


# ----------------------------------------------------------------------------------------
# Series
# ----------------------------------------------------------------------------------------


def test_series_say_what_was_counted(meters: Any, shown: list[ShownEngine]) -> None:
    core = build_core()
    meters.time_steps(core)
    core.add_request(build_request(), 1.0)
    step(core)
    shown.append(ShownEngine("model", "3", INFO, reader_of(meters)))
    samples = samples_of(generate_latest(registry_with(shown[0])).decode())
    labels = ("engine=3", "model_name=model")
    for name in ("schedule", "update_from_output"):
        assert samples[f"sparksched:{name}_seconds_count", *labels] == 1
        last = (f"sparksched:{name}_seconds_bucket", labels[0], "le=+Inf", labels[1])
        assert samples[last] == 1
    assert samples["sparksched:requests_running", *labels] == 1
    assert not any("ring_" in name for name, *_ in samples), "there are no rings"
    bounds = {key[2] for key in samples if key[0] == "sparksched:schedule_seconds_bucket"}
    assert len(bounds) == len(_core.meter_bounds_s()) + 1


def test_no_label_is_long_and_the_later_engine_wins(shown: list[ShownEngine]) -> None:
    for reason in ("x" * 5000, "short"):
        shown.append(ShownEngine("model", "0", INFO | {"fallback_reason": reason}, None))
        text = generate_latest(registry_with(shown[-1])).decode()
        assert text.count("sparksched:info{") == 1
        assert reason[: collector.MAX_LABEL_CHARACTERS] in text
        assert "x" * (collector.MAX_LABEL_CHARACTERS + 1) not in text
    collector.hide(shown[0])
    assert "short" in generate_latest(registry_with(shown[-1])).decode()


def collect_a_client_while_reading(registry: CollectorRegistry, num_allocations: int) -> int:
    """Drop a client, which the given allocation of the reading collects; count what is read."""

    class Client:
        def __init__(self) -> None:
            self.itself = self

    view = ShownEngine("model", str(num_allocations), INFO, None)
    collector.show(view)
    weakref.finalize(Client(), collector.hide, view)
    gc.set_threshold(num_allocations)
    gc.enable()
    text = generate_latest(registry).decode()
    gc.disable()
    gc.collect()
    return text.count('model_name="kept"')


def test_a_client_that_is_collected_while_engines_are_read_hides_its_own(
    shown: list[ShownEngine],
) -> None:
    shown.append(ShownEngine("kept", "0", INFO, None))
    registry = registry_with(shown[0])
    found: list[int] = []

    def read() -> None:
        found.extend(collect_a_client_while_reading(registry, it) for it in range(1, 100))

    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()
    try:
        # Should it wait for itself, it does so for good.
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(30)
        assert found == [1] * 99
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
        gc.unfreeze()
    assert 'model_name="model"' not in generate_latest(registry).decode()


def test_every_series_is_described(shown: list[ShownEngine]) -> None:
    class Full:
        def steps(self) -> dict[str, Any]:
            times = ([1] * (len(_core.meter_bounds_s()) + 1), 1.0)
            names = ("schedule", "update_from_output", "step_gap")
            counts = {"num_running": 1, "num_waiting": 1, "num_queue_timeouts": 1}
            others = {"waiting_for": {"blocks": 1}, "pacing": defaultdict(int, chunk_tokens=1)}
            return dict.fromkeys(names, times) | counts | others

        def rings(self) -> dict[str, Any]:
            keys = ("waiting_bytes", "high_water_bytes", "backlog_bytes", "num_without_room")
            directions = dict.fromkeys(("to_engine", "to_client"), dict.fromkeys(keys, 1))
            return {**directions, "num_rescues": 1, "num_clients_lost": 1}

        def tenants(self) -> str:
            return "1 1 tenant\n"

    described = {it.name for it in EngineCollector().describe()}
    shown.append(ShownEngine("model", "0", INFO, Full()))  # type: ignore[arg-type]
    collector.show(shown[0])
    assert {it.name for it in EngineCollector().collect()} == described


def test_an_error_takes_nothing_of_vllms_away(shown: list[ShownEngine]) -> None:
    class Broken:
        def steps(self) -> None:
            raise RuntimeError("no steps today")

    class Other:
        def collect(self) -> Iterator[CounterMetricFamily]:
            yield CounterMetricFamily("other", "Something of vLLM's.", value=1)

    with collected(logger="vllm.sparksched") as lines:
        shown.append(ShownEngine("model", "0", INFO, Broken()))  # type: ignore[arg-type]
        registry = registry_with(shown[0])
        registry.register(Other())  # type: ignore[arg-type]
        text = generate_latest(registry).decode()
    assert "other_total 1.0" in text
    assert "sparksched" not in text
    assert lines == ["sparksched: its metrics can't be shown"]


def test_an_unknown_vllm_is_shown_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = compat.Unsupported("vLLM 99.0", "sparksched doesn't know it")
    monkeypatch.setattr(compat, "unsupported_version", lambda: problem)
    registry = CollectorRegistry()
    registry.register(EngineCollector())
    (sample,) = samples_of(generate_latest(registry).decode())
    assert {"scheduler=vllm", "fallback_feature=vLLM 99.0"} < set(sample)
