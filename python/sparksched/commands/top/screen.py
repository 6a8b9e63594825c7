"""How it looks on a terminal of 80 columns."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from sparksched.commands.top.page import Change, Labels, Page

if TYPE_CHECKING:
    from sparksched.commands.top.servers import Server
    from sparksched.shared.card import EngineCard

WIDTH: Final = 80
MAX_TENANTS: Final = 5

_TIMES: Final = {
    "time to first token": "vllm:time_to_first_token_seconds",
    "between tokens": "vllm:inter_token_latency_seconds",
    "schedule": "sparksched:schedule_seconds",
    "update from output": "sparksched:update_from_output_seconds",
    "gap to next schedule": "sparksched:step_gap_seconds",
}
_DIRECTIONS: Final = {"to_engine": "to engine", "to_client": "to API servers"}
_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def render(name: str, change: Change | None, notice: str = "") -> RenderableType:
    """Return what to show of a server; `notice` is about it and comes first."""
    parts: list[RenderableType] = []
    models = ""
    if change is not None:
        now = change.now
        models = ", ".join(_models(now)) or "no model"
        parts += [
            *_schedulers(now),
            Text(),
            _requests(change),
            *_waits(now),
            Text(),
            _times(change),
        ]
        parts += [*_paced(change), *_tenants(now), *_rings(change)]
    if notice:
        parts.insert(0, Text(notice, style="bold red"))
    return Group(Text.assemble(("sparksched top", "bold"), f"  {name}  {models}"), *parts)


def render_servers(rows: "Sequence[tuple[Server, EngineCard, Change | None]]") -> RenderableType:
    """Return what several servers do, an engine a line; None is what wasn't seen twice."""
    table = _table("model", "engine", "process", "server", "running", "waiting", "steps/s")
    # A model's name may be a long path: it is broken, and all else stays whole.
    model = table.columns[0]
    model.no_wrap, model.overflow, model.min_width = False, "fold", None
    for server, card, change in rows:
        running = waiting = steps_per_s = None
        if change is not None:
            running = _num_requests(change.now, "running")
            waiting = _num_requests(change.now, "waiting")
            steps_per_s = change.times("sparksched:schedule_seconds").per_s
        table.add_row(
            card.model_name,
            card.engine,
            str(card.pid),
            server.name.removeprefix("http://"),
            *map(number, (running, waiting, steps_per_s)),
        )
    title = Text("sparksched top  this machine", "bold")
    parts: list[RenderableType] = [title, Text(), table, Text()]
    for name in dict.fromkeys(server.name for server, _, _ in rows if server.url is None):
        parts.append(Text(f"No page of vLLM's metrics was found for {name}.", "yellow"))
    parts.append(Text("More on one of them: sparksched top URL, or --pid with its process."))
    return Group(*parts)


def _models(now: Page) -> list[str]:
    names = ("vllm:num_requests_running", "sparksched:info")
    return sorted({its.get("model_name", "") for it in names for its in now.labels(it)} - {""})


def _schedulers(now: Page) -> Iterator[Text]:
    engines = now.labels("sparksched:info")
    if not engines:
        yield Text("This server runs without sparksched: only vLLM's part is shown.", "yellow")
    # Engines that don't differ make one line.
    for line in dict.fromkeys(map(_scheduler, engines)):
        yield Text(line, "green" if line.startswith("scheduler: sparksched") else "yellow")


def _scheduler(labels: Labels) -> str:
    transport = "shared memory" if labels.get("transport") == "shm" else "ZMQ"
    versions = f"sparksched {labels.get('version')}, vLLM {labels.get('vllm_version')}"
    if labels.get("scheduler") == "sparksched":
        return f"scheduler: sparksched, {transport}; {versions}"
    feature, reason = labels.get("fallback_feature"), labels.get("fallback_reason")
    why = f"because of {feature}: {reason}" if feature else "for a reason that it doesn't tell"
    return f"scheduler: vLLM's own, {transport}; {versions}\n{why}"


def _requests(change: Change) -> Table:
    table = _table("", "running", "waiting", "KV cache", "prompt tok/s", "output tok/s")
    usages = change.now.values("vllm:kv_cache_usage_perc")
    table.add_row(
        "requests",
        number(_num_requests(change.now, "running")),
        number(_num_requests(change.now, "waiting")),
        f"{sum(usages) / len(usages):.1%}" if usages else "-",
        number(change.rate("vllm:prompt_tokens_total")),
        number(change.rate("vllm:generation_tokens_total")),
    )
    return table


