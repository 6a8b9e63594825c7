"""A server's `/metrics` page: fetched, and read into sums over its engines."""

import http.client
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S: Final = 5.0
MAX_PAGE_BYTES: Final = 32 << 20

Labels = dict[str, str]
Buckets = dict[float, float]
"""Cumulative counts by upper bound."""


class PageError(Exception):
    """There is no page of a vLLM server: the text says why."""


class NoAnswerError(PageError):
    """Nobody answers, or not with a page: this may change."""


@dataclass
class Page:
    """What a page says, at one moment."""

    at_s: float
    """Of the monotonic clock."""
    samples: dict[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum a series over all engines; None if it is not there."""
        found = [
            value for its, value in self.samples.get(name, ()) if labels.items() <= its.items()
        ]
        return sum(found) if found else None

    def largest(self, name: str, **labels: str) -> float | None:
        """Return the largest of a series over all engines; None if it is not there."""
        found = [
            value for its, value in self.samples.get(name, ()) if labels.items() <= its.items()
        ]
        return max(found, default=None)

    def mean(self, name: str) -> float | None:
        """Average a series over all engines; None if it is not there."""
        found = self.samples.get(name, ())
        return sum(value for _, value in found) / len(found) if found else None

    def buckets(self, name: str) -> Buckets | None:
        """Sum a histogram over all engines; None if it is not there."""
        found = self.samples.get(f"{name}_bucket")
        if not found:
            return None
        buckets: Buckets = defaultdict(float)
        for labels, value in found:
            buckets[_bound(labels)] += value
        return dict(sorted(buckets.items()))

    def values(self, name: str, label: str) -> list[str]:
        """Return the values that a label has in the series of a name, each once."""
        return list(dict.fromkeys(labels.get(label, "") for labels in self.labels(name)))

    def labels(self, name: str) -> list[Labels]:
        """Return the labels of all series of a name."""
        return [labels for labels, _ in self.samples.get(name, ())]


def _printable(labels: Labels) -> Labels:
    """Return labels that do nothing to a terminal."""
    return {
        name: "".join(it if it.isprintable() else "?" for it in value)
        for name, value in labels.items()
    }


def _bound(labels: Labels) -> float:
    try:
        return float(labels["le"])
    except (KeyError, ValueError):
        raise PageError("it has a histogram with a bucket without a bound") from None


def address(url: str) -> str:
    """Complete what a user may leave out of a URL.

    Raises:
        ValueError: if that is none of HTTP.

    """
    if "://" not in url:
        url = f"http://{url}"
    parts = urllib.parse.urlsplit(url)
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
        NoAnswerError: if there is none now.
        PageError: if what is there is no vLLM server.

    """
    try:
        with _opener.open(f"{url}/metrics", timeout=TIMEOUT_S) as response:
            content = response.read(MAX_PAGE_BYTES + 1)
    except urllib.error.HTTPError as error:
        what = f"it answers with HTTP status {error.code}"
        if error.code >= http.client.INTERNAL_SERVER_ERROR:
            raise NoAnswerError(what) from error
        raise PageError(f"there is no /metrics page: {what}") from error
    except urllib.error.URLError as error:
        raise NoAnswerError(f"no server answers: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(f"no server answers: {error or type(error).__name__}") from error
    if len(content) > MAX_PAGE_BYTES:
        raise PageError(f"its /metrics page is longer than {MAX_PAGE_BYTES >> 20} MiB")
    return parse(content.decode(errors="replace"), time.monotonic())


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
