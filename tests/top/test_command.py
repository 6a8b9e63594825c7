"""The command against servers that answer with pages, or not at all."""

import itertools
import signal

import pytest
from sparksched.commands.top import command
from sparksched.commands.top.page import Page, PageError, parse

from testkit.server import reserved_port

from .servers import page_of, serving, without_sparksched
from .terminal import COLUMNS, piped, terminal

QUICKLY = ("--interval", "0.2")


def test_one_look_through_a_pipe() -> None:
    with serving(page_of("idle"), page_of("busy")) as url:
        looked = piped(url, "--once", *QUICKLY)
    assert looked.returncode == 0, looked.stderr
    assert "scheduler: sparksched, shared memory" in looked.stdout
    for name in ("time to first token", "schedule", "update from output", "gap to next schedule"):
        (line,) = [it for it in looked.stdout.splitlines() if it.startswith(f"{name}  ")]
        assert line.rstrip().endswith("s")
    assert "gap to next schedule" in looked.stdout
    assert "to API servers" in looked.stdout
    assert max(map(len, looked.stdout.splitlines())) <= COLUMNS
    assert "\x1b" not in looked.stdout
    assert "…" not in looked.stdout


def test_a_server_without_sparksched_is_told() -> None:
    pages = [without_sparksched(page_of(name)) for name in ("idle", "busy")]
    with serving(*pages) as url:
        looked = piped(url, "--once", *QUICKLY)
    assert looked.returncode == 0
    assert "This server runs without sparksched" in looked.stdout
    assert "time to first token" in looked.stdout
    assert "schedule " not in looked.stdout


def test_a_fallback_is_told_with_its_reason() -> None:
    page = page_of("busy").replace('scheduler="sparksched"', 'scheduler="vllm"')
    page = page.replace('fallback_feature=""', 'fallback_feature="prompt embeddings"')
    page = page.replace('fallback_reason=""', 'fallback_reason="the core has tokens"')
    with serving(page) as url:
        looked = piped(url, "--once", *QUICKLY)
    assert "scheduler: vLLM's own, shared memory" in looked.stdout
    assert "because of prompt embeddings: the core has tokens" in looked.stdout


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ((404, "no such thing"), "no /metrics page: HTTP Error 404"),
        ("up 1\n", "no series of vLLM's"),
    ],
)
def test_what_is_no_vllm_server_is_an_error(page: str | tuple[int, str], expected: str) -> None:
    with serving(page) as url:
        looked = piped(url, "--once", *QUICKLY)
    assert looked.returncode == 1
    assert looked.stdout == ""
    assert looked.stderr.startswith(f"sparksched top: {url}: ")
    assert expected in looked.stderr


def test_no_server_is_an_error() -> None:
    with reserved_port() as port:
        looked = piped(f"localhost:{port}")
    assert looked.returncode == 1
    assert "Connection refused" in looked.stderr
    assert "Traceback" not in looked.stderr


@pytest.mark.parametrize("arguments", [("--interval", "0"), ("--interval", "soon"), ("ftp://a",)])
def test_wrong_arguments_are_told(arguments: tuple[str, ...]) -> None:
    looked = piped(*arguments)
    assert looked.returncode == 2
    assert "is not" in looked.stderr


def test_a_live_view_of_80_columns_ends_when_told_to() -> None:
    with serving(page_of("idle"), page_of("busy")) as url, terminal(url, *QUICKLY) as screen:
        screen.wait_for("API servers lost")
        assert "gap to next schedule" in screen.text
        assert screen.longest_line <= COLUMNS
        screen.process.send_signal(signal.SIGINT)
        assert screen.wait_for_end() == 0


def test_a_server_that_goes_away_is_told() -> None:
    with serving(page_of("busy"), (503, "going down")) as url:
        looked = piped(url, "--once", *QUICKLY)
    assert looked.returncode == 1
    assert "The server is away since" in looked.stdout
    assert "503" in looked.stdout


def test_a_server_that_comes_and_goes_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = page_of("busy")
    answers: list[Page | PageError] = [
        parse(busy, 1.0),
        PageError("gone"),
        PageError("gone"),
        parse(busy, 4.0),
        parse(busy, 5.0),
    ]

    def answer() -> Page:
        page = answers.pop(0)
        if isinstance(page, PageError):
            raise page
        return page

    clock = itertools.count(1)
    monkeypatch.setattr(command.time, "strftime", lambda _: f"{next(clock)} o'clock")
    looks = list(itertools.islice(command.watch(answer, 0.0, parse(busy, 0.0)), 5))
    notice = "The server is away since 1 o'clock: gone. Still trying."
    assert [it for _, it in looks] == ["", notice, notice, "", ""]
    rates = [change and change.rate("vllm:generation_tokens_total") for change, _ in looks]
    assert rates == [0, 0, 0, None, 0]
