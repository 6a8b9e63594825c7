"""What `register()` changes in vLLM, when it does, and that it changes nothing otherwise."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from logs import collected, with_level
from sparksched import environment, plugin
from sparksched.compat import patching, seams

pytestmark = pytest.mark.release


@pytest.fixture(autouse=True)
def environment_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name == "VLLM_SCHEDULER" or name.startswith("SPARKSCHED_"):
            monkeypatch.delenv(name)


@pytest.fixture
def vllm_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo, after the test, what `register()` does to vLLM."""
    import vllm.envs

    replace = patching.replace

    def replace_for_a_while(owner: object, name: str, make: Any) -> None:
        monkeypatch.setattr(owner, name, getattr(owner, name))
        replace(owner, name, make)

    monkeypatch.setattr(patching, "replace", replace_for_a_while)
    monkeypatch.setattr(vllm.envs, "environment_variables", dict(vllm.envs.environment_variables))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


class StubScheduler:
    """Stands for `sparksched.scheduler.SparkScheduler`, also to those who look at names."""

    __module__ = "sparksched.scheduler"
    __qualname__ = "SparkScheduler"


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the extension and for the scheduler: the plugin needs only their names."""
    # These would keep the stub for good if they were imported with it.
    for name in (
        "engine.core_proc",
        "api_server.client",
        "api_server.overload",
    ):
        importlib.import_module(f"sparksched.{name}")
    scheduler = ModuleType("sparksched.scheduler")
    scheduler.SparkScheduler = StubScheduler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sparksched._core", ModuleType("sparksched._core"))
    monkeypatch.setitem(sys.modules, "sparksched.scheduler", scheduler)


@pytest.fixture
def registered(vllm_restored: None, stubs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SCHEDULER", "sparksched")
    plugin.register()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    with collected("vllm.sparksched", text=with_level) as lines:
        yield lines


def run_python(code: str, **variables: str) -> str:
    """Run code in a fresh interpreter, as vLLM's spawned processes are."""
    package_root = str(Path(plugin.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **variables},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def scheduler_config(**fields: object) -> Any:
    from vllm.config.scheduler import SchedulerConfig

    return SchedulerConfig.default_factory(**fields)


# ----------------------------------------------------------------------------------------
# Environment variables
# ----------------------------------------------------------------------------------------


VALUES: list[tuple[Callable[[], object], str, dict[str | None, object]]] = [
    (
        environment.is_selected,
        "VLLM_SCHEDULER",
        {None: False, "": False, "vllm": False, "sparksched": True},
    ),
    (
        environment.is_strict,
        "SPARKSCHED_STRICT",
        {None: False, "": False, "0": False, "1": True},
    ),
    (
        environment.transport,
        "SPARKSCHED_TRANSPORT",
        {None: "auto", "": "auto", "auto": "auto", "shm": "shm", "zmq": "zmq", "libzmq": "libzmq"},
    ),
    (
        lambda: environment.ring_bytes() >> 20,
        "SPARKSCHED_RING_MIB",
        {None: 8, "": 8, "1": 1, "2": 2, "3": 4, "9": 16, "1000": 1024, "1024": 1024},
    ),
    (
        environment.stuck_after_s,
        "SPARKSCHED_STUCK_AFTER_S",
        {None: 10.0, "": 10.0, "0.1": 0.1, "2.5": 2.5, "3600": 3600.0, "1e1": 10.0},
    ),
    (
        environment.verification,
        "SPARKSCHED_VERIFY",
        {None: None, "": None, "0": None, "1": "1", "stop": "stop"},
    ),
]


@pytest.mark.parametrize(("read", "name", "meanings"), VALUES, ids=[it[1] for it in VALUES])
def test_values(
    read: Callable[[], object],
    name: str,
    meanings: dict[str | None, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, meaning in meanings.items():
        if value is not None:
            monkeypatch.setenv(name, value)
        assert read() == meaning


NO_SCHEDULER = "names no known scheduler; allowed are 'vllm' and 'sparksched'"
NO_VERIFICATION = "names no known kind of verification; allowed are '0', '1' and 'stop'"
NO_FRONT_END = "names no known front end; allowed are 'vllm' and 'sparksched'"
NO_TRANSPORT = "names no known transport; allowed are 'auto', 'shm', 'zmq' and 'libzmq'"
NO_SWITCH = "names no known value; allowed are '0' and '1'"
NO_MIB = "is not a whole number from 1 to 1024"
NO_BYTES = (
    ": behind the file, which has no comma in its name, only ',bytes=N' is allowed, with N from "
    f"{1 << 16} to {1 << 40}"
)
NO_SECONDS = "is not a number of seconds from 0.1 to 3600"
NO_WAIT = "is not a number of seconds from 0.1 to 86400"
NO_WEIGHTS = "is not a list of NAME=WEIGHT with weights from 0.01 to 1000"
NO_ORDER = "names no known order; allowed are 'fair', 'deadline' and 'aging'"


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("VLLM_SCHEDULER", "Sparksched", NO_SCHEDULER),
        ("VLLM_SCHEDULER", " ", NO_SCHEDULER),
        ("SPARKSCHED_STRICT", "yes", NO_SWITCH),
        ("SPARKSCHED_FRONT_END", "rust", NO_FRONT_END),
        ("SPARKSCHED_VERIFY", "vllm", NO_VERIFICATION),
        ("SPARKSCHED_TRANSPORT", "tcp", NO_TRANSPORT),
        ("SPARKSCHED_RING_MIB", "0", NO_MIB),
        ("SPARKSCHED_RING_MIB", "1025", NO_MIB),
        ("SPARKSCHED_RING_MIB", "8M", NO_MIB),
        ("SPARKSCHED_STUCK_AFTER_S", "3601", NO_SECONDS),
        ("SPARKSCHED_STUCK_AFTER_S", "nan", NO_SECONDS),
        ("SPARKSCHED_STUCK_AFTER_S", "10s", NO_SECONDS),
        ("SPARKSCHED_QUEUE_TIMEOUT_S", "0", NO_WAIT),
        ("SPARKSCHED_QUEUE_TIMEOUT_S", "30s", NO_WAIT),
        ("SPARKSCHED_ORDER", "fifo", NO_ORDER),
        ("SPARKSCHED_WEIGHTS", "gold=4,free=0", NO_WEIGHTS),
        ("SPARKSCHED_WEIGHTS", "gold=nan", NO_WEIGHTS),
        ("SPARKSCHED_WEIGHTS", "gold", NO_WEIGHTS),
        ("SPARKSCHED_AGING_S", "0", "is not a number of seconds from 0.001 to 86400"),
        (
            "SPARKSCHED_RECORD",
            "/no/such/place/trace",
            "is in no folder: there is no '/no/such/place'",
        ),
        ("SPARKSCHED_RECORD", "/tmp", "names no file that can be written"),
        ("SPARKSCHED_RECORD", "trace,token", NO_BYTES),
        ("SPARKSCHED_RECORD", "trace,bytes=65535", NO_BYTES),
        ("SPARKSCHED_RECORD", "trace,bytes=1e9", NO_BYTES),
        ("SPARKSCHED_RECORD", "trace,bytes=" + "9" * 5000, NO_BYTES),
    ],
)
def test_wrong_values_are_reported_by_register(
    stubs: None, monkeypatch: pytest.MonkeyPatch, name: str, value: str, complaint: str
) -> None:
    monkeypatch.setenv("VLLM_SCHEDULER", "sparksched")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name) as error:
        plugin.register()
    space = "" if complaint.startswith(":") else " "
    assert str(error.value) == f"{name}={value!r}{space}{complaint}"


