"""Shows results: writes the pages' tables and pictures, or a report of some files.

python -m bench.report                    # the pages of this repository, from bench/results,
                                          # which keeps what tables read
python -m bench.report FILE... --out DIR  # DIR/report.md with all that these files have
"""

import argparse
import sys
from pathlib import Path

from bench.report.pages import PageError, read_results, written_anew
from bench.report.plots import pictures
from bench.report.tables import as_markdown


def main() -> int:
    """Write pages or a report, or none of them; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results, as JSON")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR")
    options = parser.parse_args()
    try:
        texts = _report(options.files, options.out) if options.files else written_anew()
    except PageError as error:
        sys.exit(f"error: {error}")
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"written: {path}")
    return 0


def _report(files: list[Path], out: Path) -> dict[Path, str]:
    results = read_results(files, files[0].parent)
    drawn = pictures(results)
    shown = "\n".join(f"![{name}]({name}.svg)\n" for name in drawn)
    text = f"# Results\n\n{shown}\n{as_markdown(results)}\n"
    return {out / "report.md": text} | {out / f"{name}.svg": svg for name, svg in drawn.items()}


if __name__ == "__main__":
    sys.exit(main())
