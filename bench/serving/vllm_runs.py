"""Starts the engines of a plan, has `vllm bench` measure them, and keeps what it found."""

import re
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.progress import Progress
from bench.serving import vllm_client, vllm_offline
from bench.serving.benchmark import (
    CONTEXT_TOKENS,
    OutOfTimeError,
    TooFewCoresError,
    divide_cores,
    reason_of,
)
from bench.serving.gpus import memory_of_gpus, wait_until_free
from bench.serving.measure import has_compiled, warm_up
from bench.serving.models import Model, prepare
from bench.serving.plan import ServerKey
from bench.serving.remote import RemoteError
from bench.serving.server import PYTHON, STOCK, Server, ServerError, Start, serve
from bench.serving.store import Store
from bench.serving.vllm_cases import (
    NO_FRONT_END,
    NUM_PREFIXES,
    CaseKey,
    Lengths,
    Plan,
    num_prompts,
)
from bench.serving.vllm_client import ClientError, Order

Row = dict[str, Any]

USUAL_NUM_SEQS = 1024
"""What vLLM runs at once on a large GPU if nothing else is asked for."""
WARM_UP_TOKENS = 16
MOST_WARM_UP_TOKENS = 1 << 17
"""Of all prompts of a warm-up together."""
SERVERS_ERROR = re.compile(r"\bERROR\b")
"""What lines of a server's log have that tell of one; the last of a traceback is its cause."""


