"""Where long prompts can't be paced, and what pacing chooses in vLLM's own scheduler."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sparksched.compat.rule import Rule, Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RULES: Final = (
    Rule(
        "a pooling model",
        "it generates nothing that would have to wait",
        lambda config: config.model_config.runner_type == "pooling",
    ),
    Rule(
        "data-parallel engines of a mixture of experts",
        "they step together, and none may choose for itself",
        lambda config: config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe,
    ),
    Rule(
        "pipeline parallelism",
        "several steps run at once, so that how long one takes is not known",
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
    ),
    Rule(
        "a KV connector",
        "what it loads and sends beside the steps would wait with the prompts",
        lambda config: config.kv_transfer_config is not None,
    ),
    Rule(
        "an encoder cache connector",
        "what it loads beside the steps would wait with the prompts",
        lambda config: config.ec_transfer_config is not None,
    ),
    Rule(
        "--no-enable-chunked-prefill",
        "prompts are to be computed at once",
        lambda config: not config.scheduler_config.enable_chunked_prefill,
    ),
    Rule(
        "--long-prefill-token-threshold-adaptive",
        "it keeps chunks from being made small",
        lambda config: config.scheduler_config.long_prefill_token_threshold_adaptive,
    ),
    Rule(
        "--disable-chunked-mm-input",
        "a chunk may be too small for an image as a whole",
        lambda config: config.scheduler_config.disable_chunked_mm_input,
    ),
    Rule(
        "--prefill-schedule-interval",
        "it says by number of steps what pacing says by time: choose one of them",
        lambda config: (getattr(config.scheduler_config, "prefill_schedule_interval", 1) or 1) > 1,
    ),
)


def unpaceable(vllm_config: "VllmConfig") -> Unsupported | None:
    """Return what keeps long prompts from being paced, else None."""
    return next((rule.problem() for rule in RULES if rule.applies(vllm_config)), None)


def max_graph_tokens(vllm_config: "VllmConfig") -> int:
    """Return the most tokens of a step with prompts that runs as a CUDA graph; 0 without any."""
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if vllm_config.model_config.enforce_eager or mode is None or mode.mixed_mode().name == "NONE":
        return 0
    return max(compilation.cudagraph_capture_sizes or (), default=0)


class StepKnobs(NamedTuple):
    """What a step is decided with: values that vLLM's scheduler has."""

    max_num_scheduled_tokens: int
    long_prefill_token_threshold: int
    throttle_prefills: bool
    order: tuple[str, ...] = ()
    """Ids of requests that go to the end of the running list, or the front of the queue."""

    def for_ours(self) -> tuple[int, int, tuple[str, ...]]:
        """Return what our scheduler takes besides `throttle_prefills`."""
        return self.max_num_scheduled_tokens, self.long_prefill_token_threshold, self.order


def schedule_with(scheduler: Any, knobs: StepKnobs) -> Any:
    """Have vLLM's own scheduler decide on a step with these values; return its output."""
    with _set(scheduler, "max_num_scheduled_tokens", knobs.max_num_scheduled_tokens):
        threshold = knobs.long_prefill_token_threshold
        with (
            _set(scheduler.scheduler_config, "long_prefill_token_threshold", threshold),
            _in_order(scheduler, knobs.order),
        ):
            return scheduler.schedule(knobs.throttle_prefills)


@contextlib.contextmanager
def _in_order(scheduler: Any, order: tuple[str, ...]) -> Iterator[None]:
    """Have these requests go last of those that run and first of those that wait.

    Afterwards each is back in its place. A queue by priority has no front, and stays as it is.
    """
    place = {request_id: number for number, request_id in enumerate(order)}
    running, waiting = list(scheduler.running), scheduler.waiting
    scheduler.running.sort(key=lambda it: place.get(it.request_id, -1))
    queue = list(waiting) if isinstance(waiting, deque) else []
    if queue:
        _sort(waiting, lambda it: place.get(it.request_id, len(place)))
    yield
    before = {id(it): number for number, it in enumerate(running)}
    scheduler.running.sort(key=lambda it: before.get(id(it), len(before)))
    if queue:
        before = {id(it): number for number, it in enumerate(queue)}
        _sort(waiting, lambda it: before.get(id(it), -1))


def _sort(queue: deque[Any], key: Callable[[Any], int]) -> None:
    ordered = sorted(queue, key=key)
    queue.clear()
    queue.extend(ordered)


@contextlib.contextmanager
def _set(target: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
