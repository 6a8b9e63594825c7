"""Takes a plan of cells, starts the servers that it needs, and keeps what was measured."""

import itertools
import os
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.progress import Progress
from bench.serving.drivers import HTTP, AsyncLLMDriver, Driver, HttpDriver, running_loaders
from bench.serving.evaluate import NothingMeasuredError
from bench.serving.gpus import memory_of_gpus, wait_until_free
from bench.serving.layouts import Layout
from bench.serving.measure import Effort, measure_in_turn, measure_same_streams
from bench.serving.models import Model, prepare
from bench.serving.plan import ALL, CellKey, Plan, ServerKey
from bench.serving.remote import Remote, RemoteError
from bench.serving.server import Server, ServerError, Start, serve
from bench.serving.store import STREAMS, Store
from bench.serving.workload import Workload

Cells = tuple[CellKey, ...]
"""The same cell of servers that run side by side: they take turns."""
FAILURES = (RemoteError, ServerError, NothingMeasuredError)
MAX_REASON = 2000
"""Characters that are kept of a failure."""
CAUSE = re.compile(r"\b\w+(Error|Exception): .+")
"""What the last line of a traceback has; the first one in a log is the cause of the others."""
CONTEXT_TOKENS = 2048
"""What a server has to take at least."""
ALL_MEMORY = 0.8
"""The share of a GPU's memory that servers have together which run side by side."""
START_RESERVE = 1.2
"""How much longer than the last time a start may take."""


class TooFewCoresError(ValueError):
    """The machine has fewer processors than a cell is to be confined to."""


class OutOfTimeError(RuntimeError):
    """What is left must wait for another run."""


@dataclass(frozen=True)
class Subject:
    """A model, and over how many GPUs it is spread."""

    source: str
    """A name or a directory."""
    layout: Layout


