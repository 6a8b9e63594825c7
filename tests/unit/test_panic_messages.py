"""What panics say: numbers of our own, and nothing of what users sent.

A panic's message is printed, logged and told to Python. So whatever a macro that panics formats is
listed here, and so are the two sides of a comparison, which it prints.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {
    *("count", "self.num_free", "block.ref_cnt", "prev", "block.prev_free", "num_free"),
    *("num_used + num_free as usize + 1", "self.blocks.len()", "self.free_tail", "0"),
    *("self.contents.prev_same[next as usize]", "num_indexed", "num_keys"),
    *("request.groups.len()", "1", "counted", "owners", "num_requests", "id", "id.0", "ring_bytes"),
    *("num_queued + self.num_kept", "idle", "self.num_waiting_for_input", "deferred"),
    *("self.deferred", "capacity", "index", "bits", "deadline.to_bits()"),
}
"""Counts, sizes and places of blocks, requests and rings, and times."""

NAMES = {
    *("self.request(index).status", "RequestStatus::WaitingForInput", "RequestStatus::Running"),
    *("self.config.policy", "Policy::Priority", "point"),
}
"""States, and names that are in the sources."""

_PANICKING = re.compile(
    r"\b(panic|unreachable|todo|unimplemented|(?:debug_)?assert(?:_eq|_ne)?)!\s*\("
)
_NUM_CONDITIONS = {"assert": 1, "assert_eq": 2, "assert_ne": 2}
_TESTS = re.compile(r"^#\[cfg\(.*\btest\b.*\)\]\nmod tests", re.M)
_EXPECTING = re.compile(r"\.(?:expect|expect_err)\(\s*(?!\")")


def sources() -> list[Path]:
    """Return those of the product."""
    found = (ROOT / "rust").glob("**/src/**/*.rs")
    return [it for it in found if not {"fuzz", "entry-points"} & set(it.parts)]


def product_of(text: str) -> str:
    """Return the text without comments and without the tests at its end."""
    text = re.sub(r"^\s*//.*$", "", text, flags=re.M)
    return _TESTS.split(text)[0]


def arguments_behind(text: str, begin: int) -> list[str]:
    """Return the arguments of a call whose parenthesis opens before `begin`."""
    found, depth, start, is_quoted = [], 0, begin, False
    for place in range(begin, len(text)):
        letter = text[place]
        if letter == '"' and text[place - 1] != "\\":
            is_quoted = not is_quoted
        elif is_quoted:
            continue
        elif letter in "([{":
            depth += 1
        elif letter in ")]}" and depth:
            depth -= 1
        elif letter == ")" or (letter == "," and depth == 0):
            found.append(" ".join(text[start:place].split()))
            start = place + 1
            if letter == ")":
                return [argument for argument in found if argument]
    raise AssertionError("a call without an end")


def formatted_in(text: str) -> Iterator[str]:
    """Yield each expression whose value may be in a message."""
    for call in _PANICKING.finditer(text):
        arguments = arguments_behind(text, call.end())
        num_conditions = _NUM_CONDITIONS.get(call[1].removeprefix("debug_"), 0)
        if num_conditions == 2:
            yield from arguments[:2]
        for message in arguments[num_conditions : num_conditions + 1]:
            yield from re.findall(r"\{(\w+)", message)
            yield from arguments[num_conditions + 1 :]


@pytest.mark.parametrize("source", sources(), ids=lambda it: str(it.relative_to(ROOT / "rust")))
def test_panics_say_numbers_and_names(source: Path) -> None:
    text = product_of(source.read_text())
    assert set(formatted_in(text)) <= NUMBERS | NAMES
    assert not _EXPECTING.search(text), "a reason is a text of ours"
