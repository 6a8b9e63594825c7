"""What a scheduler holds is given back when it goes."""

import gc
import weakref

from engine.harness import restored_vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from testkit.worlds.candidates import CANDIDATES
from testkit.worlds.draw import draw_configuration
from testkit.worlds.world import build_world, vllm_environment


def test_a_scheduler_and_its_requests_are_collected() -> None:
    configuration = draw_configuration("async-hybrid", 0)
    with restored_vllm(), vllm_environment(configuration):
        world = build_world(configuration)
        manager = StructuredOutputManager(world.vllm_config)
        scheduler = world.build_scheduler(CANDIDATES["sparksched"](configuration), manager)
        request = Request("one", [1, 2, 3], SamplingParams(max_tokens=4), None)
        scheduler.add_request(request)
        scheduler.schedule()
        held = [weakref.ref(scheduler), weakref.ref(request), weakref.ref(manager)]
        del scheduler, request, manager
        gc.collect()
        assert [it() for it in held] == [None, None, None]
