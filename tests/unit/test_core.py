"""The Rust extension by itself: what it refuses and how, and its block hashes against vLLM's."""

import itertools
import random
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparksched import engine_hooks
from sparksched._core import NativeBlockHasher, SchedulerCore
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

BLOCK_SIZE = 4
NONE_HASH = bytes(range(32))
FULL_ATTENTION = None
SLIDING_WINDOW = (8, 4)

TOO_LARGE_TOKENS = [2**31, 2**40, 2**63, 2**64, 2**100, -(2**31) - 1]
BEYOND_64_BITS = [2**63, 2**64 - 1, -(2**63) - 1]


# ----------------------------------------------------------------------------------------
# A scheduler and what it is given
# ----------------------------------------------------------------------------------------


def core_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "async_scheduling": False,
        "policy": "fcfs",
        "max_num_active_reqs": 8,
        "max_num_scheduled_tokens": 64,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "reserve_full_isl": False,
        "resume_as_new": False,
        "log_stats": True,
        "block_size": BLOCK_SIZE,
        "num_blocks": 101,
        "watermark_blocks": 0,
        "groups": [FULL_ATTENTION, SLIDING_WINDOW],
        "lookup_groups": [[0], [1]],
        "retention_interval": 0,
        "hash_algorithm": "sha256",
    }
    return config | changes


def accept_all(_request: Request, _token_ids: list[int]) -> bool:
    return True


def build_core(
    *,
    accept_tokens: Callable[[Request, list[int]], bool] = accept_all,
    hash_first_block: Callable[[Request], bytes] | None = None,
    include_finished_set: bool = False,
    **changes: Any,
) -> SchedulerCore:
    core = SchedulerCore(
        core_config(**changes),
        accept_tokens=accept_tokens,
        hash_first_block=hash_first_block or (lambda _request: NONE_HASH),
        include_finished_set=include_finished_set,
    )
    core.set_none_hash(NONE_HASH)
    return core


def build_request(
    request_id: str = "a", prompt: list[int] | None = None, max_tokens: int = 8, **settings: Any
) -> Request:
    params = {
        name: settings.pop(name)
        for name in list(settings)
        if name in SamplingParams.__struct_fields__
    }
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(10)) if prompt is None else prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        pooling_params=None,
        arrival_time=settings.pop("arrival_time", 1.0),
        **settings,
    )


def structured_request(request_id: str = "a") -> Request:
    """Return a request whose grammar is ready."""
    request = build_request(request_id, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    request.structured_output_request.grammar = SimpleNamespace()
    return request


def runner_output(scheduled: Any, token_id: int = 7) -> ModelRunnerOutput:
    """Return one token for each scheduled request."""
    request_ids = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
        sampled_token_ids=[[token_id] for _ in request_ids],
    )


def step(core: SchedulerCore, token_id: int = 7) -> dict[int, Any]:
    scheduled = core.schedule(False, 2.0)
    return core.update_from_output(scheduled, runner_output(scheduled, token_id))


def run_to_the_end(core: SchedulerCore) -> dict[str, Any]:
    """Let all requests finish; return their finish reasons."""
    reasons = {}
    for _ in range(1000):
        if not core.has_requests():
            return reasons
        for outputs in step(core).values():
            reasons |= {it.request_id: it.finish_reason for it in outputs.outputs}
        core.check_invariants()
    raise AssertionError("the requests do not end")


