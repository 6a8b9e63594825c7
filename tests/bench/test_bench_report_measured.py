"""The report's tables are made of what benchmarks keep: nothing that was measured is missing."""

import pytest
from reported import rows_in

from bench import recording, step_cost
from bench.reporting.document import Section
from bench.reporting.recording import recording as recording_sections
from bench.reporting.step_cost import step_cost as step_cost_sections
from bench.reporting.values import MISSING
from bench.step_loads import PLAIN
from testkit.worlds.world import vllm_environment

FEWEST = 2, step_cost.STEPS_IN_A_ROW
"""Running requests, and steps."""


def assert_whole(sections: list[Section], num_rows: int) -> None:
    rows = rows_in(sections)
    assert len(rows) == num_rows
    assert not [row for row in rows if any(MISSING in text for text in row)]


@pytest.mark.e2e
def test_steps() -> None:
    with vllm_environment(PLAIN.configuration):
        result = {
            "broadcast": [step_cost.measure_broadcast(*FEWEST)],
            "verified": [step_cost.measure_decode(*FEWEST, sides=step_cost.VERIFIED_SIDES)],
            "counted": [step_cost.measure_decode(*FEWEST, sides=step_cost.COUNTED_SIDES)],
        }
    assert_whole(step_cost_sections(result), num_rows=3)


@pytest.mark.e2e
def test_recordings() -> None:
    with vllm_environment(PLAIN.configuration):
        rows = [
            {"side": side, "requests": 2, "kind": kind} | found
            for side in step_cost.SIDES
            for kind, found in recording.measure(side, 2, recording.STEPS_A_TURN).items()
        ]
    assert_whole(recording_sections({"recording": rows}), num_rows=len(recording.KINDS))
