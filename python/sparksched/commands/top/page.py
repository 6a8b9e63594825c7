"""A server's `/metrics` page, and what has happened between two of them."""

import http.client
import math
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S: Final = 5.0

Labels = dict[str, str]


class PageError(Exception):
    """There is no page of a vLLM server: the text says why."""


@dataclass
class Page:
    """What a page says, at one moment."""

    at_s: float
    """Of the monotonic clock."""
    samples: dict[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    def values(self, name: str, **labels: str) -> list[float]:
        """Return what the series of a name with these labels say, an engine each."""
        return [it for its, it in self.samples.get(name, ()) if labels.items() <= its.items()]

    def total(self, name: str, **labels: str) -> float | None:
        """Sum a series over all engines; None if it is not there."""
        found = self.values(name, **labels)
        return sum(found) if found else None

    def buckets(self, name: str) -> dict[float, float]:
        """Sum a histogram over all engines: cumulative counts by upper bound, ascending."""
        buckets: dict[float, float] = defaultdict(float)
        for labels, value in self.samples.get(f"{name}_bucket", ()):
            buckets[float(labels["le"])] += value
        return dict(sorted(buckets.items()))

    def labels(self, name: str) -> list[Labels]:
        """Return the labels of all series of a name."""
        return [labels for labels, _ in self.samples.get(name, ())]


class Times(NamedTuple):
    """How often something happened, and how long it took; None is unknown or not at all."""

    per_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None


class Change(NamedTuple):
    """What has happened between two pages of a server."""

    before: Page
    now: Page

    def rate(self, name: str, **labels: str) -> float | None:
        """Return how fast a counter has grown; None if it hasn't: the server is another then."""
        first, last = self.before.total(name, **labels), self.now.total(name, **labels)
        seconds = self.now.at_s - self.before.at_s
        if first is None or last is None or last < first or seconds <= 0:
            return None
        return (last - first) / seconds

    def times(self, name: str) -> Times:
        """Return what a histogram of times has got."""
        first, last = self.before.buckets(name), self.now.buckets(name)
        seconds = self.now.at_s - self.before.at_s
        if first.keys() != last.keys() or seconds <= 0:
            return Times()
        grown = {bound: last[bound] - first[bound] for bound in last}
        if not grown or min(grown.values()) < 0:
            return Times()
        return Times(max(grown.values()) / seconds, quantile(grown, 0.5), quantile(grown, 0.99))


def quantile(cumulative: dict[float, float], share: float) -> float | None:
    """Estimate below which value a share of all samples is; None without samples.

    As Prometheus does: evenly spread within a bucket, and no more than the last finite bound.
    """
    total = max(cumulative.values())
    finite = {bound: count for bound, count in cumulative.items() if math.isfinite(bound)}
    if not total or not finite:
        return None
    return float(np.interp(share * total, [0.0, *finite.values()], [0.0, *finite]))


def address(url: str) -> str:
    """Complete what a user may leave out of a URL.

    Raises:
        ValueError: if that is none of HTTP.

    """
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of an HTTP server")
    parts.port  # noqa: B018 - raises ValueError for one that can't be
    path = parts.path.rstrip("/")
    return parts._replace(path=path.removesuffix("/metrics"), query="", fragment="").geturl()


# A server's page is looked at where it is, not where a proxy would look.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str) -> Page:
    """Fetch the page of the server at an address.

    Raises:
        PageError: if there is none, or none of a vLLM server.

    """
    try:
        with _opener.open(f"{url}/metrics", timeout=TIMEOUT_S) as response:
            text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise PageError(f"no /metrics page: {error or type(error).__name__}") from error
    return parse(text, time.monotonic())


def parse(text: str, at_s: float) -> Page:
    """Read a page.

    Raises:
        PageError: if it is none of a vLLM server.

    """
    page = Page(at_s)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    series = page.samples.setdefault(sample.name, [])
                    series.append((_printable(sample.labels), sample.value))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PageError("what it calls /metrics is not a page of Prometheus metrics") from error
    if not any(name.startswith(("vllm:", "sparksched:")) for name in page.samples):
        raise PageError(
            "its /metrics page has no series of vLLM's: another server, or one with "
            "--disable-log-stats"
        )
    return page


def _printable(labels: Labels) -> Labels:
    """Return labels that do nothing to a terminal."""
    return {
        name: "".join(it if it.isprintable() else "?" for it in value)
        for name, value in labels.items()
    }
