"""An EC connector's scheduler side: encoder outputs that come from elsewhere and are sent there.

The core decides when, and hands over a `Request` that is up to date. Mirrors what vLLM's
`v1/core/sched/scheduler.py` does with its `ec_connector`. The calls in functions that
`EncoderInputs` takes from vLLM are not here.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request


class EncoderTransfer:
    """A connector, and what is counted of it in a step."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.connector = ECConnectorFactory.create_connector(
            config=vllm_config, role=ECConnectorRole.SCHEDULER
        )
        self._stats: ECConnectorStats | None = None

    # ---- called by the core ----

    def has_outputs(self, request: Request, num_computed_tokens: int) -> bool:
        """Ask whether what a request needs behind its first tokens is there, or needn't be."""
        return bool(self.connector.ensure_cache_available(request, num_computed_tokens))

    def finish_request(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Tell that a request has ended.

        Returns whether it is to be kept, and what the client is told.
        """
        keeps, params = self.connector.request_finished(request)
        return bool(keeps), params

    def take_unavailable(self) -> set[str]:
        """Return the ids of requests whose inputs can't be had any more."""
        unavailable: set[str] = self.connector.take_unavailable_requests()
        return unavailable

    def update(self, report: ECConnectorOutput | None) -> None:
        """Tell what the workers report, and add up their statistics and the connector's."""
        stats: ECConnectorStats | None = None
        if report:
            self.connector.update_connector_output(report)
            stats = report.ec_connector_stats
        own = self.connector.get_ec_connector_stats()
        if own is not None and not own.is_empty():
            stats = own if stats is None else stats.aggregate(own)
        self._stats = stats

    def take_stats(self) -> dict[str, Any] | None:
        """Return what `SchedulerStats` says of the connector."""
        stats, self._stats = self._stats, None
        return stats.data if stats else None
