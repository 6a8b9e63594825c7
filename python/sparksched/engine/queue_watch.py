"""Looks now and then whether the queue moves, and whether a request has waited for too long.

A thread looks, because the engine's loop may itself be stuck or asleep. The thread changes nothing:
the loop ends requests whose time is up, as if their clients had aborted them.
"""

import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from sparksched import _core, environment
from sparksched.engine.notices import Notice
from sparksched.shared import queue_timeout

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

    from sparksched.engine.scheduler import NativeScheduler

logger = init_logger("vllm.sparksched")

_LOOKS_IN_TIME: Final = 10
"""So often it looks until something is told: a report comes at most a tenth of the time late."""
_MAX_PAUSE_S: Final = 1.0
_MIN_PAUSE_S: Final = 0.01


class QueueWatch:
    """Watches the queue of one engine, in a thread of its own."""

    def __init__(
        self,
        engine: "EngineCoreProc",
        scheduler: "NativeScheduler",
        meters: "_core.EngineMeters | None",
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._meters = meters
        after_s = environment.stuck_after_s()
        self._watch = _core.QueueWatch(after_s)
        self._pause_s = min(after_s / _LOOKS_IN_TIME, _MAX_PAUSE_S)
        self._is_noticed = False

    def start(self) -> None:
        """Start to look."""
        threading.Thread(target=self._run, name="QueueWatchThread", daemon=True).start()

    def _run(self) -> None:
        pause_s = self._pause_s
        try:
            while True:
                time.sleep(pause_s)
                pause_s = self._look(time.monotonic())
        except Exception:
            logger.exception("sparksched: nobody looks any more whether the queue moves")

    def _look(self, now: float) -> float:
        """Look once; return after how many seconds to look again."""
        finding, next_deadline = self._watch.look(self._scheduler.core, now)
        if finding is not None:
            _report(finding)
        if next_deadline > now:
            return max(min(self._pause_s, next_deadline - now), _MIN_PAUSE_S)
        if not self._is_noticed:
            # Once: a loop that stands still doesn't take notices.
            self._is_noticed = True
            self._engine.input_queue.put_nowait((Notice.QUEUE_TIME_IS_UP, None))
        return self._pause_s

    def end_expired(self) -> None:
        """End the requests whose time in the queue is up, and tell their clients.

        Only the engine's loop may call this, for the scheduler belongs to it.
        """
        self._is_noticed = False
        expired = self._scheduler.take_expired()
        if not expired:
            return
        ids = [request.request_id for request in expired]
        self._engine.scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
        logger.info("sparksched: requests that waited too long in the queue: %d", len(ids))
        if self._meters is not None:
            self._meters.count_queue_timeouts(len(ids))
        for client, outputs in _outputs_by_client(expired).items():
            self._engine.output_queue.put_nowait((client, outputs))


def _outputs_by_client(expired: list[Request]) -> dict[int, EngineCoreOutputs]:
    by_client = defaultdict[int, EngineCoreOutputs](lambda: EngineCoreOutputs(outputs=[]))
    for request in expired:
        outputs = by_client[request.client_index]
        output = EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.ERROR,
            stop_reason=queue_timeout.CODE,
            trace_headers=request.trace_headers,
            **_error_of(request),
        )
        outputs.outputs.append(output)
        outputs.finished_requests = (outputs.finished_requests or set()) | {request.request_id}
    return by_client


def _error_of(request: Request) -> dict[str, Any]:
    """Return the field of an output that says why, where vLLM has it: front ends pass it on."""
    if not queue_timeout.outputs_say_why():
        return {}
    from vllm.outputs import RequestError

    text = queue_timeout.message(time.time() - request.arrival_time)
    return {"error": RequestError(queue_timeout.CODE, text, retryable=True)}


# ----------------------------------------------------------------------------------------
# In words
# ----------------------------------------------------------------------------------------


def _report(finding: dict[str, Any]) -> None:
    request_id, seconds = finding["request_id"], finding["waits_s"]
    if finding["reason"] is None:
        logger.info("sparksched: request %s moves after %.1f s", request_id, seconds)
        return
    logger.warning(
        "sparksched: request %s, the first in the queue, has waited for %.1f s (running: %d, "
        "waiting: %d). It waits for %s",
        request_id,
        seconds,
        finding["num_running"],
        finding["num_waiting"],
        describe(finding),
    )


def describe(finding: dict[str, Any]) -> str:
    """Return in words what the head of the queue waits for."""
    reason: str = finding["reason"]
    if reason == "blocks":
        return f"KV cache blocks: {_describe_blocks(finding['blocks'])}"
    if reason == "adapter":
        adapters = ", ".join(map(str, finding["lora_ids"]))
        return f"a place for adapter {finding['lora_id']}: a step has adapters {adapters}"
    if reason == "max_num_seqs":
        return (
            "a place in the batch (--max-num-seqs): "
            f"{finding['num_running']} requests run, {finding['num_sessions']} sessions are "
            "between two turns"
        )
    return _IN_WORDS[reason]


_IN_WORDS: Final = {
    "turn": "the next step: the engine has begun none meanwhile, so a step or a call takes long",
    "token_budget": "tokens of a step (--max-num-batched-tokens): others use them up",
    "held_back": "prompts to be allowed again: the engine, or pacing, holds them back",
    "pause": "scheduling to be resumed: it is paused",
    "grammar": "its grammar, which is being compiled",
    "encoder": "the encoder's budget, or room for its outputs",
    "encoder_load": "encoder outputs that an EC connector is to bring",
    "kv_lookup": "the KV connector, which doesn't know yet what it has",
    "kv_load": "KV that a connector is to bring",
    "stale_output": "steps in flight from before it was preempted",
}


def _describe_blocks(blocks: dict[str, Any]) -> str:
    wanted = "more" if blocks["wanted"] is None else f"{blocks['wanted']}"
    reserved = f", {blocks['reserved']} of them to stay free for others" * bool(blocks["reserved"])
    holders = {
        "running": "by running requests",
        "sessions": "by sessions between two turns",
        "waiting": "by requests whose KV is loaded",
        "ended": "by ended requests, for transfers or steps in flight",
    }
    held = ", ".join(f"{blocks[key]} {whose}" for key, whose in holders.items() if blocks[key])
    return (
        f"it wants {wanted}{reserved}; of {blocks['all']}, {blocks['free']} are free, cached ones "
        f"included, and held are {held or 'none'}"
    )
