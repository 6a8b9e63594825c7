"""What the reader makes of files that are cut off, damaged, foreign, or from the future."""

import gzip
import os
import random
import stat
from pathlib import Path

import pytest
from sparksched.environment import file_of_engine
from sparksched.record.events import (
    KEY_BYTES,
    MAX_LINE_BYTES,
    VERSION,
    Event,
    Pause,
    Step,
    TraceError,
    Update,
)
from sparksched.record.keys import Chain, segment_sizes
from sparksched.record.load import Load, Trace
from sparksched.record.step_time import step_time
from sparksched.record.tokens import Tokens
from sparksched.record.write import Writer

from .samples import ENDED, arrival, every_event, settings, write

NUM_DAMAGED = 500


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return write(tmp_path / "trace", every_event())


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        Load(str(path))
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(f"{path} ")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    events = every_event()
    trace = Trace(write(tmp_path / "trace", events))
    assert trace.settings == events[0].settings  # type: ignore[union-attr]
    assert list(trace.events()) == events[1:]
    assert trace.missing is None


def test_a_file_is_new_and_its_owner_s(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    Writer(path, 1 << 16).close(ENDED)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for taken in (path, tmp_path / "link"):
        with pytest.raises(FileExistsError):
            Writer(taken, 1 << 16)
    assert path.read_bytes() == content
    assert not (tmp_path / "target").exists()


def test_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "newer"
    path.write_bytes(gzip.compress(b'{"event": "begin", "version": %d}\n' % (VERSION + 1)))
    assert refusal(path) == "has version 4 of the format, and this sparksched reads version 3"


def test_cut_off_anywhere(path: Path) -> None:
    """What is left is read up to the last whole line, and it is said where that ends."""
    content, events = path.read_bytes(), every_event()[1:]
    num_found = []
    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            trace = Trace(path)
            found = list(trace.events())
            missing = trace.missing
        except TraceError as refused:
            found, missing = [], str(refused)
        assert found == events[: len(found)]
        cut_off = [f"{path} is cut off behind line {number}" for number in (0, len(found) + 1)]
        assert missing in (f"{path} has no end", *cut_off)
        num_found.append(len(found))
    assert num_found == sorted(num_found)
    # Some within a piece, too.
    assert len(set(num_found)) > len(events) / 4 + 1


NONSENSE: dict[str, list[Event]] = {
    "KeyError('nobody')": [Step(2, 1.0, ids=["nobody"])],
    "KeyError(7)": [Update(7, 1.0)],
    "zip()": [Step(2, 1.0, ids=["request-0"]), Update(2, 1.0, 1.0, [1, 1])],
    "a prompt of impossible length": [arrival(2, 65)],
    "another beginning": every_event()[:1],
    "line 15: it is behind the end": every_event()[-1:],
    "`$.sequence`": [Step(-1, 1.0)],
    "`$.time`": [Step(2, float("inf"))],
    "`$.state`": [Pause(1.0, 3)],
}


@pytest.mark.parametrize("problem", NONSENSE)
def test_events_that_make_no_sense(problem: str, tmp_path: Path) -> None:
    events = every_event()
    events[-1:-1] = NONSENSE[problem]
    said = refusal(write(tmp_path / "trace", events))
    assert said.startswith("is damaged: line 1")
    assert problem in said


@pytest.mark.parametrize("filling", [b"\0", b"\n", b'{"event":"end"}\n'])
def test_what_unpacks_to_much_more(filling: bytes, path: Path) -> None:
    """No more than a line is held in memory."""
    with path.open("ab") as file:
        file.write(gzip.compress(filling * (4 * MAX_LINE_BYTES // len(filling)), 1))
    assert refusal(path).startswith("is damaged: line ")


def test_damage_by_chance(tmp_path: Path) -> None:
    """Whatever stands in a file, it is read or refused, by name."""
    original = write(tmp_path / "original", every_event()).read_bytes()
    path = tmp_path / "damaged"
    refusals = []
    for seed in range(NUM_DAMAGED):
        rng = random.Random(seed)
        content = bytearray(original)
        is_packed = rng.random() < 0.2
        if not is_packed:
            # Behind the checksums.
            content = bytearray(gzip.decompress(content))
        at = rng.randrange(len(content))
        content[at : at + rng.choice((1, 1, 5))] = rng.choice((b"", b"9", b"-", b"[", b'"', b"\n"))
        path.write_bytes(content if is_packed else gzip.compress(content, 1))
        try:
            step_time(Load(str(path)))
        except TraceError as refused:
            refusals.append(str(refused))
    assert 0.3 < len(refusals) / NUM_DAMAGED < 0.99
    assert all(str(path) in refusal for refusal in refusals)


@pytest.mark.parametrize(("index", "name"), [(0, "trace-{}"), (2, "trace-{}.2")])
def test_each_engine_has_a_file_of_its_own(index: int, name: str) -> None:
    assert file_of_engine("trace-%p", index) == Path(name.format(os.getpid()))


# ----------------------------------------------------------------------------------------
# What stands for tokens
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_lookahead_tokens", [0, 1, 3])
def test_keys_are_equal_as_far_as_tokens_are(num_lookahead_tokens: int) -> None:
    rng = random.Random(num_lookahead_tokens)
    sizes = segment_sizes(
        settings(hash_block_size=8, num_hash_lookahead_tokens=num_lookahead_tokens)
    )

    def keys_of(tokens: list[int], piece: int = 64) -> bytes:
        keys, chain = b"", Chain(b"secret", "adapter", sizes)
        for begin in range(0, len(tokens), piece):
            chain.tail += tokens[begin : begin + piece]
            keys += chain.close_segments()
        return keys

    tokens = [rng.randrange(1000) for _ in range(64)]
    whole = keys_of(tokens)
    assert keys_of(tokens, piece=1) == whole
    ends = [sum((sizes * 64)[: number + 1]) for number in range(len(whole) // 8)]
    for position in range(64):
        other = list(tokens)
        other[position] += 1
        keys = keys_of(other)
        # Nothing is equal behind the first difference, though the tokens are.
        are_equal = [keys[at : at + 8] == whole[at : at + 8] for at in range(0, len(keys), 8)]
        assert are_equal == [end <= position for end in ends]


def test_an_output_has_the_keys_that_it_has_in_a_later_prompt() -> None:
    tokens = Tokens(lambda _: None, settings())
    prompt, output = [*range(6)], [*range(10, 17)]
    first, update, second = arrival(0, 6), Update(0, 0.2, num_sampled=[7]), arrival(1, 13)
    tokens.arrive(first, None, prompt, "")
    tokens.step(Step(0, 0.1, ids=[first.request_id]))
    tokens.update(update, output)
    tokens.arrive(second, None, prompt + output, "")
    assert len(second.keys) == 3 * KEY_BYTES
    assert second.keys == first.keys + update.keys[0]