# ----------------------------------------------------------------------------------------
# Configurations
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", core_config())
def test_missing_config_key(key: str) -> None:
    config = core_config()
    del config[key]
    with pytest.raises(KeyError) as error:
        SchedulerCore(
            config,
            accept_tokens=accept_all,
            hash_first_block=accept_all,
            include_finished_set=False,
        )
    assert error.value.args == (key,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "lifo"}, 'unknown scheduling policy "lifo"'),
        ({"hash_algorithm": "md5"}, 'unknown hash algorithm "md5"'),
        ({"block_size": 0}, "blocks of 0 tokens can't be hashed"),
        ({"block_size": 0, "hash_algorithm": None}, "block_size must be at least 1"),
        ({"block_size": 20_000}, "blocks of 20000 tokens can't be hashed"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"num_blocks": 2**32 - 1}, "num_blocks must be below"),
        ({"max_num_active_reqs": 0}, "max_num_active_reqs must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"groups": [], "lookup_groups": []}, "at least one KV cache group"),
        ({"retention_interval": 6}, "retention_interval must be a multiple of block_size"),
        ({"lookup_groups": [[0]]}, "lookup_groups must hold each KV cache group once"),
        ({"lookup_groups": [[0], [0, 1]]}, "lookup_groups must hold each KV cache group once"),
        ({"lookup_groups": [[0, 1]]}, "looked up together must have equal specs"),
        ({"lookup_groups": [[1], [0]]}, "full attention groups must be looked up first"),
        ({"lookup_groups": [[], [0], [1]]}, "lookup_groups must"),
    ],
)
def test_contradicting_config(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_core(**changes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"block_size": "16"}, TypeError),
        ({"policy": None}, TypeError),
        ({"async_scheduling": None}, TypeError),
        ({"groups": [3]}, TypeError),
        ({"num_blocks": -1}, OverflowError),
        ({"max_model_len": 2**32}, OverflowError),
    ],
)
def test_config_of_another_type(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        build_core(**changes)


def test_none_hash_that_is_too_long() -> None:
    core = build_core()
    with pytest.raises(ValueError, match="NONE_HASH is longer than 32 bytes"):
        core.set_none_hash(bytes(33))


# ----------------------------------------------------------------------------------------
# Requests that are refused
# ----------------------------------------------------------------------------------------


def assert_goes_on(core: SchedulerCore, *request_ids: str) -> None:
    """Check that these requests, and no others, are there and run to their end."""
    assert list(core.requests) == list(request_ids)
    core.check_invariants()
    core.add_request(build_request("another"), 1.0)
    assert set(run_to_the_end(core)) == {*request_ids, "another"}
    assert core.requests == {}


@pytest.mark.parametrize("token_id", TOO_LARGE_TOKENS)
def test_prompt_token_beyond_32_bits(token_id: int) -> None:
    core = build_core()
    with pytest.raises(OverflowError, match=f"token id {token_id} does not fit into 32 bits"):
        core.add_request(build_request(prompt=[1, token_id, 2]), 1.0)
    assert_goes_on(core)


@pytest.mark.parametrize("token_id", TOO_LARGE_TOKENS)
def test_sampled_token_beyond_32_bits(token_id: int) -> None:
    core = build_core()
    core.add_request(build_request(), 1.0)
    scheduled = core.schedule(False, 2.0)
    with pytest.raises(OverflowError, match=f"token id {token_id} does not fit into 32 bits"):
        core.update_from_output(scheduled, runner_output(scheduled, token_id))
    core.check_invariants()
    core.update_from_output(scheduled, runner_output(scheduled))
    assert_goes_on(core, "a")


@pytest.mark.parametrize("token_id", [0, 255, 256, 65535, 65536, 2**31 - 1, -(2**31)])
def test_tokens_within_32_bits(token_id: int) -> None:
    core = build_core()
    core.add_request(build_request(prompt=[token_id] * 9), 1.0)
    (output,) = step(core, token_id)[0].outputs
    assert output.new_token_ids == [token_id]
    assert_goes_on(core, "a")


def test_duplicate_request_id() -> None:
    core = build_core()
    first = build_request()
    core.add_request(first, 1.0)
    with pytest.raises(ValueError, match="duplicate request id a"):
        core.add_request(build_request(), 1.0)
    assert core.requests["a"] is first
    assert_goes_on(core, "a")


def test_request_id_that_comes_again() -> None:
    core = build_core()
    for _ in range(3):
        core.add_request(build_request(), 1.0)
        run_to_the_end(core)
    assert_goes_on(core)


def image_feature() -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier="image-hash",
        mm_position=PlaceholderRange(offset=2, length=5),
    )


def pooling_request() -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=[1, 2, 3],
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        arrival_time=1.0,
    )


