"""What has changed between two releases of vLLM, of all that sparksched and its benchmarks rest on.

    python -m tools.drift 0.32.0 0.33.0

Lines are grouped by what the new release introduced: a name that is nowhere in the old one. Neither
release is imported, so its sources are enough.
"""

import argparse
import ast
import difflib
import json
import re
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from packaging.requirements import Requirement
from sparksched.compat import fingerprints, releases, seams, source
from sparksched.compat.source import MissingError, Sources, dotted, module_of, with_conditional

from testkit.vllm_source import ROOT, ensure_source_distribution

_PACKAGE: Final = ROOT / "python/sparksched"
_RECORDED: Final = _PACKAGE / "compat/fingerprints.json"

DECISIONS: Final = seams.NATIVE_ENGINE.code
"""What the Rust core does as well."""
SEAMS: Final = tuple(
    target
    for group in seams.GROUPS
    for target in (*group.code, *group.values)
    if target.startswith("vllm") and target not in (*DECISIONS, seams.VARIABLES)
)
"""What is replaced, set or called besides."""
BENCHMARKS: Final = (
    "vllm.model_executor.model_loader.dummy_loader",
    "vllm.model_executor.model_loader.weight_utils:initialize_dummy_weights",
    "vllm.model_executor.model_loader.weight_utils:initialize_single_dummy_weight",
    "vllm.model_executor.layers.quantization.mxfp4",
    "vllm.model_executor.layers.fused_moe.router.routing_simulator_router",
    "vllm.benchmarks.serve",
)
"""What fills a model without weights and spreads its tokens, and what sends requests."""

_PINS: Final = ("requirements/common.txt", "requirements/cuda.txt")
_WORD: Final = re.compile(r"[A-Za-z_]\w{3,}")


class Hunk(NamedTuple):
    """Lines that one place lost and got."""

    place: str
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def num_lines(self) -> int:
        """How many lines of either release it has."""
        return len(self.removed) + len(self.added)