def _num_requests(now: Page, what: str) -> float | None:
    """Return a number of requests; without a front end only ours is known."""
    found = now.total(f"vllm:num_requests_{what}")
    return now.total(f"sparksched:requests_{what}") if found is None else found


def _waits(now: Page) -> Iterator[Text]:
    reasons = [f"{name} {number(it)}" for name, it in _by("reason", now, "waiting") if it]
    if reasons:
        yield Text(f"waiting for           {', '.join(reasons)}", "yellow")
    if timeouts := now.total("sparksched:queue_timeouts_total"):
        yield Text(f"waited too long       {number(timeouts)}", "yellow")


def _by(label: str, now: Page, what: str) -> list[tuple[str, float]]:
    """Return how many requests each value of a label has, the most first."""
    series = f"sparksched:{what}_requests"
    values = dict.fromkeys(its.get(label, "") for its in now.labels(series))
    counts = [(it, now.total(series, **{label: it}) or 0) for it in values]
    return sorted(counts, key=lambda count: count[1], reverse=True)


def _times(change: Change) -> Table:
    table = _table("", "per second", "p50", "p99")
    for name, series in _TIMES.items():
        if series.startswith("vllm:") or change.now.buckets(series):
            times = change.times(series)
            table.add_row(name, number(times.per_s), duration(times.p50_s), duration(times.p99_s))
    return table


def _paced(change: Change) -> Iterator[RenderableType]:
    chunks = change.now.values("sparksched:paced_chunk_tokens")
    if not chunks:
        return
    prompts = change.rate("sparksched:paced_prompt_seconds_total")
    contended = change.rate("sparksched:paced_contended_seconds_total")
    table = _table("", "chunk", "share", "decodes alone/s", "longest stall")
    table.add_row(
        "paced prefill",
        f"{number(max(chunks))} tok",
        f"{min(prompts / contended, 1):.0%}" if prompts is not None and contended else "-",
        number(change.rate("sparksched:paced_decode_steps_total")),
        duration(max(change.now.values("sparksched:paced_longest_stall_seconds"), default=None)),
    )
    yield from (Text(), table)


def _tenants(now: Page) -> Iterator[RenderableType]:
    largest = _by("tenant", now, "tenant_unfinished")[:MAX_TENANTS]
    if not largest:
        return
    table = _table("largest tenants", "never scheduled", "not ended")
    table.columns[0].overflow, table.columns[0].max_width = "ellipsis", 40
    waiting = dict(_by("tenant", now, "tenant_waiting"))
    for name, unfinished in largest:
        table.add_row(name or "others", number(waiting.get(name)), number(unfinished))
    yield from (Text(), table)


def _rings(change: Change) -> Iterator[RenderableType]:
    now = change.now
    if not now.labels("sparksched:ring_waiting_bytes"):
        return
    table = _table("rings", "waiting", "most in one", "without room", "per second")
    events = "sparksched:back_pressure_events_total"
    for direction, name in _DIRECTIONS.items():
        table.add_row(
            name,
            decimal(int(now.total("sparksched:ring_waiting_bytes", direction=direction) or 0)),
            decimal(int(max(now.values("sparksched:ring_high_water_bytes", direction=direction)))),
            number(now.total(events, direction=direction)),
            number(change.rate(events, direction=direction)),
        )
    table.add_row()
    table.add_row("backlog", decimal(int(now.total("sparksched:backlog_bytes") or 0)))
    table.add_row("rescues", number(now.total("sparksched:rescues_total")))
    table.add_row("API servers lost", number(now.total("sparksched:clients_lost_total")))
    yield from (Text(), table)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True, min_width=20)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def number(value: float | None) -> str:
    """Return a count or a rate in a few digits; `-` for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def duration(seconds: float | None) -> str:
    """Return a time in the unit that suits it; `-` for None."""
    if seconds is None:
        return "-"
    for unit_s, unit in _UNITS:
        if seconds >= unit_s or unit == "us":
            break
    return f"{seconds / unit_s:.3g} {unit}"
