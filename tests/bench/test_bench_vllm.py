"""`vllm bench`: which cases there are, what the client is told, and what is made of its figures."""

import itertools
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bench.report import pages
from bench.report.tables import TABLES, as_markdown
from bench.serving import threads, vllm_offline
from bench.serving.models import SHAPES, SPACE, Model, write_shape
from bench.serving.plan import ServerKey
from bench.serving.threads import Process, Snapshot
from bench.serving.vllm_cases import CaseError, CaseKey, Lengths, Plan, Wanted, num_prompts
from bench.serving.vllm_client import ClientError, Order, Watch, figures
from bench.serving.vllm_runs import reached

Row = dict[str, Any]
BY_NAME = {table.name: table for table in TABLES}
SERVER = ServerKey("tiny", "stock", "async")
CASE = CaseKey(SERVER, "serve", "1024/128", concurrency=64)
MODEL = Model("tiny", Path("/models/tiny"), {"vocab_size": 10}, has_dummy_weights=True)


# ---- cases ----


@pytest.mark.parametrize("name", ["1024/128", "4096+256/128"])
def test_lengths_are_written_as_they_are_read(name: str) -> None:
    assert Lengths.named(name).name == name


@pytest.mark.parametrize("name", ["", "1024", "1024/0", "0/1", "a/b", "1+/2", "1/2/3"])
def test_lengths_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(CaseError, match="is no case"):
        Lengths.named(name)


@pytest.mark.parametrize("load", ["", "x", "0", "5 %", "%"])
def test_loads_that_mean_nothing_are_refused(load: str) -> None:
    with pytest.raises(CaseError, match="is no load"):
        Wanted.named(f"8/4:{load}", (), ())


def test_rates_are_measured_before_they_are_given_and_vllm_comes_first() -> None:
    plan = Plan(
        model="m",
        mode="async",
        schedulers=("stock", "sparksched"),
        front_ends=("python",),
        wanted=tuple(Wanted.named(it, (1, 2), (50,)) for it in ("8/4", "16+8/4:3:90%")),
        cores=("1", "all", "2"),
        offline=("latency", "throughput"),
    )
    assert [it.scheduler for it in plan.servers()] == ["stock", "sparksched"]
    cases = list(plan.cases(next(iter(plan.servers()))))
    assert list(dict.fromkeys(it.cores for it in cases)) == ["all", "2", "1"]
    loads = {"8/4": [(1, None), (2, None), (None, 50)], "16+8/4": [(3, None), (None, 90)]}
    for (_, lengths), group in itertools.groupby(cases, lambda it: (it.cores, it.lengths)):
        assert [(it.concurrency, it.rate_percent) for it in group] == loads[lengths]
    assert plan.most_at_once == 8
    offline = [(it.command, it.lengths, it.concurrency) for it in plan.offline_cases()]
    assert offline == 2 * [("latency", "8/4", 8)] + 2 * [("throughput", "8/4", None)]


def test_both_schedulers_have_the_same_prompts_and_no_other_case_has() -> None:
    ours = replace(CASE, server=replace(SERVER, scheduler="sparksched"))
    assert ours.seed(0) == CASE.seed(0)
    others = [CASE.seed(1), replace(CASE, concurrency=65).seed(0), replace(CASE, cores="2").seed(0)]
    assert len({CASE.seed(0), *others}) == 4


def test_there_are_as_many_requests_with_each_prefix() -> None:
    at_rate = replace(CASE, concurrency=None, rate_percent=50)
    assert [num_prompts(CASE, 3.0, least) for least in (1, 300)] == [192, 304]
    assert num_prompts(replace(CASE, concurrency=1), 3.0, 1) == 8
    assert [num_prompts(at_rate, times) for times in (0.1, 100.2)] == [32, 104]


def test_the_rate_is_the_highest_that_vllm_reaches_in_the_same_case() -> None:
    def cell(rate: float, **changes: Any) -> Row:
        return CASE.as_row() | {"rounds": [{"requests_per_s": rate}]} | changes

    wanted = replace(CASE, concurrency=None, rate_percent=80)
    others = [
        cell(9.0, scheduler="sparksched"),
        cell(9.0, front_end="rust"),
        cell(9.0, cores="2"),
        cell(9.0, lengths="8192/256"),
        cell(9.0, concurrency=None, rate_percent=95),
        CASE.as_row() | {"error": "it failed"},
    ]
    assert reached(others, wanted) is None
    assert reached([*others, cell(3.0), cell(4.0, concurrency=256)], wanted) == 4.0


# ---- the client ----


