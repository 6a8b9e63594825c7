"""The command against servers that answer with pages, or not at all."""

import itertools
import json
import signal
import subprocess

import pytest
from sparksched.commands.top import command
from sparksched.commands.top.page import NoAnswerError, Page, PageError, parse

from testkit.server import reserved_port

from .servers import page_of, serving, without_sparksched
from .terminal import COLUMNS, COMMAND, piped, terminal

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


def test_one_look_for_a_program() -> None:
    with serving(page_of("idle"), page_of("busy")) as url:
        looked = piped(url, "--once", "--json", *QUICKLY)
    (line,) = looked.stdout.splitlines()
    interval = json.loads(line)
    assert interval["generation_tokens_per_s"] > 0
    assert interval["steps"]["gap"]["p99_s"] > 0
    assert interval["rings"]["to_client"]["waiting_bytes"] == 0
    assert interval["engines"][0]["transport"] == "shm"


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
        ((404, "no such thing"), "there is no /metrics page: it answers with HTTP status 404"),
        ((503, "busy"), "it answers with HTTP status 503"),
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
    assert "no server answers" in looked.stderr
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


def test_a_program_is_told_of_a_server_that_goes_away() -> None:
    with serving(page_of("busy"), (503, "going down")) as url:
        looked = piped(url, "--once", "--json", *QUICKLY)
    assert looked.returncode == 1
    assert "status 503" in json.loads(looked.stdout)["error"]


def test_a_reader_that_has_seen_enough_ends_it() -> None:
    with serving(page_of("busy")) as url:
        process = subprocess.Popen(
            [*COMMAND, url, "--json", *QUICKLY],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_server_that_comes_and_goes_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = page_of("busy")
    answers: list[Page | PageError] = [
        parse(busy, 1.0),
        NoAnswerError("gone"),
        NoAnswerError("gone"),
        parse(busy, 4.0),
        parse(busy, 5.0),
        PageError("it has become another"),
    ]

    def answer(_url: str) -> Page:
        page = answers.pop(0)
        if isinstance(page, PageError):
            raise page
        return page

    clock = itertools.count(1)
    monkeypatch.setattr(command, "fetch", answer)
    monkeypatch.setattr(command.time, "strftime", lambda _: f"{next(clock)} o'clock")
    looks = list(
        itertools.islice(command.watch(lambda: command.fetch("url"), 0.0, parse(busy, 0.0)), 6)
    )
    assert [bool(look.problem) for look in looks] == [False, True, True, False, False, True]
    assert looks[1].problem == looks[2].problem
    assert "doesn't answer since 1 o'clock: gone" in looks[1].problem
    assert "is no vLLM server since 2 o'clock: it has become another" in looks[5].problem
    rates = [look.interval and look.interval.generation_tokens_per_s for look in looks]
    assert rates == [0, 0, 0, None, 0, 0]
