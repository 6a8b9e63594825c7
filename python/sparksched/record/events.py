"""The schema of a trace: lines of JSON, compressed by gzip. Each line is one of these events.

The first is a `Begin`, the last an `End`. Fields that have their default are left out; unknown ones
are refused. A request is named by its id: that of the latest request which arrived with it. Times
are seconds since the recording began.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from sparksched.compat.pacing import StepKnobs

VERSION: Final = 3
"""Of the format: raised by changes that an older reader can't refuse by a field's name."""

KEY_BYTES: Final = 8
"""Of what stands for a segment of a block; see `keys`."""

MAX_COUNT: Final = 1 << 24
MAX_LINE_BYTES: Final = 16 << 20

Id = Annotated[str, Meta(min_length=1, max_length=1 << 16)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Size = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Number = Annotated[int, Meta(ge=0)]
RowLength = Annotated[int, Meta(ge=0, le=1 << 10)]
"""How many tokens or drafts one request gets in one step."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Microseconds = Annotated[float, Meta(ge=0, le=1e12)]
BlockIds = list[list[int]]
"""Ids of blocks, by KV cache group."""


class TraceError(ValueError):
    """A file is no trace, is damaged, or can't be replayed; the message says what and where."""


# ---- settings ----


class _Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Fields have the names that they have in vLLM's configuration."""


class Group(_Settings, frozen=True):
    """A KV cache group."""

    kind: Literal[
        "FullAttentionSpec",
        "HiddenStateCacheSpec",
        "MLAAttentionSpec",
        "ChunkedLocalAttentionSpec",
        "CircularBufferSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
    ]
    """The name of its class in vLLM's `kv_cache_interface`."""
    fields: dict[str, int | bool | str | None]
    is_eagle_group: bool


class Config(_Settings, frozen=True):
    """Of vLLM's `SchedulerConfig`, `CacheConfig`, `ModelConfig` and `ParallelConfig`."""

    async_scheduling: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    max_num_active_seqs: int | None
    max_num_batched_tokens: int
    max_num_scheduled_tokens: int | None
    max_num_seqs: int
    policy: str
    prefill_schedule_interval: int
    scheduler_reserve_full_isl: bool
    watermark: float
    enable_prefix_caching: bool
    prefix_caching_hash_algo: str
    max_model_len: Size
    runner_type: str
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=1 << 10)]
    data_parallel_size: Annotated[int, Meta(ge=1, le=1 << 16)]


class SpeculativeConfig(_Settings, frozen=True):
    """Of vLLM's class of that name; behind the numbers what its methods return."""

    num_speculative_tokens: RowLength
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None
    max_num_new_slots_for_drafting: int
    use_dflash: bool
    use_dspark: bool
    use_eagle: bool
    use_eagle_block_drop: bool
    use_multi_module_mtp: bool
    uses_draft_model: bool


class Settings(_Settings, frozen=True):
    """What a scheduler was built from, as far as it decides anything."""

    sparksched: str
    vllm: str
    scheduler: str
    """Which scheduler was recorded: the name of its class."""
    block_size: Size
    hash_block_size: Size
    num_hash_lookahead_tokens: RowLength
    num_blocks: Size
    retention_interval: int | None
    groups: Annotated[list[Group], Meta(max_length=64)]
    config: Config
    speculative_config: SpeculativeConfig | None
    fills_in: bool
    """Whether a drafter that reserves a slot more than it drafts does so for a bonus query."""
    uses_mrope: bool
    use_v2_model_runner: bool
    max_loras: int | None
    max_graph_tokens: Count
    """The most tokens of a step with prompts that ran as a CUDA graph; 0 without any."""


# ---- events ----


class _Event(
    Struct, omit_defaults=True, forbid_unknown_fields=True, tag_field="event", tag=str.lower
):
    """One line."""


class Begin(_Event):
    """The first line."""

    version: int
    settings: Settings


class Arrive(_Event, kw_only=True):
    """`add_request()`."""

    time: Seconds
    request_id: Id
    client_index: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    arrival_time: float
    priority: Annotated[int, Meta(gt=-(1 << 31), lt=1 << 31)] = 0
    num_prompt_tokens: Size
    keys: bytes = b""
    """Of the prompt's whole segments."""
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    has_grammar: bool = False
    is_pooling: bool = False
    lora_id: Number = 0
    """0 without an adapter."""
    skips_cache: bool = False


class Ready(_Event):
    """A grammar is there, or will never be."""

    request_id: Id
    is_compiled: bool


class Step(_Event):
    """`schedule()` and its decision."""

    sequence: Number
    time: Seconds
    duration_us: Microseconds = 0.0
    throttle_prefills: bool = False
    knobs: StepKnobs | None = None
    """Values of vLLM's scheduler with which it was decided; None for those of the settings."""
    finished: list[Id] = []
    preempted: list[Id] = []
    ids: list[Id] | None = None
    """The requests that were scheduled, in order; None for those of the step before."""
    num_tokens: list[Size] | None = None
    """How many tokens of each; None if it is one of each."""
    num_drafts: list[RowLength] | None = None
    """How many of them are drafts; None for no drafts at all."""
    new: list[tuple[Id, Count, BlockIds]] = []
    """Requests that the workers don't know: id, computed tokens, blocks."""
    resumed: list[Id] = []
    new_block_ids: list[BlockIds | None] = []
    """Of the other requests, in order."""
    checksum: int = 0
    """CRC-32 of the other requests' counts of computed and output tokens."""


class Update(_Event):
    """`update_from_output()`. Rows are those of the step, in its order."""

    sequence: Number
    time: Seconds
    duration_us: Microseconds = 0.0
    num_sampled: list[RowLength] | None = None
    """How many tokens each row got; None for one each, an empty list for none at all."""
    pooled: list[bool] | None = None
    """Which rows got a pooler's output; None without a pooler."""
    num_tokens: list[Count] | None = None
    """As in the step, where the model runner has changed them."""
    num_drafts: list[RowLength] | None = None
    """The same."""
    rejected: list[Id] = []
    """Requests whose grammar rejected what was sampled."""
    stops: dict[Number, RowLength] = {}
    """By row, if a token ends its request: the how manieth of the row's, from 0."""
    keys: dict[Number, bytes] = {}
    """Of segments that became whole, by row."""


class Finish(_Event):
    """`finish_requests()`, in the order that resulted; None for all requests."""

    time: Seconds
    ids: list[str] | None
    status: Literal[
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_IGNORED",
        "FINISHED_ERROR",
        "FINISHED_REPETITION",
    ]


class Reset(_Event):
    """`reset_prefix_cache()`."""

    time: Seconds
    reset_running_requests: bool


class Pause(_Event):
    """`set_pause_state()`."""

    time: Seconds
    state: Annotated[int, Meta(ge=0, le=2)]


class Drafts(_Event):
    """`update_draft_token_ids()`, or `..._in_output()` for a step that is waiting."""

    sequence: Number | None
    ids: list[Id]
    num_drafts: list[RowLength]
    num_padding: list[RowLength]
    """How many of the drafts, the last ones, stand for none."""
    num_valid: dict[Id, RowLength]
    """How many of its drafts a request's grammar let pass, where it was asked."""


class End(_Event):
    """The last line: why the recording ended."""

    time: Seconds
    reason: str


Event = Begin | Arrive | Ready | Step | Update | Finish | Reset | Pause | Drafts | End
