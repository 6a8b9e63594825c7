"""What the system may lack or forbid: who goes on how, and that nothing is left over.

Full or missing file systems don't matter: shared memory is memfds, and sockets have abstract names.
"""

import copy
import ctypes
import errno
import multiprocessing.popen_fork
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scale import FULL
from sparksched import _core, plugin
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from testkit.executor import write_model_directory

from .clients import child, expected_tokens, front_end, prompt_of, run_async
from .conftest import MAX_MODEL_LEN, make_config
from .engines import (
    STOP_TIMEOUT_S,
    PacedExecutor,
    environment_with,
    possessions,
    running_engine,
    start_process,
    thread_names,
    wait_until,
)
from .test_staying_on_zmq import check_that_it_works

pytestmark = pytest.mark.timeout(180)

RING_BYTES = 8 << 20
SEGMENT_BYTES = 4096 + 2 * RING_BYTES
NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
NO_MEMORY = f"shared memory of {SEGMENT_BYTES} bytes can't be made: "


@contextmanager
def limit(which: int, value: int) -> Iterator[None]:
    """Lower a limit of this process for a while."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def num_descriptors() -> int:
    """Return the limit that leaves no room for another descriptor."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    return lowest_free


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def engine_rings(name: str = "") -> Any:
    return _core.EngineRings(
        name or f"exhaustion-{uuid.uuid4()}",
        num_clients=2,
        ring_bytes=RING_BYTES,
        max_idle_backlog_bytes=1 << 20,
        max_backlog_bytes=1 << 20,
        stuck_after_s=10.0,
    )


def client_rings(name: str, index: int = 0) -> Any:
    return _core.ClientRings(name, client_index=index, stuck_after_s=10.0)


def run_in_a_process(function: Callable[..., None], log_path: Path, *args: Any) -> None:
    """Run a function in a process of its own: limits are the whole process's."""
    process = start_process(function, log_path, environment_with(), *args)
    process.join(STOP_TIMEOUT_S)
    exitcode = process.exitcode
    process.kill()
    process.join()
    assert exitcode == 0, log_path.read_text()


# ----------------------------------------------------------------------------------------
# The rings alone: each call that can fail, one after the other
# ----------------------------------------------------------------------------------------


def until_there_are_enough(make: Callable[[], Any], texts: set[str]) -> None:
    """Allow one descriptor more each time until it works.

    Each failure says why, and leaves nothing; `texts` are all there are.
    """
    before = possessions(os.getpid())
    reasons: set[str] = set()
    for num_more in range(20):
        with limit(resource.RLIMIT_NOFILE, num_descriptors() + num_more):
            made = made_or_reason(make)
        if not isinstance(made, str):
            made.close()
            assert reasons == texts
            return
        reason, _, error = made.rpartition(": ")
        assert error == "Too many open files (os error 24)", made
        reasons.add(reason)
        wait_until(lambda: possessions(os.getpid()).is_within(before), what="for what is left")
    raise AssertionError(reasons)


def made_or_reason(make: Callable[[], Any]) -> Any:
    while True:
        try:
            return make()
        except ConnectionError as error:
            # Until the engine has seen that the attempt before failed.
            if "is here already" not in str(error):
                return str(error)


def check_engine_without_descriptors() -> None:
    until_there_are_enough(
        engine_rings,
        {
            f"shared memory of {SEGMENT_BYTES} bytes can't be made",
            "a Unix socket can't be made",
            "no thread to watch",
        },
    )


def check_client_without_descriptors(name: str) -> None:
    until_there_are_enough(
        lambda: client_rings(name),
        {
            "a Unix socket can't be made",
            "the peer's descriptors can't be received",
            "no thread to watch",
        },
    )


def test_an_engine_without_descriptors(tmp_path: Path) -> None:
    run_in_a_process(check_engine_without_descriptors, tmp_path / "log")


def test_a_client_without_descriptors(tmp_path: Path) -> None:
    """Its engine isn't harmed: the client comes once it has what it needs, and another one does."""
    engine = engine_rings()
    run_in_a_process(check_client_without_descriptors, tmp_path / "log", engine.name)
    client_rings(engine.name, index=1).close()
    engine.close()