@dataclass
class VllmBench:
    """A run: what is asked for, where it goes, and when it has to end."""

    plans: dict[str, Plan]
    """By what the model was called."""
    store: Store
    progress: Progress
    work_dir: Path
    has_gpu: bool
    deadline: float
    """By `time.monotonic()`."""
    rounds: int = 1
    waves: float = 3.0
    """How many requests follow each other in each place of those at once."""
    least: int = 200
    """The fewest requests of a case that goes as fast as it can."""
    seconds: float = 20.0
    """For how long requests come, where they come at a rate."""
    serve_arguments: str = ""

    def run(self) -> None:
        """Measure all that is not there yet.

        Raises:
            OutOfTimeError: if there is no time left, or wasn't for all.

        """
        is_short = False
        for source, plan in self.plans.items():
            model = prepare(source, self.work_dir)
            for key in plan.servers():
                cases = [it for it in plan.cases(key) if self._is_wanted(plan, it)]
                self.progress.skip(len(list(plan.cases(key))) - len(cases))
                if cases:
                    # The first start of a model compiles: the next one takes no longer.
                    start_s = self.store.last_start_s(key.model)
                    self._check_time(start_s + self.store.known_s(cases[0]))
                    is_short |= not self._measure_server(plan, key, model, cases)
            for case in plan.offline_cases():
                if self._is_wanted(plan, case):
                    self._measure_offline(plan, case, model)
                else:
                    self.progress.skip(1)
        if is_short:
            raise OutOfTimeError("there was no time for all cases")

    def _is_wanted(self, plan: Plan, case: CaseKey) -> bool:
        """Whether a case is still to be measured; ours alone, without vLLM's, would tell nothing.

        vLLM's is missing where it failed, or where there was no time for both.
        """
        vllms = replace(case, server=replace(case.server, scheduler=STOCK))
        is_alone = STOCK in plan.schedulers and not self.store.has_cell(vllms)
        return not self.store.has_cell(case) and (case == vllms or not is_alone)

    def _has_time(self, needed_s: float) -> bool:
        return time.monotonic() + needed_s <= self.deadline

    def _check_time(self, needed_s: float) -> None:
        if not self._has_time(needed_s):
            raise OutOfTimeError("what is left of --minutes is too short for what comes next")

    def _expected_s(self, case: CaseKey, cases: list[CaseKey]) -> float:
        """Return how long a case may take; unknown: as long as the longest one so far."""
        return self.store.known_s(case) or max(map(self.store.known_s, cases))

    def _following_s(self, plan: Plan, case: CaseKey, cases: list[CaseKey]) -> float:
        """Return what the other scheduler's server takes for the same cases up to this one.

        Args:
            plan: What is asked for: nothing follows the last scheduler.
            case: The one that is to come next.
            cases: This server's, in order.

        """
        if case.server.scheduler == plan.schedulers[-1]:
            return 0.0
        same = cases[: cases.index(case) + 1]
        cases_s = sum(self._expected_s(it, cases) for it in same)
        return self.store.last_start_s(case.server.model) + cases_s

    def _start(self, plan: Plan, key: ServerKey, model: Model) -> Start:
        return Start(
            model=model,
            scheduler=key.scheduler,
            mode=key.mode,
            max_num_seqs=max(plan.most_at_once, USUAL_NUM_SEQS if self.has_gpu else 0),
            max_model_len=max(CONTEXT_TOKENS, *(it.lengths.max_context for it in plan.wanted)),
            has_gpu=self.has_gpu,
            front_end=PYTHON if key.front_end == NO_FRONT_END else key.front_end,
            extra_arguments=self.serve_arguments,
            kv_cache_gib=self.store.kv_cache_gib(key.model),
        )

    def _wait_for_gpu(self) -> None:
        if self.has_gpu and not wait_until_free(memory_of_gpus):
            self.progress.say("the GPU's memory is in use; vLLM will say whether enough is left")

    # ---- servers ----

    def _measure_server(
        self, plan: Plan, key: ServerKey, model: Model, cases: list[CaseKey]
    ) -> bool:
        """Measure cases on a server; return whether there was time for all."""
        start = self._start(plan, key, model)
        if plan.client == PYTHON:
            vllm_client.preload()
        self._wait_for_gpu()
        self.progress.say(f"starting vllm serve: {start.label}")
        try:
            with serve(start, self.work_dir, self.deadline) as server:
                about = {
                    "start_s": server.start_s,
                    "max_model_len": start.max_model_len,
                    "kv_cache_gib": server.kv_cache_gib,
                }
                self.store.put("servers", key, about)
                begun = time.monotonic()
                self._warm_up(plan, server, cases)
                self.store.put("servers", key, about | {"warm_up_s": time.monotonic() - begun})
                for cores in dict.fromkeys(case.cores for case in cases):
                    if not self._measure_confined(plan, server, cores, cases):
                        return False
        except (ClientError, ServerError, RemoteError) as error:
            self.progress.say(f"failed: {reason_of(error)}")
            for case in cases:
                if not self.store.has_cell(case):
                    self.store.put_failure(case, {}, reason_of(error))
        return True

    def _warm_up(self, plan: Plan, server: Server, cases: list[CaseKey]) -> None:
        """Have kernels compiled: of batches of all sizes, and of the cases' prompts."""
        short = Lengths(WARM_UP_TOKENS, WARM_UP_TOKENS)
        cases_lengths = [Lengths.named(it) for it in dict.fromkeys(it.lengths for it in cases)]
        for lengths in (short, *cases_lengths):
            shortened = replace(lengths, output_tokens=min(lengths.output_tokens, WARM_UP_TOKENS))
            fitting = MOST_WARM_UP_TOKENS // (lengths.prefix_tokens + lengths.input_tokens)
            most_at_once = min(plan.most_at_once, max(fitting, NUM_PREFIXES))
            case = replace(
                cases[0], lengths=shortened.name, concurrency=most_at_once, rate_percent=None
            )
            send = partial(
                self._send, server, case, None, num_prompts(case, 1.0, 1), None, "warm-up"
            )
            try:
                warm_up(server, send)
            except ClientError as error:
                raise _explained(error, server) from None

    def _measure_confined(
        self, plan: Plan, server: Server, cores: str, cases: list[CaseKey]
    ) -> bool:
        """Measure the cases on so many processors; return whether there was time for all."""
        chosen = [case for case in cases if case.cores == cores]
        try:
            ours, others = divide_cores(cores)
        except TooFewCoresError as error:
            for case in chosen:
                self.store.put_failure(case, {}, reason_of(error))
            return True
        if ours is not None:
            server.confine(ours)
        for case in chosen:
            expected_s = self._expected_s(case, cases)
            self._check_time(expected_s)
            if not self._has_time(expected_s + self._following_s(plan, case, cases)):
                self.progress.say("the rest of the time is for the other server")
                return False
            self.progress.begin(case.label)
            begun = time.monotonic()
            try:
                rate = self._rate(case)
                rounds = [
                    self._measure_round(server, case, rate, others, number)
                    for number in range(self.rounds)
                ]
            except ClientError as error:
                reason = reason_of(_explained(error, server))
                self.store.put_failure(case, {}, reason)
                self.progress.say(f"failed: {reason}")
                if not server.is_healthy():
                    log = server.launched.log_path
                    raise ServerError(f"{error}; the server is gone: {log}") from None
                continue
            found = {"request_rate": rate, "seconds": time.monotonic() - begun, "cpus": ours}
            self.store.put_cell(case, found | {"rounds": rounds})
        return True

    def _rate(self, case: CaseKey) -> float | None:
        """Return the requests a second of a case; None: as fast as it goes."""
        if case.rate_percent is None:
            return None
        highest = reached(self.store.result["cells"], case)
        if highest is None:
            raise ClientError(
                "the rate that vLLM's scheduler reaches isn't known: measure it first, with "
                "--schedulers stock and --concurrency"
            )
        return highest * case.rate_percent / 100

    def _measure_round(
        self,
        server: Server,
        case: CaseKey,
        rate: float | None,
        cores: set[int] | None,
        number: int,
    ) -> Row:
        if rate is None:
            count = num_prompts(case, self.waves, self.least)
        else:
            count = num_prompts(case, rate * self.seconds)
        has_compiled(server)
        found = self._send(server, case, rate, count, cores, number)
        if has_compiled(server):
            found = self._send(server, case, rate, count, cores, number, "again")
            found["has_compiled"] = has_compiled(server)
        return found

    def _send(
        self,
        server: Server,
        case: CaseKey,
        rate: float | None,
        count: int,
        cores: set[int] | None,
        *seed: Any,
    ) -> Row:
        order = Order(
            base_url=server.launched.base_url,
            model=server.start.model,
            lengths=Lengths.named(case.lengths),
            num_prompts=count,
            seed=case.seed(*seed),
            concurrency=case.concurrency,
            rate=rate,
        )
        folder = server.launched.log_path.parent
        processes = server.processes()
        before = server.num_preempted()
        found = vllm_client.run(order, case.client, processes, folder, cores, self.deadline)
        return found | {"preempted": server.preempted_since(before)}

    # ---- engines without a server ----

    def _measure_offline(self, plan: Plan, case: CaseKey, model: Model) -> None:
        following = len(plan.schedulers) - plan.schedulers.index(case.server.scheduler)
        self._check_time(following * self._expected_s(case, list(plan.offline_cases())))
        self.progress.begin(case.label)
        self._wait_for_gpu()
        begun = time.monotonic()
        folder = self.work_dir / f"{model.name}-{case.server.scheduler}-{case.command}"
        start = self._start(plan, case.server, model)
        prompts = max(self.least, round(self.waves * plan.most_at_once))
        try:
            found = vllm_offline.run(case, start, prompts, folder, self.deadline)
        except ClientError as error:
            self.store.put_failure(case, {}, reason_of(error))
            self.progress.say(f"failed: {reason_of(error)}")
        else:
            seconds = time.monotonic() - begun
            self.store.put_cell(case, {"seconds": seconds, "rounds": [found]})


def reached(cells: list[Row], case: CaseKey) -> float | None:
    """Return the highest rate of requests that vLLM's scheduler reached where a case has its rate.

    That is with the same front end, lengths and processors, and any number at once. None: it wasn't
    measured.
    """
    same = ("model", "mode", "front_end", "command", "lengths", "cores", "client")
    wanted = {name: case.as_row()[name] for name in same} | {"scheduler": STOCK}
    rates = [
        statistics.median(it["requests_per_s"] for it in cell["rounds"])
        for cell in cells
        if all(cell.get(name) == value for name, value in wanted.items())
        and cell.get("rate_percent") is None
        and cell.get("rounds")
    ]
    return max(rates, default=None)


def _explained(error: ClientError, server: Server) -> ClientError:
    """Return the error with the last one that the server has told of: the client knows no cause."""
    told = [line for line in server.launched.log.splitlines() if SERVERS_ERROR.search(line)]
    return ClientError(f"{error}; the server: {told[-1].strip()}") if told else error
