"""A client may use an id again while a step of its former request is in flight.

Random traces leave this out, because the asynchronous scheduler of vLLM 0.32.0 ends in an assertion
if such a step brings a token. If it brings none (a part of a prompt), vLLM carries on, and so must
we. Since 0.33.0 it carries on in any case, and gives the token to the new request.
"""

import pytest
from sparksched.compat import releases
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from testkit.worlds.candidates import CANDIDATES, stock_block_hasher
from testkit.worlds.draw import draw_configuration
from testkit.worlds.world import World, build_world, vllm_environment

from .state import snapshot, stock_snapshot

pytestmark = pytest.mark.release


def run(
    scheduler: SchedulerInterface, world: World, former_prompt: int, stale_tokens: list[int]
) -> list[object]:
    """Abort a request after its first step and use its id again; return what was scheduled.

    `stale_tokens` are what that step brings when it comes back.
    """
    scheduled: list[object] = []

    def add(num_tokens: int) -> None:
        prompt = list(range(num_tokens))
        params = SamplingParams(max_tokens=6, temperature=0.0)
        hasher = stock_block_hasher(world)
        request = Request("again", prompt, params, None, arrival_time=1.0, block_hasher=hasher)
        scheduler.add_request(request)

    def schedule() -> SchedulerOutput:
        output = scheduler.schedule()
        scheduled.append(dict(output.num_scheduled_tokens))
        return output

    def bring(output: SchedulerOutput, tokens: list[int]) -> None:
        ids = list(output.num_scheduled_tokens)
        rows = {request_id: row for row, request_id in enumerate(ids)}
        scheduler.update_from_output(output, ModelRunnerOutput(ids, rows, [list(tokens)]))

    add(former_prompt)
    first_step = schedule()
    scheduler.finish_requests("again", RequestStatus.FINISHED_ABORTED)
    add(5)
    bring(first_step, stale_tokens)
    for token in (7, 8, 9):
        bring(schedule(), [token])
    scheduled.append(dict(schedule().num_scheduled_tokens))
    return scheduled


@pytest.mark.parametrize("name", ["async-hybrid", "async-full-v2", "sync-full"])
def test_a_chunk_of_a_former_request_comes_back(name: str) -> None:
    longer_than_a_step = draw_configuration(name, 0).max_num_batched_tokens * 2
    assert_both_carry_on(name, longer_than_a_step, [])


@pytest.mark.skipif(not releases.is_since("0.33.0"), reason="vLLM ends in an assertion")
@pytest.mark.parametrize("name", ["async-hybrid", "async-full-v2", "async-four-groups"])
def test_a_token_of_a_former_request_comes_back(name: str) -> None:
    assert_both_carry_on(name, 3, [4])


def assert_both_carry_on(name: str, former_prompt: int, stale_tokens: list[int]) -> None:
    configuration = draw_configuration(name, 0)
    with vllm_environment(configuration):
        world = build_world(configuration)
        manager = StructuredOutputManager(world.vllm_config)
        sides = {
            side: world.build_scheduler(CANDIDATES[side](configuration), manager)
            for side in ("stock", "sparksched")
        }
        scheduled = {
            side: run(scheduler, world, former_prompt, stale_tokens)
            for side, scheduler in sides.items()
        }
    assert scheduled["sparksched"] == scheduled["stock"]
    assert snapshot(sides["sparksched"]) == stock_snapshot(sides["stock"])
