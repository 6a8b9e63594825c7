"""What the machine and its software are like, whatever is to be served."""

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

from sparksched import compat, environment
from sparksched.commands.check.finding import Finding, ok, problem, warning
from sparksched.compat import releases

CGROUP = Path("/sys/fs/cgroup")
MIN_PROCESSORS = 2
"""One for the API server, one for the engine."""


def findings() -> Iterator[Finding]:
    """Look at everything, cheapest first."""
    yield _extension()
    yield from _variables()
    yield _plugin()
    yield _vllm()
    yield processors(CGROUP)


def _extension() -> Finding:
    topic = "sparksched"
    try:
        import sparksched._core  # noqa: F401
    except ImportError as error:
        return problem(topic, f"its extension can't be loaded: {error}", "reinstall sparksched")
    return ok(topic, importlib.metadata.version("sparksched"))


def _variables() -> Iterator[Finding]:
    topic = "environment"
    are_good = True
    for read in environment.READERS:
        try:
            read()
        except ValueError as error:
            are_good = False
            yield problem(topic, str(error), "correct or unset it: vLLM won't start with it")
    if not are_good:
        return
    values = (f"{it}={os.environ[it]}" for it in environment.VARIABLES if os.environ.get(it))
    yield ok("switches", ", ".join(values) or "all at their defaults")
    if environment.is_selected():
        yield ok(topic, f"{environment.SCHEDULER}=sparksched")
    else:
        state = "asks for vLLM" if environment.is_set() else "is not set"
        yield warning(
            topic,
            f"{environment.SCHEDULER} {state}: vLLM's own scheduler would run",
            f"set {environment.SCHEDULER}=sparksched; all below is said as if it were set",
        )


def _plugin() -> Finding:
    topic = "plugin"
    entry_points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "sparksched" not in entry_points.names:
        return problem(topic, "vLLM can't find sparksched", "install it beside vLLM")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "sparksched" not in allowed.split(","):
        return problem(
            topic, f"VLLM_PLUGINS={allowed!r} leaves sparksched out", "add sparksched to it"
        )
    return ok(topic, "vLLM finds sparksched")


def _vllm() -> Finding:
    topic = "vLLM"
    try:
        unsupported = compat.unsupported_version()
    except ImportError as error:
        return problem(topic, f"it can't be loaded: {error}", "install it beside sparksched")
    if unsupported is None:
        return ok(topic, releases.installed())
    text = f"{unsupported.feature} is not supported: it would run its own scheduler"
    return problem(topic, text, unsupported.reason)


def processors(cgroup: Path) -> Finding:
    """Return how many processors vLLM's processes may use together, by affinity and container."""
    topic = "processors"
    count = float(len(os.sched_getaffinity(0)))
    text = f"{count:.0f} may be used"
    quota = _cpu_quota(cgroup)
    if quota is not None and quota < count:
        count = quota
        text = f"the container is allowed the time of {quota:g}"
    if count < MIN_PROCESSORS:
        return warning(
            topic,
            text,
            "API server and engine each keep one busy: give them two or more",
        )
    return ok(topic, text)


def _cpu_quota(cgroup: Path) -> float | None:
    """Return the processors that the container may use, None for as many as there are."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
