"""Real servers over rings and stock ones over ZMQ: users see no difference, also at the worst."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.server import Server, serve
from testkit.streaming import Prompt, stream_chunks
from testkit.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_ENDLESS = 4
NUM_ABORTED = 200
# A minute's worth and more: some streams may begin seconds after others.
ENDLESS_TOKENS = 60_000
ROOM_FOR_ENDLESS = f"--max-model-len={ENDLESS_TOKENS + 1024}"
ENDLESS = Prompt("nobody sees the end of this", ENDLESS_TOKENS, {"ignore_eos": True})
OVER_RINGS = {"SPARKSCHED_STRICT": "1", "SPARKSCHED_TRANSPORT": "shm"}
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
END_TIMEOUT_S = 60.0


# ----------------------------------------------------------------------------------------
# Servers and their ends
# ----------------------------------------------------------------------------------------


@dataclass
class Observed:
    """What happened in the life of one server."""

    answers: dict[str, Any]
    health: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    status: int | None = None
    log: str = field(default="", repr=False)


def run_server(
    model_dir: Path,
    log_dir: Path,
    observe: Callable[[Server], Observed],
    *,
    over_rings: bool,
    arguments: tuple[str, ...] = (),
) -> Observed:
    """Observe a server until it has ended; nothing of it may be left then."""
    with serve(
        model_dir,
        log_dir / "serve.log",
        scheduler="sparksched" if over_rings else None,
        is_preloaded=True,
        environment={**DEVELOPMENT, **(OVER_RINGS if over_rings else {})},
        arguments=(ROOM_FOR_ENDLESS, *arguments),
    ) as server:
        shared = shared_memory_of(server)
        observed = observe(server)
        wait_until(lambda: not processes_of(server), "for the end of each process")
        observed.status = server.process.wait()
        observed.log = server.log
    assert not [path for path in shared if path.exists()]
    return observed


def processes_of(server: Server) -> list[int]:
    """Return the processes of a server that run: it leads a process group."""
    running = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (directory / "stat").read_text().rsplit(")", 1)[1].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group) == server.process.pid and state != "Z":
            running.append(int(directory.name))
    return running


def shared_memory_of(server: Server) -> set[Path]:
    """Return the files in shared memory that processes of a server have mapped."""
    found: set[Path] = set()
    for process in processes_of(server):
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                if "/dev/shm/" in line and not line.endswith("(deleted)"):
                    found.add(Path(line[line.index("/dev/shm/") :]))
    return found


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {END_TIMEOUT_S:g} s {what}"
        time.sleep(0.05)


def process_named(server: Server, name: str) -> int:
    """Return a process of a server that has said something in the log."""
    match = re.search(rf"\({name} pid=(\d+)\)", server.log)
    assert match is not None, name
    return int(match[1])


async def kill_in_mid_stream(server: Server, pid: int) -> list[str]:
    """Kill a process of a server under load; return how each request ended."""
    begun = [asyncio.Event() for _ in range(NUM_ENDLESS)]
    async with httpx.AsyncClient(base_url=server.base_url, timeout=END_TIMEOUT_S) as client:
        streams = [asyncio.create_task(end_of_stream(client, server, it)) for it in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(pid, signal.SIGKILL)
        return list(await asyncio.gather(*streams))


async def end_of_stream(client: httpx.AsyncClient, server: Server, begun: asyncio.Event) -> str:
    num_finished = 0
    try:
        async for chunk in stream_chunks(client, server.model, ENDLESS):
            begun.set()
            num_finished += any(it.get("finish_reason") for it in chunk["choices"])
    except (RuntimeError, httpx.TransportError) as error:
        assert num_finished == 0
        return "an error in the stream" if "ended with an error" in str(error) else "a hang-up"
    return "complete" if num_finished else "cut off"


# ----------------------------------------------------------------------------------------
# One API server
# ----------------------------------------------------------------------------------------


def observe_one(server: Server) -> Observed:
    """Send commands, stop the engine for a while, and kill it in the end."""
    engine = process_named(server, "EngineCore")
    observed = Observed(asyncio.run(command(server)))
    if "uses shared memory" in server.log:
        observed.health = watch_health_of_stopped_engine(server, engine)
    server.wait_until_idle()
    observed.ends = asyncio.run(kill_in_mid_stream(server, engine))
    return observed


async def command(server: Server) -> dict[str, Any]:
    """Leave streams in the middle, and use each of the engine's commands that the CPU has."""
    answers: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        for _ in range(2):
            chunks = stream_chunks(client, server.model, ENDLESS)
            for _ in range(5):
                await anext(chunks)
            await chunks.aclose()
        await asyncio.to_thread(server.wait_until_idle)
        answers["abort_requests"] = await abort_all(client, server)
        for number, (method, path) in enumerate(
            [
                ("GET", "/health"),
                ("GET", "/is_sleeping"),
                ("POST", "/sleep?level=0"),
                ("GET", "/is_sleeping"),
                ("POST", "/wake_up?tags=scheduling"),
                ("GET", "/is_sleeping"),
                ("POST", "/reset_prefix_cache"),
                ("POST", "/start_profile"),
                ("POST", "/stop_profile"),
                ("POST", "/sleep?level=7"),
            ]
        ):
            response = await client.request(method, path)
            answers[f"{number} {path}"] = response.status_code, response.text
    return answers


