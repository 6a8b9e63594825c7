"""`SchedulerCore` without a `SparkScheduler` around it, block hashers, and requests for them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sparksched._core import SchedulerCore
from sparksched.compat import releases
from sparksched.engine import sessions
from sparksched.engine.encoder import PartEncoder
from sparksched.engine.extra_keys import extra_keys_writer
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

BLOCK_SIZE = 4
NONE_HASH = bytes(range(32))
FULL_ATTENTION = ("full", 0, 0, 0)
SLIDING_WINDOW = ("sliding", 8, 0, 4)
CIRCULAR = ("circular", 0, 0, 0)

LORA = LoRARequest("adapter", 1, "/nowhere")

BlockHasher = Callable[[Request], list[bytes]]


# ----------------------------------------------------------------------------------------
# A scheduler
# ----------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


_OFF = _words("""
    async_scheduling long_prefill_token_threshold_adaptive reserve_full_isl resume_as_new
    uses_mrope sends_sampled_tokens continues_after_self_preemption skips_held_up
    counts_loras_of_all_running caches_settled_output keeps_block_before_junction
    requeues_sessions_last caches_state_tails_once caps_hits_to_aux_output can_skip_drafts
    partial_hits zeroes_blocks enable_kv_cache_events kv_cache_metrics transfers_encoder_outputs
    collects_aux_output
""")
_ZERO = _words("""
    long_prefill_token_threshold num_spec_tokens num_lookahead_tokens num_prefill_lookahead_tokens
    num_draft_slots decode_stagger local_prefill_interval watermark_blocks retention_interval
    num_hash_lookahead_tokens
