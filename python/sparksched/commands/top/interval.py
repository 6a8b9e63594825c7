"""What has happened between two pages."""

import itertools
import math
from dataclasses import dataclass
from typing import Final

from sparksched.commands.top.page import Buckets, Labels, Page

STEP_HISTOGRAMS: Final = {
    "schedule": "sparksched:schedule_seconds",
    "update": "sparksched:update_from_output_seconds",
    "gap": "sparksched:step_gap_seconds",
}
LATENCIES: Final = {
    "time_to_first_token": "vllm:time_to_first_token_seconds",
    "inter_token_latency": "vllm:inter_token_latency_seconds",
}
MAX_TENANTS: Final = 5
DIRECTIONS: Final = ("to_engine", "to_client")


@dataclass(frozen=True)
class Times:
    """How long something took in the interval."""

    per_s: float
    """How often a second."""
    p50_s: float | None
    p99_s: float | None
    """None if it didn't happen."""


@dataclass(frozen=True)
class Ring:
    """One direction, all API servers together."""

    waiting_bytes: float
    high_water_bytes: float
    """Of one ring, since the start."""
    back_pressure_events: float
    """Since the start."""
    back_pressure_per_s: float | None


@dataclass(frozen=True)
class Paced:
    """Paced prefill."""

    chunk_tokens: float
    """Tokens of prompts in the last step that had some; of several engines the most."""
    prefill_share: float | None
    """0 to 1: what prompts got of the time in which decodes had work, too; None without such."""
    decode_steps_per_s: float | None
    """Steps of decodes alone that were put in."""
    longest_stall_s: float
    """Of this half minute and the one before."""


@dataclass(frozen=True)
class Interval:
    """All that is shown; None is what the page doesn't have, or what can't be told yet."""

    seconds: float
    model_names: list[str]
    running: float | None
    waiting: float | None
    kv_cache_usage: float | None
    """0 to 1, the engines' mean."""
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    latencies: dict[str, Times | None]
    waiting_for: dict[str, float]
    """Requests that wait, by reason; reasons for which none waits are left out."""
    queue_timeouts: float | None
    """Since the start."""
    engines: list[Labels]
    """The labels of `sparksched:info`; none without sparksched."""
    steps: dict[str, Times | None]
    paced: Paced | None
    tenants: dict[str, tuple[float, float]]
    """The largest ones: requests that were never scheduled, and that haven't ended."""
    rings: dict[str, Ring | None]
    backlog_bytes: float | None
    rescues: float | None
    clients_lost: float | None

    @property
    def has_sparksched(self) -> bool:
        """Whether the server knows sparksched at all."""
        return bool(self.engines)


def between(before: Page, now: Page) -> Interval:
    """Compare two pages of a server."""
    names = {
        labels.get("model_name", "")
        for name in ("vllm:num_requests_running", "sparksched:info")
        for labels in now.labels(name)
    }
    return Interval(
        seconds=now.at_s - before.at_s,
        model_names=sorted(names - {""}),
        running=_of_vllm_or_ours(now, "running"),
        waiting=_of_vllm_or_ours(now, "waiting"),
        kv_cache_usage=now.mean("vllm:kv_cache_usage_perc"),
        prompt_tokens_per_s=_rate(before, now, "vllm:prompt_tokens_total"),
        generation_tokens_per_s=_rate(before, now, "vllm:generation_tokens_total"),
        latencies={key: _times(before, now, name) for key, name in LATENCIES.items()},
        waiting_for=_waiting_for(now),
        queue_timeouts=now.total("sparksched:queue_timeouts_total"),
        engines=now.labels("sparksched:info"),
        steps={key: _times(before, now, name) for key, name in STEP_HISTOGRAMS.items()},
        paced=_paced(before, now),
        tenants=_tenants(now),
        rings={direction: _ring(before, now, direction) for direction in DIRECTIONS},
        backlog_bytes=now.total("sparksched:backlog_bytes"),
        rescues=now.total("sparksched:rescues_total"),
        clients_lost=now.total("sparksched:clients_lost_total"),
    )


