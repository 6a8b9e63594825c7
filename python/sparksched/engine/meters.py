"""The engine's side of metrics: the page on which it counts, and how API servers find that page."""

import os
import uuid
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from sparksched import __version__, _core, compat, environment
from sparksched.engine.context import context_of
from sparksched.shared.offer import EngineReport, MetersOffer, pid_namespace

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched")


def begin(engine: "EngineCoreProc", rings: "_core.EngineRings | None") -> EngineReport:
    """Have the scheduler and the rings of an engine count; return what to tell API servers."""
    is_native = context_of(engine).scheduler is not None
    refused = None if is_native else compat.refused()
    return EngineReport(
        scheduler="sparksched" if is_native else "vllm",
        fallback_feature="" if refused is None else refused.feature,
        fallback_reason="" if refused is None else refused.reason,
        version=__version__,
        meters=_begin_counting(engine, rings),
    )


def _begin_counting(
    engine: "EngineCoreProc", rings: "_core.EngineRings | None"
) -> MetersOffer | None:
    if not (environment.shows_metrics() and engine.log_stats):
        return None
    page_id = uuid.uuid4()
    try:
        meters = _core.EngineMeters(page_id.int)
    except ConnectionError as error:
        logger.warning("sparksched: there will be no metrics of this engine: %s", error)
        return None
    context = context_of(engine)
    context.meters = meters
    if context.scheduler is not None:
        meters.time_steps(context.scheduler.core)
    if rings is not None:
        rings.report_to(meters)
    return MetersOffer(
        pid=os.getpid(),
        fd=meters.fileno(),
        id=page_id.bytes,
        pid_namespace=pid_namespace(),
    )
