"""Before the first request, an engine that paces prompts runs steps of each size that it will use.

vLLM compiles kernels for each size that it has not run yet. That takes seconds, and everybody
waits. vLLM's dummy runs don't help: each holds either prompts or decodes, and what a step compiles
depends on the mixture. So some requests of our own decode, while prompts beside them fill one step
of each size. They pass through scheduler and executor as any others, and nobody gets their outputs.
The prompts are the same in each run, so that recordings can be compared.

Kernels are compiled for classes of numbers: the next power of two, and whether 16, or 4, divides
them. Each size therefore runs in four ways.
"""

import random
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import RequestStatus

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
_LONGEST_S = 120.0


def run(engine: "EngineCoreProc") -> None:
    """Warm up. A failure is a warning: the kernels are compiled when they are needed, then."""
    warm_up = _WarmUp(engine)
    start = time.monotonic()
    try:
        with engine.scheduler.warming_up():
            try:
                num_sizes = warm_up.run(start + _LONGEST_S)
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
        "sparksched: paced prefill is warm: %d of %d sizes, of up to %d tokens, in %.1f s;"
        " the longest step took %.1f s",
        num_sizes,
        len(warm_up.sizes),
        warm_up.sizes[-1],
        time.monotonic() - start,
        warm_up.longest_s,
    )


class _WarmUp:
    """Requests of our own, and the steps that compute them."""

    def __init__(self, engine: "EngineCoreProc") -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._model = engine.vllm_config.model_config
        self.sizes: list[int] = self._scheduler.pacing()["sizes"]
        self.longest_s = 0.0
        self._chance = random.Random(0)
        self._num_requests = 0
        max_num_seqs = engine.vllm_config.scheduler_config.max_num_seqs
        # Room for prompts beside them, in number and in tokens.
        self._num_streams = min(_NUM_STREAMS, max_num_seqs // 2)

    def run(self, deadline: float) -> int:
        """Run a step of each size in each way; return for how many sizes there was time."""
        for done, size in enumerate(self.sizes):
            for num_tokens in (size, size, size * 3 // 4 + 4, size * 3 // 4 + 1):
                if time.monotonic() > deadline or not self._engine.is_running():
                    return done
                self._run_size(num_tokens)
        return len(self.sizes)

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

    def _run_size(self, num_tokens: int) -> None:
        num_decode_tokens = self._ready_streams()
        prompts = []
        num_left = num_tokens - num_decode_tokens
        while num_left >= _LEAST_PROMPT:
            length = min(num_left, self._model.max_model_len - 1)
            prompts.append(self._add(length, max_tokens=1))
            num_left -= length
        for _ in range(_MAX_STEPS):
            if not any(it in self._scheduler.requests for it in prompts):
                return
            self._step()
        self._finish(prompts)

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
        tokens_of_each: int = 1 + self._engine.vllm_config.num_speculative_tokens
        return tokens_of_each * len(self._scheduler.requests)

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