def _of_vllm_or_ours(now: Page, what: str) -> float | None:
    """Return a number of requests; without a front end only ours is known."""
    found = now.total(f"vllm:num_requests_{what}")
    return now.total(f"sparksched:requests_{what}") if found is None else found


def _waiting_for(now: Page) -> dict[str, float]:
    name = "sparksched:waiting_requests"
    reasons = now.values(name, "reason")
    counts = {reason: now.total(name, reason=reason) or 0 for reason in reasons}
    return {reason: count for reason, count in counts.items() if count}


def _tenants(now: Page) -> dict[str, tuple[float, float]]:
    waiting, unfinished = (
        {name: now.total(series, tenant=name) or 0 for name in now.values(series, "tenant")}
        for series in (f"sparksched:tenant_{it}_requests" for it in ("waiting", "unfinished"))
    )
    largest = sorted(unfinished, key=unfinished.__getitem__, reverse=True)[:MAX_TENANTS]
    return {name: (waiting.get(name, 0), unfinished[name]) for name in largest}


def _rate(before: Page, now: Page, name: str, **labels: str) -> float | None:
    """Return how fast a counter has grown; None if it hasn't: the server is another one then."""
    first, last = before.total(name, **labels), now.total(name, **labels)
    seconds = now.at_s - before.at_s
    if first is None or last is None or last < first or seconds <= 0:
        return None
    return (last - first) / seconds


def _paced(before: Page, now: Page) -> Paced | None:
    chunk_tokens = now.largest("sparksched:paced_chunk_tokens")
    if chunk_tokens is None:
        return None
    prompts = _rate(before, now, "sparksched:paced_prompt_seconds_total")
    contended = _rate(before, now, "sparksched:paced_contended_seconds_total")
    return Paced(
        chunk_tokens=chunk_tokens,
        prefill_share=min(prompts / contended, 1.0) if prompts is not None and contended else None,
        decode_steps_per_s=_rate(before, now, "sparksched:paced_decode_steps_total"),
        longest_stall_s=now.largest("sparksched:paced_longest_stall_seconds") or 0,
    )


def _ring(before: Page, now: Page, direction: str) -> Ring | None:
    events = "sparksched:back_pressure_events_total"
    waiting = now.total("sparksched:ring_waiting_bytes", direction=direction)
    if waiting is None:
        return None
    return Ring(
        waiting_bytes=waiting,
        high_water_bytes=now.largest("sparksched:ring_high_water_bytes", direction=direction) or 0,
        back_pressure_events=now.total(events, direction=direction) or 0,
        back_pressure_per_s=_rate(before, now, events, direction=direction),
    )


def _times(before: Page, now: Page, name: str) -> Times | None:
    first, last = before.buckets(name), now.buckets(name)
    seconds = now.at_s - before.at_s
    if first is None or last is None or first.keys() != last.keys() or seconds <= 0:
        return None
    grown = {bound: last[bound] - first[bound] for bound in last}
    if any(count < 0 for count in grown.values()):
        return None
    return Times(max(grown.values()) / seconds, quantile(grown, 0.5), quantile(grown, 0.99))


def quantile(cumulative: Buckets, share: float) -> float | None:
    """Estimate below which value a share of all samples is; None without samples.

    As Prometheus does: evenly spread within a bucket, and no more than the last finite bound.
    """
    bounds = sorted(cumulative)
    total = cumulative[bounds[-1]]
    if total <= 0:
        return None
    rank = share * total
    lower = 0.0
    for below, bound in itertools.pairwise([-math.inf, *bounds]):
        if cumulative[bound] >= rank:
            if bound == math.inf:
                return lower
            before = cumulative.get(below, 0.0)
            inside = cumulative[bound] - before
            return lower + (bound - lower) * ((rank - before) / inside if inside else 1.0)
        lower = bound
    return lower
