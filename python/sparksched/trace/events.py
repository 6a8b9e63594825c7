"""What is in a trace: the calls of a scheduler in their order, and what it decided.

Requests are named by their number: 0 is the first to arrive. A number stays with its request when
another one gets the same id. Times are seconds since the recording began, durations microseconds.
"""

from typing import Final

import msgspec

Number = int
BlockIds = list[list[int]]
"""Ids of blocks, by KV cache group."""

UNKNOWN: Final = -1
"""In the place of the number of a request that was not there, or not any more."""

KEY_BYTES: Final = 8
"""Of what stands for a segment of a block; see `tokens`."""


class TraceError(ValueError):
    """A file is no trace, is damaged, or can't be replayed; the message says what and where."""


class Group(msgspec.Struct, frozen=True):
    """A KV cache group."""

    kind: str
    """The name of its class in vLLM's `kv_cache_interface`."""
    fields: dict[str, int | bool | str | None]
    is_eagle_group: bool


class Speculation(msgspec.Struct, frozen=True):
    """What schedulers ask the configuration of speculative decoding."""

    num_tokens: int
    by_batch_size: list[tuple[int, int, int]] | None
    answers: dict[str, bool]
    """By the name of a method without arguments."""
    max_num_new_slots: int
    fills_in: bool
    """Whether a drafter that reserves a slot more than it drafts does so for a bonus query."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler was built from, as far as it decides anything."""

    sparksched: str
    vllm: str
    scheduler: str
    """Which scheduler was recorded: the name of its class."""
    started: float
    """Seconds since the epoch."""
    has_tokens: bool
    block_size: int
    hash_block_size: int
    num_hash_lookahead_tokens: int
    num_blocks: int
    retention_interval: int | None
    groups: list[Group]
    scheduler_config: dict[str, int | float | bool | str | None]
    enable_prefix_caching: bool
    hash_algorithm: str
    max_model_len: int
    runner_type: str
    uses_mrope: bool
    pipeline_parallel_size: int
    data_parallel_size: int
    use_v2_model_runner: bool
    max_loras: int | None
    speculation: Speculation | None


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first event."""

    settings: Settings


class Arrive(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`add_request()`."""

    time: float
    request_id: str
    client_index: int
    arrival_time: float
    priority: int
    num_prompt_tokens: int
    keys: bytes
    """Of the prompt's whole segments."""
    prompt: list[int] | None
    """Tokens, if the trace has them."""
    salt: bytes
    """What stands for the cache salt, if the trace has tokens; else keys cover it."""
    max_tokens: int
    min_tokens: int
    eos_token_id: int | None
    stop_token_ids: list[int]
    repetition: tuple[int, int, int] | None
    """Largest and smallest pattern, and how many of them end the request."""
    has_grammar: bool
    is_pooling: bool
    lora_id: int
    """0 without an adapter."""
    skips_cache: bool


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A grammar is there, or will never be."""

    number: Number
    is_compiled: bool


class Step(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """`schedule()` and its decision."""

    sequence: int
    time: float
    duration_us: float
    throttle_prefills: bool
    numbers: list[Number] | None
    """The requests that were scheduled, in order; None for those of the step before."""
    num_tokens: list[int] | None
    """How many tokens of each; None if it is one of each."""
    num_drafts: list[int] | None
    """How many of them are drafts; None for no drafts at all."""
    new: list[tuple[Number, int, BlockIds]]
    """Requests that the workers don't know: number, computed tokens, blocks."""
    new_block_ids: list[BlockIds | None]
    """Of the other requests, in order."""
    resumed: list[Number]
    preempted: list[Number]
    finished: list[Number]
    checksum: int
    """CRC-32 of the other requests' counts of computed and output tokens."""
    knobs: tuple[int, int] | None = None
    """`max_num_scheduled_tokens` and `long_prefill_token_threshold` of this step; None for those of
    the settings. Since version 2 of the format."""


class Update(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """`update_from_output()`. Rows are those of the step, in its order."""

    sequence: int
    time: float
    duration_us: float
    num_sampled: list[int] | None
    """How many tokens each row got; None for one each, an empty list for none at all."""
    tokens: list[int] | None
    """These, row after row, if the trace has tokens."""
    pooled: list[bool] | None
    """Which rows got a pooler's output; None without a pooler."""
    num_tokens: list[int] | None
    """As in the step, where the model runner has changed them."""
    num_drafts: list[int] | None
    """The same."""
    rejected: list[Number]
    """Requests whose grammar rejected what was sampled."""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """`finish_requests()`, in the order that resulted; None for all requests."""

    time: float
    numbers: list[Number] | None
    status: str


class Reset(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """`reset_prefix_cache()`."""

    time: float
    reset_running_requests: bool


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """`set_pause_state()`."""

    time: float
    state: int


class Drafts(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """`update_draft_token_ids()`, or `..._in_output()` for a step that is waiting."""

    sequence: int | None
    numbers: list[Number]
    num_drafts: list[int]
    num_padding: list[int]
    """How many of the drafts, the last ones, stand for none."""
    tokens: list[int] | None
    """Row after row, if the trace has tokens."""
    num_valid: list[tuple[Number, int]]
    """How many of its drafts a request's grammar let pass, where it was asked."""


class Grow(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Keys of segments that requests have filled with their output."""

    keys: list[tuple[Number, bytes]]


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A request has sampled a token that ends it."""

    number: Number
    num_output_tokens: int
    """With that one."""


class Difference(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """What another scheduler would have decided, in words."""

    time: float
    text: str


class End(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The last event: why the recording ended."""

    time: float
    reason: str


Event = (
    Begin
    | Arrive
    | Ready
    | Step
    | Update
    | Finish
    | Reset
    | Pause
    | Drafts
    | Grow
    | Stop
    | Difference
    | End
)