def embeds_request(**settings: Any) -> Request:
    embeds = torch.arange(48, dtype=torch.float32).reshape(12, 4)
    request = build_request(prompt_embeds=embeds, prompt=list(range(12)), **settings)
    assert request.num_prompt_tokens == 12
    return request


LORA = LoRARequest("adapter", 1, "/nowhere")

UNSUPPORTED_REQUESTS = {
    "a streaming-input session": lambda: build_request(resumable=True),
    "a pooling request": pooling_request,
    "a LoRA request": lambda: build_request(lora_request=LORA),
    "a multimodal request": lambda: build_request(mm_features=[image_feature()]),
    "a request with prompt embeddings": embeds_request,
}


@pytest.mark.parametrize("kind", UNSUPPORTED_REQUESTS)
def test_unsupported_kind_of_request(kind: str) -> None:
    core = build_core()
    with pytest.raises(ValueError, match=f"request a is {kind}, which sparksched does not") as it:
        core.add_request(UNSUPPORTED_REQUESTS[kind](), 1.0)
    assert "VLLM_SCHEDULER=vllm does" in str(it.value)
    assert_goes_on(core)


def test_first_block_that_cannot_be_hashed_on_arrival() -> None:
    def fail(_request: Request) -> bytes:
        raise LookupError("no hash for you")

    core = build_core(hash_first_block=fail)
    with pytest.raises(LookupError, match="no hash for you"):
        core.add_request(build_request(cache_salt="salt"), 1.0)
    assert_goes_on(core)


def test_block_hash_that_is_too_long() -> None:
    core = build_core(hash_first_block=lambda _request: bytes(33))
    with pytest.raises(ValueError, match="a block hash is longer than 32 bytes"):
        core.add_request(build_request(cache_salt="salt"), 1.0)
    assert_goes_on(core)


# ----------------------------------------------------------------------------------------
# Numbers that no machine word holds
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_beyond_64_bits(policy: str) -> None:
    core = build_core(policy=policy, max_num_active_reqs=1)
    priorities = [0, *BEYOND_64_BITS]
    for index, priority in enumerate(priorities):
        core.add_request(build_request(f"{index}", priority=priority), 1.0)
    order = [int(request.request_id) for request in core.waiting_requests()]
    expected = sorted(range(4), key=priorities.__getitem__) if policy == "priority" else [*range(4)]
    assert order == expected
    assert set(run_to_the_end(core)) == set("0123")


@pytest.mark.parametrize("number", BEYOND_64_BITS)
def test_stop_token_ids_beyond_64_bits(number: int) -> None:
    core = build_core()
    core.add_request(build_request(stop_token_ids=[number, 7], max_tokens=5), 1.0)
    (output,) = step(core, 7)[0].outputs
    assert (output.stop_reason, output.new_token_ids) == (7, [7])


def test_max_tokens_beyond_64_bits() -> None:
    core = build_core()
    request = build_request(max_tokens=2**63, min_tokens=2**63)
    core.add_request(request, 1.0)
    assert set(run_to_the_end(core)) == {"a"}
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED  # of the model's length


def test_repetition_parameters_beyond_64_bits() -> None:
    repetition = RepetitionDetectionParams(max_pattern_size=2**63, min_pattern_size=1, min_count=3)
    core = build_core()
    request = build_request(max_tokens=50, repetition_detection=repetition)
    core.add_request(request, 1.0)
    run_to_the_end(core)
    assert request.status == RequestStatus.FINISHED_REPETITION


# ----------------------------------------------------------------------------------------
# Calls that are refused
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [3, 255])
def test_unknown_pause_state(state: int) -> None:
    core = build_core()
    with pytest.raises(ValueError, match=f"unknown pause state {state}"):
        core.set_pause_state(state)
    assert core.pause_state() == 0


@pytest.mark.parametrize("state", [0, 1, 2])
def test_pause_states(state: int) -> None:
    core = build_core()
    core.add_request(build_request(), 1.0)
    core.set_pause_state(state)
    assert core.pause_state() == state
    assert core.num_unfinished_requests() == (1 if state == 0 else 0)


