"""The Rust extension by itself: what it refuses and how, and its block hashes against vLLM's.

Hashes that cover more than tokens are in `test_extra_keys.py`.
"""

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparksched._core import CachedBlocks, NativeBlockHasher, SchedulerCore, read_prompt
from sparksched.engine import hashing, sessions
from unit.bare_core import (
    BLOCK_SIZE,
    CIRCULAR,
    FULL_ATTENTION,
    LORA,
    NONE_HASH,
    Encoder,
    assert_goes_on,
    build_core,
    build_request,
    hashes_while_growing,
    images,
    run_to_the_end,
    runner_output,
    step,
    stock_block_hasher,
    structured_request,
)
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

pytestmark = pytest.mark.release

TOO_LARGE_TOKENS = [2**31, 2**40, 2**63, 2**64, 2**100, -(2**31) - 1]
BEYOND_64_BITS = [2**63, 2**64 - 1, -(2**63) - 1]


# ----------------------------------------------------------------------------------------
# Configurations
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "lifo"}, 'unknown scheduling policy "lifo"'),
        ({"hash_algorithm": "md5"}, 'unknown hash algorithm "md5"'),
        ({"hash_block_size": 0}, "blocks of 0 tokens can't be hashed"),
        ({"group_block_sizes": [4]}, "each group needs a block size"),
        ({"block_size": 8, "hash_block_size": 8}, "must be a multiple of hash_block_size"),
        (
            {"groups": [], "group_block_sizes": [], "lookup_groups": []},
            "prefix caching needs a KV cache group",
        ),
        ({"retention_interval": 6}, "retention_interval must be a multiple of block_size"),
        ({"lookup_groups": [[0]]}, "lookup_groups must hold each KV cache group once"),
        ({"lookup_groups": [[0, 1]]}, "looked up together must have equal specs"),
        ({"lookup_groups": [[1], [0]]}, "full attention groups must be looked up first"),
        ({"groups": [FULL_ATTENTION, ("mamba", 8, 0, 4)]}, 'unknown KV cache group "mamba"'),
        (
            {"groups": [FULL_ATTENTION, CIRCULAR]},
            "lookup_groups must hold each KV cache group once, but for circular buffers",
        ),
        (
            {
                "groups": [FULL_ATTENTION, CIRCULAR],
                "lookup_groups": [[0]],
                "config_of_kv_transfer": {
                    "defer_block_free": False,
                    "requires_kv_delivery": False,
                    "recompute_load_failures": False,
                },
            },
            "a KV connector does not fill circular buffers",
        ),
        ({"per_request_spec_decode_metrics": "verbose"}, 'unknown level "verbose"'),
    ],
)
def test_contradicting_config(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        build_core(**changes)


# ----------------------------------------------------------------------------------------
# Requests that are refused
# ----------------------------------------------------------------------------------------


TOO_LARGE = r"^a token id does not fit into 32 bits$"


@pytest.mark.parametrize("token_id", TOO_LARGE_TOKENS)
def test_tokens_beyond_32_bits(token_id: int) -> None:
    core = build_core(num_spec_tokens=3)
    with pytest.raises(OverflowError, match=TOO_LARGE):
        core.add_request(build_request(prompt=[1, token_id, 2]), 1.0)
    with pytest.raises(OverflowError, match=TOO_LARGE):
        build_hasher()(build_request(prompt=[1, 2, 3, token_id]))
    core.add_request(build_request(), 1.0)
    scheduled = core.schedule(False, 2.0)
    with pytest.raises(OverflowError, match=TOO_LARGE):
        core.update_from_output(scheduled, runner_output(scheduled, token_id))
    core.check_invariants()
    core.update_from_output(scheduled, runner_output(scheduled))
    with pytest.raises(OverflowError, match=TOO_LARGE):
        core.update_draft_token_ids(["a"], [[1, token_id]])
    assert_goes_on(core, "a")


def test_duplicate_request_id() -> None:
    core = build_core()
    first = build_request()
    core.add_request(first, 1.0)
    with pytest.raises(ValueError, match="duplicate request id a"):
        core.add_request(build_request(), 1.0)
    assert core.requests["a"] is first
    assert_goes_on(core, "a")


# ----------------------------------------------------------------------------------------
# Extra keys of block hashes
# ----------------------------------------------------------------------------------------


class NoKeys(Exception):
    pass


def no_keys(_request: Request) -> Any:
    raise NoKeys("no keys for you")


@pytest.mark.parametrize("settings", [{"cache_salt": "salt"}, {"lora_request": LORA}], ids=str)
@pytest.mark.parametrize("length", [2, 10], ids=["shorter-than-a-block", "longer-than-a-block"])
def test_extra_keys_that_fail_on_arrival(settings: dict[str, Any], length: int) -> None:
    core = build_core(extra_keys=no_keys)
    with pytest.raises(NoKeys, match="no keys for you"):
        core.add_request(build_request(prompt=[1] * length, **settings), 1.0)
    assert_goes_on(core)


@pytest.mark.parametrize("length", [2, 10], ids=["shorter-than-a-block", "longer-than-a-block"])
def test_extra_keys_that_fail_ahead_of_the_scheduler(length: int) -> None:
    request = build_request(prompt=[1] * length, cache_salt="salt")
    with pytest.raises(NoKeys, match="no keys for you"):
        read_prompt(request, extra_keys=no_keys)
    core = build_core()
    core.add_request(request, 1.0)
    assert_goes_on(core, "a")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"prompt": [1, 2**31]}, OverflowError),
        ({"prompt": []}, ValueError),
        ({"request_id": "\ud800"}, UnicodeEncodeError),
    ],
    ids=str,
)
def test_prompts_that_cannot_be_read(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        read_prompt(build_request(**settings), extra_keys=None)


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


# ----------------------------------------------------------------------------------------
# Draft tokens
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda core: core.update_draft_token_ids(["b", "a"], [[1], [2]]),
        lambda core: core.valid_drafts("a", [2]),
    ],
    ids=["update_draft_token_ids", "valid_drafts"],
)
@pytest.mark.parametrize("answer", [LookupError("out of grammar"), None, (2,)], ids=repr)
def test_grammar_that_fails_on_drafts(
    call: Callable[[SchedulerCore], object], answer: Exception | object
) -> None:
    def validate_tokens(_request: Request, _drafts: list[int]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    core = build_core(num_spec_tokens=3, validate_tokens=validate_tokens)
    core.add_request(structured_request("a", max_tokens=50), 1.0)
    core.add_request(build_request("b", max_tokens=50), 1.0)
    step(core)
    with pytest.raises(LookupError if isinstance(answer, Exception) else TypeError):
        call(core)
    assert_goes_on(core, "a", "b")


# ----------------------------------------------------------------------------------------
# Streaming-input sessions
# ----------------------------------------------------------------------------------------


def session_core(
    next_turn: Callable[[Request, int], bool | None] = sessions.next_turn,
) -> tuple[SchedulerCore, Request]:
    """Return a scheduler and its session, whose turn of one token has been scheduled."""
    core = build_core(next_turn=next_turn)
    request = build_request("session", max_tokens=1, resumable=True)
    sessions.open_session(request)
    core.add_request(request, 1.0)
    return core, request


def input_of(*token_ids: int) -> Callable[[Request, int], None]:
    update = StreamingUpdate.from_request(build_request(prompt=[*token_ids], resumable=True))

    def give(request: Request, num_kept_tokens: int) -> None:
        sessions.continue_session(request, update, num_kept_tokens)

    return give


def core_with_idle_session_without_blocks(**settings: Any) -> SchedulerCore:
    """Return a scheduler with a session whose turn has ended after it was preempted."""
    pool_of_four = {"num_blocks": 5, "groups": [FULL_ATTENTION], "lookup_groups": [[0]]}
    core = build_core(async_scheduling=True, **settings, **pool_of_four)
    core.add_request(build_request("other", prompt=[*range(8)]), 1.0)
    session = build_request("session", prompt=[*range(20, 27)], max_tokens=1, resumable=True)
    sessions.open_session(session)
    core.add_request(session, 1.0)
    first = core.schedule(False, 2.0)
    assert first.num_scheduled_tokens == {"other": 8, "session": 7}
    # The other request needs a third block.
    assert core.schedule(False, 2.0).preempted_req_ids == {"session"}
    outputs = core.update_from_output(first, runner_output(first))
    assert [it.request_id for it in outputs[0].outputs if it.finish_reason] == ["session"]
    assert core.is_waiting_for_input("session")
    return core


@pytest.mark.parametrize("requeues_sessions_last", [False, True])
def test_session_that_stops_while_preempted(requeues_sessions_last: bool) -> None:
    """It stays in the queue and goes on with its next input; vLLM 0.32.0 loses it."""
    core = core_with_idle_session_without_blocks(requeues_sessions_last=requeues_sessions_last)
    core.check_invariants()
    core.continue_session("session", input_of(30, 31))
    core.finish_requests(["other"], RequestStatus.FINISHED_ABORTED)
    # Of its prompt of nine tokens by now, the first block is still cached.
    assert core.schedule(False, 2.0).num_scheduled_tokens == {"session": 5}
    core.check_invariants()


def test_idle_session_without_blocks_while_new_requests_are_paused() -> None:
    """It is taken off although it was not counted, as in vLLM."""
    core = core_with_idle_session_without_blocks()
    core.set_pause_state(PauseState.PAUSED_NEW.value)
    assert core.num_unfinished_requests() == 0
    core.finish_requests(["other"], RequestStatus.FINISHED_ABORTED)
    assert core.num_unfinished_requests() == -1
    assert not core.has_unfinished_requests()
    core.set_pause_state(PauseState.UNPAUSED.value)
    assert core.num_unfinished_requests() == 0


@pytest.mark.parametrize("request_id", ["?", 3, None], ids=repr)
def test_unknown_session(request_id: Any) -> None:
    core, _ = session_core()
    step(core)
    assert not core.is_waiting_for_input(request_id)
    with pytest.raises(ValueError, match=re.escape(f"there is no session {request_id}")):
        core.continue_session(request_id, no_keys)
    assert core.is_waiting_for_input("session")


def test_input_that_fails() -> None:
    core, _ = session_core()
    step(core)
    with pytest.raises(NoKeys, match="no keys for you"):
        core.continue_session("session", lambda request, _num_kept_tokens: no_keys(request))
    assert core.is_waiting_for_input("session")
    core.finish_requests(["session"], RequestStatus.FINISHED_ABORTED)
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
    "update_draft_token_ids": lambda core: core.update_draft_token_ids(["b"], [[1]]),
    "valid_drafts": lambda core: core.valid_drafts("b", [1]),
    "continue_session": lambda core: core.continue_session("a", input_of(1)),
    "preempt_running": lambda core: core.preempt_running(2.0),
    "reset_prefix_cache": lambda core: core.reset_prefix_cache(),
    "check_invariants": lambda core: core.check_invariants(),
}