def main(arguments: list[str] | None = None) -> int:
    """Print what has changed; return 1 if anything has, 2 if a vLLM can't be read."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.drift", description="List what has changed between two vLLMs."
    )
    where = "a release, `installed`, a folder, a wheel or a source distribution"
    parser.add_argument("old", help=f"{where}: one that is supported")
    parser.add_argument("new", help=f"{where}: the one to compare with it")
    parser.add_argument("--diff", action="store_true", help="show the lines")
    parser.add_argument(
        "--record", metavar="RELEASE", help="store the new one's fingerprints under this release"
    )
    asked = parser.parse_args(arguments)
    with ExitStack() as stack:
        try:
            old, new = (_open(name, stack) for name in (asked.old, asked.new))
        except (OSError, MissingError, tarfile.TarError, zipfile.BadZipFile) as error:
            print(f"drift: {error}", file=sys.stderr)
            return 2
        found = list(changes(old, new, with_diff=asked.diff))
        print("\n".join(found or ["Nothing has changed."]))
        if asked.record:
            _record(new, asked.record)
    return int(bool(found))


def changes(old: Sources, new: Sources, with_diff: bool = False) -> Iterator[str]:
    """Yield lines on what has changed."""
    decisions = list(_hunks(old, new, DECISIONS))
    others = [it for it in _hunks(old, new, SEAMS) if it not in decisions]
    known, now = _words_in(old), _words_in(new)
    for title, hunks in (
        ("Decisions", decisions),
        ("Functions that are replaced or called", others),
        ("What benchmarks rest on", list(_hunks(old, new, BENCHMARKS))),
    ):
        if hunks:
            yield f"{title}: {sum(it.num_lines for it in hunks)} lines"
            for name, part in _by_news(hunks, known, now):
                yield from _told(name, part, with_diff)
    yield from _listed(
        "Defaults of environment variables", _differences(*map(_variables, (old, new)))
    )
    pins = _pins(old), _pins(new)
    if all(pins):  # a wheel or an installed release has none
        yield from _listed("Pins", _differences(*pins))
    yield from _listed("Names that are imported and gone", _lost_imports(old, new))


def _told(name: str, hunks: list[Hunk], with_diff: bool) -> Iterator[str]:
    places = dict.fromkeys(it.place for it in hunks)
    head = f"  {name}: "
    if len(places) > 1:
        yield f"{head}{sum(it.num_lines for it in hunks)} lines in {len(places)} places"
        head = "    "
    for place in places:
        here = [it for it in hunks if it.place == place]
        removed, added = (sum(len(it[side]) for it in here) for side in (1, 2))
        yield f"{head}+{added} -{removed} in {place.removeprefix('vllm.')}"
        for hunk in here if with_diff else ():
            yield from (f"      - {line}" for line in hunk.removed)
            yield from (f"      + {line}" for line in hunk.added)


def _listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number == 0:
            yield f"{title}:"
        yield f"  {line}"


def _by_news(hunks: list[Hunk], known: set[str], now: set[str]) -> Iterator[tuple[str, list[Hunk]]]:
    """Yield the names that explain most lines, each with its hunks; then the hunks without one."""
    names = {
        hunk: {word for line in hunk.added for word in _WORD.findall(line)} - known
        | {f"{word} (gone)" for line in hunk.removed for word in _WORD.findall(line)}
        - {f"{word} (gone)" for word in now}
        for hunk in hunks
    }
    left = list(hunks)
    while True:
        lines = Counter[str]()
        for hunk in left:
            for name in sorted(names[hunk]):
                lines[name] += hunk.num_lines
        if not lines:
            break
        name = lines.most_common(1)[0][0]
        yield name, [it for it in left if name in names[it]]
        left = [it for it in left if name not in names[it]]
    if left:
        yield "without a new name", left


# ----------------------------------------------------------------------------------------
# Code
# ----------------------------------------------------------------------------------------


def _hunks(old: Sources, new: Sources, targets: Iterable[str]) -> Iterator[Hunk]:
    before, after = (_units(sources, targets) for sources in (old, new))
    for place in {**after, **before}:
        lines = before.get(place, []), after.get(place, [])
        for tag, a, b, c, d in difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
            if tag != "equal":
                yield Hunk(place, tuple(lines[0][a:b]), tuple(lines[1][c:d]))


def _units(sources: Sources, targets: Iterable[str]) -> dict[str, list[str]]:
    """Return the lines of each function and of the rest of each class, by its name."""
    units: dict[str, list[str]] = {}
    for target in targets:
        try:
            module, found = sources.place(target)
        except MissingError:
            continue
        path = target.partition(":")[2]
        owner = module if path else module_of(target)
        prefix = ".".join(filter(None, (owner, path.rpartition(".")[0])))
        statements = [it for it in found if isinstance(it, ast.stmt)]
        if path.endswith(".*"):
            units[f"{module}.{path.removesuffix('.*')}"] = [ast.unparse(it) for it in statements]
        else:
            _add_units(units, prefix, statements)
    return units


def _add_units(units: dict[str, list[str]], owner: str, body: list[ast.stmt]) -> None:
    """Add what a module or class consists of; docstrings and comments are no part of it."""
    rest: list[str] = []
    for node in with_conditional(body):
        if isinstance(node, ast.ClassDef):
            _add_units(units, f"{owner}.{node.name}", node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            units[f"{owner}.{node.name}"] = ast.unparse(_without_docstrings(node)).splitlines()
        elif not isinstance(node, ast.Import | ast.ImportFrom) and not source.is_docstring(node):
            rest += ast.unparse(node).splitlines()
    if rest:
        units[owner] = rest


def _without_docstrings(function: ast.stmt) -> ast.stmt:
    for node in ast.walk(function):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [it for it in body if not source.is_docstring(it)] or [ast.Pass()]
    return function


def _words_in(sources: Sources) -> set[str]:
    words: set[str] = set()
    for path in sources.folder.rglob("*.py"):
        words.update(_WORD.findall(path.read_text(errors="replace")))
    return words


# ----------------------------------------------------------------------------------------
# What is no code
# ----------------------------------------------------------------------------------------


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield f"{name}: {'gone' if new is None else 'new'}"
        elif old != new:
            yield f"{name}: {old} -> {new}"


def _variables(sources: Sources) -> dict[str, str]:
    """Return how vLLM reads each environment variable, default included."""
    try:
        (statement,) = sources.find(seams.VARIABLES)
    except MissingError:
        return {}
    table = getattr(statement, "value", None)
    if not isinstance(table, ast.Dict):
        return {}
    return {
        str(name.value): ast.unparse(read).removeprefix("lambda: ")
        for name, read in zip(table.keys, table.values, strict=True)
        if isinstance(name, ast.Constant)
    }


def _pins(sources: Sources) -> dict[str, str]:
    """Return the versions that a source distribution, or what was unpacked of one, asks for."""
    pins: dict[str, str] = {}
    for name in _PINS:
        path = sources.folder.parent / name
        for line in path.read_text().splitlines() if path.is_file() else ():
            text = line.partition("#")[0].strip()
            if text and not text.startswith("-"):
                requirement = Requirement(text)
                pins[requirement.name] = str(requirement.specifier) or "any"
    return pins


def _lost_imports(old: Sources, new: Sources) -> Iterator[str]:
    """Yield what our modules import from vLLM, where the old one has it and the new one doesn't."""
    lost = {
        target
        for path in _PACKAGE.rglob("*.py")
        for target in _imported(ast.parse(path.read_bytes()))
        if _has(old, target) and not _has(new, target)
    }
    yield from (dotted(target) for target in sorted(lost))


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm"):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def _has(sources: Sources, target: str) -> bool:
    try:
        sources.find(target)
    except MissingError:
        return sources.has_module(dotted(target))
    return True


# ----------------------------------------------------------------------------------------
# Where a vLLM is
# ----------------------------------------------------------------------------------------


def _open(name: str, stack: ExitStack) -> Sources:
    """Return the source of what is named; raise OSError or MissingError if there is none."""
    if name == "installed":
        return Sources(source.installed().folder)
    path = ensure_source_distribution(name) if re.fullmatch(r"[\d.]+\w*", name) else Path(name)
    if path.is_file():
        archive, path = path, Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _unpack(archive, path)
    for folder in (path, path / "vllm", *path.glob("*/vllm")):
        if folder.name == "vllm" and (folder / "__init__.py").is_file():
            return Sources(folder)
    raise MissingError(f"there is no vLLM in {name}")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the Python sources of a wheel or a source distribution, and its requirements."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [it for it in wheel.namelist() if it.endswith(".py")])
        return
    with tarfile.open(archive) as distribution:
        members = [it for it in distribution if it.isfile() and it.name.endswith((".py", *_PINS))]
        distribution.extractall(folder, members, filter="data")


def _record(sources: Sources, release: str) -> None:
    """Store fingerprints; those of releases that are supported no longer go."""
    found = {}
    for target in sorted(
        {it for group in seams.GROUPS for it in group.code if not group.any_release}
    ):
        try:
            found[target] = sources.look_up(target).fingerprint
        except MissingError:  # another release has it
            continue
    known = {**fingerprints.KNOWN, release: found}
    kept = {it: known[it] for it in sorted(known) if it in (*releases.SUPPORTED, release)}
    _RECORDED.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