@pytest.mark.parametrize(
    "status", [it for it in RequestStatus if not RequestStatus.is_finished(it)]
)
@pytest.mark.parametrize("request_ids", [None, "a", ["a"]])
def test_finishing_with_another_status(status: RequestStatus, request_ids: Any) -> None:
    core = build_core()
    core.add_request(build_request(), 1.0)
    with pytest.raises(ValueError, match="requests can't be finished with the status"):
        core.finish_requests(request_ids, status)
    assert_goes_on(core, "a")


def test_finishing_requests() -> None:
    core = build_core()
    requests = {name: build_request(name) for name in "abcd"}
    for request in requests.values():
        core.add_request(request, 1.0)
    assert core.finish_requests("a", RequestStatus.FINISHED_ABORTED) == [requests["a"]]
    assert core.finish_requests(["b", "a", "?"], RequestStatus.FINISHED_ERROR) == [requests["b"]]
    assert core.finish_requests(iter("b?"), RequestStatus.FINISHED_ABORTED) == []
    rest = core.finish_requests(None, RequestStatus.FINISHED_STOPPED)
    assert rest == [requests["c"], requests["d"]]
    assert [request.status.name for request in requests.values()] == [
        "FINISHED_ABORTED",
        "FINISHED_ERROR",
        "FINISHED_STOPPED",
        "FINISHED_STOPPED",
    ]
    assert core.schedule(False, 2.0).finished_req_ids == set("abcd")
    assert_goes_on(core)


def test_request_without_output() -> None:
    core = build_core()
    for name in "ab":
        core.add_request(build_request(name), 1.0)
    scheduled = core.schedule(False, 2.0)
    output = runner_output(scheduled)
    del output.req_id_to_index["b"]
    with pytest.raises(KeyError) as error:
        core.update_from_output(scheduled, output)
    assert error.value.args == ("b",)
    aborted = core.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in aborted] == ["a", "b"]
    assert_goes_on(core)


def test_row_without_tokens() -> None:
    core = build_core()
    core.add_request(build_request(), 1.0)
    scheduled = core.schedule(False, 2.0)
    output = runner_output(scheduled)
    output.req_id_to_index["a"] = 5
    with pytest.raises(IndexError):
        core.update_from_output(scheduled, output)


def test_output_of_a_request_that_is_gone() -> None:
    core = build_core()
    core.add_request(build_request(), 1.0)
    scheduled = core.schedule(False, 2.0)
    core.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    outputs = core.update_from_output(scheduled, output)
    assert all(not it.outputs for it in outputs.values())
    assert_goes_on(core)


# ----------------------------------------------------------------------------------------
# After an error in the middle of a step
# ----------------------------------------------------------------------------------------


class GrammarBroke(Exception):
    pass


@pytest.fixture
def broken_core() -> tuple[SchedulerCore, list[Request]]:
    """Return a scheduler whose `accept_tokens` raised, and its three requests."""

    def fail(_request: Request, _token_ids: list[int]) -> bool:
        raise GrammarBroke("out of grammar")

    core = build_core(accept_tokens=fail, max_num_active_reqs=2)
    requests = [structured_request("a"), build_request("b"), build_request("waits")]
    for request in requests:
        core.add_request(request, 1.0)
    with pytest.raises(GrammarBroke, match="out of grammar"):
        step(core)
    return core, requests


CALLS_THAT_CHANGE_STATE: dict[str, Callable[[SchedulerCore], object]] = {
    "add_request": lambda core: core.add_request(build_request("new"), 1.0),
    "schedule": lambda core: core.schedule(False, 2.0),
    "update_from_output": lambda core: core.update_from_output(
        SimpleNamespace(num_scheduled_tokens={}), ModelRunnerOutput([], {})
    ),
    "finish_requests": lambda core: core.finish_requests(["a"], RequestStatus.FINISHED_ABORTED),
    "preempt_running": lambda core: core.preempt_running(2.0),
    "reset_prefix_cache": lambda core: core.reset_prefix_cache(),
    "check_invariants": lambda core: core.check_invariants(),
}

