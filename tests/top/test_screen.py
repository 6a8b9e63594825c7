"""What is made of two pages."""

import math

import pytest
from rich.console import Console, RenderableType
from sparksched.commands.top.page import Change, PageError, Times, address, parse, quantile
from sparksched.commands.top.screen import WIDTH, render, render_servers
from sparksched.commands.top.servers import Server
from sparksched.shared.card import EngineCard
from sparksched.shared.offer import EngineReport

from .servers import page_of

TOKENS = "vllm:generation_tokens_total"


def change(first: str = "idle", last: str = "busy") -> Change:
    return Change(parse(page_of(first), 10.0), parse(page_of(last), 12.0))


def lines_of(picture: RenderableType) -> list[list[str]]:
    console = Console(width=WIDTH)
    with console.capture() as capture:
        console.print(picture)
    return [line.split() for line in capture.get().splitlines()]


def test_counters_become_rates() -> None:
    assert change().rate(TOKENS) == 232 / 2
    schedule = change().times("sparksched:schedule_seconds")
    assert schedule.per_s == 51 / 2
    assert schedule.p50_s is not None
    assert schedule.p99_s is not None
    assert 1e-6 < schedule.p50_s <= schedule.p99_s < 1
    shown = lines_of(render("a server", change()))
    assert ["requests", "0", "0", "0.0%", "582", "116"] in shown
    assert ["to", "engine", "0", "bytes", "1.2", "kB", "0", "0"] in shown


def paced_page(prompt_s: float, contended_s: float, num_decode_steps: int) -> str:
    return page_of("busy") + "".join(
        f'sparksched:paced_{name}{{engine="0"}} {value}\n'
        for name, value in (
            ("chunk_tokens", 2032),
            ("longest_stall_seconds", 0.15),
            ("prompt_seconds_total", prompt_s),
            ("contended_seconds_total", contended_s),
            ("decode_steps_total", num_decode_steps),
        )
    )


def test_paced_prefill_has_a_line() -> None:
    before, now = parse(paced_page(3, 4, 100), 10.0), parse(paced_page(3.5, 6, 150), 12.0)
    paced = ["paced", "prefill", "2,032", "tok"]
    shown = lines_of(render("a server", Change(before, now)))
    assert [*paced, "25%", "25", "150", "ms"] in shown
    # Nothing to share, and no line where prompts aren't paced.
    later = parse(paced_page(3.5, 6, 150), 14.0)
    assert [*paced, "-", "0", "150", "ms"] in lines_of(render("a server", Change(now, later)))
    assert paced not in [line[:4] for line in lines_of(render("a server", change()))]


def test_the_largest_tenants_have_a_line() -> None:
    counts = {
        "gold": (1, 3),
        "x" * 48: (190, 198),
        "": (0, 40),
        **{f"t{n}": (0, 2) for n in (1, 2)},
    }
    page = page_of("busy") + "".join(
        f'sparksched:tenant_{what}_requests{{engine="{engine}",tenant="{name}"}} {it[place]}\n'
        for name, it in (counts | {"tiny": (0, 1)}).items()
        for place, what in enumerate(("waiting", "unfinished"))
        for engine in (0, 1)
    )
    shown = lines_of(render("a server", Change(*[parse(page, 10.0)] * 2)))
    (head,) = [index for index, line in enumerate(shown) if line[:2] == ["largest", "tenants"]]
    assert shown[head + 1] == ["x" * 39 + "…", "380", "396"]
    assert shown[head + 2 : head + 6] == [
        ["others", "0", "80"],
        ["gold", "2", "6"],
        ["t1", "0", "4"],
        ["t2", "0", "4"],
    ]
    assert not shown[head + 6]


def test_a_server_that_was_started_again_has_no_rates() -> None:
    again = change("busy", "idle")
    assert again.rate(TOKENS) is None
    assert again.times("sparksched:schedule_seconds") == Times()


def test_engines_are_added_up() -> None:
    one = page_of("busy")
    two = parse(one + one.replace('engine="0"', 'engine="1"'), 1.0)
    single = parse(one, 1.0)
    assert two.total(TOKENS) == 2 * (single.total(TOKENS) or 0)
    name = "vllm:time_to_first_token_seconds"
    assert two.buckets(name) == {it: 2 * count for it, count in single.buckets(name).items()}


def test_each_engine_of_several_servers_has_a_line() -> None:
    def server(pid: int, url: str | None) -> Server:
        report = EngineReport("sparksched")
        card = EngineCard(pid, "here", "tiny", "0", "shm", report)
        return Server(pid, (card,), url)

    seen, gone = server(11, "http://localhost:1"), server(12, None)
    rows = [(seen, *seen.engines, change()), (gone, *gone.engines, None)]
    shown = lines_of(render_servers(rows))
    assert ["tiny", "0", "11", "localhost:1", "0", "0", "25.5"] in shown
    assert ["tiny", "0", "12", "process", "12", "-", "-", "-"] in shown
    assert [
        "No",
        "page",
        "of",
        "vLLM's",
        "metrics",
        "was",
        "found",
        "for",
        "process",
        "12.",
    ] in shown


def test_quantiles_are_those_of_prometheus() -> None:
    assert quantile({1.0: 0, 2.0: 10, math.inf: 10}, 0.5) == 1.5
    assert quantile({1.0: 4, 2.0: 4, 4.0: 8, math.inf: 8}, 0.75) == 3.0
    assert quantile({1.0: 0, math.inf: 5}, 0.99) == 1.0
    assert quantile({1.0: 0, math.inf: 0}, 0.5) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("up 1\n", "no series of vLLM's"),
        ("<!doctype html><html>hello</html>", "not a page of Prometheus"),
        ("vllm:x{", "not a page of Prometheus"),
        ('vllm:x{a="b"} seven\n', "not a page of Prometheus"),
    ],
)
def test_what_is_no_page_of_vllm_is_told(text: str, expected: str) -> None:
    with pytest.raises(PageError, match=expected):
        parse(text, 1.0)


def test_what_a_page_says_does_nothing_to_a_terminal() -> None:
    page = parse(
        'vllm:num_requests_running{model_name="\x1b[2J"} NaN\nvllm:x{m="\x1b[2J"} 1\n', 1.0
    )
    assert page.total("vllm:num_requests_running") is None
    assert page.labels("vllm:x") == [{"m": "?[2J"}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("https://host/", "https://host"),
        ("http://host:1/prefix/metrics", "http://host:1/prefix"),
    ],
)
def test_addresses_are_completed(given: str, expected: str) -> None:
    assert address(given) == expected


@pytest.mark.parametrize("given", ["ftp://host", "http://", "http://host:99999", "file:///etc"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        address(given)
