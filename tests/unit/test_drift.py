"""`tools.drift` on two small vLLMs."""

from pathlib import Path
from typing import Any

from tools import drift

SCHEDULER = """
class Scheduler:
    def schedule(self):
        '''Decide.'''
        budget = self.budget
        return budget

    def update(self):
        return 1
"""
ENVS = 'environment_variables = {"VLLM_KNOB": lambda: 1}\n'


def write_vllm(folder: Path, scheduler: str, envs: str, pins: str) -> str:
    texts = {
        "vllm/__init__.py": "",
        "vllm/v1/core/sched/scheduler.py": scheduler,
        "vllm/envs.py": envs,
        "requirements/common.txt": pins,
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_lines_are_grouped_by_what_is_new(tmp_path: Path, capsys: Any) -> None:
    old = write_vllm(tmp_path / "old", SCHEDULER, ENVS, "torch == 1.0\n")
    assert drift.main([old, old]) == 0
    assert capsys.readouterr().out == "Nothing has changed.\n"

    scheduler = SCHEDULER.replace("Decide", "Decide well").replace(
        "return budget", "return budget - self.skip_drafts"
    )
    scheduler += "    def drafts(self):\n        return self.skip_drafts\n"
    scheduler = scheduler.replace("return 1", "return 2")
    new = write_vllm(tmp_path / "new", scheduler, ENVS.replace("1", "2"), "torch == 2.0\n")
    assert drift.main([old, new]) == 1
    place = "in v1.core.sched.scheduler.Scheduler"
    assert capsys.readouterr().out.splitlines() == [
        "Decisions: 6 lines",
        "  skip_drafts: 4 lines in 2 places",
        f"    +1 -1 {place}.schedule",
        f"    +2 -0 {place}.drafts",
        f"  without a new name: +1 -1 {place}.update",
        "Defaults of environment variables:",
        "  VLLM_KNOB: 1 -> 2",
        "Pins:",
        "  torch: ==1.0 -> ==2.0",
    ]