def order(**changes: Any) -> list[str]:
    made = Order("http://127.0.0.1:1", MODEL, Lengths(8, 4), num_prompts=16, seed=7)
    return replace(made, **changes).arguments(Path("/tmp"), "client.json")


def test_the_client_is_told_lengths_and_load() -> None:
    at_once = order(concurrency=64)
    assert {"--dataset-name=random", "--random-input-len=8", "--random-output-len=4"} < {*at_once}
    assert {"--max-concurrency=64", "--num-prompts=16", "--ignore-eos", "--seed=7"} < {*at_once}
    assert not any(it.startswith("--request-rate") for it in at_once)
    shared = order(lengths=Lengths(8, 4, 4096), rate=2.5)
    assert {"--dataset-name=prefix_repetition", "--prefix-repetition-prefix-len=4096"} < {*shared}
    assert {"--prefix-repetition-suffix-len=8", "--request-rate=2.5"} < {*shared}
    assert not any(it.startswith("--max-concurrency") for it in shared)
    embedded = order(model=replace(MODEL, is_pooling=True))
    assert {"--backend=openai-embeddings", "--endpoint=/v1/embeddings"} < {*embedded}


RESULT: Row = {
    "completed": 2,
    "duration": 4.0,
    "request_throughput": 0.5,
    "output_throughput": 3.0,
    "total_input_tokens": 20,
    "total_output_tokens": 12,
    "itls": [[0.1, 0.1], [0.1, 0.1]],
    "errors": ["", ""],
    "p50_ttft_ms": 5.0,
    "p99_ttft_ms": 6.0,
}


def test_figures_of_the_client() -> None:
    found = figures(RESULT, 2)
    assert (found["requests_per_s"], found["tokens_per_s"]) == (0.5, 3.0)
    # two first outputs, and four more
    assert found["tokens_per_output"] == 2.0
    assert found["ttft_ms"] == {"p50": 5.0, "p99": 6.0}
    assert "itl_ms" not in found
    embedded = {name: it for name, it in RESULT.items() if "output" not in name}
    assert "output_tokens" not in figures(embedded, 2)


def test_requests_that_fail_are_no_result() -> None:
    result = RESULT | {"completed": 1, "errors": ["", "Traceback\nConnectionError: gone"]}
    with pytest.raises(ClientError, match="1 of 2 requests failed: ConnectionError: gone"):
        figures(result, 2)


def watched(client_s: float) -> Row:
    """Return what is made of a second in which an engine worked for 250 ms, and the client."""
    watch = Watch([Process("engine", 1)], Process("client", 2))
    watch.before, watch.after = Snapshot(10.0, [{1: 1.0}]), Snapshot(12.0, [{1: 1.25}])
    # It works for longer than its requests run: it computes its figures.
    spent = ((10.0, 0.0), (10.5, client_s / 2), (11.0, client_s), (12.0, client_s + 1.0))
    watch.of_client = [Snapshot(at, [{2: cpu_s}]) for at, cpu_s in spent]
    return watch.evaluate(1.0, output_tokens=1000, requests=10)


def test_processor_time_of_server_and_client() -> None:
    found = watched(client_s=0.5)
    assert found["cpu"]["us_per_token"]["engine"] == pytest.approx(250.0)
    assert found["cpu"]["us_per_request"]["engine"] == pytest.approx(25_000.0)
    assert found["cpu"]["percent"]["engine"] == pytest.approx(25.0)
    assert found["client"]["busiest_percent"] == pytest.approx(50.0)
    assert not found["client"]["is_limit"]
    assert watched(client_s=0.95)["client"]["is_limit"]


def test_a_client_that_waits_for_a_processor_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran_and_waited_ns = "400000000 500000000 7"
    monkeypatch.setattr(threads, "_read", lambda pid, tid, name: ran_and_waited_ns)
    took, wanted = (Process("client", os.getpid(), wants=it).cpu_s() for it in (False, True))
    assert set(took.values()) == {0.4}
    assert set(wanted.values()) == {0.9}


def test_a_client_that_is_gone_has_no_share_of_a_processor() -> None:
    watch = Watch([], Process("client", 2))
    watch.before = watch.after = Snapshot(10.0, [])
    watch.of_client = [Snapshot(10.0, [{2: 1.0}]), Snapshot(10.1, [{}])]
    assert "missing" in watch._client(1.0)


def test_the_watch_looks_when_the_client_begins_and_ends(tmp_path: Path) -> None:
    watch = Watch([], Process("client", os.getpid()))
    watch.look("INFO loading tokenizer")
    assert watch.before is None
    watch.look("INFO starting main benchmark run")
    assert watch.before is not None
    assert watch.after is None
    watch.look("Starting main benchmark run...\n===== Serving Benchmark Result =====")
    assert watch.after is not None
    assert len(watch.of_client) == 2