async def abort_all(client: httpx.AsyncClient, server: Server) -> tuple[int, set[str]]:
    """Abort all that is in flight once one of many prompts has a token; return how they ended.

    Those without a token end without a word, and the stream with the last.
    """
    prompts = [[number] for number in range(NUM_ABORTED)]
    status, ends = 0, set()
    async for chunk in stream_chunks(client, server.model, Prompt(prompts, 3000, ENDLESS.extra)):
        if not status:
            status = (await client.post("/abort_requests", json={})).status_code
        ends |= {it["finish_reason"] for it in chunk["choices"]}
    return status, ends - {None}


def watch_health_of_stopped_engine(server: Server, engine: int) -> list[int]:
    """Return what /health says before, during and after a stop of the engine."""
    seen = [health(server)]
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: health(server) != seen[-1], "for the server to be unhealthy")
    seen.append(health(server))
    os.kill(engine, signal.SIGCONT)
    wait_until(lambda: health(server) != seen[-1], "for the server to be healthy")
    seen.append(health(server))
    return seen


def health(server: Server) -> int:
    return httpx.get(f"{server.base_url}/health", timeout=END_TIMEOUT_S).status_code


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def profiling(directory: Path) -> tuple[str, ...]:
    settings = {
        "profiler": "torch",
        "torch_profiler_dir": str(directory),
        # A worker that waits calls functions all the time: writing them all has taken a minute.
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
    }
    return (f"--profiler-config={json.dumps(settings)}",)


@pytest.fixture(scope="module")
def stock(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    directory = tmp_path_factory.mktemp("stock")
    arguments = profiling(directory)
    return run_server(model_dir, directory, observe_one, over_rings=False, arguments=arguments)


@pytest.fixture(scope="module")
def ours(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    directory = tmp_path_factory.mktemp("ours")
    arguments = profiling(directory)
    return run_server(model_dir, directory, observe_one, over_rings=True, arguments=arguments)


def test_messages_go_through_rings(ours: Observed) -> None:
    assert ours.log.count("messages to engine 0 go through shared memory") == 1
    assert len(re.findall(r"API server 0 \(process \d+\) uses shared memory", ours.log)) == 1
    assert "over ZMQ" not in ours.log


def test_commands_are_answered_alike(stock: Observed, ours: Observed) -> None:
    """The CPU can't sleep any deeper than level 0, which stops the scheduler alone."""
    assert ours.answers == stock.answers
    statuses = [status for status, _ in ours.answers.values()]
    assert statuses == [200] * (len(statuses) - 1) + [400]
    assert ours.answers["abort_requests"] == (200, {"abort"})
    sleeping = [json.loads(text)["is_sleeping"] for path, (_, text) in ours.answers.items()
                if path.endswith("/is_sleeping")]  # fmt: skip
    assert sleeping == [False, True, False]


def test_health_of_a_stopped_engine(ours: Observed) -> None:
    assert ours.health == [200, 503, 200]
    (_, after) = ours.log.split("engine 0 is stuck: it hasn't run for", 1)
    assert "engine 0 runs again" in after


def test_a_killed_engine_ends_the_server_alike(stock: Observed, ours: Observed) -> None:
    assert ours.ends == stock.ends == ["an error in the stream"] * NUM_ENDLESS
    assert ours.status == stock.status
    # Whoever notices first says so: our watcher, or vLLM's monitor.
    notices = ("engine 0 is gone: its process died", "engine core exited unexpectedly")
    assert any(notice in ours.log for notice in notices)


def test_nothing_unusual_is_logged(stock: Observed, ours: Observed) -> None:
    """Errors that follow the engine's death are stock's."""
    assert tracebacks(ours) <= tracebacks(stock) | {"EngineDeadError", "CancelledError"}


def tracebacks(observed: Observed) -> set[str]:
    """Return the kinds of exceptions whose tracebacks are in a log."""
    names = set()
    lines = observed.log.splitlines()
    for index, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            prefix = line[: line.index("Traceback")]
            for after in lines[index + 1 :]:
                text = after[len(prefix) :]
                if after.startswith(prefix) and text[:1].strip():
                    names.add(text.split(":")[0].rsplit(".", 1)[-1])
                    break
    return names
