"""An executor whose GPU is only a timer, and the configuration of engines that run on it.

The engine process of an `AsyncLLM` imports this module by its name.

A step begins when it is launched or when the step before it ends, whichever is later, and ends the
step time after that. Its result is waited for by one `time.sleep()`: a wake-up that is late delays
this result, but no step, because the ends of steps are computed and not measured. There is no
spinning, which would count as CPU time of the engine; the kernel is asked not to round sleeps up.
With a step time of 0 nothing sleeps.

If the client is slower than this GPU, outputs pile up without end, since nothing in vLLM holds an
engine back. Therefore one stream of the client, the marker, writes a byte into a pipe for each
token that it has got, and a result is held back while the marker lacks more than a few.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from testkit import executor
from testkit.executor import FakeExecutor, write_model_directory

NUM_BLOCKS = 400_000
MAX_MODEL_LEN = 131_072
MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 8192

VOCAB_SIZE = 201_088
FIRST_TOKEN = 100_000
"""Sampled tokens begin here and change with each step; five bytes in msgpack, as most of them."""
NUM_TOKENS = 1 << 16

CORE = "core"
"""The key of `additional_config` that says on which processor the engine runs."""

PIPE = "pipe"
"""The key of `additional_config` for the path of the marker's pipe."""

MARKER = "marker"
"""What the marker's request id begins with."""

END_OF_MARKER = b"."
"""What the client writes into the pipe before it ends the marker."""

TIMES = "SPARKSCHED_BENCH_TIMES"
"""What steps take from the start on: a step in ms, what prompts add in ms, and each token in µs."""
NUM_GAPS = 1 << 18
"""Launches whose delay is kept, at most."""

PR_SET_TIMERSLACK = 29


class _Ready:
    """As much of a finished `Future` as the engine uses."""

    __slots__ = ("_result",)

    def __init__(self, result: Any) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._result


_NOTHING_YET = _Ready(None)
_EMPTY_STEP = _Ready(EMPTY_MODEL_RUNNER_OUTPUT)


class _Step:
    """As much of a launched step's `Future` as the engine uses."""

    __slots__ = ("_end_ns", "_executor", "_is_marked", "_output", "_token")

    def __init__(
        self, executor: "ClockedExecutor", output: ModelRunnerOutput, token: int, end_ns: int
    ) -> None:
        self._token = token
        self._executor = executor
        self._output = output
        self._end_ns = end_ns
        self._is_marked = executor.is_marked

    def done(self) -> bool:
        return time.perf_counter_ns() >= self._end_ns

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        now_ns = time.perf_counter_ns()
        if now_ns < self._end_ns:
            time.sleep((self._end_ns - now_ns) * 1e-9)
            now_ns = time.perf_counter_ns()
        if self._is_marked and self._executor.is_marked:
            now_ns = self._executor.wait_for_marker()
        self._executor.note_result(self._token, now_ns)
        return self._output