@pytest.mark.parametrize("call", CALLS_THAT_CHANGE_STATE)
def test_broken_scheduler_refuses(
    call: str, broken_core: tuple[SchedulerCore, list[Request]]
) -> None:
    core, _ = broken_core
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"stopped after an earlier error.*out of grammar"):
            CALLS_THAT_CHANGE_STATE[call](core)


@pytest.mark.parametrize("finishes_first", [False, True])
def test_broken_scheduler_ends_its_engine(
    finishes_first: bool, broken_core: tuple[SchedulerCore, list[Request]]
) -> None:
    """The engine's loop asks this before it sleeps: it would wait, broken, for the next request."""
    core, _ = broken_core
    if finishes_first:
        core.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    with pytest.raises(RuntimeError, match=r"stopped after an earlier error.*out of grammar"):
        core.has_requests()


def test_broken_scheduler_gives_its_requests_back(
    broken_core: tuple[SchedulerCore, list[Request]],
) -> None:
    core, requests = broken_core
    assert core.finish_requests(None, RequestStatus.FINISHED_ERROR) == requests
    assert {request.status for request in requests} == {RequestStatus.FINISHED_ERROR}
    assert core.requests == {}
    assert core.finish_requests(None, RequestStatus.FINISHED_ERROR) == []
    assert not core.has_unfinished_requests()
    assert core.request_counts() == (0, 0)
    assert core.running_requests() == core.waiting_requests() == []


