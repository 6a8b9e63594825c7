"""What an API server shows of each engine: its page of metrics, and what it says of itself."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

from sparksched import __version__, _core, environment
from sparksched.api_server import metrics
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
        views.append(EngineView(model_name, str(rank), info, _open_meters(rank, offer)))
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
