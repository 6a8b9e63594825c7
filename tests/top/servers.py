"""Servers that answer whatever a test wants."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "pages"


def recorded(name: str) -> str:
    """Return a page of a real server, as far as `top` reads it."""
    return (PAGES / f"{name}.txt").read_text()


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
