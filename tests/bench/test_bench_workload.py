"""The requests of workloads, and the plan of cells."""

import json
from pathlib import Path

import pytest

from bench.serving.models import NAMES, SHAPES, Model, ModelError, prepare
from bench.serving.plan import Plan
from bench.serving.workload import Workload

MODEL = Model("gpt-oss-120b", Path("/nowhere"), SHAPES["gpt-oss-120b"], has_dummy_weights=True)


def plan(**changes: object) -> Plan:
    options: dict[str, object] = {
        "models": ("gpt-oss-120b",),
        "schedulers": ("stock", "sparksched"),
        "modes": ("async",),
        "cores": ("all",),
        "concurrencies": (1, 64),
        "drivers": ("asyncllm", "http"),
    }
    return Plan(**(options | changes))  # type: ignore[arg-type]


# ---- workloads ----


def test_the_same_seed_brings_the_same_requests_and_another_one_others() -> None:
    workload = plan().workload(64, MODEL)
    first = workload.seeded("http", 0).requests()
    assert first == workload.seeded("http", 0).requests()
    assert first != workload.seeded("http", 1).requests()
    assert {len(it.prompt) for it in first} == {128}
    assert {it.max_tokens for it in first} == {384}


def test_streams_that_are_compared_have_lengths_within_bounds() -> None:
    requests = plan().compared_workload(MODEL, 256, 64).requests()
    assert len(requests) == 256
    for lengths, least, most in (
        ([len(it.prompt) for it in requests], 16, 128),
        ([it.max_tokens for it in requests], 10, 64),
    ):
        assert least <= min(lengths) < least + 8
        assert most - 8 < max(lengths) <= most


@pytest.mark.parametrize("vocab_size", [10, 430, 201088])
def test_prompts_are_within_the_vocabulary(vocab_size: int) -> None:
    workload = Workload(4, vocab_size, (50, 50), (1, 1))
    for request in workload.requests():
        assert 3 <= min(request.prompt) <= max(request.prompt) < vocab_size


# ---- plan ----


def test_each_server_is_started_once_for_all_of_its_cells() -> None:
    chosen = plan(modes=("async", "sync"), cores=("1", "all", "4"))
    servers = list(chosen.servers())
    assert len(servers) == len(set(servers)) == 4
    cells = list(chosen.cells(servers[0]))
    assert len(cells) == 3 * 2 * 2
    # A server is confined to fewer and fewer processors.
    assert list(dict.fromkeys(cell.cores for cell in cells)) == ["all", "4", "1"]


def test_a_front_end_in_rust_is_driven_over_http_alone() -> None:
    chosen = plan(front_ends=("python", "rust"), concurrencies=(1,))
    servers = list(chosen.servers())
    assert [(it.front_end, it.scheduler) for it in servers] == [
        ("python", "stock"),
        ("python", "sparksched"),
        ("rust", "stock"),
        ("rust", "sparksched"),
    ]
    drivers = [[cell.driver for cell in chosen.cells(it)] for it in servers[1:3]]
    assert drivers == [["asyncllm", "http"], ["http"]]


def test_a_server_takes_all_that_its_cells_send() -> None:
    assert plan(concurrencies=(1,)).max_num_seqs == 8
    assert plan(concurrencies=(1, 1024)).max_num_seqs == 1024


# ---- models ----


def test_a_shape_is_written_with_a_tokenizer_of_its_size(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = prepare("Qwen2-1.5B", tmp_path)
    assert model.has_dummy_weights
    tokenizer = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == model.vocab_size == 151936
    words = tokenizer.decode([1000, 2000, 150000]).split()
    assert len(set(words)) == 3


def test_a_directory_is_a_model_and_anything_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    model = prepare(str(tmp_path), tmp_path)
    assert (model.vocab_size, model.has_dummy_weights) == (7, True)
    (tmp_path / "model.safetensors").touch()
    assert not prepare(str(tmp_path), tmp_path).has_dummy_weights
    with pytest.raises(ModelError, match="gpt-oss-20b"):
        prepare("gpt-oss-21b", tmp_path)
    assert set(NAMES) == {
        "gpt-oss-120b",
        "gpt-oss-20b",
        "Qwen2-1.5B",
        "Qwen3-0.6B",
        "Qwen3-Next-quarter",
        "tiny",
    }


def test_a_model_that_speculates_or_embeds_has_a_name_of_its_own(tmp_path: Path) -> None:
    ngram = prepare("tiny+ngram", tmp_path)
    assert ngram.name == "tiny+ngram"
    assert ngram.speculation is not None
    assert ngram.speculation["method"] == "ngram"
    eagle3 = prepare("gpt-oss-20b+eagle3", tmp_path)
    assert eagle3.speculation is not None
    head = json.loads((Path(eagle3.speculation["model"]) / "config.json").read_text())
    assert head["vocab_size"] == eagle3.vocab_size
    embedding = prepare("tiny+embed", tmp_path)
    assert (embedding.name, embedding.is_pooling) == ("tiny+embed", True)
    with pytest.raises(ModelError, match="medusa is none of ngram, eagle3, embed"):
        prepare("gpt-oss-20b+medusa", tmp_path)