READS: dict[str, Callable[[SchedulerCore], object]] = {
    "has_requests": lambda core: core.has_requests(),
    "has_unfinished_requests": lambda core: core.has_unfinished_requests(),
    "has_finished_requests": lambda core: core.has_finished_requests(),
    "num_unfinished_requests": lambda core: core.num_unfinished_requests(),
    "request_counts": lambda core: core.request_counts(),
    "running_requests": lambda core: core.running_requests(),
    "waiting_requests": lambda core: core.waiting_requests(),
    "kv_cache_usage": lambda core: core.kv_cache_usage(),
    "num_used_blocks": lambda core: core.num_used_blocks(),
    "pause_state": lambda core: core.pause_state(),
    "make_stats": lambda core: core.make_stats(),
    "snapshot": lambda core: core.snapshot(),
    "structured_output_request_ids": lambda core: core.structured_output_request_ids({"a": 1}),
}


@pytest.mark.parametrize("call", CALLS_THAT_CHANGE_STATE)
def test_broken_scheduler_refuses(
    call: str, broken_core: tuple[SchedulerCore, list[Request]]
) -> None:
    core, _ = broken_core
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"stopped after an earlier error.*out of grammar"):
            CALLS_THAT_CHANGE_STATE[call](core)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("finishes_first", [False, True])
def test_broken_scheduler_can_be_read(
    read: str, finishes_first: bool, broken_core: tuple[SchedulerCore, list[Request]]
) -> None:
    core, _ = broken_core
    if finishes_first:
        core.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    READS[read](core)


def test_broken_scheduler_gives_its_requests_back(
    broken_core: tuple[SchedulerCore, list[Request]],
) -> None:
    core, requests = broken_core
    assert core.finish_requests(None, RequestStatus.FINISHED_ERROR) == requests
    assert {request.status for request in requests} == {RequestStatus.FINISHED_ERROR}
    assert core.requests == {}
    assert core.finish_requests(None, RequestStatus.FINISHED_ERROR) == []


def test_broken_scheduler_has_nothing_to_do_once_its_requests_are_gone(
    broken_core: tuple[SchedulerCore, list[Request]],
) -> None:
    core, _ = broken_core
    core.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert not core.has_unfinished_requests()
    assert core.num_unfinished_requests() == 0
    assert core.request_counts() == (0, 0)
    assert core.running_requests() == core.waiting_requests() == []


def test_first_block_that_cannot_be_hashed_in_mid_step() -> None:
    def fail(_request: Request) -> bytes:
        raise LookupError("no hash for you")

    core = build_core(hash_first_block=fail)
    core.add_request(build_request(prompt=[1, 2], cache_salt="salt"), 1.0)
    with pytest.raises(LookupError, match="no hash for you"):
        run_to_the_end(core)
    with pytest.raises(RuntimeError, match=r"stopped after an earlier error.*no hash for you"):
        core.schedule(False, 2.0)


# ----------------------------------------------------------------------------------------
# The state as plain data
# ----------------------------------------------------------------------------------------


def test_snapshot() -> None:
    core = build_core(max_num_active_reqs=1)
    for name in "ab":
        core.add_request(build_request(name, prompt=list(range(10))), 1.0)
    step(core)
    state = core.snapshot()
    assert state.keys() == {
        "requests",
        "running",
        "waiting",
        "free_blocks",
        "ref_counts",
        "cached_blocks",
    }
    assert (state["running"], state["waiting"]) == (["a"], ["b"])
    tables = state["requests"]["a"].pop("block_ids")
    assert state["requests"]["a"] == {
        "status": "RUNNING",
        "num_computed_tokens": 10,
        "num_output_placeholders": 0,
        "num_in_flight_tokens": 0,
        "num_stale_output_tokens": 0,
        "num_tokens": 11,
        "num_preemptions": 0,
    }
    assert [len(table) for table in tables] == [3, 3]
    used = set(itertools.chain.from_iterable(tables)) - {0}
    assert state["ref_counts"] == dict.fromkeys(used, 1)
    assert set(state["free_blocks"]) == set(range(1, 101)) - used
    assert state["requests"]["b"]["block_ids"] == [[], []]
    group_of_full_blocks = {block: key[-8:] for block, key in state["cached_blocks"].items()}
    assert set(group_of_full_blocks.values()) == {"00000000", "00000001"}
    assert {len(key) for key in state["cached_blocks"].values()} == {2 * (32 + 4)}


