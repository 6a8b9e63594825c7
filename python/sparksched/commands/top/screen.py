"""How an interval looks on a terminal of 80 columns."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sparksched.commands.top.interval import Interval, Paced, Times
from sparksched.commands.top.page import Labels

if TYPE_CHECKING:
    from sparksched.commands.top.servers import Server
    from sparksched.shared.card import EngineCard

WIDTH: Final = 80
UNKNOWN: Final = "-"

_LATENCY_NAMES: Final = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "between tokens",
}
_STEP_NAMES: Final = {
    "schedule": "schedule",
    "update": "update from output",
    "gap": "gap to next schedule",
}

_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def render(url: str, interval: Interval, notice: str = "") -> RenderableType:
    """Return what to show; `notice` is about the server and comes first."""
    parts: list[RenderableType] = [_title(url, interval)]
    if notice:
        parts.append(Text(notice, style="bold red"))
    parts += _schedulers(interval)
    parts += [Text(), _requests(interval), *_waits(interval), Text(), _times(interval)]
    if interval.paced is not None:
        parts += [Text(), _paced(interval.paced)]
    if interval.tenants:
        parts += [Text(), _tenants(interval)]
    if any(interval.rings.values()):
        parts += [Text(), _rings(interval)]
    return Group(*parts)


def _title(url: str, interval: Interval) -> Text:
    models = ", ".join(interval.model_names) or "no model"
    return Text.assemble(("sparksched top", "bold"), f"  {url}  {models}")


def _schedulers(interval: Interval) -> Iterator[Text]:
    if not interval.has_sparksched:
        yield Text("This server runs without sparksched: only vLLM's part is shown.", "yellow")
        return
    said = set()
    for labels in interval.engines:
        line = _scheduler(labels)
        if line.plain not in said:
            said.add(line.plain)
            yield line


def _scheduler(labels: Labels) -> Text:
    """Say what schedules; engines that don't differ make one line."""
    transport = "shared memory" if labels.get("transport") == "shm" else "ZMQ"
    versions = f"sparksched {labels.get('version')}, vLLM {labels.get('vllm_version')}"
    if labels.get("scheduler") == "sparksched":
        return Text(f"scheduler: sparksched, {transport}; {versions}", "green")
    feature, reason = labels.get("fallback_feature"), labels.get("fallback_reason")
    why = f"because of {feature}: {reason}" if feature else "for a reason that it doesn't tell"
    return Text(f"scheduler: vLLM's own, {transport}; {versions}\n{why}", "yellow")


def _requests(interval: Interval) -> Table:
    table = _table("", "running", "waiting", "KV cache", "prompt tok/s", "output tok/s")
    usage = interval.kv_cache_usage
    table.add_row(
        "requests",
        number(interval.running),
        number(interval.waiting),
        UNKNOWN if usage is None else f"{usage:.1%}",
        number(interval.prompt_tokens_per_s),
        number(interval.generation_tokens_per_s),
    )
    return table


def _waits(interval: Interval) -> Iterator[Text]:
    if interval.waiting_for:
        reasons = (f"{name} {number(count)}" for name, count in interval.waiting_for.items())
        yield Text(f"waiting for           {', '.join(reasons)}", "yellow")
    if interval.queue_timeouts:
        yield Text(f"waited too long       {number(interval.queue_timeouts)}", "yellow")


def render_servers(
    rows: "Sequence[tuple[Server, EngineCard, Interval | None]]",
) -> RenderableType:
    """Return what several servers do, an engine a line."""
    table = _table("model", "engine", "process", "server", "running", "waiting", "steps/s")
    # A model's name may be a long path: it is broken, and all else stays whole.
    model = table.columns[0]
    model.no_wrap, model.overflow, model.min_width = False, "fold", None
    for server, card, interval in rows:
        steps = None if interval is None else interval.steps["schedule"]
        table.add_row(
            card.model_name,
            card.engine,
            str(card.pid),
            server.name.removeprefix("http://"),
            number(None if interval is None else interval.running),
            number(None if interval is None else interval.waiting),
            number(steps.per_s if steps else None),
        )
    title = Text("sparksched top  this machine", "bold")
    parts: list[RenderableType] = [title, Text(), table, Text()]
    for name in dict.fromkeys(server.name for server, _, _ in rows if server.url is None):
        parts.append(Text(f"No page of vLLM's metrics was found for {name}.", "yellow"))
    parts.append(Text("More on one of them: sparksched top URL, or --pid with its process."))
    return Group(*parts)


def _times(interval: Interval) -> Table:
    table = _table("", "per second", "p50", "p99")
    for key, name in _LATENCY_NAMES.items():
        table.add_row(name, *_times_cells(interval.latencies[key]))
    for key, name in _STEP_NAMES.items():
        times = interval.steps[key]
        if times is not None:
            table.add_row(name, *_times_cells(times))
    return table


def _times_cells(times: Times | None) -> Sequence[str]:
    if times is None:
        return (UNKNOWN, UNKNOWN, UNKNOWN)
    return (number(times.per_s), duration(times.p50_s), duration(times.p99_s))


def _paced(paced: Paced) -> Table:
    table = _table("", "chunk", "share", "decodes alone/s", "longest stall")
    share = paced.prefill_share
    table.add_row(
        "paced prefill",
        f"{number(paced.chunk_tokens)} tok",
        UNKNOWN if share is None else f"{share:.0%}",
        number(paced.decode_steps_per_s),
        duration(paced.longest_stall_s),
    )
    return table


def _tenants(interval: Interval) -> Table:
    table = _table("largest tenants", "never scheduled", "not ended")
    table.columns[0].overflow, table.columns[0].max_width = "ellipsis", 40
    for name, counts in interval.tenants.items():
        table.add_row(name or "others", *map(number, counts))
    return table


def _rings(interval: Interval) -> Table:
    table = _table("rings", "waiting", "most in one", "without room", "per second")
    names = {"to_engine": "to engine", "to_client": "to API servers"}
    for direction, name in names.items():
        ring = interval.rings[direction]
        if ring is not None:
            table.add_row(
                name,
                size(ring.waiting_bytes),
                size(ring.high_water_bytes),
                number(ring.back_pressure_events),
                number(ring.back_pressure_per_s),
            )
    table.add_row()
    table.add_row("backlog", size(interval.backlog_bytes))
    table.add_row("rescues", number(interval.rescues))
    table.add_row("API servers lost", number(interval.clients_lost))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True, min_width=20)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def number(value: float | None) -> str:
    """Return a count or a rate in a few digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def duration(seconds: float | None) -> str:
    """Return a time in the unit that suits it."""
    if seconds is None:
        return UNKNOWN
    for unit_s, unit in _UNITS:
        if seconds >= unit_s or unit == "us":
            break
    return f"{seconds / unit_s:.3g} {unit}"


def size(value: float | None) -> str:
    """Return a number of bytes in the unit that suits it."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
