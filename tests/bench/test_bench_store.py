"""The result file: what a run leaves behind, and what another one makes of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.serving.plan import CellKey, ServerKey
from bench.serving.store import Store, StoreError, dumps

SERVER = ServerKey("tiny", "stock", "sync")
CELL = CellKey(SERVER, "all", 4, "http")
OTHER = CellKey(SERVER, "2", 4, "http")
RUN = {"commit": "first"}


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    first = Store(path, RUN)
    first.put_cell(CELL, {"rounds": [{"tokens_per_s": 1.5}]})
    second = Store(path, {"commit": "second"})
    assert second.has_cell(CELL)
    assert not second.has_cell(OTHER)
    second.put_cell(OTHER, {"rounds": []})
    result = json.loads(path.read_text())
    assert [cell["run"] for cell in result["cells"]] == [0, 1]
    assert [run["commit"] for run in result["runs"]] == ["first", "second"]


def test_what_has_failed_is_tried_again_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    Store(path, RUN).put_failure(CELL, {"output_tokens": (8, 8)}, "the server is gone")
    (cell,) = json.loads(path.read_text())["cells"]
    assert (cell["output_tokens"], cell["error"]) == ([8, 8], "the server is gone")
    again = Store(path, RUN)
    assert not again.has_cell(CELL)
    again.put_cell(CELL, {"rounds": [1]})
    (cell,) = json.loads(path.read_text())["cells"]
    assert "error" not in cell


def test_streams_are_kept_by_server(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.json", RUN)
    store.put("streams", SERVER, {"digests": []})
    again = Store(tmp_path / "x.json", RUN)
    assert again.has("streams", SERVER)
    assert not again.has("streams", replace(SERVER, front_end="rust"))


def test_a_killed_run_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    store = Store(path, RUN)
    store.put_cell(CELL, {"rounds": []})
    before = path.read_text()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.serving.store.os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        store.put_cell(OTHER, {"rounds": []})
    assert path.read_text() == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "something else"}'])
def test_another_file_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(StoreError):
        Store(path, RUN)
    assert path.read_text() == content


def test_results_of_another_benchmark_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    Store(path, RUN, "vllm_bench").put_cell(CELL, {"rounds": [1]})
    with pytest.raises(StoreError):
        Store(path, RUN)
    assert Store(path, RUN, "vllm_bench").has_cell(CELL)


def test_numbers_that_are_none_become_missing() -> None:
    found = json.loads(dumps({"a": float("nan"), "b": [float("inf")], "c": 0.12345678}))
    assert found == {
        "a": {"missing": "not a number"},
        "b": [{"missing": "not a number"}],
        "c": 0.123457,
    }