def no_keys_for(*_arguments: object) -> Any:
    raise NoKeys("no keys for you")


def open_session() -> Request:
    request = build_request(max_tokens=1, resumable=True)
    sessions.open_session(request)
    return request


def broken_encoder(method: str) -> Encoder:
    encoder = Encoder()
    setattr(encoder, method, no_keys_for)
    return encoder


def broken_collector() -> Any:
    collector = SimpleNamespace(max_cache_hit=no_keys_for, cached_blocks=CachedBlocks())
    collector.connector = collector
    return collector


CALLBACKS: dict[str, tuple[dict[str, Any], Callable[[], Request]]] = {
    "next_turn": ({"next_turn": no_keys_for}, open_session),
    "block_observer": (
        {"block_observer": SimpleNamespace(on_evicted=no_keys_for), "kv_cache_metrics": True},
        build_request,
    ),
    "aux_outputs": (
        {
            "aux_outputs": broken_collector(),
            **dict.fromkeys(("collects_aux_output", "caps_hits_to_aux_output"), True),
        },
        build_request,
    ),
} | {
    f"encoder.{method}": (
        {"encoder_inputs": broken_encoder(method)},
        lambda: build_request(mm_features=images((2, 5))),
    )
    for method in ("plan", "schedule", "free_processed", "free", "end_step")
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_fails_in_the_middle_of_a_step(name: str) -> None:
    settings, make_request = CALLBACKS[name]
    core = build_core(**settings)
    core.add_request(make_request(), 1.0)
    with pytest.raises(NoKeys, match="no keys for you"):
        run_to_the_end(core)
    with pytest.raises(RuntimeError, match=r"stopped after an earlier error.*no keys for you"):
        core.schedule(False, 2.0)


def test_blocks_can_not_be_looked_up_at_other_times() -> None:
    with pytest.raises(RuntimeError, match="only when the scheduler calls"):
        CachedBlocks().get_cached_block(b"hash", [0])


# ----------------------------------------------------------------------------------------
# Block hashes
# ----------------------------------------------------------------------------------------

# Pickle writes tuples of one, two and three items with opcodes of their own.
BLOCK_SIZES = [1, 2, 3, 4, 16, 64]
EDGE_TOKENS = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1]


