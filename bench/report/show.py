"""What every benchmark does with its result: prints its tables, and writes JSON."""

import json
from pathlib import Path
from typing import Any

from bench.report.tables import as_markdown


def show(result: dict[str, Any], path: Path | None) -> None:
    """Print the tables of a result, and write it to a file if there is to be one."""
    run = ", ".join(f"{name} {value}" for name, value in result["run"].items())
    print(f"\n{run}\n\n{as_markdown({'this run': result})}")
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