class ClockedExecutor(FakeExecutor):
    """Reports the KV cache of gpt-oss and samples a token a step for each request in decode.

    It runs in the engine's own process, and pins that to one processor. Methods named `on_...` are
    what `collective_rpc` may ask for.
    """

    sliding_window = 128

    def _init_executor(self) -> None:
        super()._init_executor()
        config = self.vllm_config.additional_config
        pin_process(config[CORE])
        _wake_in_time()
        self.result_ns = 0
        """When the engine got its last result, until the next launch; else 0."""
        # An engine that paces prompts learns from its first steps what they take.
        step_ms, fixed_ms, token_us = map(float, os.environ.get(TIMES, "0 0 0").split())
        self.on_set_step_ms(step_ms)
        self._prompt_ns = (fixed_ms * 1e6, token_us * 1e3)
        """What prompts add to a step: whatever their length, and for each token."""
        self._end_ns = 0
        self._launched: SchedulerOutput | None = None
        self._gaps_ns: deque[int] = deque(maxlen=NUM_GAPS)
        self._results_ns: dict[int, int] = {}
        """When the engine got each step's result in a window, by the token of the step."""
        self._num_missing: dict[str, int] = {}
        """Tokens to compute, of requests whose prompt is not computed to its end."""
        self._ids: list[str] = []
        self._rows: dict[str, int] = {}
        self._num_steps = 0
        self._num_tokens = 0
        self._cpu_ns = 0
        self.is_marked = False
        """Whether the marker is given tokens."""
        self._pipe = os.open(config[PIPE], os.O_RDONLY | os.O_NONBLOCK)
        self._max_ahead = 0
        self._num_ahead = 0

    def determine_available_memory(self) -> list[int]:
        """Return more than enough: the number of blocks is given."""
        return [1 << 40]

    # ---- steps ----

    def note_result(self, token: int, now_ns: int) -> None:
        """Note that the engine has a step's result now."""
        self.result_ns = now_ns
        self._results_ns[token] = now_ns

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Start the timer of a step."""
        now_ns = time.perf_counter_ns()
        if self.result_ns:
            self._gaps_ns.append(now_ns - self.result_ns)
            self.result_ns = 0
        if scheduler_output.preempted_req_ids:
            raise RuntimeError("a request was preempted: there are too few blocks")
        if scheduler_output.scheduled_new_reqs or scheduler_output.finished_req_ids:
            self._follow_prompts(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return _EMPTY_STEP
        self._end_ns = max(now_ns, self._end_ns) + self._time_of(scheduler_output)
        self._launched = scheduler_output
        return _NOTHING_YET

    def _time_of(self, step: SchedulerOutput) -> int:
        """Return how long a step takes, in nanoseconds."""
        if not self._num_missing:
            return self._step_ns
        scheduled = step.num_scheduled_tokens
        # A GPU computes one token of a prompt as it computes a decode: in the same CUDA graph.
        num_tokens = sum(it for name in self._num_missing if (it := scheduled.get(name, 0)) > 1)
        if not num_tokens:
            return self._step_ns
        fixed_ns, token_ns = self._prompt_ns
        return self._step_ns + round(fixed_ns + token_ns * num_tokens)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """Return the future result of the step that was launched last."""
        step, self._launched = self._launched, None
        assert step is not None
        assert non_block, "the engine doesn't schedule asynchronously"
        ids = list(step.num_scheduled_tokens)
        if ids != self._ids:
            # Kept while the batch stays the same, as model runners do.
            self._ids = ids
            self._rows = {request_id: row for row, request_id in enumerate(ids)}
        self._num_steps += 1
        self._num_tokens += len(ids)
        token = FIRST_TOKEN + self._num_steps % NUM_TOKENS
        sampled = [[token] for _ in ids]  # vLLM keeps these lists: each is its own
        if self._num_missing:
            self._leave_out_prompts(step, sampled)
        output = ModelRunnerOutput(self._ids, self._rows, sampled)
        return _Step(self, output, token, self._end_ns)

    def _follow_prompts(self, step: SchedulerOutput) -> None:
        """Take notice of requests that came or ended."""
        for request_id in step.finished_req_ids:
            self._num_missing.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._num_missing[new.req_id] = len(new.prompt_token_ids) - new.num_computed_tokens

    def _leave_out_prompts(self, step: SchedulerOutput, sampled: list[list[int]]) -> None:
        """Take the tokens from requests whose prompt is not computed to its end by this step."""
        for request_id in list(self._num_missing):
            num_tokens = step.num_scheduled_tokens.get(request_id)
            if num_tokens is None:
                continue
            self._num_missing[request_id] -= num_tokens
            if self._num_missing[request_id] > 0:
                sampled[self._rows[request_id]].clear()
                self._num_tokens -= 1
            else:
                del self._num_missing[request_id]
                self.is_marked |= self._max_ahead > 0 and request_id.startswith(MARKER)

    def wait_for_marker(self) -> int:
        """Wait until the marker has got all but the last few tokens; return the time after that."""
        self._num_ahead += 1
        while self._num_ahead > self._max_ahead:
            taken = os.read(self._pipe, 1 << 16)
            self._num_ahead -= len(taken)
            if not taken or END_OF_MARKER in taken:  # nothing: the client is gone
                self.is_marked = False
                break
        return time.perf_counter_ns()

    # ---- what the benchmark asks for ----

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Answer the engine's questions and the benchmark's."""
        own = getattr(self, f"on_{method}", None)
        if own is None:
            return super().collective_rpc(method, timeout, args, kwargs, non_block)
        return [own(*args)]

    def on_describe(self) -> dict[str, Any]:
        """Return what runs here: scheduler, mode, processors, process id."""
        engine = self._find_engine()
        scheduler = type(engine.scheduler)
        return {
            "scheduler": f"{scheduler.__module__}.{scheduler.__qualname__}",
            "is_async": engine.async_scheduling and engine.batch_queue_size == 2,
            "cores": sorted(os.sched_getaffinity(0)),
            "pid": os.getpid(),
        }

    def _find_engine(self) -> Any:
        """Return the engine, which is among the callers: an executor isn't told who owns it."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if getattr(caller, "model_executor", None) is self and hasattr(caller, "scheduler"):
                return caller
            frame = frame.f_back
        raise RuntimeError("no engine has asked for this")

    def on_set_step_ms(self, step_ms: float) -> None:
        """Set how long the steps take that are launched from now on."""
        self._step_ns = round(step_ms * 1e6)

    def on_hold_back(self, max_ahead: int) -> None:
        """Hold results back from now on if the next marker lacks more steps than this; 0: never."""
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._pipe, 1 << 16):
                pass  # what is left of the marker before
        os.set_blocking(self._pipe, True)
        self.is_marked = False
        self._max_ahead = max_ahead
        self._num_ahead = 0

    def on_start_record(self) -> None:
        """Begin a window."""
        self._gaps_ns.clear()
        self._results_ns.clear()
        self._num_tokens = 0
        self._cpu_ns = time.process_time_ns()

    def on_take_record(self) -> dict[str, Any]:
        """End a window: return its tokens, its CPU time of all threads, and delays of launches.

        A delay lies between a step's result and the next step's launch. Times are in nanoseconds.
        """
        cpu_ns = time.process_time_ns() - self._cpu_ns
        found = {"tokens": self._num_tokens, "cpu_ns": cpu_ns, "gaps_ns": list(self._gaps_ns)}
        return found | {"results_ns": dict(self._results_ns)}


def _wake_in_time() -> None:
    """Have the kernel not round up the sleeps of this thread, by 50 µs otherwise."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def pin_process(core: int) -> None:
    """Confine all threads of this process to one processor, and those that they start later."""
    for name in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(name), {core})


def engine_args(directory: Path, pipe: Path, core: int) -> AsyncEngineArgs:
    """Return the arguments of an engine on such an executor, which runs on one processor."""
    model = write_model_directory(
        directory,
        vocab_size=VOCAB_SIZE,
        eos_token_id=VOCAB_SIZE - 1,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    args = executor.engine_args(
        model,
        async_scheduling=True,
        skip_tokenizer_init=True,
        distributed_executor_backend=ClockedExecutor,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    args.additional_config |= {CORE: core, PIPE: str(pipe)}
    return args
