"""In a process that finds this on its path, a verified scheduler decides wrongly once.

Python imports it at its start. The folder holds nothing else: whatever it has goes before packages.
"""

from types import ModuleType
from typing import Any

from sparksched.compat import patching

NUM_GOOD_STEPS = 20


class PlantedCore:
    """The core, which after a while names another block for a new request than the one it took."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def schedule(self, *arguments: Any) -> Any:
        output = self._core.schedule(*arguments)
        self._num_steps += 1
        if self._num_steps > NUM_GOOD_STEPS:
            for new_request in output.scheduled_new_reqs:
                new_request.block_ids[0][0] += 1
        return output


def plant(module: ModuleType) -> None:
    """Have each verifying scheduler get such a core, once the metrics have got the real one."""
    report_to = module.VerifyingScheduler.report_to

    def report_to_and_plant(self: Any, meters: Any) -> None:
        report_to(self, meters)
        self._core = PlantedCore(self._core)

    module.VerifyingScheduler.report_to = report_to_and_plant


patching.after_import("sparksched.verify.scheduler", plant)
