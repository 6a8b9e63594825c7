"""Why the head of the queue doesn't move, and requests that have waited for too long."""

import math
from concurrent.futures import Future
from typing import Any

import pytest
from bare_core import build_core, build_request, step
from sparksched._core import QueueWatch, SchedulerCore
from sparksched.engine import queue_watch, sessions
from sparksched.shared import queue_timeout
from test_kv_transfer import KV_TRANSFER, Connector, report_after_a_step
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import RequestStatus, StreamingUpdate

pytestmark = pytest.mark.release

AFTER_S = 10.0


def waits(core: SchedulerCore) -> dict[str, str]:
    return dict(core.snapshot()["waiting_for"])


def finding(core: SchedulerCore, steps: bool = True) -> dict[str, Any] | None:
    """Let time go by, with steps in it or without; return what is told."""
    watch = QueueWatch(AFTER_S)
    assert watch.look(core, 0.0) == (None, math.inf)
    if steps:
        step(core)
    assert watch.look(core, AFTER_S - 0.1)[0] is None
    told = watch.look(core, AFTER_S)[0]
    assert watch.look(core, AFTER_S + 1)[0] is None, "told twice"
    return told


def described(told: dict[str, Any] | None) -> str:
    assert told is not None
    return queue_watch.describe(told)


def session(name: str, num_tokens: int) -> Any:
    request = build_request(name, prompt=[ord(name)] * num_tokens, max_tokens=1, resumable=True)
    sessions.open_session(request)
    return request


def test_sessions_that_hold_all_blocks() -> None:
    """Three of them fill 40 blocks of 4 tokens, and the one that goes on finds none."""
    core = build_core(groups=[("full", 0, 0, 0)], lookup_groups=[[0]], num_blocks=41)
    for name in "abc":
        core.add_request(session(name, 52), 1.0)
        step(core)
    update = StreamingUpdate.from_request(session("a", 30))
    core.continue_session("a", lambda it, kept: sessions.continue_session(it, update, kept))
    step(core)
    assert waits(core) == {"a": "blocks", "b": "session_input", "c": "session_input"}
    text = described(told := finding(core))
    assert told is not None
    assert told["request_id"] == "a"
    blocks = told["blocks"]
    assert blocks["all"] == 40
    assert blocks["free"] + blocks["sessions"] + blocks["waiting"] == 40
    assert blocks["wanted"] > blocks["free"]
    assert f"it wants {blocks['wanted']}; of 40, {blocks['free']} are free" in text
    assert f"{blocks['sessions']} by sessions between two turns" in text


def test_an_adapter_that_finds_no_place() -> None:
    core = build_core(max_loras=1)
    for number in (1, 2):
        lora = LoRARequest(f"adapter {number}", number, "/nowhere")
        core.add_request(build_request(str(number), max_tokens=100, lora_request=lora), 1.0)
    step(core)
    assert waits(core) == {"2": "adapter"}
    assert described(finding(core)) == "a place for adapter 2: a step has adapters 1"


def test_a_grammar_that_is_never_compiled() -> None:
    core = build_core()
    params = StructuredOutputsParams(regex="[a-z]+")
    request = build_request(structured_outputs=params)
    request.structured_output_request.grammar = Future()
    core.add_request(request, 1.0)
    assert waits(core) == {"a": "grammar"}
    step(core)
    assert described(finding(core)) == "its grammar, which is being compiled"


def test_a_load_that_never_comes() -> None:
    connector = Connector()
    connector.hit = (8, True)
    core = build_core(kv_transfer=connector, config_of_kv_transfer=KV_TRANSFER)
    core.add_request(build_request(), 1.0)
    report_after_a_step(core)
    assert waits(core) == {"a": "kv_load"}
    assert described(finding(core)) == "KV that a connector is to bring"


@pytest.mark.parametrize("state", [1, 2])
def test_a_pause(state: int) -> None:
    core = build_core()
    core.set_pause_state(state)
    core.add_request(build_request(), 1.0)
    assert waits(core) == {"a": "pause"}
    assert described(finding(core, steps=False)) == "scheduling to be resumed: it is paused"


