"""The table of seams: each name deleted in turn, code that is not as it is known, and its page."""

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine.harness import restored_vllm
from logs import collected
from sparksched import plugin
from sparksched.compat import fingerprints, patching, releases, seams, source
from sparksched.compat.seams import Group, Seam
from sparksched.engine import hashing

from tools.pages import LIST, with_seams

pytestmark = pytest.mark.release

FUNCTIONS = [(group, seam) for group in seams.GROUPS for seam in group.functions]
ANY_RELEASE = [group for group in seams.GROUPS if group.any_release]
VLLM_SCHEDULER = (seams.CHOICE, seams.NATIVE_ENGINE)
"""Groups without which vLLM's own scheduler serves."""


def name_of(value: object) -> str:
    """Return what a parameter is called in a test's name."""
    if isinstance(value, Group):
        return value.name
    return value.target if isinstance(value, Seam) else str(value)


@pytest.fixture(autouse=True)
def vllm_restored(tmp_path: Any) -> Iterator[None]:
    for group in seams.GROUPS:
        for module in (*group.modules, *map(source.module_of, group.code)):
            importlib.import_module(module)
    with restored_vllm():
        for name in [it for it in os.environ if it.startswith(("SPARKSCHED_", "VLLM_SCHED"))]:
            del os.environ[name]
        give_back()
        os.environ["SPARKSCHED_RECORD"] = str(tmp_path / "trace")
        yield


def give_back() -> None:
    """Take back what is replaced: another test of this process may have built an engine."""
    for _, seam in FUNCTIONS:
        original = patching.original_of(seam.target)
        if original is not None:
            owner, name = patching.owner_of(seam.target)
            setattr(owner, name, original)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    with collected(level=logging.WARNING, logger="vllm.sparksched") as lines:
        yield lines


def start(mode: str, **variables: str) -> None:
    """Load the plugin, and build what an engine builds of it."""
    os.environ.update(variables, VLLM_SCHEDULER=mode)
    plugin.register()
    if mode == "sparksched" and chosen_class() == "SparkScheduler":
        cache_config = SimpleNamespace(enable_prefix_caching=False)
        hashing.prepare_engine(
            SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache_config))
        )  # type: ignore[arg-type]


def chosen_class() -> str:
    """Return the name of the class that vLLM would schedule with, "" if it can't even be asked."""
    from vllm.config import scheduler

    config = getattr(scheduler, "SchedulerConfig", None)
    if not hasattr(config, "get_scheduler_cls"):
        return ""
    name: str = config.default_factory().get_scheduler_cls().__name__
    return name


def replaced() -> set[str]:
    """Return the targets of all functions that are replaced."""
    return {seam.target for _, seam in FUNCTIONS if patching.original_of(seam.target) is not None}


def expected(without: Group | None = None) -> set[str]:
    """Return the targets of all functions that should be, if one group is left out."""
    is_native = without not in VLLM_SCHEDULER
    groups = [
        group
        for group in seams.GROUPS
        if group is not without and (is_native or not group.waits_for_scheduler)
    ]
    return {seam.target for group in groups for seam in group.functions}