""")
_NONE = ["num_spec_tokens_by_batch_size", "max_loras", "kv_transfer"]
_STATES = {
    **dict.fromkeys(_words("aligns_chunks has_checkpoint_blocks drops_last_unit"), False),
    "keeps_junctions": False,
    "block_size": BLOCK_SIZE,
    "checkpoint_alignment": None,
    "num_hash_lookahead_tokens": 0,
}


def core_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        **dict.fromkeys(_OFF, False),
        **dict.fromkeys(_ZERO, 0),
        **dict.fromkeys(_NONE),
        "states": dict(_STATES),
        "policy": "fcfs",
        "max_num_active_reqs": 8,
        "max_num_scheduled_tokens": 64,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "enable_chunked_prefill": True,
        "per_request_spec_decode_metrics": "none",
        "num_sampled_tokens_per_step": 1,
        "log_stats": True,
        "block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
        "num_blocks": 101,
        "groups": [FULL_ATTENTION, SLIDING_WINDOW],
        "group_block_sizes": [BLOCK_SIZE, BLOCK_SIZE],
        "lookup_groups": [[0], [1]],
        "eagle_groups": [],
        "hash_algorithm": "sha256",
    }
    unknown = changes.keys() - config
    assert not unknown, unknown
    if "groups" in changes:
        config["group_block_sizes"] = [BLOCK_SIZE] * len(changes["groups"])
    return config | changes


def accept_all(_request: Request, _token_ids: list[int]) -> bool:
    return True


def accept_drafts(_request: Request, draft_token_ids: list[int]) -> list[int]:
    return draft_token_ids


class Encoder:
    """Has room for whatever is asked of it; see `EncoderInputs`."""

    def plan(self, _request: Request, _num_computed_tokens: int, num_new_tokens: int) -> int:
        return num_new_tokens

    def schedule(self, *_: Any) -> None: ...

    free_processed = free = schedule

    def end_step(self, _log_stats: bool) -> tuple[Any, ...]:
        return {}, [], None, None

    def take_mismatches(self) -> set[str]:
        return set()


def callbacks(**changes: Any) -> dict[str, Any]:
    """Return what `SchedulerCore` wants besides its configuration."""
    arguments: dict[str, Any] = {
        "accept_tokens": accept_all,
        "validate_tokens": accept_drafts,
        "next_turn": sessions.next_turn,
        "encoder_inputs": None,
        "extra_keys": None,
        "block_observer": None,
        "kv_transfer": None,
        "encoder_transfer": None,
        "aux_outputs": None,
        "step_perf_stats": None,
        "encode_part": PartEncoder().encode_part,
        "include_finished_set": False,
    }
    return arguments | changes


def build_core(
    *,
    none_hash: bytes = NONE_HASH,
    config_of_kv_transfer: dict[str, bool] | None = None,
    **changes: Any,
) -> SchedulerCore:
    """Build a scheduler; `changes` are of `core_config` and `callbacks`."""
    arguments = {name: changes.pop(name) for name in callbacks() if name in changes}
    config = core_config(**changes, kv_transfer=config_of_kv_transfer)
    if config["hash_algorithm"] is not None:
        writer = extra_keys_writer(config["hash_algorithm"], config["block_size"])
        arguments.setdefault("extra_keys", writer)
    core = SchedulerCore(config, **callbacks(**arguments))
    core.set_none_hash(none_hash)
    return core


def runner_output(scheduled: Any, token_id: int = 7) -> ModelRunnerOutput:
    """Return one token for each scheduled request."""
    token_ids = {request_id: [token_id] for request_id in scheduled.num_scheduled_tokens}
    return sampled(scheduled, **token_ids)


def sampled(scheduled: Any, **token_ids: list[int]) -> ModelRunnerOutput:
    """Return these tokens for the requests of a step."""
    request_ids = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
        sampled_token_ids=[list(token_ids[request_id]) for request_id in request_ids],
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


def assert_goes_on(core: SchedulerCore, *request_ids: str) -> None:
    """Check that these requests, and no others, are there and run to their end."""
    assert list(core.requests) == list(request_ids)
    core.check_invariants()
    core.add_request(build_request("another"), 1.0)
    assert set(run_to_the_end(core)) == {*request_ids, "another"}
    assert core.requests == {}


# ----------------------------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------------------------


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


def structured_request(request_id: str = "a", **settings: Any) -> Request:
    """Return a request whose grammar is ready."""
    params = StructuredOutputsParams(regex="[a-z]+")
    request = build_request(request_id, structured_outputs=params, **settings)
    request.structured_output_request.grammar = SimpleNamespace()
    return request


def images(*positions: tuple[int, int], identifier: str | None = None) -> list[Any]:
    """Return the features of images at these offsets and of these lengths in the prompt."""
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier or f"hash of image {index}",
            mm_position=PlaceholderRange(offset, length),
        )
        for index, (offset, length) in enumerate(positions)
    ]


# ----------------------------------------------------------------------------------------
# Block hashes
# ----------------------------------------------------------------------------------------


# Tokens behind a block that this vLLM's hashes may cover.
LOOKAHEADS = (0, 1, 2, 3) if releases.is_since("0.33.0") else (0,)


def stock_block_hasher(
    algorithm: str, block_size: int, num_lookahead_tokens: int = 0
) -> BlockHasher:
    """Return vLLM's own; `native_block_hasher` of `engine.hashing` is ours."""
    lookahead = (num_lookahead_tokens,) if num_lookahead_tokens else ()
    hash_function = get_hash_fn_by_name(algorithm)
    return kv_cache_utils.get_request_block_hasher(block_size, hash_function, *lookahead)


def hashes_while_growing(
    hasher: BlockHasher, prompt: list[int] | None, growth: Sequence[list[int]], **settings: Any
) -> list[list[bytes]]:
    """Return a request's block hashes at first and after each addition."""
    request = build_request(prompt=prompt, block_hasher=hasher, **settings)
    hashes = [list(request.block_hashes)]
    for tokens in growth:
        request.append_output_token_ids(tokens)
        hashes.append(list(request.block_hashes))
    return hashes
