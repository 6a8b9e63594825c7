"""The long tests' own means: sizes that the environment says, and what counts as growth."""

import pytest
from scale import size

from .holdings import Trend


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 7), ("", 7), ("5", 5), ("288000", 288_000)], ids=repr
)
def test_a_size(value: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("SIZE", value)
    assert size("SIZE", short=7, full=7, minimum=5) == expected


@pytest.mark.parametrize("value", ["4", "0", "-5", "1e6", "many", " 7"])
def test_no_size(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", value)
    with pytest.raises(ValueError, match=r"SIZE=.* is not a whole number of at least 5"):
        size("SIZE", short=7, full=7, minimum=5)


def test_a_trend_is_not_what_a_single_point_shows() -> None:
    num_requests = range(0, 1000, 100)
    assert Trend(num_requests, [5] * 10).growth == 0
    assert Trend(num_requests, [200 * number for number in num_requests]).growth == 200
    assert Trend(num_requests, [5, 5, 9000, 5, 5, 5, 5, 5, 5, 9000]).growth == 0