def test_snapshot_of_an_empty_scheduler() -> None:
    core = build_core(num_blocks=4, hash_algorithm=None)
    assert core.snapshot() == {
        "requests": {},
        "running": [],
        "waiting": [],
        "free_blocks": [1, 2, 3],
        "ref_counts": {},
        "cached_blocks": {},
    }


def test_snapshot_does_not_change_anything() -> None:
    core = build_core()
    core.add_request(build_request(), 1.0)
    step(core)
    assert core.snapshot() == core.snapshot()
    assert_goes_on(core, "a")


def test_stats_are_off() -> None:
    assert build_core(log_stats=False).make_stats() is None


def test_finished_set_by_client() -> None:
    core = build_core(include_finished_set=True)
    for client, name in enumerate("ab"):
        core.add_request(build_request(name, client_index=client), 1.0)
    core.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    outputs = step(core)
    assert {client: it.finished_requests for client, it in outputs.items()} == {0: None, 1: {"b"}}


# ----------------------------------------------------------------------------------------
# Block hashes
# ----------------------------------------------------------------------------------------

ALGORITHMS = [
    "sha256",
    "sha256_cbor",
    *(["xxhash", "xxhash_cbor"] if find_spec("xxhash") else []),
]
# Pickle writes tuples of one, two and three items with opcodes of their own.
BLOCK_SIZES = [1, 2, 3, 4, 16, 64]
EDGE_TOKENS = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1]

BlockHasher = Callable[[Request], list[bytes]]


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> str:
    """Initialise vLLM's hashing with one of its algorithms."""
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(request.param))
    return request.param


def stock_block_hasher(algorithm: str, block_size: int) -> BlockHasher:
    return kv_cache_utils.get_request_block_hasher(block_size, get_hash_fn_by_name(algorithm))


def random_tokens(rng: random.Random, length: int) -> list[int]:
    """Return tokens of all sizes, the edges of their encodings more often than not."""
    return [
        rng.choice(EDGE_TOKENS) if rng.random() < 0.6 else rng.randrange(2 ** rng.randint(1, 31))
        for _ in range(length)
    ]


def hashes_while_growing(
    hasher: BlockHasher, prompt: list[int], growth: list[list[int]], **settings: Any
) -> list[list[bytes]]:
    """Return a request's block hashes at first and after each addition."""
    request = build_request(prompt=prompt, block_hasher=hasher, **settings)
    hashes = [list(request.block_hashes)]
    for tokens in growth:
        request.append_output_token_ids(tokens)
        hashes.append(list(request.block_hashes))
    return hashes


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("cache_salt", [None, "", "salt", "s" * 300, "\N{SPARKLES}"])
def test_hashes_equal_vllms(algorithm: str, block_size: int, cache_salt: str | None) -> None:
    rng = random.Random(f"{algorithm}/{block_size}/{cache_salt}")
    for length in [0, 1, block_size - 1, block_size, block_size + 1, 5 * block_size + 2, 700]:
        prompt = random_tokens(rng, length)
        growth = [random_tokens(rng, count) for count in (1, block_size, 1, 2 * block_size + 1)]
        native, stock = (
            hashes_while_growing(
                build(algorithm, block_size), prompt, growth, cache_salt=cache_salt
            )
            for build in (engine_hooks.native_block_hasher, stock_block_hasher)
        )
        assert native == stock
        assert len(stock[-1]) == (length + sum(map(len, growth))) // block_size


