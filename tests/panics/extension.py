"""The extension with its points: built beside the ordinary one, and loaded in its place.

Nothing of vLLM or sparksched is imported here: a process loads this before it loads those.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "rust/python/src"

NAME = "sparksched._core"


def build() -> Path:
    """Build the extension with its points; return where it is."""
    features = "test-points,pyo3/extension-module"
    subprocess.run(
        ["cargo", "build", "--locked", "-p", "sparksched-python", "--features", features],
        cwd=ROOT,
        env={**os.environ, "PYO3_PYTHON": sys.executable},
        check=True,
    )
    return ROOT / "target/debug/libsparksched_core_python.so"


def load(path: Path) -> None:
    """Load the extension in the place of the ordinary one, which must not be there yet."""
    assert NAME not in sys.modules, f"{NAME} is loaded already"
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module


def call(path: Path, module: str, function: str, *args: Any) -> None:
    """Call a function of a module that needs the extension with its points."""
    load(path)
    getattr(importlib.import_module(module), function)(*args)


_FUNCTION = re.compile(
    r"^#\[entry_points\]\n#\[pyfunction\]\n(?:#.*\n)*(?:pub\(crate\) )?fn (\w+)", re.M
)
_METHODS = re.compile(
    r"^#\[entry_points\((\w+)\)\]\n#\[pymethods\]\nimpl \w+ \{\n(.*?)^\}", re.M | re.S
)
_CALLABLE = re.compile(r"^#\[(?:pyfunction|pymethods)\]$", re.M)
_METHOD = re.compile(r"((?:^    #\[.*?\]\n)*)^    (?:pub\(crate\) )?fn (\w+)", re.M | re.S)


def entry_points() -> list[str]:
    """Return what Python can call in the extension, as its sources have it."""
    names: list[str] = []
    for source in sorted(SOURCES.rglob("*.rs")):
        if source.name == "points.rs":
            continue
        text = source.read_text()
        functions, classes = _FUNCTION.findall(text), _METHODS.findall(text)
        num_callable = len(_CALLABLE.findall(text))
        assert len(functions) + len(classes) == num_callable, f"unguarded functions in {source}"
        names += functions
        for class_name, body in classes:
            names += [f"{class_name}.{_name(*method)}" for method in _METHOD.findall(body)]
    return names


def _name(attributes: str, rust_name: str) -> str:
    if "#[new]" in attributes:
        return "__new__"
    setter = re.search(r"#\[setter\((\w+)\)\]", attributes)
    assert setter or "#[setter]" not in attributes, "name the field of a setter"
    return f"{setter[1]}=" if setter else rust_name
