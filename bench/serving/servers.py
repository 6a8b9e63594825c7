"""Real `vllm serve` processes, as many at a time as are compared, on the GPUs that there are."""

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.cpu import Threads
from bench.filler import OURS as OUR_FILLER
from bench.models import TINY, Model
from bench.sides import Side
from testkit.server import Server as Launched
from testkit.server import ServerError
from testkit.server import serve as launch

ROOT = Path(__file__).resolve().parents[2]
START_S = 540.0
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batch sizes for which CUDA graphs are captured. vLLM's default are many more: minutes."""
PREFIX = "SPARKSCHED_BENCH_"
COUNTERS = {
    "preempted": "vllm:num_preemptions_total",
    "queried": "vllm:prefix_cache_queries_total",
    "cached": "vllm:prefix_cache_hits_total",
}


@dataclass(frozen=True)
class Plan:
    """What all servers of a comparison have in common."""

    model: Model
    has_gpu: bool
    max_num_seqs: int
    max_model_len: int
    kv_gib: float | None = None
    """Memory of the KV cache, the same for each; None: what vLLM finds."""
    filler: str = OUR_FILLER
    arguments: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    """Servers are placed on them in turn; none: all on the one that there is."""


@dataclass
class Server:
    """One that runs."""

    side: Side
    model: Model
    launched: Launched
    folder: Path
    environment: Mapping[str, str]
    memory: dict[str, Any] = field(default_factory=dict)
    """What a load remembers of its former rounds."""

    @property
    def filler(self) -> str:
        """Whose random weights it has."""
        return self.environment[f"{PREFIX}FILLER"]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.launched.base_url.rpartition(":")[2])

    def threads(self) -> Threads:
        """Look at the CPU time of its threads."""
        return Threads.of(self.launched.process.pid)

    def num_compiled(self) -> int:
        """Return how many Triton kernels its workers have compiled."""
        path = self.folder / "compiled"
        return path.read_text().count("\n") if path.exists() else 0

    def steps(self) -> list[dict[str, float]]:
        """Return what was noted of each step by `bench.worker_notes.note_experts`."""
        path = self.folder / "experts"
        return [json.loads(it) for it in path.read_text().splitlines()] if path.exists() else []

    def empty_cache(self) -> None:
        """Have it forget all prefixes: the same recording again would find all of it cached."""
        url = f"{self.launched.base_url}/reset_prefix_cache"
        httpx.post(url, timeout=60).raise_for_status()

    def counters(self) -> dict[str, float]:
        """Return counters of its `/metrics`, as far as it has them."""
        found = {}
        for name, series in COUNTERS.items():
            try:
                found[name] = self.launched.metric(series)
            except (KeyError, httpx.HTTPError):
                continue
        return found


@contextmanager
def running(sides: Sequence[Side], plan: Plan, work_dir: Path | None) -> Iterator[list[Server]]:
    """Start all servers; stop them at the end.

    One that doesn't come up, or runs another scheduler, is told and left out.
    """
    with ExitStack() as stack:
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        placed = list(zip(sides, itertools.cycle(plan.gpus or ("",)), strict=False))

        def enter(placed: tuple[Side, str]) -> Server | None:
            server = _running(*placed, plan, work_dir)
            try:
                return stack.enter_context(server)
            except ServerError as error:
                print(f"failed: {placed[0].name}: {error}", file=sys.stderr, flush=True)
                return None

        # What ends with its parent ends with the parent's thread: the threads stay until the end.
        with ThreadPoolExecutor(len(sides)) as starting:
            servers = []
            if plan.has_gpu:
                # The others find compiled what the first one has compiled. Side by side two of
                # gpt-oss-120b also run out of memory: weights take more of it while they load.
                servers.append(starting.submit(enter, placed.pop(0)).result())
            servers += starting.map(enter, placed)
            yield [it for it in servers if it is not None]


@contextmanager
def _running(side: Side, gpu: str, plan: Plan, work_dir: Path) -> Iterator[Server]:
    folder = work_dir / side.name
    folder.mkdir(parents=True, exist_ok=True)
    notes = {name: folder / name.lower() for name in ("COMPILED", "EXPERTS")}
    for path in notes.values():
        path.unlink(missing_ok=True)
    arguments = [*engine_arguments(plan), "--disable-uvicorn-access-log", *side.arguments]
    if "--enforce-eager" not in plan.arguments:
        del notes["EXPERTS"]
    environment = hooked({name: str(path) for name, path in notes.items()}, plan.filler)
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    environment["VLLM_CACHE_ROOT"] = str(work_dir / "cache")
    environment |= side.environment
    begun = time.monotonic()
    with launch(
        plan.model.directory,
        folder / "serve.log",
        name=plan.model.name,
        is_on_cpu=not plan.has_gpu,
        arguments=arguments,
        environment=environment,
        start_timeout_s=START_S,
    ) as launched:
        if launched.runs_sparksched != side.is_ours:
            raise ServerError(f"{side.name} runs another scheduler; see {launched.log_path}")
        print(f"{side.name} serves after {time.monotonic() - begun:.0f} s", flush=True)
        yield Server(side, plan.model, launched, folder, environment)


def hooked(notes: Mapping[str, str], filler: str) -> dict[str, str]:
    """Return what has a process of vLLM end with this one, and note what it does."""
    search_path = [str(ROOT / "bench" / "hooks"), os.environ.get("PYTHONPATH", "")]
    notes = {PREFIX + name: value for name, value in notes.items()}
    return {
        "SPARKSCHED_STRICT": "1",
        f"{PREFIX}PARENT": str(os.getpid()),
        f"{PREFIX}FILLER": filler,
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        # A connection that is idle until the next request is due is not a failure.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        # For `empty_cache`.
        "VLLM_SERVER_DEV_MODE": "1",
        **notes,
    }


def engine_arguments(plan: Plan) -> list[str]:
    """Return what an engine is given, besides the model and what a side adds."""
    model = plan.model
    given: list[str] = [
        f"--max-num-seqs={plan.max_num_seqs}",
        f"--max-model-len={plan.max_model_len}",
    ]
    if model.has_dummy_weights:
        given.append("--load-format=dummy")
        longest = model.config.get("max_position_embeddings", plan.max_model_len)
        if plan.max_model_len > longest:  # random weights say as little at any position
            override = {"max_position_embeddings": plan.max_model_len}
            given.append(f"--hf-overrides={json.dumps(override)}")
    if not plan.has_gpu:
        given.append(f"--max-num-batched-tokens={max(4096, plan.max_num_seqs)}")
    elif "--enforce-eager" not in plan.arguments:
        # Also of a step in which a request joins those that decode.
        sizes = {it for it in GRAPHS if it < 2 * plan.max_num_seqs} | {plan.max_num_seqs}
        captured = {"cudagraph_capture_sizes": sorted(sizes)}
        given.append(f"--compilation-config={json.dumps(captured)}")
    if plan.has_gpu and model.name == TINY:
        given.append("--dtype=bfloat16")
    if plan.has_gpu and plan.kv_gib is not None:
        # The size counts; the share of the GPU is only what must be free at the start.
        given.append(f"--kv-cache-memory-bytes={round(plan.kv_gib * 2**30)}")
        given.append("--gpu-memory-utilization=0.05")
    return [*given, *plan.arguments]