def random_tokens(rng: random.Random, length: int) -> list[int]:
    """Return tokens of all sizes, the edges of their encodings more often than not."""
    return [
        rng.choice(EDGE_TOKENS) if rng.random() < 0.6 else rng.randrange(2 ** rng.randint(1, 31))
        for _ in range(length)
    ]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_hashes_equal_vllms(algorithm: str, block_size: int) -> None:
    rng = random.Random(f"{algorithm}/{block_size}")
    for length in [0, 1, block_size - 1, block_size, block_size + 1, 5 * block_size + 2, 700]:
        prompt = random_tokens(rng, length)
        growth = [random_tokens(rng, count) for count in (1, block_size, 1, 2 * block_size + 1)]
        native, stock = (
            hashes_while_growing(build(algorithm, block_size), prompt, growth)
            for build in (hashing.native_block_hasher, stock_block_hasher)
        )
        assert native == stock
        assert len(stock[-1]) == (length + sum(map(len, growth))) // block_size


def build_hasher(**changes: Any) -> NativeBlockHasher:
    settings: dict[str, Any] = {
        "algorithm": "sha256",
        "block_size": BLOCK_SIZE,
        "none_hash": NONE_HASH,
        "extra_keys": no_keys,
    }
    settings |= changes
    positional = [settings.pop(name) for name in ("algorithm", "block_size", "none_hash")]
    return NativeBlockHasher(*positional, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_salt": "salt"},
        {"lora_request": LORA},
        {"mm_features": images((2, 5))},
        {"prompt_embeds": torch.zeros(10, 4)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_extra_keys_are_asked_for_only_when_needed(settings: dict[str, Any]) -> None:
    hasher = build_hasher()
    with pytest.raises(NoKeys, match="no keys for you"):
        hasher(build_request(**settings))
    assert len(hasher(build_request())) == 2


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
