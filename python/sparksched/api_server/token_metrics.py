"""What a token costs the front end's Prometheus metrics: a step's latencies are observed at once.

Read it beside the loop over `inter_token_latencies_iter` in vLLM's `PrometheusStatLogger.record`,
which calls `Histogram.observe` for each token of a step. What is scraped is the same, but for the
last digit of the sum: a step's latencies are added up before they are added to it.

This relies on the inside of prometheus_client's `Histogram`. If that is not as expected, or the
metrics are not that library's, as with Ray, vLLM's loop does the work.
"""

import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import vllm
from prometheus_client import Histogram

from sparksched.compat import patching

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


def _observing_latencies_at_once(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def record(
        self: "PrometheusStatLogger",
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        latencies = iteration_stats.inter_token_latencies_iter if iteration_stats else ()
        histogram = self.histogram_inter_token_latency[engine_idx] if latencies else None
        if type(histogram) is not Histogram:
            original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            return
        assert iteration_stats is not None
        iteration_stats.inter_token_latencies_iter = []
        try:
            original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        finally:
            # Other loggers get the same object.
            iteration_stats.inter_token_latencies_iter = latencies
        observe_all(histogram, latencies)

    return record


def observe_all(histogram: Histogram, values: Sequence[float]) -> None:
    """Do what calling `histogram.observe` for each of the values would do."""
    total = sum(values)
    if math.isnan(total):  # which belongs into no bucket
        for value in values:
            histogram.observe(value)
        return
    histogram._sum.inc(total)
    # A bucket takes values up to its bound, and that one too.
    find_bucket = functools.partial(bisect_left, histogram._upper_bounds)
    for index, count in Counter(map(find_bucket, values)).items():
        histogram._buckets[index].inc(count)


def prepare() -> str | None:
    """Return what is not as `observe_all` expects it, or None.

    No histogram is tried out: where several API servers share their metrics, it would be scraped.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    record: Any = PrometheusStatLogger.record
    if not record.__code__.co_filename.startswith(str(Path(vllm.__file__).parent)):
        return "PrometheusStatLogger.record is not vLLM's own"
    if {*Histogram.observe.__code__.co_names} != {*_NAMES_IN_OBSERVE.split()}:
        return "prometheus_client.Histogram is not as sparksched knows it"
    return None


_NAMES_IN_OBSERVE: Final = """
    _raise_if_not_observable _sum inc enumerate _upper_bounds _buckets _validate_exemplar
    set_exemplar Exemplar time
"""