def serve_without(what: str, name: str, connection: Any) -> None:
    """Be an engine that lacks something when a client comes, and then has it."""
    engine = engine_rings(name)
    which, value = {
        # For the client's socket and what tells of its process, and no more.
        "descriptors": (resource.RLIMIT_NOFILE, num_descriptors() + 2),
        "memory": (resource.RLIMIT_FSIZE, 1 << 20),
    }[what]
    with limit(which, value):
        connection.send("limited")
        connection.recv()
    connection.send([type(it).__name__ + getattr(it, "reason", "") for it in engine.receive()])
    connection.recv()
    # The client may know of its memory before the engine uses it.
    while not engine.is_attached(1):
        engine.receive()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("descriptors", f"the engine refuses: {NO_MEMORY}Too many open files (os error 24)"),
        ("memory", f"the engine refuses: {NO_MEMORY}File too large (os error 27)"),
    ],
)
def test_an_engine_that_has_no_more_when_a_client_comes(
    what: str, reason: str, tmp_path: Path
) -> None:
    """The client is told, and stays on ZMQ; the engine goes on and takes the next."""
    name = f"exhaustion-{uuid.uuid4()}"
    with child(serve_without, tmp_path / "log", what, name) as engine:
        assert engine.receive() == "limited"
        with pytest.raises(ConnectionError) as error:
            client_rings(name)
        assert str(error.value) == reason
        engine.connection.send("go on")
        assert engine.receive() == [f"RingRefused{reason}"]
        client_rings(name, index=1).close()
        engine.connection.send("end")
        engine.process.join(STOP_TIMEOUT_S)
        assert engine.process.exitcode == 0, engine.log


def check_without_threads() -> None:
    if os.geteuid() == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)  # the limit doesn't hold for root
    before = possessions(os.getpid())
    with limit(resource.RLIMIT_NPROC, 0), pytest.raises(ConnectionError) as error:
        engine_rings()
    assert str(error.value) == (
        "no thread to watch: Resource temporarily unavailable (os error 11)"
    )
    assert possessions(os.getpid()).is_within(before)


def test_no_threads(tmp_path: Path) -> None:
    run_in_a_process(check_without_threads, tmp_path / "log")


def check_without_file_systems() -> None:
    engine = engine_rings()
    client_rings(engine.name).close()
    for full in ("/dev/shm", "/tmp"):
        with pytest.raises(OSError, match=r"No space left|Read-only"):
            Path(full, "file").write_bytes(bytes(2 * resource.getpagesize()))


def run_without_file_systems() -> None:
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    for mount in (
        "mount --make-rprivate /",
        "mount -t tmpfs -o size=4k tmpfs /dev/shm",
        "mount -t tmpfs -o ro tmpfs /tmp",
    ):
        subprocess.run(mount.split(), check=True)
    check_without_file_systems()


def can_mount() -> bool:
    unshare = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    try:
        return subprocess.run(unshare, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_full_and_read_only_file_systems(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("this user can't mount file systems of its own")
    run_in_a_process(run_without_file_systems, tmp_path / "log")


# ----------------------------------------------------------------------------------------
# Engines
# ----------------------------------------------------------------------------------------


def lack_descriptors() -> None:
    _lack(resource.RLIMIT_NOFILE, num_descriptors)


def lack_address_space() -> None:
    _lack(resource.RLIMIT_AS, lambda: address_space_bytes() + RING_BYTES)


def lack_file_size() -> None:
    _lack(resource.RLIMIT_FSIZE, lambda: 1 << 20)


def _lack(which: int, value: Callable[[], int]) -> None:
    """Let there be none left in the moment when an engine makes its rings."""
    make = _core.EngineRings

    def make_limited(*args: Any, **kwargs: Any) -> Any:
        # The limit is the whole process's, and vLLM's other thread makes sockets meanwhile.
        wait_until(waits_for_outputs, what="for the sockets of outputs")
        with limit(which, value()):
            return make(*args, **kwargs)

    _core.EngineRings = make_limited  # type: ignore[assignment, misc]


def waits_for_outputs() -> bool:
    """Whether the thread that sends outputs has come so far that it waits for the first."""
    stacks = (traceback.extract_stack(it) for it in sys._current_frames().values())
    names = ([frame.name for frame in stack] for stack in stacks)
    return any("process_output_sockets" in it and it[-1] == "wait" for it in names)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lack_descriptors, "Too many open files (os error 24)"),
        (lack_address_space, "Cannot allocate memory (os error 12)"),
        (lack_file_size, "File too large (os error 27)"),
    ],
)
def test_an_engine_that_lacks_something_at_its_start(
    prepare: Callable[[], None], reason: str, config: VllmConfig, logged: list[str]
) -> None:
    """It serves over ZMQ, and its clients' logs say why."""
    with front_end(), running_engine(config, prepare=prepare) as engine:
        run_async(check_that_it_works(config, engine))
        assert possessions(engine.pid).num_mappings == 1, "the page on which it counts, and no more"
        assert "sparksched-watch" not in thread_names(engine.pid)
    assert logged == [f"INFO sparksched: messages to engine 0 go over ZMQ: {NO_MEMORY}{reason}"]


# ----------------------------------------------------------------------------------------
# Where people run it
# ----------------------------------------------------------------------------------------


def forbid(number: int, error: int) -> None:
    """Let a system call fail in this process and its children, as a container's seccomp would."""
    # Load the call's number; return the error if it is this one, else allow it.
    instructions = (
        struct.pack("HBBI", 0x20, 0, 0, 0)
        + struct.pack("HBBI", 0x15, 0, 1, number)
        + struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error)
        + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    )
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, mode_filter, program, 0, 0) == 0, ctypes.get_errno()


