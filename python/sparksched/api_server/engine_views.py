"""The API server's part: each engine's page, what the engine says of itself, and deliveries."""

import functools
import threading
from typing import TYPE_CHECKING

from prometheus_client import Histogram
from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

from sparksched import __version__, _core, environment
from sparksched.api_server import metrics
from sparksched.api_server.deliveries import Deliveries
from sparksched.api_server.metrics import EngineView
from sparksched.shared.offer import (
    EngineReport,
    MetersOffer,
    Offer,
    host_identity,
    pid_namespace,
)

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import MPClient

logger = init_logger("vllm.sparksched")

_NO_PLUGIN = EngineReport(
    scheduler="vllm",
    fallback_feature="an engine without sparksched",
    fallback_reason="its process has not loaded the plugin, or has another VLLM_SCHEDULER",
)


def show_engines(client: "MPClient", ranks_on_rings: set[int]) -> list[EngineView]:
    """Show the engines of a client in the metrics, until `metrics.hide` is called."""
    if not environment.shows_metrics():
        return []
    model_name = str(client.vllm_config.model_config.served_model_name)
    views = []
    histograms: dict[int, Histogram] = {}
    for engine, offer in client.sparksched_offers.items():
        rank = int.from_bytes(engine, "little")
        report = _NO_PLUGIN if offer is None else offer.engine
        info = {
            "scheduler": report.scheduler,
            "transport": "shm" if rank in ranks_on_rings else "zmq",
            "version": __version__,
            "vllm_version": vllm_version,
            "fallback_feature": report.fallback_feature,
            "fallback_reason": report.fallback_reason,
        }
        view = EngineView(model_name, str(rank), info, _open_meters(rank, offer))
        if report.meters is not None:
            histograms[rank] = _delivery_histogram().labels(model_name, str(rank))
        views.append(view)
    if histograms:
        client.resources.sparksched_deliveries = Deliveries(histograms)
        client.resources.sparksched_deliveries.watch(client.outputs_queue)
    # Last, so that none is shown for good if there is an error before.
    for view in views:
        metrics.show(view)
    return views


def _open_meters(rank: int, offer: Offer | None) -> "_core.MeterReader | None":
    if offer is None or offer.engine.meters is None:
        return None
    try:
        return _open(offer, offer.engine.meters)
    except (ConnectionError, OverflowError) as error:
        logger.info("sparksched: no metrics from within engine %d: %s", rank, error)
        return None


def _open(offer: Offer, meters: MetersOffer) -> "_core.MeterReader":
    if offer.host != host_identity() or meters.pid_namespace != pid_namespace():
        raise ConnectionError("it runs on another host, or in another container")
    if meters.version != __version__:
        raise ConnectionError(f"it has version {meters.version} of sparksched")
    return _core.MeterReader(pid=meters.pid, fd=meters.fd, id=int.from_bytes(meters.id))


_making_histogram = threading.Lock()


def _delivery_histogram() -> Histogram:
    # Not when this is imported: where several API servers share their metrics, prometheus_client
    # has to be told before.
    with _making_histogram:
        return _cached_delivery_histogram()


@functools.cache
def _cached_delivery_histogram() -> Histogram:
    return Histogram(
        "sparksched:deliver_seconds",
        "Time from the arrival of a step's outputs in the API server until streams have them.",
        metrics.LABELS,
        buckets=_core.meter_bounds_s(),
    )