def delete(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Delete a name from vLLM, wherever it is inherited from."""
    owner, name = patching.owner_of(target)
    for place in owner.__mro__[:-1] if isinstance(owner, type) else (owner,):
        if name in vars(place):
            monkeypatch.delattr(place, name)


# ----------------------------------------------------------------------------------------
# What is replaced
# ----------------------------------------------------------------------------------------


def test_all_that_the_table_lists_is_replaced_and_nothing_is_said(warnings: list[str]) -> None:
    start("sparksched")
    assert replaced() == expected()
    assert warnings == []


def test_off_replaces_nothing(warnings: list[str]) -> None:
    import vllm.envs

    values = dict(vars(vllm.envs))
    start("vllm")
    assert replaced() == set()
    changed = {name for name, value in vars(vllm.envs).items() if value is not values.get(name)}
    assert changed == {"environment_variables"}
    assert warnings == []


def test_a_module_that_is_still_being_imported_lacks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `async_llm`: it imports `core_client`, of the same group, before it has its own class."""
    module = importlib.import_module("vllm.v1.engine.async_llm")
    monkeypatch.delattr(module, "AsyncLLM")
    assert fingerprints.difference(seams.CLIENT_TRANSPORT) is not None
    monkeypatch.setattr(module.__spec__, "_initializing", True, raising=False)
    assert fingerprints.difference(seams.CLIENT_TRANSPORT) is None


# ----------------------------------------------------------------------------------------
# What is missing, or not as it is known
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", seams.GROUPS, ids=name_of)
def test_a_name_that_is_missing_leaves_its_group_to_vllm(
    group: Group, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    target = group.functions[-1].target
    delete(monkeypatch, target)
    start("sparksched")
    assert replaced() == expected(without=group) - sharing(target)
    assert len(warnings) == len(groups_that_need(target))
    # It may be inherited from another one of the group, which is named then.
    name = target.rpartition(".")[2].rpartition(":")[2]
    ending = f"'{name}'\")" if group.any_release else f".{name} is missing"
    assert all(warning.endswith(ending) for warning in warnings)


def groups_that_need(target: str) -> list[Group]:
    return [group for group in seams.GROUPS if target in group.code]


def sharing(target: str) -> set[str]:
    """Return the functions of all groups that need a target."""
    return {seam.target for group in groups_that_need(target) for seam in group.functions}


@pytest.mark.parametrize("group", [it for it in seams.GROUPS if not it.any_release], ids=name_of)
def test_code_that_differs_leaves_its_group_to_vllm(
    group: Group, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    release = releases.installed()
    target = group.functions[-1].target
    known = {**fingerprints.KNOWN[release], target: "another"}
    monkeypatch.setattr(fingerprints, "KNOWN", {release: known})
    start("sparksched")
    assert replaced() == expected(without=group) - sharing(target)
    assert warnings
    for warning in warnings:
        assert warning.endswith(f"{source.dotted(target)} is not that of vLLM {release}")


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = seams.CLIENT_TRANSPORT.functions[0].target
    delete(monkeypatch, target)
    missing = source.dotted(target)
    with pytest.raises(RuntimeError, match=f"{missing}.*SPARKSCHED_STRICT=1 makes this an error"):
        start("sparksched", SPARKSCHED_STRICT="1")


@pytest.mark.parametrize(
    ("group", "target"),
    [
        (seams.NATIVE_ENGINE, "vllm.v1.core.sched.output:SchedulerOutput"),
        (seams.NATIVE_ENGINE, "vllm.config:CacheConfig"),
        (seams.OUTPUTS, "vllm.v1.engine.output_processor:OutputProcessor.process_outputs"),
        (seams.OUTPUTS, "vllm.outputs:CompletionOutput"),
    ],
    ids=name_of,
)
def test_what_another_plugin_has_replaced_stays(
    group: Group, target: str, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Its source is still there as it is known."""
    owner, name = patching.owner_of(target)
    original = getattr(owner, name)
    foreign = type(name, (original,), {}) if isinstance(original, type) else lambda *_: None
    monkeypatch.setattr(owner, name, foreign)
    start("sparksched")
    assert getattr(owner, name) is foreign
    assert not replaced() & {seam.target for seam in group.functions}
    assert any(it.endswith(f"{source.dotted(target)} is not vLLM's own") for it in warnings)


def test_a_fork_without_a_private_function_runs_vllms_scheduler(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Our modules take it when they are imported: that must not happen."""
    for name in [it for it in sys.modules if it.startswith("sparksched.")]:
        if name.split(".")[1] in ("engine", "scheduler"):
            monkeypatch.delitem(sys.modules, name)
    target = "vllm.v1.core.sched.scheduler:Scheduler._free_encoder_inputs"
    delete(monkeypatch, target)
    os.environ["VLLM_SCHEDULER"] = "sparksched"
    plugin.register()
    assert chosen_class() == "Scheduler"
    assert "sparksched.engine.scheduler" not in sys.modules
    assert replaced() >= {seam.target for seam in seams.ENGINE_TRANSPORT.functions}
    assert warnings == [
        "sparksched: using vLLM's own scheduler: this build of vLLM is not supported: "
        f"{source.dotted(target)} is missing"
    ]
    # Nor if it is asked for by its name.
    by_name = importlib.import_module("sparksched.scheduler").SparkScheduler
    scheduler_config = SimpleNamespace(async_scheduling=True)
    config = SimpleNamespace(diffusion_config=None, scheduler_config=scheduler_config)
    assert by_name.choose(config, None, 16, None).__name__ == "AsyncScheduler"


def test_what_was_replaced_is_given_back_if_a_later_module_lacks_a_name(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    first, later = seams.CLIENT_TRANSPORT.modules
    module = sys.modules[later]
    monkeypatch.delitem(sys.modules, later)
    patching.install(seams.CLIENT_TRANSPORT)
    targets = {seam.target for seam in seams.CLIENT_TRANSPORT.functions}
    assert replaced() & targets == {it for it in targets if it.startswith(f"{first}:")}
    monkeypatch.setitem(sys.modules, later, module)
    delete(monkeypatch, f"{later}:AsyncLLM.check_health")
    patching.install(seams.CLIENT_TRANSPORT)
    assert replaced() & targets == set()
    assert len(warnings) == 1


# ----------------------------------------------------------------------------------------
# Fingerprints
# ----------------------------------------------------------------------------------------


def test_each_release_has_its_fingerprints() -> None:
    assert tuple(fingerprints.KNOWN) == releases.SUPPORTED
    code = {it for group in seams.GROUPS for it in group.code if group not in ANY_RELEASE}
    assert set().union(*fingerprints.KNOWN.values()) == code
    replaced = {seam.target for group, seam in FUNCTIONS if group not in ANY_RELEASE}
    for known in fingerprints.KNOWN.values():
        assert replaced <= known.keys()


def test_all_of_the_installed_release_is_known() -> None:
    for group in seams.GROUPS:
        assert fingerprints.difference(group) is None
        for target in group.values:
            source.installed().look_up(target)


CODE = """
from base import Base

class Thing(Base):
    def method(self, a: int = 1) -> int:
        return a + 1

VALUES = {"NAME": lambda: 1}
"""
SAME = '''
"""A module."""
from base import Base


class Thing(Base):
    """A class."""

    def method(
        self,
        a: int = 1,
    ) -> int:
        """Return it."""
        return (a
            + 1)  # a comment

VALUES = {
    "NAME": (lambda: 1),
}
'''
OTHERS = ["a + 2", "a - 1", "b + 1", "1 + a"]


@pytest.fixture
def vllm_of(tmp_path: Any) -> Any:
    """Write a vLLM with one module."""

    def write(code: str) -> source.Sources:
        folder = tmp_path / str(hash(code)) / "vllm"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "thing.py").write_text(code)
        return source.Sources(folder)

    return write


def test_fields_are_those_of_a_class_and_its_bases(vllm_of: Any) -> None:
    def fingerprint(code: str) -> str:
        found: str = vllm_of(code).look_up("vllm.thing:Thing.*").fingerprint
        return found

    code = "class Base:\n    a: int = 1\nclass Thing(Base):\n    b: int = 2\n    def c(self): 3\n"
    assert fingerprint(code.replace("3", "4")) == fingerprint(code)
    for field in ("a: int = 1", "b: int = 2"):
        assert fingerprint(code.replace(field, f"{field}\n    new: int = 0")) != fingerprint(code)


@pytest.mark.parametrize("target", ["vllm.thing:Thing.method", "vllm.thing:Thing", "vllm.thing"])
def test_a_fingerprint_is_that_of_the_code(vllm_of: Any, target: str) -> None:
    fingerprint = vllm_of(CODE).look_up(target).fingerprint
    assert vllm_of(SAME).look_up(target).fingerprint == fingerprint
    for other in OTHERS:
        assert vllm_of(CODE.replace("a + 1", other)).look_up(target).fingerprint != fingerprint


def test_inherited_and_imported_names_are_found(tmp_path: Any) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "base.py").write_text("class Base:\n    def __init__(self):\n        self.a = 1\n")
    (folder / "thing.py").write_text("from vllm.base import Base as B\nclass Thing(B):\n    pass\n")
    sources = source.Sources(folder)
    assert sources.find("vllm.thing:Thing.a")
    assert sources.find("vllm.thing:B.__init__") == sources.find("vllm.thing:Thing.__init__")


# ----------------------------------------------------------------------------------------
# The page
# ----------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs/changes-in-vllm.md"


def test_the_page_is_written_from_the_table() -> None:
    """If this fails, `make tables` mends it."""
    text = PAGE.read_text()
    assert with_seams(text) == text
    assert LIST.findall(text) == [group.name for group in seams.GROUPS]
