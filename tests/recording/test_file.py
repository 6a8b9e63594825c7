"""What the reader makes of files that are cut off, damaged, foreign, or from the future."""

import itertools
import random
import stat
import struct
from pathlib import Path

import msgspec
import pytest
from sparksched.trace.events import Arrive, Event, Step, TraceError
from sparksched.trace.file import (
    FRAME_HEADER_BYTES,
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    pack_frame,
)
from sparksched.trace.read import Trace
from sparksched.trace.tokens import Chain, KeyMaker, segment_sizes, tokens_of

from . import mutations
from .samples import arrival, every_event, write

NUM_MUTATIONS = 3000


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return write(tmp_path / "trace", every_event(False))


def read(path: Path) -> list[Event]:
    return list(Trace(path).events())


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(f"{path} ")


@pytest.mark.parametrize("with_tokens", [False, True])
def test_what_is_written_is_read(with_tokens: bool, tmp_path: Path) -> None:
    events = every_event(with_tokens)
    trace = Trace(write(tmp_path / "trace", events))
    assert trace.settings == events[0].settings  # type: ignore[union-attr]
    assert list(trace.events()) == events[1:]
    assert trace.missing is None


def test_nobody_else_may_read_it(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_there_is_left_alone(path: Path) -> None:
    content = path.read_bytes()
    with pytest.raises(FileExistsError):
        write(path, every_event(False))
    assert path.read_bytes() == content


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        write(tmp_path / "link", every_event(False))
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4 something else", MAGIC[:-1]])
def test_a_foreign_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    assert refusal(path) == "is not a trace: it doesn't begin with sparksched's mark"


def test_the_version_before_is_read(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(MAGIC + struct.pack("<H", 1) + content[HEADER_BYTES:])
    assert read(path) == every_event(False)[1:]


def test_a_newer_version(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(MAGIC + struct.pack("<H", 3) + content[HEADER_BYTES:])
    expected = "has version 3 of the format, and this sparksched reads versions 1 to 2"
    assert refusal(path) == expected


def test_cut_off_anywhere(path: Path) -> None:
    """What is left is read up to the last whole frame, and it is said where that ends."""
    content = path.read_bytes()
    ends = [position for position, _ in mutations.frames(content)] + [len(content)]
    whole = read(path)
    for length in range(ends[1], len(content)):
        path.write_bytes(content[:length])
        trace = Trace(path)
        events = list(trace.events())
        assert events == whole[: len(events)]
        last = max(end for end in ends if end <= length)
        expected = (
            f"{path} has no end: what came behind its last frame is missing"
            if length == last
            else f"{path} is cut off in the frame at byte {last}: the rest is missing"
        )
        assert trace.missing == expected
    for length in range(len(MAGIC), ends[1]):
        path.write_bytes(content[:length])
        is_whole = length == HEADER_BYTES
        assert refusal(path).startswith(
            "is damaged: it doesn't begin" if is_whole else "is cut off"
        )


def test_each_damaged_byte_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    frames = [position for position, _ in mutations.frames(content)]
    for position in range(HEADER_BYTES, len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x55
        path.write_bytes(damaged)
        frame = max(it for it in frames if it <= position)
        trace_or_refusal = _refusal_or_missing(path)
        assert f"frame at byte {frame}" in trace_or_refusal


def _refusal_or_missing(path: Path) -> str:
    try:
        trace = Trace(path)
        list(trace.events())
    except TraceError as error:
        return str(error)
    assert trace.missing is not None
    return trace.missing


def test_a_frame_that_unpacks_to_more_than_it_says(path: Path) -> None:
    header = path.read_bytes()[:HEADER_BYTES]
    bomb = bytearray(pack_frame(bytes(MAX_FRAME_BYTES)))
    lying = struct.pack("<II", len(bomb) - FRAME_HEADER_BYTES, 100)
    checksum = struct.pack("<I", zlib_checksum(lying, bytes(bomb[FRAME_HEADER_BYTES:])))
    path.write_bytes(header + lying + checksum + bytes(bomb[FRAME_HEADER_BYTES:]))
    assert refusal(path).endswith("the frame at byte 10 has another length inside")


def zlib_checksum(lengths: bytes, packed: bytes) -> int:
    import zlib

    return zlib.crc32(lengths + packed)


NONSENSE: dict[str, Event | None] = {
    "names a request that has not arrived": Step(
        2, 1.0, 1.0, False, [5], None, None, [], [], [], [], [], 0
    ),
    "has steps that don't follow each other": Step(
        7, 1.0, 1.0, False, [0], None, None, [], [], [], [], [], 0
    ),
    "schedules a request twice": Step(
        2, 1.0, 1.0, False, [0, 0], None, None, [], [], [], [], [], 0
    ),
    "has other rows than its step": Step(
        2, 1.0, 1.0, False, [0], [1, 1], None, [], [], [], [], [], 0
    ),
    "has a prompt of impossible length": arrival(2, 65, False),
    "has a prompt with other keys": arrival(2, 9, False, keys=b"12345678"),
    "has an arrival at no time": arrival(2, 9, False, arrival_time=float("nan")),
    "happens at no time": arrival(2, 9, False, time=float("inf")),
    "begins once more": None,
}


@pytest.mark.parametrize("problem", NONSENSE)
def test_events_that_make_no_sense(problem: str, tmp_path: Path) -> None:
    events = every_event(False)
    events.insert(-1, NONSENSE[problem] or events[0])
    assert refusal(write(tmp_path / "trace", events, 1)).endswith(problem)


def test_nothing_follows_the_end(tmp_path: Path) -> None:
    events = every_event(False)
    path = write(tmp_path / "trace", [*events, events[-1]])
    assert refusal(path).endswith("goes on behind the end")


def test_a_file_of_another_kind_of_events(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", every_event(False)[:1])
    with path.open("ab") as file:
        file.write(pack_frame(msgspec.msgpack.encode([[99, "what will be"]])))
    assert "holds no events" in refusal(path)


def test_damage_by_chance(tmp_path: Path) -> None:
    """`make fuzz TARGET=trace` goes on for longer."""
    num_files, num_read = mutations.run(tmp_path, range(NUM_MUTATIONS))
    assert num_files == NUM_MUTATIONS
    # Some of the damage is to what may have any value: the checks behind the checksums are reached.
    assert 0.02 < num_read / num_files < 0.5


def test_damage_is_another_in_each_run_or_as_one_wishes() -> None:
    """What goes on for hours in portions is to be as much as in one run."""
    one, other = (next(mutations.seeds_from(0)) for _ in range(2))
    assert one != other
    assert list(itertools.islice(mutations.seeds_from(7), 3)) == [7, 8, 9]


# ----------------------------------------------------------------------------------------
# What stands for tokens
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_lookahead_tokens", [0, 1, 3])
def test_keys_are_equal_as_far_as_tokens_are(num_lookahead_tokens: int) -> None:
    rng = random.Random(num_lookahead_tokens)
    sizes = segment_sizes(8, num_lookahead_tokens)
    maker = KeyMaker()
    root = maker.root("adapter", "salt")
    tokens = [rng.randrange(1000) for _ in range(64)]
    whole = Chain(maker, root, sizes).take(tokens)
    piecemeal = Chain(maker, root, sizes)
    assert b"".join(piecemeal.take([token]) for token in tokens) == whole
    for position in range(64):
        other = list(tokens)
        other[position] += 1
        keys = Chain(maker, root, sizes).take(other)
        equal = len(_common(keys, whole)) // 8
        ends = [sum((sizes * 64)[: number + 1]) for number in range(len(whole) // 8)]
        assert equal == sum(end <= position for end in ends)
        # Nor is anything equal behind the first difference, though the tokens are.
        rest = [(keys[at : at + 8], whole[at : at + 8]) for at in range(8 * equal, len(keys), 8)]
        assert all(one != other for one, other in rest)


def _common(first: bytes, second: bytes) -> bytes:
    pairs = zip(first, second, strict=True)
    length = next((at for at, (one, other) in enumerate(pairs) if one != other), len(first))
    return first[: length // 8 * 8]


def test_keys_of_two_files_have_nothing_in_common() -> None:
    tokens = list(range(16))
    keys = [
        Chain(maker, maker.root("", ""), (8,)).take(tokens) for maker in (KeyMaker(), KeyMaker())
    ]
    assert keys[0][:8] != keys[1][:8]


def test_another_adapter_or_salt_is_another_prefix() -> None:
    maker = KeyMaker()
    roots = {maker.root(*parts) for parts in (("", ""), ("a", ""), ("", "a"), ("a", "a"))}
    assert len(roots) == 4


def test_stand_ins_follow_from_keys() -> None:
    assert tokens_of(b"12345678", 16) == tokens_of(b"12345678", 16)
    assert tokens_of(b"12345678", 16) != tokens_of(b"12345679", 16)
    assert all(0 <= token < 2**31 for token in tokens_of(b"12345678", 4096))


def test_the_largest_prompt_of_a_frame_is_read(tmp_path: Path) -> None:
    events = every_event(True)
    begin = events[0]
    longest = msgspec.structs.replace(begin.settings, max_model_len=1 << 21)  # type: ignore[union-attr]
    events[0] = msgspec.structs.replace(begin, settings=longest)
    events[2] = arrival(1, 1 << 20, True)
    found = read(write(tmp_path / "trace", events))
    assert isinstance(found[1], Arrive)
    assert found[1].num_prompt_tokens == 1 << 20
