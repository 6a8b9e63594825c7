"""Servers that answer whatever a test wants."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LABELS = 'engine="0",model_name="tiny"'

# Name, further labels, value when idle and when busy.
SERIES = """
sparksched:info fallback_feature="",fallback_reason="",scheduler="sparksched",transport="shm", 1 1
sparksched:requests_running - 0 0
sparksched:requests_waiting - 0 0
sparksched:ring_waiting_bytes direction="to_engine", 0 0
sparksched:ring_waiting_bytes direction="to_client", 0 0
sparksched:ring_high_water_bytes direction="to_engine", 72 1189
sparksched:ring_high_water_bytes direction="to_client", 80 2394
sparksched:back_pressure_events_total direction="to_engine", 0 0
sparksched:back_pressure_events_total direction="to_client", 0 0
sparksched:backlog_bytes - 0 0
sparksched:rescues_total - 0 0
sparksched:clients_lost_total - 0 0
vllm:num_requests_running - 0 0
vllm:num_requests_waiting - 0 0
vllm:kv_cache_usage_perc - 0 0
vllm:prompt_tokens_total - 0 1164
vllm:generation_tokens_total - 0 232
"""
HISTOGRAMS = {
    "sparksched:schedule_seconds": {"8.192e-06": 17, "1.6384e-05": 45, "+Inf": 51},
    "sparksched:update_from_output_seconds": {"1.6384e-05": 17, "3.2768e-05": 51, "+Inf": 51},
    "sparksched:step_gap_seconds": {"0.000131072": 20, "0.000524288": 49, "+Inf": 49},
    "vllm:time_to_first_token_seconds": {"0.02": 1, "0.04": 6, "0.08": 8, "+Inf": 8},
    "vllm:inter_token_latency_seconds": {"0.01": 220, "0.025": 224, "+Inf": 224},
}


def page_of(name: str) -> str:
    """Return the page of a server that is "idle" or was "busy", as far as `top` reads it."""
    lines = []
    for series, labels, idle, busy in map(str.split, SERIES.strip().splitlines()):
        value = busy if name == "busy" else idle
        lines.append(f"{series}{{{labels.removeprefix('-')}{LABELS}}} {value}")
    for series, buckets in HISTOGRAMS.items():
        counts = {bound: count * (name == "busy") for bound, count in buckets.items()}
        lines += [f'{series}_bucket{{le="{it}",{LABELS}}} {counts[it]}' for it in counts]
        lines.append(f"{series}_count{{{LABELS}}} {counts['+Inf']}")
    return "".join(f"{line}\n" for line in lines)


def without_sparksched(page: str) -> str:
    return "".join(line for line in page.splitlines(keepends=True) if "sparksched:" not in line)


class Pages:
    """What a server answers: each page once, and the last from then on."""

    def __init__(self, *pages: str | tuple[int, str]) -> None:
        self.pages = list(pages)

    def next(self) -> tuple[int, bytes]:
        page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        status, text = (200, page) if isinstance(page, str) else page
        return status, text.encode()


@contextmanager
def serving(*pages: str | tuple[int, str], port: int = 0) -> Iterator[str]:
    """Serve pages on a local port; yield the server's address."""
    answers = Pages(*pages)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answers.next()
            self.send_response(status if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    class Server(http.server.ThreadingHTTPServer):
        allow_reuse_address = True

    with Server(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