@pytest.mark.parametrize("token_id", EDGE_TOKENS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_hashes_of_single_tokens_equal_vllms(
    algorithm: str, block_size: int, token_id: int
) -> None:
    prompt = [token_id] * (3 * block_size)
    native = engine_hooks.native_block_hasher(algorithm, block_size)
    assert hashes_while_growing(native, prompt, []) == hashes_while_growing(
        stock_block_hasher(algorithm, block_size), prompt, []
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda **settings: build_request(prompt=[*range(12)], lora_request=LORA, **settings),
        lambda **settings: build_request(
            prompt=[*range(12)], mm_features=[image_feature()], **settings
        ),
        embeds_request,
    ],
    ids=["lora", "multimodal", "prompt-embeds"],
)
def test_hashes_with_keys_in_every_block_equal_vllms(
    build: Callable[..., Request], algorithm: str
) -> None:
    native, stock = (
        build(block_hasher=build_hasher(algorithm, BLOCK_SIZE), cache_salt="salt")
        for build_hasher in (engine_hooks.native_block_hasher, stock_block_hasher)
    )
    assert len(stock.block_hashes) == 3
    assert native.block_hashes == stock.block_hashes
    for request in (native, stock):
        request.append_output_token_ids([1, 2, 3, 4])
    assert native.block_hashes == stock.block_hashes
    assert (
        native.block_hashes[0]
        != build_request(
            prompt=[*range(12)], block_hasher=stock_block_hasher(algorithm, BLOCK_SIZE)
        ).block_hashes[0]
    )


def build_hasher(**changes: Any) -> NativeBlockHasher:
    settings: dict[str, Any] = {
        "algorithm": "sha256",
        "block_size": BLOCK_SIZE,
        "none_hash": NONE_HASH,
        "hash_first_block": lambda _request: NONE_HASH,
        "fallback": lambda _request: [b"from the fallback"],
    }
    settings |= changes
    positional = [settings.pop(name) for name in ("algorithm", "block_size", "none_hash")]
    return NativeBlockHasher(*positional, **settings)


def test_fallback_is_asked_only_when_needed() -> None:
    hasher = build_hasher()
    assert hasher(build_request(lora_request=LORA)) == [b"from the fallback"]
    assert hasher(build_request(mm_features=[image_feature()])) == [b"from the fallback"]
    assert hasher(embeds_request()) == [b"from the fallback"]
    assert len(hasher(build_request(prompt=[1] * 9))) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "md5"}, 'unknown hash algorithm "md5"'),
        ({"algorithm": ""}, 'unknown hash algorithm ""'),
        ({"block_size": 0}, "blocks of 0 tokens can't be hashed"),
        ({"block_size": 2**32 - 1}, "blocks of 4294967295 tokens can't be hashed"),
        ({"none_hash": bytes(33)}, "32 bytes"),
    ],
)
def test_hasher_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_hasher(**changes)


@pytest.mark.parametrize("token_id", TOO_LARGE_TOKENS)
def test_hashing_a_token_beyond_32_bits(token_id: int) -> None:
    with pytest.raises(OverflowError, match=f"token id {token_id} does not fit into 32 bits"):
        build_hasher()(build_request(prompt=[1, 2, 3, token_id]))


def test_error_of_the_first_block_passes_through_the_hasher() -> None:
    def fail(_request: Request) -> bytes:
        raise LookupError("no hash for you")

    with pytest.raises(LookupError, match="no hash for you"):
        build_hasher(hash_first_block=fail)(build_request(cache_salt="salt"))


@pytest.mark.parametrize("length", [3, 4, 9, 300])
def test_scheduler_takes_over_what_the_hasher_computed(length: int) -> None:
    """Blocks are cached under the same hashes, whoever has computed them."""
    caches = []
    for hasher in (None, build_hasher()):
        core = build_core(max_model_len=512, num_blocks=301)
        core.add_request(build_request(prompt=[*range(length)], block_hasher=hasher), 1.0)
        run_to_the_end(core)
        caches.append(core.snapshot()["cached_blocks"])
    assert caches[0] == caches[1]


def test_request_that_has_grown_since_it_was_hashed() -> None:
    """What the hasher left with the request is stale then, and not used."""
    request = build_request(prompt=[*range(9)], block_hasher=build_hasher())
    request.append_output_token_ids([9, 10, 11, 12])
    core = build_core()
    core.add_request(request, 1.0)
    scheduled = core.schedule(False, 2.0)
    assert scheduled.num_scheduled_tokens == {"a": 13}
    core.check_invariants()