# ----------------------------------------------------------------------------------------
# Off means off
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "vllm"])
def test_unselected_imports_nothing(value: str) -> None:
    run_python(
        "import sys\n"
        "from sparksched.plugin import register\n"
        "register()\n"
        "assert not {'vllm', 'torch', 'sparksched._core', 'sparksched.scheduler'} "
        "& sys.modules.keys()\n",
        VLLM_SCHEDULER=value,
    )


# ----------------------------------------------------------------------------------------
# Selected
# ----------------------------------------------------------------------------------------


def test_missing_extension_is_a_clear_error(
    vllm_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SCHEDULER", "sparksched")
    monkeypatch.setitem(sys.modules, "sparksched._core", None)
    with pytest.raises(RuntimeError, match=r"sparksched\._core cannot be loaded") as error:
        plugin.register()
    assert "unset VLLM_SCHEDULER" in str(error.value)


def test_vllm_knows_the_variable(registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs
    from vllm.platforms import current_platform

    for name in list(os.environ):
        if name.startswith("VLLM_") and name != "VLLM_SCHEDULER":
            monkeypatch.delenv(name)
    current_platform.validate_environ(hard_fail=True)
    assert vllm.envs.VLLM_SCHEDULER == "sparksched"


def test_compilation_cache_is_shared_with_stock(
    vllm_restored: None, stubs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.envs

    stock = vllm.envs.compile_factors()
    monkeypatch.setenv("VLLM_SCHEDULER", "sparksched")
    monkeypatch.setenv("SPARKSCHED_STRICT", "1")
    plugin.register()
    assert vllm.envs.compile_factors() == stock


def test_rays_actors_get_all_variables(
    vllm_restored: None, stubs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.ray import ray_env

    monkeypatch.setenv("VLLM_SCHEDULER", "sparksched")
    plugin.register()
    defined = {
        value
        for name, value in vars(environment).items()
        if name.isupper() and str(value).startswith(("SPARKSCHED_", "VLLM_"))
    }
    assert len(defined) == len(environment.VARIABLES)
    assert defined <= ray_env.get_env_vars_to_copy()


# ----------------------------------------------------------------------------------------
# The choice of the scheduler
# ----------------------------------------------------------------------------------------


def foreign_classes() -> list[object]:
    from vllm.v1.core.sched.scheduler import Scheduler

    class Foreign(Scheduler):
        pass

    return ["vllm.v1.core.sched.scheduler.Scheduler", Foreign]


@pytest.mark.parametrize("index", [0, 1], ids=["name", "class"])
def test_foreign_scheduler_class_wins_with_a_warning(
    registered: None, logged: list[str], monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """In strict mode it is an error."""
    from vllm.v1.core.sched.scheduler import Scheduler

    asked = foreign_classes()[index]
    config = scheduler_config(scheduler_cls=asked)
    assert config.get_scheduler_cls() is (Scheduler if isinstance(asked, str) else asked)
    assert logged == [
        f"WARNING VLLM_SCHEDULER=sparksched is ignored, because --scheduler-cls asks for {asked}"
    ]
    monkeypatch.setenv("SPARKSCHED_STRICT", "1")
    with pytest.raises(RuntimeError, match="VLLM_SCHEDULER=sparksched contradicts --scheduler-cls"):
        config.get_scheduler_cls()


@pytest.mark.parametrize("name", ["DiffusionScheduler", "DiffusionAsyncScheduler"])
def test_diffusion_scheduler_that_vllm_presets_is_refused_by_feature(
    registered: None, logged: list[str], name: str
) -> None:
    config = scheduler_config(scheduler_cls=f"vllm.v1.core.sched.diffusion_scheduler.{name}")
    assert config.get_scheduler_cls().__name__ == name
    assert len(logged) == 1
    assert "using vLLM's own scheduler: diffusion is not supported" in logged[0]


def test_unknown_version_runs_stock_without_importing_the_scheduler(
    vllm_restored: None, stubs: None, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.engine.output_processor import OutputProcessor

    process_outputs = OutputProcessor.process_outputs
    monkeypatch.setenv("VLLM_SCHEDULER", "sparksched")
    monkeypatch.setattr("vllm.version.__version__", "0.34.0")
    monkeypatch.setitem(sys.modules, "sparksched.scheduler", None)
    plugin.register()
    assert scheduler_config(async_scheduling=True).get_scheduler_cls() is AsyncScheduler
    assert len(logged) == 1
    assert "using vLLM's own scheduler: vLLM 0.34.0 is not supported" in logged[0]
    assert OutputProcessor.process_outputs is process_outputs


# ----------------------------------------------------------------------------------------
# Functions of vLLM's
# ----------------------------------------------------------------------------------------


def test_a_module_is_changed_when_it_comes_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def change(module: ModuleType) -> None:
        patching.replace(module.Late, "method", lambda original: lambda self: original(self) + 1)

    (tmp_path / "late_module.py").write_text("class Late:\n    def method(self): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for _ in range(2):
        patching.after_import("late_module", change)
    # To look for the module without importing it must not use the change up.
    assert importlib.util.find_spec("late_module") is not None
    module = importlib.import_module("late_module")
    assert hasattr(module.Late.method, patching.MARK)
    assert module.Late().method() == 2
    patching.after_import("late_module", change)  # now there is nothing to wait for
    assert module.Late().method() == 2
    monkeypatch.delitem(sys.modules, "late_module")


def test_register_replaces_functions_that_keep_their_signatures(
    vllm_restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SCHEDULER", "sparksched")
    targets = [
        seam.target
        for group in seams.GROUPS
        if group.is_on() and not group.waits_for_scheduler
        for seam in group.functions
        if seam.target.startswith("vllm.")
    ]
    assert targets

    def functions() -> list[Any]:
        split = (target.split(":") for target in targets)
        return [operator.attrgetter(path)(importlib.import_module(it)) for it, path in split]

    for target in targets:
        # Another test of this process may have built an engine.
        if (replaced := patching.original_of(target)) is not None:
            owner, name = patching.owner_of(target)
            monkeypatch.setattr(owner, name, replaced)
    before = functions()
    assert not any(hasattr(function, patching.MARK) for function in before)
    plugin.register()
    for target, original, function in zip(targets, before, functions(), strict=True):
        assert getattr(function, patching.MARK) is original, target
        if not isinstance(original, property):
            assert inspect.signature(function) == inspect.signature(original), target


@pytest.mark.command
def test_register_leaves_the_front_end_module_to_those_who_need_it() -> None:
    """In a fresh process, as vLLM's workers and its inspection of models are."""
    run_python(
        "import sys, threading\n"
        "from types import ModuleType\n"
        "sys.modules['sparksched._core'] = ModuleType('sparksched._core')\n"
        "import vllm.config\n"
        "before = set(sys.modules)\n"
        "from sparksched.plugin import register\n"
        "register()\n"
        "imported = {name for name in set(sys.modules) - before if name.startswith('vllm.')}\n"
        "assert not imported, imported\n"
        "assert threading.active_count() == 1\n"
        "from vllm.v1.engine.output_processor import OutputProcessor\n"
        "assert hasattr(OutputProcessor.process_outputs, '__sparksched__')\n",
        VLLM_SCHEDULER="sparksched",
    )


# ----------------------------------------------------------------------------------------
# The real thing
# ----------------------------------------------------------------------------------------


def test_entry_point_is_installed() -> None:
    (entry_point,) = importlib.metadata.entry_points(
        group="vllm.general_plugins", name="sparksched"
    )
    assert entry_point.load() is plugin.register