MEMFD_CREATE, PIDFD_OPEN, PIDFD_GETFD = 319, 434, 438
"""Of x86-64; the last two have these numbers everywhere."""


def as_another_user() -> None:
    # The interpreter's library may be root's alone: this is imported when a process is forked.
    assert multiprocessing.popen_fork.Popen
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def mount(*commands: str) -> None:
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    for command in ("--make-rprivate /", *commands):
        subprocess.run(["mount", *command.split()], check=True)


def read_only() -> None:
    mount("--bind /tmp /tmp", "-o remount,bind,ro /")
    with pytest.raises(OSError, match="Read-only"):
        Path("/var/tmp/file").touch()


def hidden_processes() -> None:
    mount("-t proc -o hidepid=2 proc /proc")
    as_another_user()


def small_shared_memory() -> None:
    mount("-t tmpfs -o size=64k tmpfs /dev/shm")


def unshared(flags: int) -> None:
    assert ctypes.CDLL(None).unshare(flags) == 0


def as_first_process() -> None:
    """Go on as the first process of a namespace, as in a container."""
    unshared(CLONE_NEWPID)
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    assert os.getpid() == 1


IN_SHARED_MEMORY = "messages to engine 0 go through shared memory"
OVER_ZMQ = "messages to engine 0 go over ZMQ: shared memory of"

SURROUNDINGS: dict[str, tuple[Callable[[], object], str]] = {
    "another-user": (as_another_user, IN_SHARED_MEMORY),
    "read-only": (read_only, IN_SHARED_MEMORY),
    "hidepid": (hidden_processes, IN_SHARED_MEMORY),
    "small-dev-shm": (small_shared_memory, IN_SHARED_MEMORY),
    "ipc-namespace": (lambda: unshared(CLONE_NEWIPC), IN_SHARED_MEMORY),
    "network-namespace": (lambda: unshared(CLONE_NEWNET), IN_SHARED_MEMORY),
    "pid-namespace": (as_first_process, IN_SHARED_MEMORY),
    "256-descriptors": (
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        IN_SHARED_MEMORY,
    ),
    "no-locked-memory": (
        lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)),
        IN_SHARED_MEMORY,
    ),
    "no-memfd-EPERM": (lambda: forbid(MEMFD_CREATE, errno.EPERM), OVER_ZMQ),
    "no-memfd-ENOSYS": (lambda: forbid(MEMFD_CREATE, errno.ENOSYS), OVER_ZMQ),
    "no-pidfd-EPERM": (lambda: forbid(PIDFD_OPEN, errno.EPERM), IN_SHARED_MEMORY),
    "no-pidfd-ENOSYS": (lambda: forbid(PIDFD_OPEN, errno.ENOSYS), IN_SHARED_MEMORY),
    "no-pidfd-getfd": (lambda: forbid(PIDFD_GETFD, errno.EPERM), IN_SHARED_MEMORY),
}

WITHOUT_METRICS = [
    "there will be no metrics of this engine",
    "this engine can't be found by its process",
]
MOST_TELLING = ("another-user", "pid-namespace", "no-memfd-EPERM", "no-pidfd-EPERM")


def serve(config: VllmConfig) -> None:
    engine = LLMEngine(copy.deepcopy(config), PacedExecutor, log_stats=True, multiprocess_mode=True)
    params = SamplingParams(max_tokens=10, detokenize=False)
    engine.add_request("request", {"prompt_token_ids": prompt_of(3)}, params)
    while not (outputs := engine.step()) or not outputs[0].finished:
        pass
    assert list(outputs[0].outputs[0].token_ids) == expected_tokens(prompt_of(3), 10)


def serve_in(name: str, config: VllmConfig) -> None:
    """Serve in such surroundings; the engine is forked, and so has them as well."""
    enter, _ = SURROUNDINGS[name]
    enter()
    plugin.register()
    serve(config)


@pytest.fixture(scope="module")
def public_config() -> Iterator[VllmConfig]:
    """Return the configuration of a model that everybody can read, and that no mount hides."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        model = write_model_directory(Path(directory), max_position_embeddings=MAX_MODEL_LEN)
        yield make_config(model)


@pytest.mark.parametrize("name", SURROUNDINGS if FULL else MOST_TELLING)
def test_where_people_run_it(name: str, public_config: VllmConfig, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("only root can set this up")
    log_path = tmp_path / "log"
    variables = environment_with(VLLM_WORKER_MULTIPROC_METHOD="fork")
    process = start_process(serve_in, log_path, variables, name, public_config)
    process.join(120)
    exitcode = process.exitcode
    process.kill()
    process.join()
    log = log_path.read_text()
    assert exitcode == 0, log
    assert SURROUNDINGS[name][1] in log
    assert "Traceback" not in log
    warnings = re.findall(r"WARNING .*sparksched: ([^:]*)", log)
    assert warnings == (WITHOUT_METRICS if SURROUNDINGS[name][1] == OVER_ZMQ else [])