# ---- engines without a server ----


def test_figures_of_offline_commands() -> None:
    latency = {"avg_latency": 0.5, "percentiles": {"50": 0.4, "99": 0.6}}
    found = vllm_offline.figures(replace(CASE, command="latency"), latency)
    assert found == {"batch_ms": {"p50": 400.0, "p99": 600.0, "mean": 500.0}}
    rates = {"num_requests": 3, "elapsed_time": 2.0, "requests_per_second": 1.5}
    rates["tokens_per_second"] = 30.0
    found = vllm_offline.figures(replace(CASE, command="throughput"), rates)
    assert (found["requests_per_s"], found["all_tokens_per_s"]) == (1.5, 30.0)


# ---- the tokenizer of shapes ----


@pytest.mark.parametrize("name", ["gpt-oss-120b", "Qwen2-1.5B", "Qwen3-0.6B", "Qwen3-Next-quarter"])
def test_each_token_has_a_text_and_words_are_found_again(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    write_shape(tmp_path, shape)
    # As vLLM loads it: which class reads the file depends on the type of the model.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    size, end = shape["vocab_size"], shape["eos_token_id"]
    texts = tokenizer.batch_decode([[it] for it in range(size)], skip_special_tokens=True)
    assert [token for token, text in enumerate(texts) if not text] == [end]
    words = [it for it in range(size) if tokenizer.convert_ids_to_tokens(it).startswith(SPACE)]
    assert len(words) > 0.99 * size
    shuffled = random.Random(0).sample(words, 20_000)
    assert tokenizer.encode(tokenizer.decode(shuffled)) == shuffled


# ---- tables ----


def result(**changes: Any) -> Row:
    times = {"p50": 10.0, "p99": 20.0}
    entry: Row = {"requests_per_s": 8.0, "tokens_per_output": 1.0, "client": {"is_limit": False}}
    entry |= dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"), times)
    costs = {"engine": 40.0, "API server": 60.0}
    entry["cpu"] = {"us_per_token": costs, "us_per_request": costs}
    faster = entry | {"requests_per_s": 12.0, "client": {"is_limit": True}, "has_compiled": True}
    faster["preempted"] = 2
    row = CASE.as_row() | {"model": "gpt-oss-120b", "concurrency": 256} | changes
    cells = [
        row | {"rounds": [entry]},
        row | {"scheduler": "sparksched", "rounds": [faster]},
    ]
    run = {"date": "2026-01-01 10:00 UTC", "commit": "0" * 12, "cpu": "a CPU", "cores": 16}
    return {"kind": "vllm_bench", "run": run, "runs": [run], "cells": cells}


def test_a_row_of_vllm_bench() -> None:
    found = {"x.json": result()}
    (row,) = BY_NAME["vllm_bench"].rows(found)
    assert row == [
        "gpt-oss-120b, 1,024 in, 128 out, 256 at once",
        "8.00 → 12.0",
        "10.0 → 10.0",
        "20.0 → 20.0",
        "10.0 → 10.0",
        "20.0 → 20.0",
        "1.00 → 1.00",
        "40.0 → 40.0",
        "60.0 → 60.0",
        "nothing → client, compiler, KV cache",
    ]
    assert len(row) == len(BY_NAME["vllm_bench"].columns)


@pytest.mark.parametrize(
    ("changes", "table", "label"),
    [
        ({"front_end": "rust", "client": "rust"}, "vllm_bench", "gpt-oss-120b, Rust front end"),
        ({"concurrency": None, "rate_percent": 95}, "vllm_bench", "95 % of vLLM's rate"),
        ({"model": "Qwen3-0.6B+embed"}, "vllm_bench_embeddings", "Qwen3-0.6B+embed, 1,024, 256 at"),
        ({"command": "latency", "concurrency": 8}, "vllm_bench_latency", "a batch of 8"),
        ({"command": "throughput", "concurrency": None}, "vllm_bench_throughput", "128 out"),
    ],
)
def test_each_case_is_in_its_table(changes: Row, table: str, label: str) -> None:
    found = {"x.json": result(**changes)}
    tables = [name for name in BY_NAME if name.startswith("vllm_bench")]
    assert [name for name in tables if list(BY_NAME[name].rows(found))] == [table]
    (row,) = BY_NAME[table].rows(found)
    assert label in row[0]
    assert len(row) == len(BY_NAME[table].columns)
    assert row[0] in as_markdown(found)


def test_vllms_throughput_comes_first() -> None:
    found = result(command="throughput", concurrency=None)
    for cell, rate in zip(found["cells"], (8000.0, 12000.0), strict=True):
        cell["rounds"][0]["all_tokens_per_s"] = rate
    (row,) = BY_NAME["vllm_bench_throughput"].rows({"x.json": found})
    assert row == ["gpt-oss-120b, 1,024 in, 128 out", "8.00 → 12.0", "8,000 → 12,000"]


def measured_on(*cores: str) -> dict[str, Row]:
    """Return results of two models on these numbers of processors."""
    models = ("Qwen2-1.5B", "gpt-oss-20b")
    cases = itertools.product(models, cores)
    return {f"{model}, {it}": result(model=model, cores=it) for model, it in cases}


def test_few_processors_are_shown_beside_all() -> None:
    rows = list(BY_NAME["vllm_bench_processors"].rows(measured_on("all", "4", "2", "1")))
    places = ["", ", 4 processors", ", 2 processors", ", 1 processor"]
    assert [row[0] for row in rows] == [
        f"{model}{place}, 1,024 in, 128 out, 256 at once"
        for model in ("Qwen2-1.5B", "gpt-oss-20b")
        for place in places
    ]
    assert not list(BY_NAME["vllm_bench_processors"].rows(measured_on("all")))


def test_few_processors_of_one_gpu_are_not_shown_beside_another() -> None:
    found = {
        f"{gpu}, {cores}": on_gpu(gpu, (20.0, 20.0), cores=cores)
        for gpu, cores in (("H100", "all"), ("H100", "2"), ("H200", "all"))
    }
    rows = BY_NAME["vllm_bench_processors"].rows(found)
    assert [row[0][-4:] for row in rows] == ["H100", "H100"]


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        ({"lengths": "4096+256/128"}, "vllm_bench_long"),
        ({"lengths": "8192/256"}, "vllm_bench_long"),
        ({"model": "Qwen3-0.6B (vLLM 0.33.0)"}, "vllm_bench_releases"),
    ],
)
def test_a_table_of_its_own(changes: Row, table: str) -> None:
    found = {"x.json": result(**changes), "y.json": result()}
    (row,) = BY_NAME[table].rows(found)
    assert row in list(BY_NAME["vllm_bench"].rows(found))
    assert len(row) == len(BY_NAME[table].columns)