@dataclass
class Benchmark:
    """A run: what is asked for, where it goes, and when it has to end."""

    plan: Plan
    subjects: dict[str, Subject]
    """What the plan's models are."""
    effort: Effort
    store: Store
    progress: Progress
    work_dir: Path
    gpu: str | None
    serve_arguments: str
    deadline: float
    """By `time.monotonic()`."""

    def run(self) -> None:
        """Measure all that is not there yet.

        Raises:
            OutOfTimeError: if there is no time left.

        """
        for keys in self.plan.groups():
            rows = list(zip(*map(self.plan.cells, keys), strict=True))
            missing = [row for row in rows if not all(map(self.store.has_cell, row))]
            self.progress.skip(len(keys) * (len(rows) - len(missing)))
            if missing or any(map(self._lacks_streams, keys)):
                starts_s = START_RESERVE * len(keys) * self.store.known_start_s()
                first_s = self.store.known_s(missing[0][0]) if missing else 0.0
                self._check_time(starts_s + first_s)
                self._measure_servers(keys, missing)

    def _check_time(self, needed_s: float = 0.0) -> None:
        if time.monotonic() + needed_s > self.deadline:
            raise OutOfTimeError("what is left of --minutes is too short for what comes next")

    def _lacks_streams(self, key: ServerKey) -> bool:
        return self.plan.compares_streams and not self.store.has(STREAMS, key)

    def _measure_servers(self, keys: list[ServerKey], rows: list[Cells]) -> None:
        """Measure cells of servers that run side by side; a row has one of each server."""
        subject = self.subjects[keys[0].model]
        model = prepare(subject.source, self.work_dir)
        if self.gpu is not None and not wait_until_free(memory_of_gpus):
            self.progress.say("the GPUs' memory is in use; vLLM will say whether enough is left")
        try:
            with ExitStack() as stack:
                servers = []
                for key in keys:
                    start = self._start(key, model, subject.layout)
                    self.progress.say(f"starting vllm serve: {start.label}")
                    server = stack.enter_context(serve(start, self.work_dir, self.deadline))
                    self._describe(key, server)
                    # Cells may take until there is no time left; the comparison is short.
                    if self._lacks_streams(key):
                        self._compare_streams(key, server)
                    servers.append(server)
                self._measure_rows(servers, rows)
        except (ServerError, RemoteError) as error:
            self.progress.say(f"failed: {reason_of(error)}")
            for cell in itertools.chain.from_iterable(rows):
                if not self.store.has_cell(cell):
                    self._put_failure(cell, model, error)

    def _start(self, key: ServerKey, model: Model, layout: Layout) -> Start:
        workloads = [self._workload(cell, model) for cell in self.plan.cells(key)]
        return Start(
            model=model,
            scheduler=key.scheduler,
            mode=key.mode,
            max_num_seqs=self.plan.max_num_seqs,
            max_model_len=max(CONTEXT_TOKENS, *(it.max_context + 1 for it in workloads)),
            has_gpu=self.gpu is not None,
            layout=layout,
            front_end=key.front_end,
            extra_arguments=f"{self._share_of_memory()} {self.serve_arguments}",
            kv_cache_gib=self.store.kv_cache_gib(key.model),
        )

    def _share_of_memory(self) -> str:
        """Return the argument of one of several servers that share the GPUs."""
        if not self.plan.takes_turns or self.gpu is None:
            return ""
        return f"--gpu-memory-utilization={ALL_MEMORY / len(self.plan.schedulers):.2f}"

    def _describe(self, key: ServerKey, server: Server) -> None:
        found: dict[str, Any] = {"start_s": server.start_s, "kv_cache_gib": server.kv_cache_gib}
        if server.remotes:
            engines = server.described["engines"]
            found |= {
                "transport": server.described["transport"],
                "num_api_servers": len(server.remotes),
                "num_engines": len(engines),
                "engine": engines[0],
            }
        if not self.store.has("servers", key):
            found |= {
                "has_dummy_weights": server.start.model.has_dummy_weights,
                "max_model_len": server.start.max_model_len,
            }
            self.store.put("servers", key, found)

    def _measure_rows(self, servers: list[Server], rows: list[Cells]) -> None:
        model = servers[0].start.model
        for cores in dict.fromkeys(row[0].cores for row in rows):
            chosen = [row for row in rows if row[0].cores == cores]
            try:
                ours, others = divide_cores(cores)
            except TooFewCoresError as error:
                for cell in itertools.chain.from_iterable(chosen):
                    self._put_failure(cell, model, error)
                continue
            if ours is not None:
                for server in servers:
                    server.confine(ours)
            with ExitStack() as stack:
                loaders = None
                if any(row[0].driver == HTTP for row in chosen):
                    most = max(row[0].concurrency for row in chosen)
                    loaders = stack.enter_context(running_loaders(most, others))
                for row in chosen:
                    subjects = [(it, _driver(row[0].driver, it, loaders)) for it in servers]
                    self._measure_row(subjects, row, ours)

    def _measure_row(
        self, subjects: list[tuple[Server, Driver]], row: Cells, cores: list[int] | None
    ) -> None:
        self._check_time(self.store.known_s(row[0]))
        for cell in row:
            self.progress.begin(cell.label)
        begun = time.monotonic()
        model = subjects[0][0].start.model
        workload = self._workload(row[0], model)
        case = f"{row[0].driver}, {row[0].cores}"
        try:
            found = measure_in_turn(subjects, workload, self.effort, case)
        except FAILURES as error:
            for cell in row:
                self._put_failure(cell, model, error)
            for server, _ in subjects:
                if not server.is_healthy():
                    log = server.launched.log_path
                    raise ServerError(f"{error}; the server is gone: {log}") from None
            self.progress.say(f"failed: {reason_of(error)}")
            return
        about = workload.lengths | {"seconds": time.monotonic() - begun, "cpus": cores}
        for cell, it in zip(row, found, strict=True):
            self.store.put_cell(cell, about | it)

    def _workload(self, cell: CellKey, model: Model) -> Workload:
        return self.plan.workload(cell.concurrency, model)

    def _put_failure(self, cell: CellKey, model: Model, error: Exception) -> None:
        # With its lengths, by which a row is put beside the other scheduler's.
        self.store.put_failure(cell, self._workload(cell, model).lengths, reason_of(error))

    def _compare_streams(self, key: ServerKey, server: Server) -> None:
        """Keep digests of what the same requests bring over HTTP."""
        self._check_time()
        self.progress.say(f"streams: {server.start.label}")
        streams, tokens = self.effort.compared_streams, self.effort.compared_tokens
        workload = self.plan.compared_workload(server.start.model, streams, tokens)
        try:
            with running_loaders(streams, None) as loaders:
                found = measure_same_streams(HttpDriver(server, loaders), workload)
        except RemoteError as error:
            self.store.put(STREAMS, key, {"error": reason_of(error)})
            self.progress.say(f"failed: {reason_of(error)}")
        else:
            self.store.put(STREAMS, key, found)


def divide_cores(cores: str) -> tuple[list[int] | None, set[int] | None]:
    """Return the processors for a server and those for its load; None: all."""
    if cores == ALL:
        return None, None
    allowed = sorted(os.sched_getaffinity(0))
    count = int(cores)
    if count > len(allowed):
        raise TooFewCoresError(f"there are only {len(allowed)} processors here")
    # The first one serves most interrupts: it is left to others, if there are enough.
    first = 1 if len(allowed) > count else 0
    chosen = allowed[first : first + count]
    return chosen, set(allowed) - set(chosen) or None


def _driver(name: str, server: Server, loaders: list[Remote] | None) -> Driver:
    if name != HTTP:
        return AsyncLLMDriver(server)
    assert loaders is not None
    return HttpDriver(server, loaders)


def reason_of(error: Exception) -> str:
    """Return what is kept of a failure: the cause first, where logs with tracebacks are in it."""
    text = f"{error}"
    cause = CAUSE.search(text)
    if len(text) <= MAX_REASON or cause is None:
        return text[-MAX_REASON:]
    return f"{cause[0]}\n{text}"[:MAX_REASON]
