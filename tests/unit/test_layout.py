"""The rules of the code map that ARCHITECTURE.md states."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "rust/core"
EXTENSION = ROOT / "rust/python"


def dependencies(crate: Path) -> set[str]:
    manifest = tomllib.loads((crate / "Cargo.toml").read_text())
    return set(manifest["dependencies"])


def rust_sources(folder: Path) -> list[Path]:
    sources = sorted(folder.rglob("*.rs"))
    assert sources, f"no sources in {folder}"
    return sources


def test_the_core_knows_no_python_and_no_sibling() -> None:
    assert not {name for name in dependencies(CORE) if name.startswith(("pyo3", "sparksched"))}


def test_a_plain_cargo_test_leaves_the_extension_out() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    assert "rust/python" not in workspace["default-members"]


@pytest.mark.parametrize("forbidden", [r"\bstd::(time|fs|net|io|env|thread)\b", r"\bInstant\b"])
def test_the_core_has_no_clock_and_no_input_or_output(forbidden: str) -> None:
    for source in rust_sources(CORE / "src"):
        assert not re.search(forbidden, source.read_text()), source


@pytest.mark.parametrize("crate", [CORE, EXTENSION], ids=["core", "extension"])
def test_there_is_no_unsafe_code(crate: Path) -> None:
    for source in rust_sources(crate / "src"):
        assert not re.search(r"\bunsafe\s*(\{|fn|impl)", source.read_text()), source
    assert "#![forbid(unsafe_code)]" in (CORE / "src/lib.rs").read_text()


def test_only_convert_names_vllms_modules() -> None:
    for source in rust_sources(EXTENSION / "src"):
        if "convert" not in source.parts:
            assert '"vllm.' not in source.read_text(), source


def test_each_core_module_says_what_it_is() -> None:
    for source in rust_sources(CORE / "src"):
        assert source.read_text().startswith("//! "), source
