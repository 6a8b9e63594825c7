"""What is made of two pages."""

import math

import pytest
from rich.console import Console
from sparksched.commands.top.interval import Interval, Paced, between, quantile
from sparksched.commands.top.page import Page, PageError, address, parse
from sparksched.commands.top.screen import WIDTH, render

from .servers import page_of


def pages(first: str = "idle", last: str = "busy") -> tuple[Page, Page]:
    return parse(page_of(first), 10.0), parse(page_of(last), 12.0)


def busy_interval() -> Interval:
    return between(*pages())


def test_counters_become_rates() -> None:
    before, now = pages()
    interval = busy_interval()
    tokens = now.total("vllm:generation_tokens_total")
    assert tokens is not None
    assert tokens > 50
    assert before.total("vllm:generation_tokens_total") == 0
    assert interval.generation_tokens_per_s == tokens / 2
    schedule = interval.steps["schedule"]
    assert schedule is not None
    assert schedule.per_s == now.total("sparksched:schedule_seconds_count") / 2  # type: ignore[operator]
    assert schedule.p50_s is not None
    assert schedule.p99_s is not None
    assert 1e-6 < schedule.p50_s <= schedule.p99_s < 1
    assert interval.engines[0]["scheduler"] == "sparksched"
    assert interval.rings["to_engine"] is not None
    assert interval.rings["to_engine"].high_water_bytes > 0
    assert interval.model_names == ["tiny"]


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
    interval = between(before, now)
    assert interval.paced == Paced(2032, 0.25, 25, 0.15)
    console = Console(width=WIDTH)
    with console.capture() as capture:
        console.print(render("a server", interval))
    (line,) = [it for it in capture.get().splitlines() if it.startswith("paced prefill")]
    assert line.split()[2:] == ["2,032", "tok", "25%", "25", "150", "ms"]
    # Nothing to share, and no line where prompts aren't paced.
    idle = between(now, parse(paced_page(3.5, 6, 150), 14.0)).paced
    assert idle == Paced(2032, None, 0, 0.15)
    assert busy_interval().paced is None


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
    interval = between(*[parse(page, 10.0)] * 2)
    assert next(iter(interval.tenants.items())) == ("x" * 48, (380, 396))
    assert list(interval.tenants) == ["x" * 48, "", "gold", "t1", "t2"]
    console = Console(width=WIDTH)
    with console.capture() as capture:
        console.print(render("a server", interval))
    lines = [it.split() for it in capture.get().splitlines()]
    assert ["others", "0", "80"] in lines
    assert ["gold", "2", "6"] in lines
    assert busy_interval().tenants == {}


def test_a_server_that_was_started_again_has_no_rates() -> None:
    interval = between(*pages("busy", "idle"))
    assert interval.generation_tokens_per_s is None
    assert interval.steps["schedule"] is None
    assert interval.running == 0


def test_engines_are_added_up() -> None:
    one = page_of("busy")
    series = [line for line in one.splitlines() if line and not line.startswith("#")]
    two = parse(one + "\n".join(line.replace('engine="0"', 'engine="1"') for line in series), 1.0)
    single = parse(one, 1.0)
    name = "vllm:generation_tokens_total"
    assert two.total(name) == 2 * (single.total(name) or 0)
    doubled = {
        bound: 2 * count
        for bound, count in (single.buckets("vllm:time_to_first_token_seconds") or {}).items()
    }
    assert two.buckets("vllm:time_to_first_token_seconds") == doubled
    assert len(between(two, two).engines) == 2


def test_quantiles_are_those_of_prometheus() -> None:
    assert quantile({1.0: 0, 2.0: 10, math.inf: 10}, 0.5) == 1.5
    assert quantile({1.0: 4, 2.0: 4, 4.0: 8, math.inf: 8}, 0.5) == 1.0
    assert quantile({1.0: 4, 2.0: 4, 4.0: 8, math.inf: 8}, 0.75) == 3.0
    assert quantile({1.0: 0, math.inf: 5}, 0.99) == 1.0
    assert quantile({1.0: 0, math.inf: 0}, 0.5) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no series of vLLM's"),
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