def test_a_step_that_does_not_end() -> None:
    """What the last step has found says nothing any more."""
    core = build_core(max_num_active_reqs=1)
    core.add_request(build_request("a"), 1.0)
    core.add_request(build_request("b"), 1.0)
    core.schedule(False, 2.0)
    assert waits(core) == {"b": "max_num_seqs"}
    assert "the engine has begun none meanwhile" in described(finding(core, steps=False))


def test_once_more_when_it_moves() -> None:
    core = build_core(max_num_active_reqs=1)
    core.add_request(build_request("a", max_tokens=100), 1.0)
    core.add_request(build_request("b", max_tokens=100), 1.0)
    core.add_request(build_request("c", max_tokens=100), 1.0)
    step(core)
    watch = QueueWatch(AFTER_S)
    watch.look(core, 0.0)
    step(core)
    told, _ = watch.look(core, 12.0)
    assert told is not None
    assert told["request_id"] == "b"
    core.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    step(core)
    told, _ = watch.look(core, 15.0)
    assert told == {"request_id": "b", "reason": None, "waits_s": 15.0}
    step(core)
    # Of the same reason nothing more is said for a minute, also of the next head.
    assert watch.look(core, 30.0)[0] is None
    told, _ = watch.look(core, 75.0)
    assert told is not None
    assert told["request_id"] == "c"


def test_who_runs_or_waits_for_a_client_is_not_told_of() -> None:
    core = build_core(max_num_active_reqs=2)
    core.add_request(session("a", 4), 1.0)
    core.add_request(build_request("b", max_tokens=100), 1.0)
    step(core)
    assert waits(core) == {"a": "session_input"}
    assert finding(core) is None
    core.add_request(build_request("c"), 1.0)
    step(core)
    assert waits(core) == {"a": "session_input", "c": "max_num_seqs"}
    assert "1 requests run, 1 sessions are between two turns" in described(finding(core))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_idle_sessions_before_the_head(policy: str) -> None:
    core = build_core(policy=policy)
    for name in "abc":
        core.add_request(session(name, 4), 1.0)
    step(core)
    core.set_pause_state(2)
    update = StreamingUpdate.from_request(session("c", 4))
    core.continue_session("c", lambda it, kept: sessions.continue_session(it, update, kept))
    assert waits(core) == {"a": "session_input", "b": "session_input", "c": "turn"}
    told = finding(core, steps=False)
    assert told is not None
    assert told["request_id"] == "c"


# ----------------------------------------------------------------------------------------
# Time in the queue
# ----------------------------------------------------------------------------------------


def test_time_is_up_for_those_who_were_never_scheduled() -> None:
    core = build_core(max_num_active_reqs=1)
    for name, limit_s in (("a", 5.0), ("b", 5.0), ("c", None), ("d", 7.0)):
        core.add_request(build_request(name, max_tokens=100), 1.0, limit_s)
    step(core)
    watch = QueueWatch(AFTER_S)
    assert watch.look(core, 2.0)[1] == 6.0
    assert core.take_expired(5.9) == []
    assert [it.request_id for it in core.take_expired(6.0)] == ["b"]
    core.finish_requests(["b"], RequestStatus.FINISHED_ERROR)
    assert watch.look(core, 6.0)[1] == 8.0
    assert [it.request_id for it in core.take_expired(99.0)] == ["d"]
    core.finish_requests(["d"], RequestStatus.FINISHED_ERROR)
    assert core.take_expired(999.0) == []
    core.check_invariants()


def test_a_preempted_request_has_been_scheduled() -> None:
    core = build_core()
    core.add_request(build_request("a", max_tokens=100), 1.0, 5.0)
    step(core)
    core.preempt_running(3.0)
    assert core.take_expired(99.0) == []


@pytest.mark.parametrize("limit", [0, -1, math.nan, 86_401, 1e300, "3", True, [1]])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(VLLMValidationError, match="not a number of seconds"):
        queue_timeout.seconds_of(SamplingParams(extra_args={"queue_timeout_s": limit}))
