"""Before the first request, an engine that paces prompts runs steps of each size that it will use.

vLLM compiles kernels for each size that it has not run yet. That takes seconds, and everybody
waits. vLLM's dummy runs don't help: each holds either prompts or decodes, and what a step compiles
depends on the mixture. So some requests of our own decode, while prompts beside them fill one step
of each size. They pass through scheduler and executor as any others, and nobody gets their outputs.
The prompts are the same in each run, so that recordings can be compared.

- Each size of the ladder runs five times: the first time is for the compiler, the others say what
  such a step takes. Times vary, so one would say little.
- A long prompt tells what a token costs that attends to many. Else the first deadlines are wrong.
- Short prompts may have any number of tokens. Up to the largest CUDA graph they are filled up to a
  graph's size, and nothing is compiled. Above that, the kernels that choose experts
  (`triton_kernels`) have the number of 32s of tokens as a constant: there is one for each. So one
  number in each 32 runs, and then the multiples of 32, for which another one is compiled. Other
  kernels differ by what divides such numbers (16, or 4), so they are spread.
- That goes up to the largest size that stays within the bound, as larger ones come only when nobody
  generates. Where nothing is compiled, as in most dense models or if all is in a cache on the disk,
  a few steps show it, and the others are left out.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import RequestStatus

from sparksched import environment
from sparksched.compat.pacing import max_graph_tokens

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.sparksched")

PREFIX = "sparksched-warm-up-"
"""What the ids of its requests begin with."""

_NUM_STREAMS = 16
_LEAST_PROMPT = 16
_MAX_STEPS = 64
"""For one step of prompts: more are taken if blocks are short, or a threshold cuts prompts."""
_SETTLING_STEPS = 3
"""After the last stream was admitted: its prompt is computed, and it decodes."""
_RUNS = 5
"""Of each size."""
_FULL_STEPS = 8
"""Of a long prompt, if the model takes so long a one."""
_LAST_STEP = 128
"""Tokens of its last step: in a CUDA graph attention has a price of its own."""
_LONGEST_S = 120.0
_EVERY = 32
"""Tokens: kernels differ from one multiple of this to the next."""
_ENOUGH = 7
"""If the last so many of an octave need no compiler, the others need none either."""
_NEARLY = 1.25
"""Of the bound: what was measured holds more than the step itself."""
_REST = (
    "; time was up before all had run: the next start goes on if TRITON_CACHE_DIR is a folder that"
    " stays"
)
_COMPILER_S = 0.1
"""What takes so much longer than a larger step has waited for a compiler."""


def run(engine: "EngineCoreProc") -> None:
    """Warm up. A failure is a warning: the kernels are compiled when they are needed, then."""
    warm_up = _WarmUp(engine)
    start = time.monotonic()
    try:
        with engine.scheduler.warming_up():
            try:
                warm_up.run(start + _LONGEST_S)
            finally:
                warm_up.clean_up()
    except Exception as error:
        logger.warning(
            "sparksched: the warm-up of paced prefill failed: %r. Kernels will be compiled when"
            " they are needed, and everybody waits meanwhile.",
            error,
        )
        return
    logger.info(
        "sparksched: paced prefill is warm: %d of %d sizes, of up to %d tokens, and %d others, in"
        " %.1f s; the longest step took %.1f s%s",
        len(warm_up.seconds),
        len(warm_up.sizes),
        warm_up.sizes[-1],
        warm_up.num_others,
        time.monotonic() - start,
        warm_up.longest_s,
        _REST if warm_up.is_time_up else "",
    )


class _WarmUp:
    """Requests of our own, and the steps that compute them."""

    def __init__(self, engine: "EngineCoreProc") -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._model = engine.vllm_config.model_config
        self._deadline = 0.0
        self.sizes: list[int] = self._scheduler.pacing()["sizes"]
        self.seconds: dict[int, float] = {}
        """What each size takes once it is compiled, with a step or two of decodes after it."""
        self.num_others = 0
        self.longest_s = 0.0
        self.is_time_up = False
        self._chance = random.Random(0)
        self._num_requests = 0
        max_num_seqs = engine.vllm_config.scheduler_config.max_num_seqs
        # Room for prompts beside them, in number and in tokens.
        self._num_streams = min(_NUM_STREAMS, max_num_seqs // 2)

    def run(self, deadline: float) -> None:
        """Run whatever there is time for."""
        self._deadline = deadline
        for size in self.sizes:
            seconds = [self._run_size(size) for _ in range(_RUNS) if self._has_time()]
            if not seconds:
                return
            # The first time is for the compiler.
            self.seconds[size] = statistics.median(seconds[1:] or seconds)
        if self._has_time():
            self._run_long()
        for numbers in self._others():
            # Short prompts are more frequent, so small steps are.
            for octave in _octaves(numbers):
                self._run_octave(octave)

    def _others(self) -> tuple[list[int], list[int]]:
        """Return numbers of tokens besides the sizes: between multiples of 32, and multiples."""
        settings = environment.pacing()
        max_stall_s = settings.max_stall_s if settings else 0.0
        limit_s = _NEARLY * max_stall_s
        within = [size for size, seconds in self.seconds.items() if seconds <= limit_s]
        least = self._num_decode_tokens(self._num_streams) + _LEAST_PROMPT + _EVERY
        first = max(max_graph_tokens(self._engine.vllm_config), least) // _EVERY
        last = max(within, default=0) // _EVERY
        multiples = [_EVERY * number for number in range(first + 1, last + 1)]
        # 11 has no divisor in common with 31: all remainders have their turn.
        between = [it - 1 - 11 * turn % (_EVERY - 1) for turn, it in enumerate(multiples)]
        return between, [it for it in multiples if it not in self.seconds]

    def _run_octave(self, numbers: list[int]) -> None:
        """Run a step of each of these numbers, unless all kernels are there.

        The order is that of each start. If an earlier one ran out of time, its kernels are those of
        the first numbers, so the last ones tell.
        """
        order = random.Random(numbers[0]).sample(numbers, len(numbers))
        last = order[-_ENOUGH:]
        if all(self._needs_no_compiler(it) for it in reversed(last)):
            return
        for num_tokens in order:
            self._needs_no_compiler(num_tokens)

    def _needs_no_compiler(self, num_tokens: int) -> bool:
        """Run a step of so many tokens, if there is time."""
        if not self._has_time():
            return False
        self.num_others += 1
        larger = next(it for it in self.sizes if it >= num_tokens)
        return self._run_size(num_tokens) < self.seconds[larger] + _COMPILER_S

    def _has_time(self) -> bool:
        self.is_time_up |= time.monotonic() > self._deadline
        return not self.is_time_up and self._engine.is_running()

    def clean_up(self) -> None:
        """Leave nothing behind, be it in the midst of something."""
        if self._engine.batch_queue:
            self._engine.batch_queue.clear()
        self._finish(it for it in self._scheduler.requests if it.startswith(PREFIX))
        for _ in range(_MAX_STEPS):
            if not (self._scheduler.has_requests() or self._engine.batch_queue):
                break
            self._step()
        self._scheduler.reset_prefix_cache()

    def _run_long(self) -> None:
        """Run a long prompt in steps of known sizes, so that nothing is compiled."""
        last = next((it for it in self.sizes if it >= _LAST_STEP), self.sizes[-1])
        num_decode_tokens = self._ready_streams()
        full, last = self.sizes[-1] - num_decode_tokens, last - num_decode_tokens
        num_full_steps = min(_FULL_STEPS, (self._model.max_model_len - 1 - last) // full)
        if num_full_steps > 0:
            self._run_prompts(num_full_steps * full + last)

    def _run_size(self, num_tokens: int) -> float:
        """Have prompts fill a step of so many tokens; return for how many seconds they ran."""
        return self._run_prompts(num_tokens - self._ready_streams())

    def _run_prompts(self, num_left: int) -> float:
        prompts = []
        while num_left >= _LEAST_PROMPT:
            length = min(num_left, self._model.max_model_len - 1)
            prompts.append(self._add(length, max_tokens=1))
            num_left -= length
        start = time.monotonic()
        for _ in range(_MAX_STEPS):
            if not any(it in self._scheduler.requests for it in prompts):
                break
            self._step()
        self._finish(prompts)
        return time.monotonic() - start

    def _ready_streams(self) -> int:
        """Have streams decode; return how many tokens they have in a step."""
        num_missing = self._num_streams - len(self._scheduler.requests)
        length = min(_LEAST_PROMPT, self._model.max_model_len // 2)
        new = [self._add(length) for _ in range(num_missing)]
        if new:
            for _ in range(_MAX_STEPS):
                self._step()
                _, num_waiting = self._scheduler.get_request_counts()
                if not num_waiting:
                    break
            for _ in range(_SETTLING_STEPS):
                self._step()
        return self._num_decode_tokens(len(self._scheduler.requests))

    def _num_decode_tokens(self, num_streams: int) -> int:
        tokens_of_each: int = 1 + self._engine.vllm_config.num_speculative_tokens
        return tokens_of_each * num_streams

    def _add(self, num_tokens: int, max_tokens: int | None = None) -> str:
        request_id = f"{PREFIX}{self._num_requests}"
        self._num_requests += 1
        # Special tokens are at either end of the vocabulary.
        size = self._model.get_vocab_size()
        prompt = self._chance.choices(range(size // 4, size // 2), k=num_tokens)
        sampling = SamplingParams(
            max_tokens=max_tokens or self._model.max_model_len - num_tokens,
            ignore_eos=True,
            temperature=float(self._num_requests % 2),
        )
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._engine.add_request(*self._engine.preprocess_add_request(request))
        return request_id

    def _step(self) -> None:
        start = time.monotonic()
        _, is_executed = self._engine.step_fn()
        self._engine.post_step(is_executed)
        self.longest_s = max(self.longest_s, time.monotonic() - start)

    def _finish(self, request_ids: Iterable[str]) -> None:
        self._scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)


def _octaves(numbers: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers in groups, of which none holds one and its double."""
    groups = itertools.groupby(numbers, lambda it: (it - 1).bit_length())
    return [list(group) for _, group in groups]
