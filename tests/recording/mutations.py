"""Traces that are damaged in many ways, by chance but reproducibly.

    python -m tests.recording.mutations SECONDS SEED

goes on for so long, and ends with what it has found: a file for which the reader does anything else
than read it or refuse it with a `TraceError`. A SEED of 0 is another one each time.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from sparksched.trace.events import TraceError
from sparksched.trace.file import FRAME_HEADER_BYTES, HEADER_BYTES, pack_frame
from sparksched.trace.read import History, Trace
from sparksched.trace.workload import step_time, workload_of

from .samples import every_event, write

Mutate = Callable[[random.Random, bytes], bytes]

MEMORY_BYTES = 2 << 30
SHARED_MEMORY = "/dev/shm"
_INTERESTING = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, None)


def read_all(path: Path) -> bool:
    """Read a file as the command does; return whether it was read, False if it was refused."""
    try:
        trace = Trace(path)
        History(trace.settings, trace.events())
        step_time(workload_of(trace.events()))
    except TraceError as error:
        if str(path) not in str(error):
            raise AssertionError("the file is not named") from error
        return False
    return True


def flip_bytes(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def splice(rng: random.Random, content: bytes) -> bytes:
    begin, end, at = (rng.randrange(len(content)) for _ in range(3))
    return content[:at] + content[min(begin, end) : max(begin, end)] + content[at:]


def change_length(rng: random.Random, content: bytes) -> bytes:
    """Write another length into a frame's header."""
    position = rng.choice([position for position, _ in frames(content)])
    value = rng.choice([0, 1, 2**20, 2**31, 2**32 - 1, rng.randrange(2**32)])
    at = position + rng.choice([0, 4])
    return content[:at] + struct.pack("<I", value) + content[at + 4 :]


def shuffle_frames(rng: random.Random, content: bytes) -> bytes:
    """Change the order of frames, or have some twice."""
    payloads = [payload for _, payload in frames(content)]
    chosen = rng.choices(payloads, k=len(payloads))
    return content[:HEADER_BYTES] + b"".join(map(pack_frame, chosen))


def change_payload(rng: random.Random, content: bytes) -> bytes:
    """Damage what is in a frame, and make the frame whole again."""
    payloads = [payload for _, payload in frames(content)]
    chosen = rng.randrange(len(payloads))
    payloads[chosen] = rng.choice([flip_bytes, cut, splice])(rng, payloads[chosen])
    return content[:HEADER_BYTES] + b"".join(map(pack_frame, payloads))


def change_value(rng: random.Random, content: bytes) -> bytes:
    """Put another value in the place of one in an event."""
    payloads = [msgspec.msgpack.decode(payload) for _, payload in frames(content)]
    _change_within(rng, rng.choice(payloads))
    encoded = [pack_frame(msgspec.msgpack.encode(payload)) for payload in payloads]
    return content[:HEADER_BYTES] + b"".join(encoded)


def _change_within(rng: random.Random, values: object) -> None:
    """Walk into nested values, and replace, repeat or remove one."""
    items = list(range(len(values))) if isinstance(values, list) else list(values)  # type: ignore[arg-type,call-overload]
    if not items:
        return
    key = rng.choice(items)
    value = values[key]  # type: ignore[index]
    if isinstance(value, list | dict) and value and rng.random() < 0.9:
        _change_within(rng, value)
    elif isinstance(values, list) and rng.random() < 0.2:
        values.insert(key, value)
    elif rng.random() < 0.1:
        del values[key]  # type: ignore[attr-defined]
    elif isinstance(value, int) and rng.random() < 0.5:
        values[key] = max(-(2**63), min(value + rng.choice([-1, 1, 1000]), 2**64 - 1))  # type: ignore[index]
    else:
        values[key] = rng.choice([*_INTERESTING, "", "x", b"", [], [[]], {}])  # type: ignore[index]


def frames(content: bytes) -> list[tuple[int, bytes]]:
    """Return position and payload of each frame of a whole file."""
    found = []
    position = HEADER_BYTES
    while position < len(content):
        num_packed, _ = struct.unpack_from("<II", content, position)
        begin = position + FRAME_HEADER_BYTES
        found.append((position, zlib.decompress(content[begin : begin + num_packed])))
        position = begin + num_packed
    return found


MUTATIONS: tuple[Mutate, ...] = (
    flip_bytes,
    cut,
    splice,
    change_length,
    shuffle_frames,
    change_payload,
    change_value,
)


def seeds_from(first: int) -> Iterator[int]:
    """Return seeds from a first one on, or, for 0, from one that no other run is likely to have."""
    return itertools.count(first or random.SystemRandom().randrange(2**32, 2**64))


def run(folder: Path, seeds: Iterable[int], seconds: float = math.inf) -> tuple[int, int]:
    """Read damaged files; return how many, and how many of them were readable nevertheless."""
    originals = [
        write(folder / f"original-{with_tokens}", every_event(with_tokens)).read_bytes()
        for with_tokens in (False, True)
    ]
    path = folder / "damaged"
    end = time.monotonic() + seconds
    num_files = num_read = 0
    for seed in seeds:
        if time.monotonic() >= end:
            break
        rng = random.Random(f"trace/{seed}")
        content = rng.choice(originals)
        for _ in range(rng.choice([1, 1, 1, 2])):
            content = _mutated(rng, content)
        path.write_bytes(content)
        try:
            num_read += read_all(path)
        except BaseException:
            print(f"trace: found something with seed {seed}; the file is {path}", file=sys.stderr)
            raise
        num_files += 1
    return num_files, num_read


def _mutated(rng: random.Random, content: bytes) -> bytes:
    mutate = rng.choice(MUTATIONS)
    try:
        return mutate(rng, content)
    except (ValueError, IndexError, struct.error, zlib.error, msgspec.MsgspecError, OverflowError):
        return content  # damaged so much before that there is no frame left to damage


def main() -> None:
    """Run for the seconds that are given, from the seed that is given."""
    # Memory that is taken because a file has announced it counts as found.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Each input is a file of its own: on a disk that would be most of what this does.
    memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="sparksched-mutations-", dir=memory))
    seconds, first = float(sys.argv[1]), int(sys.argv[2])
    num_files, num_read = run(folder, seeds_from(first), seconds)
    shutil.rmtree(folder)
    print(f"{'trace':12s} {num_files:9d} inputs, {num_read:5d} of them readable, nothing found")


if __name__ == "__main__":
    main()
