"""What all recordings of these tests have in common."""

import pytest


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for the disk than a busy machine can take."""
    monkeypatch.setattr("sparksched.record.write._CLOSE_S", 60.0)
