"""`make bench`: each benchmark has a file of its own, and the report is made of all of them."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("step_cost", "ipc", "host_path", "decode")


def commands(*variables: str) -> list[str]:
    """Return what would be run, as it is written in the Makefile."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "bench", *variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if re.search(r"-m bench\.|^echo", line)]


def test_results_and_report_are_in_one_folder() -> None:
    *measuring, report, last = commands("OUT=here")
    modules = [re.findall(r"-m bench\.(\w+)", line) for line in measuring]
    assert modules == [[name] for name in MEASURED]
    for name, line in zip(MEASURED, measuring, strict=True):
        assert line.endswith(f'--json "here/{name}.json"')
        assert " --quick " in line
    assert f'-m bench.report "here"/{{{",".join(MEASURED)}}}.json --out "here"' in report
    assert "here/report.html" in last


def test_the_folder_is_no_part_of_the_repository() -> None:
    *_, report, _ = commands()
    (folder,) = re.findall(r'--out "([^"]+)"', report)
    subprocess.run(["git", "check-ignore", "--quiet", f"{folder}/"], cwd=ROOT, check=True)


def test_it_can_be_thorough() -> None:
    assert not any("--quick" in line for line in commands("EFFORT="))
