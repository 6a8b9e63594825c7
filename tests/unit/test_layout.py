"""The rules of the code map that ARCHITECTURE.md states."""

import ast
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKLOG = ROOT / "rust/links/backlog"
CORE = ROOT / "rust/core"
FUZZ = ROOT / "rust/fuzz"
METERS = ROOT / "rust/meters"
RING = ROOT / "rust/links/ring"
SHM = ROOT / "rust/shm"
WIRE = ROOT / "rust/wire"
ZMTP = ROOT / "rust/links/zmtp"
EXTENSION = ROOT / "rust/python"
PACKAGE = ROOT / "python/sparksched"

SIDES = {
    "engine": ("api_server", "commands", "verify"),
    "api_server": ("engine", "commands", "verify"),
    "shared": ("engine", "api_server", "commands", "verify", "record"),
    "compat": ("engine", "api_server", "shared", "commands", "verify", "record"),
}
"""What runs in one process, or must be the same in both: what it may not import of the package."""


def dependencies(crate: Path) -> set[str]:
    manifest = tomllib.loads((crate / "Cargo.toml").read_text())
    return set(manifest.get("dependencies", ()))


def rust_sources(folder: Path) -> list[Path]:
    sources = sorted(folder.rglob("*.rs"))
    assert sources, f"no sources in {folder}"
    return sources


@pytest.mark.parametrize(
    ("crate", "known"),
    [
        (CORE, set()),
        (WIRE, {"core"}),
        (BACKLOG, set()),
        (SHM, set()),
        (METERS, {"shm"}),
        (RING, {"backlog", "meters", "shm"}),
        (ZMTP, {"backlog"}),
    ],
    ids=lambda it: it.name if isinstance(it, Path) else "",
)
def test_a_crate_knows_no_python_and_only_these(crate: Path, known: set[str]) -> None:
    found = {name for name in dependencies(crate) if name.startswith(("pyo3", "sparksched"))}
    assert found == {f"sparksched-{name}" for name in known}


@pytest.mark.parametrize("forbidden", [r"\bstd::(time|fs|net|io|env|thread)\b", r"\bInstant\b"])
def test_the_core_has_no_clock_and_no_input_or_output(forbidden: str) -> None:
    for source in rust_sources(CORE / "src"):
        assert not re.search(forbidden, source.read_text()), source


@pytest.mark.parametrize(
    "crate",
    [BACKLOG, CORE, FUZZ, WIRE, ZMTP, EXTENSION],
    ids=["backlog", "core", "fuzz", "wire", "zmtp", "extension"],
)
def test_there_is_no_unsafe_code(crate: Path) -> None:
    for source in rust_sources(crate / "src"):
        assert not re.search(r"\bunsafe\s*(\{|fn|impl)", source.read_text()), source
    for forbidding in (BACKLOG, CORE, FUZZ, WIRE, ZMTP):
        assert "#![forbid(unsafe_code)]" in (forbidding / "src/lib.rs").read_text()


@pytest.mark.parametrize("crate", [METERS, RING, SHM], ids=["meters", "ring", "shm"])
def test_unsafe_code_has_reasons(crate: Path) -> None:
    for source in rust_sources(crate / "src"):
        lines = source.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.search(r"\bunsafe\s*(\{|impl)", line):
                before = [before.strip() for before in lines[max(number - 4, 0) : number]]
                assert any(before.startswith("// SAFETY:") for before in before), (source, number)


def test_unsafe_code_is_listed_file_by_file() -> None:
    listed = re.findall(r"^\| `(rust/\S+)` \| (\d+) \|", (ROOT / "SECURITY.md").read_text(), re.M)
    found = {
        str(source.relative_to(ROOT)): len(re.findall(r"\bunsafe\s*(\{|fn|impl)", text))
        for source in rust_sources(ROOT / "rust")
        if source.parent.name == "src" and (text := source.read_text())
    }
    assert {file: int(count) for file, count in listed} == {k: v for k, v in found.items() if v}


def test_what_python_can_call_is_guarded() -> None:
    text = "\n".join(it.read_text() for it in rust_sources(EXTENSION / "src"))
    guarded = r"^#\[entry_points(?:\(\w+\))?\]\n"
    callable_by_python = r"#\[py(?:methods|function)\]$"
    num_guarded = len(re.findall(guarded + callable_by_python, text, re.M))
    assert num_guarded == len(re.findall(f"^{callable_by_python}", text, re.M)) > 10


def test_only_convert_names_vllms_modules() -> None:
    for source in rust_sources(EXTENSION / "src"):
        if "convert" not in source.parts:
            assert '"vllm.' not in source.read_text(), source


def known_by_module(crate: Path) -> dict[str, set[str]]:
    """Return which modules of a crate each of its modules names; a folder is one module."""
    graph: dict[str, set[str]] = {}
    for source in rust_sources(crate / "src"):
        module = source.relative_to(crate / "src").parts[0].removesuffix(".rs")
        code = re.sub("//.*", "", source.read_text())
        named = set(re.findall(r"\bcrate::([a-z]\w*)", code)) - {module}
        graph[module] = graph.get(module, set()) | named
    return graph


@pytest.mark.parametrize(
    "crate", [CORE, EXTENSION, METERS, RING, SHM, WIRE, ZMTP], ids=lambda it: it.name
)
def test_no_module_of_a_crate_knows_itself_by_way_of_others(crate: Path) -> None:
    TopologicalSorter(known_by_module(crate)).prepare()


def test_only_what_looks_at_the_scheduler_knows_it() -> None:
    graph = known_by_module(CORE)
    assert {it for it in graph if "scheduler" in graph[it]} == {"pacing", "queue_watch"}


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return a package's modules, by their names below it."""
    found = {}
    for source in sorted(package.rglob("*.py")):
        parts = source.relative_to(package).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").removesuffix(".")] = source
    return found


def imported(name: str, source: Path) -> set[str]:
    """Return the modules of the package that one imports, wherever it says so."""
    known = modules()
    return {
        module
        for statement in ast.walk(ast.parse(source.read_text()))
        for module in named(statement)
        if module in known and module != name
    }


def named(statement: ast.AST) -> set[str]:
    """Return what a statement imports: a name may be a module of the package, or be in one."""
    match statement:
        case ast.ImportFrom(module=str(module), names=names) if is_ours(module):
            inner = {below(f"{module}.{it.name}") for it in names}
            return inner & modules().keys() or {below(module)}
        case ast.Import(names=names):
            return {below(it.name) for it in names if is_ours(it.name)}
    return set()


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == "sparksched"


def below(module: str) -> str:
    return module.removeprefix("sparksched").removeprefix(".")


def is_within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


@pytest.mark.parametrize(("side", "forbidden"), SIDES.items(), ids=SIDES)
def test_engine_and_api_server_share_only_what_is_shared(
    side: str, forbidden: tuple[str, ...]
) -> None:
    sources = {name: path for name, path in modules().items() if is_within(name, side)}
    assert sources
    for name, source in sources.items():
        for module in imported(name, source):
            assert not any(is_within(module, it) for it in forbidden), f"{name} imports {module}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: imported(name, source) for name, source in modules().items() if name}
    TopologicalSorter(graph).prepare()
