"""What an API server shows of each engine: its page of metrics, and what it says of itself."""

from typing import TYPE_CHECKING

import msgspec
from vllm.logger import init_logger

from sparksched import __version__, _core, environment
from sparksched.api_server import metrics
from sparksched.api_server.metrics import ShownEngine
from sparksched.shared.offer import EngineReport, MetersOffer, pid_namespace

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import MPClient

logger = init_logger("vllm.sparksched")

_NO_PLUGIN = EngineReport(
    scheduler="vllm",
    fallback_feature="an engine without sparksched",
    fallback_reason="its process has not loaded the plugin, or has another VLLM_SCHEDULER",
)


def show_engines(client: "MPClient", ranks_on_rings: set[int]) -> list[ShownEngine]:
    """Show the engines of a client in the metrics, until `metrics.hide` is called."""
    if not environment.shows_metrics():
        return []
    model_name = str(client.vllm_config.model_config.served_model_name)
    shown = []
    for engine, offer in client.sparksched_offers.items():
        rank = int.from_bytes(engine, "little")
        transport = "shm" if rank in ranks_on_rings else "zmq"
        report = _NO_PLUGIN if offer is None else offer.engine
        shown.append(shown_engine(report, model_name, str(rank), transport))
    # Last, so that none is shown for good if there is an error before.
    for it in shown:
        metrics.show(it)
    return shown


def shown_engine(report: EngineReport, model_name: str, engine: str, transport: str) -> ShownEngine:
    """Return what is shown of the engine of this rank."""
    info = {**msgspec.structs.asdict(report), "transport": transport}
    meters = None
    if report.meters is not None:
        try:
            meters = _open(report.meters, report.version)
        except (ConnectionError, OverflowError) as error:
            logger.info("sparksched: no metrics from within engine %s: %s", engine, error)
    return ShownEngine(model_name, engine, info, meters)


def _open(meters: MetersOffer, version: str) -> "_core.MeterReader":
    if meters.pid_namespace != pid_namespace():
        raise ConnectionError("it runs on another host, or in another container")
    if version != __version__:
        raise ConnectionError(f"it has version {version} of sparksched")
    return _core.MeterReader(pid=meters.pid, fd=meters.fd, id=int.from_bytes(meters.id))