def on_gpu(gpu: str, first_ms: tuple[float, float], **changes: Any) -> Row:
    """Return a result of a GPU: the latest first tokens with vLLM's scheduler and with ours."""
    found = result(**changes)
    found["run"] = found["run"] | {"gpu": gpu}
    for cell, ms in zip(found["cells"], first_ms, strict=True):
        (entry,) = cell["rounds"]
        cell["rounds"] = [entry | {"ttft_ms": {"p50": 10.0, "p99": ms}}]
    return found


def test_each_kind_of_gpu_has_a_row_and_the_readme_their_range() -> None:
    case: Row = {"front_end": "rust", "client": "rust", "concurrency": None, "rate_percent": 95}
    case["model"] = "Qwen3-0.6B"
    found = {
        "x.json": on_gpu("NVIDIA H100 80GB HBM3, driver 1", (900.0, 120.0), **case),
        "y.json": on_gpu("NVIDIA H200, driver 1", (180.0, 110.0), **case),
    }
    of_other_lengths = on_gpu("NVIDIA H200", (1.0, 1.0), lengths="8192/256", **case)
    label = "Qwen3-0.6B, Rust front end, Rust client, 1,024 in, 128 out, 95 % of vLLM's rate"
    rows = [(row[0], row[3]) for row in BY_NAME["vllm_bench"].rows(found)]
    assert rows == [(f"{label}, H100", "900 → 120"), (f"{label}, H200", "180 → 110")]
    (gain,) = BY_NAME["gain"].rows(found | {"z.json": of_other_lengths})
    assert gain[1:] == [
        f"{label}, H100 and H200",
        "ms to first token, p99",
        "180 to 900 → 110 to 120",
    ]


def test_the_same_case_of_two_kinds_of_gpu_is_not_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "STORED", tmp_path)
    for name in ("H100", "H200"):
        found = on_gpu(f"NVIDIA {name}", (20.0, 20.0))
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert list(pages.read_stored()) == ["H100.json", "H200.json"]
    shutil.copy(tmp_path / "H200.json", tmp_path / "x.json")
    with pytest.raises(pages.PageError, match="measured twice"):
        pages.read_stored()
