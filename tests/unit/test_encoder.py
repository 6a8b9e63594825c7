"""Messages that the scheduler writes itself: until they are sent, they are to change like objects.

That they have the bytes of vLLM's encoder is compared with each step of `tests/differential`.
"""

from typing import Any

import pytest
from bare_core import build_core, build_request, step
from sparksched import _core
from sparksched.engine.encoder import request_ids_in
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.release


def step_outputs() -> Any:
    """Return what a step brings to a client that gets messages."""
    core = build_core()
    core.encode_outputs_for(0)
    core.add_request(build_request("a"), 1.0)
    outputs = step(core)[0]
    assert isinstance(outputs, _core.StepOutputs)
    return outputs


def as_objects(outputs: _core.StepOutputs) -> EngineCoreOutputs:
    """Return what a client that gets this message will have."""
    return MsgpackDecoder(EngineCoreOutputs).decode(outputs.frames())


def test_fields_may_change_until_a_message_is_sent() -> None:
    outputs = step_outputs()
    outputs.frames()
    outputs.engine_index = 300
    outputs.weight_version = "2"
    outputs.finished_requests = {"a"}
    outputs.scheduler_stats = SchedulerStats(num_running_reqs=5)
    decoded = as_objects(outputs)
    assert decoded.engine_index == 300
    assert decoded.weight_version == "2"
    assert decoded.finished_requests == {"a"}
    assert decoded.scheduler_stats == SchedulerStats(num_running_reqs=5)
    assert [(it.request_id, it.new_token_ids) for it in decoded.outputs] == [("a", [7])]


def test_statistics_that_somebody_has_looked_at_can_be_changed() -> None:
    outputs = step_outputs()
    assert outputs.scheduler_stats == as_objects(outputs).scheduler_stats
    outputs.scheduler_stats.num_running_reqs = 4
    assert as_objects(outputs).scheduler_stats.num_running_reqs == 4


def test_the_requests_of_a_message_are_found_without_decoding_it() -> None:
    outputs = [EngineCoreOutput(name, [1], trace_headers={"b": "c"}) for name in ("a", "é" * 40)]
    message = EngineCoreOutputs(outputs=outputs, finished_requests={"d"}, timestamp=1.0)
    assert request_ids_in(MsgpackEncoder().encode(message)) == {"a", "é" * 40, "d"}
    assert request_ids_in(MsgpackEncoder().encode(EngineCoreOutputs())) == set()
