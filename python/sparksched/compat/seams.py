"""Where sparksched touches vLLM: every function that is replaced, and every one that is relied on.

This table is the truth. The plugin replaces what it lists, `docs/changes-in-vllm.md` is written
from it, tests delete names of each group, and `tools.drift` compares another vLLM with it.
`fingerprints.json` holds what each name is in each supported release.

A group works as a whole or not at all: if one of its names is missing, or not as in the releases
that are known, all of it stays vLLM's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from sparksched import environment
from sparksched.compat.source import module_of

_ENGINE: Final = "EngineCore"
_API_SERVER: Final = "API servers"
_PACKAGES: Final = {"all processes": "", _ENGINE: ".engine", _API_SERVER: ".api_server"}


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of vLLM's that one of ours stands in for."""

    target: str
    """Where vLLM has it: a module, a colon and a path in it."""
    by: str
    """What makes ours of the original, below the package of its group."""
    purpose: str


@dataclass(frozen=True, slots=True)
class Group:
    """Seams that work together only."""

    name: str
    process: str
    off: str
    """What turns it off."""
    gain: str
    """What a user has of it."""
    instead: str
    """What happens where it is left out."""
    functions: tuple[Seam, ...]
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What is set on vLLM's objects by others of our functions, and why."""
    relied_on: tuple[str, ...] = ()
    """Targets that our functions call, or do the work of."""
    after: tuple[str, ...] = ()
    """Modules: as soon as one is imported, its functions are replaced, and with the first those of
    all others. If empty, the modules that have the functions."""
    waits_for_scheduler: bool = False
    """Whether it is replaced when an engine builds a native scheduler, not at an import."""
    bypasses: bool = False
    """Whether functions that another plugin has replaced leave it to vLLM, because ours would not
    call them. Elsewhere they don't: what is wrapped is most often only watched."""
    is_on: Callable[[], bool] = lambda: True
    any_release: bool = False
    """Whether it holds for every release, so that no fingerprint is looked at."""
    prepare: str = ""
    """A function of ours that is called before anything is replaced."""

    @property
    def package(self) -> str:
        """Our package whose functions stand in for vLLM's."""
        return f"sparksched{_PACKAGES[self.process]}"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules whose import has something replaced, the first one first."""
        return self.after or tuple(dict.fromkeys(module_of(it.target) for it in self.functions))

    @property
    def code(self) -> tuple[str, ...]:
        """The targets whose code must be as it is known."""
        return (*(seam.target for seam in self.functions), *self.relied_on)


_CORE: Final = "vllm.v1.engine.core"
_CLIENT: Final = "vllm.v1.engine.core_client"
_ASYNC_LLM: Final = "vllm.v1.engine.async_llm"
_OUTPUT: Final = "vllm.v1.engine.output_processor"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_HASHES: Final = "vllm.v1.core.kv_cache_utils"
_ARRIVAL: Final = f"{_CORE}:EngineCore.preprocess_add_request"
_STATS: Final = "vllm.v1.metrics.stats"

CHOICE: Final = Group(
    name="choice",
    process="all processes",
    off="`VLLM_SCHEDULER=vllm`",
    gain="decisions are made in Rust",
    instead="using vLLM's own scheduler",
    any_release=True,
    functions=(
        Seam(
            "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
            "plugin:_preferring_spark_scheduler",
            "returns `SparkScheduler` unless `--scheduler-cls` asks for another class",
        ),
    ),
    # Ours are not to be in the key of the compilation cache: see `sparksched.plugin`.
    relied_on=("vllm.envs:compile_factors",),
)

VARIABLES: Final = "vllm.envs:environment_variables"
"""What vLLM knows its environment variables by. Ours are added, with `VLLM_SCHEDULER=vllm`, too."""

SECTIONS: Final = {
    "scheduler_config": "SchedulerConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "model_config": "ModelConfig",
    "speculative_config": "SpeculativeConfig",
    "lora_config": "LoRAConfig",
    "attention_config": "AttentionConfig",
    "mamba_config": "MambaConfig",
    "engram_config": "EngramConfig",
    "observability_config": "ObservabilityConfig",
    "structured_outputs_config": "StructuredOutputsConfig",
    "reasoning_config": "ReasoningConfig",
    "watermark_config": "WatermarkConfig",
    "aux_output_config": "AuxOutputConfig",
    "offload_config": "OffloadConfig",
    "kv_transfer_config": "KVTransferConfig",
    "kv_events_config": "KVEventsConfig",
    "ec_transfer_config": "ECTransferConfig",
    "ec_manager_config": "EncoderCacheManagerConfig",
}
"""Sections of vLLM's configuration that a decision could depend on, and their classes. The others
are about devices, kernels, loading, logs."""

NATIVE_ENGINE: Final = Group(
    name="native_engine",
    process=_ENGINE,
    off="a fallback",
    gain="prompts are hashed outside the engine loop",
    instead="using vLLM's own scheduler",
    waits_for_scheduler=True,
    functions=(
        Seam(
            f"{_CORE}:get_request_block_hasher",
            "hashing:_preferring_native_hasher",
            "hashes prompts in Rust, without the GIL",
        ),
    ),
    relied_on=(
        _ARRIVAL,
        # Whose decisions the Rust core makes as well, and whose functions its callbacks use.
        _SCHEDULER,
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        "vllm.v1.core.sched.request_queue",
        "vllm.v1.core.sched.utils",
        "vllm.v1.core.block_pool",
        "vllm.v1.core.kv_cache_manager",
        "vllm.v1.core.kv_cache_coordinator",
        "vllm.v1.core.single_type_kv_cache_manager",
        f"{_HASHES}:FreeKVCacheBlockQueue",
        f"{_HASHES}:BlockHashListWithBlockSize",
        f"{_HASHES}:get_request_block_hasher",
        f"{_HASHES}:hash_block_tokens",
        f"{_HASHES}:init_none_hash",
        f"{_HASHES}:generate_block_hash_extra_keys",
        f"{_HASHES}:generate_lookahead_block_hash_extra_keys",
        f"{_HASHES}:maybe_convert_block_hash",
        f"{_HASHES}:to_event_extra_keys",
        f"{_HASHES}:partial_hash_hits_enabled",
        "vllm.v1.core.kv_cache_metrics:KVCacheMetricsCollector",
        "vllm.v1.core.encoder_cache_manager:EncoderCacheManager",
        "vllm.v1.serial_utils:MsgpackEncoder",
        "vllm.v1.spec_decode.dynamic.utils:build_dynamic_sd_schedule_lookup",
        "vllm.v1.structured_output:StructuredOutputManager.accept_tokens",
        "vllm.v1.structured_output:StructuredOutputManager.validate_tokens",
        "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask",
        "vllm.v1.structured_output.utils:strip_speculative_padding",
        # What it reads and builds, by the positions of fields and the values of members.
        "vllm.v1.core.sched.interface",
        "vllm.v1.core.sched.output",
        "vllm.v1.kv_cache_interface",
        "vllm.v1.request",
        "vllm.v1.outputs:ModelRunnerOutput",
        "vllm.v1.outputs:DraftTokenIds",
        "vllm.v1.engine:EngineCoreOutput",
        "vllm.v1.engine:EngineCoreOutputs",
        "vllm.v1.engine:EngineCoreEvent",
        "vllm.v1.engine:EngineCoreEventType",
        "vllm.v1.engine:FinishReason",
        f"{_STATS}:SchedulerStats",
        f"{_STATS}:BaseCacheStats",
        f"{_STATS}:PrefixCacheStats",
        f"{_STATS}:PrefillStats",
        f"{_STATS}:RequestSpecDecodeMetrics",
        "vllm.v1.spec_decode.metrics:SpecDecodingStats",
        "vllm.distributed.kv_events:KVCacheEvent",
        "vllm.distributed.kv_events:BlockStored",
        "vllm.distributed.kv_events:BlockRemoved",
        "vllm.distributed.kv_events:AllBlocksCleared",
        # A new setting may be a new way to decide, and a new parameter a new way to stop.
        "vllm.config:VllmConfig.*",
        *(f"vllm.config:{cls}.*" for cls in SECTIONS.values()),
        "vllm.sampling_params:SamplingParams.*",
        "vllm.sampling_params:RepetitionDetectionParams.*",
    ),
)

ARRIVAL: Final = Group(
    name="arrival",
    process=_ENGINE,
    off="`VLLM_SCHEDULER=vllm`",
    gain="a request that can't be served fails alone",
    instead="using vLLM's own scheduler and sockets",
    functions=(
        Seam(
            _ARRIVAL,
            "arrival:_checking_one_at_a_time",
            "refuses a request that the core can't take, with a message; reads its time limit; "
            "takes a lock, because rings and sockets have a thread each",
        ),
    ),
)

ENGINE_TRANSPORT: Final = Group(
    name="engine_transport",
    process=_ENGINE,
    off="`SPARKSCHED_TRANSPORT=libzmq`; the engine still stops without its launcher",
    gain="the engine loop sends and receives; what waits for a client is bounded",
    instead="messages of this engine go through vLLM's own sockets",
    functions=(
        Seam(
            f"{_CORE}:EngineCoreProc.process_input_sockets",
            "core_proc:_with_rings",
            "creates the engine's rings",
        ),
        Seam(
            f"{_CORE}:EngineCoreProc._make_ready_response",
            "core_proc:_with_offer",
            "offers them to clients",
        ),
        Seam(
            f"{_CORE}:EngineCoreProc._handle_client_request",
            "core_proc:_with_notices",
            "passes notices about clients to the engine loop",
        ),
        Seam(f"{_CORE}:EngineCoreProc.shutdown", "core_proc:_closing_rings", "closes them"),
    ),
    values={
        f"{_CORE}:EngineCore": "gets `sparksched`, the state that our functions share",
        f"{_CORE}:EngineCoreProc.output_queue": "sends at once what the engine loop puts there",
        f"{_CORE}:EngineCoreProc.input_queue": "receives while the engine loop waits",
        f"{_CORE}:EngineCoreProc.tensor_ipc_receiver": (
            "under a lock, because rings and sockets have a thread each"
        ),
        f"{_CORE}:EngineCoreProc.shutdown_state": (
            "set when the last API server is gone, so that the engine stops"
        ),
        f"{_CORE}:EngineCoreProc.enable_fault_tolerance": (
            "set to False when the launcher is gone or our transport has failed, because nobody "
            "could send recovery commands"
        ),
    },
    relied_on=(
        _ARRIVAL,
        f"{_CORE}:EngineCoreProc.process_output_sockets",
        f"{_CORE}:EngineCoreProc._process_engine_step",
        f"{_CORE}:EngineCoreProc._process_input_queue",
        f"{_CORE}:EngineCoreProc._handle_mm_cache_miss",
        f"{_CORE}:EngineCoreProc._handle_request_preproc_error",
        f"{_CORE}:EngineCoreProc._handle_request_validation_error",
        f"{_CORE}:EngineCoreProc.abort_requests",
        f"{_CORE}:EngineCoreProc.has_work",
        f"{_CORE}:EngineCoreProc.is_running",
        f"{_CORE}:EngineShutdownState",
        "vllm.v1.serial_utils:MsgpackEncoder",
        "vllm.v1.serial_utils:MsgpackDecoder",
        "vllm.v1.fault_tolerance.engine_core_sentinel:FT_UTILITY_METHOD",
    ),
)

CLIENT_TRANSPORT: Final = Group(
    name="client_transport",
    process=_API_SERVER,
    off="`SPARKSCHED_TRANSPORT=zmq`; requests still get an answer at shutdown",
    gain="the event loop reads a step without a thread or a socket; requests of a dead engine fail",
    instead="messages to engines go through vLLM's own sockets",
    functions=(
        Seam(
            f"{_CLIENT}:MPClient._apply_ready_response",
            "client:_remembering_offers",
            "keeps the offer",
        ),
        Seam(f"{_CLIENT}:BackgroundResources.__call__", "client:_closing_rings", "says goodbye"),
        Seam(f"{_CLIENT}:AsyncMPClient.__init__", "client:_connecting", "connects"),
        Seam(f"{_CLIENT}:SyncMPClient.__init__", "client:_connecting", "connects"),
        Seam(
            f"{_CLIENT}:AsyncMPClient._send_input",
            "client:_sending_async",
            "sends requests and aborts; a load balancer forgets a request that was not sent",
        ),
        Seam(
            f"{_CLIENT}:AsyncMPClient._send_input_message",
            "client:_sending_calls",
            "sends utility calls",
        ),
        Seam(f"{_CLIENT}:SyncMPClient._send_input", "client:_sending_sync", "sends"),
        Seam(
            f"{_ASYNC_LLM}:AsyncLLM._add_request",
            "overload:_forgetting_refused_requests",
            "forgets a request that was not accepted",
        ),
        Seam(
            f"{_ASYNC_LLM}:AsyncLLM.check_health",
            "overload:_checking_rings",
            "makes `/health` answer 503 when an engine is stopped",
        ),
        Seam(
            f"{_ASYNC_LLM}:AsyncLLM.shutdown",
            "shutdown:_answering_what_is_in_flight",
            "with several API servers, answers requests within `--shutdown-timeout`; others fail, "
            "where vLLM may leave them waiting forever",
        ),
        Seam(
            f"{_ASYNC_LLM}:AsyncLLM.add_request",
            "shutdown:_refusing_requests",
            "answers 503 meanwhile",
        ),
        Seam(
            f"{_ASYNC_LLM}:AsyncLLM.dead_error",
            "shutdown:_DeadError",
            "answers 503 also when the engine is gone by then",
        ),
    ),
    values={
        VARIABLES: (
            "`VLLM_V1_OUTPUT_PROC_CHUNK_SIZE` is 4,096 in API servers with rings unless the user "
            "sets it, so that streams catch up"
        ),
        f"{_ASYNC_LLM}:AsyncLLM": "gets `sparksched_shutdown_s` when it shuts down",
        f"{_CLIENT}:MPClient": "gets `sparksched_offers`",
        f"{_CLIENT}:BackgroundResources": "gets `sparksched_rings`",
        f"{_CLIENT}:BackgroundResources.engine_dead": (
            "set when the rings report that the engine is dead"
        ),
    },
    relied_on=(
        f"{_CLIENT}:_process_utility_output",
        f"{_CLIENT}:MPClient.ensure_alive",
        f"{_CLIENT}:AsyncMPClient._ensure_output_queue_task",
        f"{_CLIENT}:BackgroundResources",
        f"{_CLIENT}:SyncMPClient.outputs_queue",
        f"{_CLIENT}:AsyncMPClient.outputs_queue",
        f"{_CLIENT}:DPLBAsyncMPClient.process_engine_outputs",
        f"{_ASYNC_LLM}:AsyncLLM.abort",
        f"{_ASYNC_LLM}:AsyncLLM.errored",
        f"{_ASYNC_LLM}:AsyncLLM.output_handler",
        f"{_ASYNC_LLM}:AsyncLLM._run_output_handler",
        f"{_OUTPUT}:OutputProcessor.propagate_error",
        "vllm.v1.serial_utils:MsgpackDecoder",
        "vllm.v1.engine.exceptions:EngineDeadError",
    ),
)

OUTPUTS: Final = Group(
    name="outputs",
    process=_API_SERVER,
    off="`SPARKSCHED_FRONT_END=vllm`",
    gain="API servers need less CPU time per token",
    instead="outputs are processed by vLLM's own code",
    is_on=environment.replaces_front_end,
    bypasses=True,
    prepare="output_processor:prepare",
    functions=(
        Seam(
            f"{_OUTPUT}:RequestOutputCollector.put",
            "request_collector:_waking_the_consumer",
            "lets streams wait on a future, not an event",
        ),
        Seam(
            f"{_OUTPUT}:RequestOutputCollector.get",
            "request_collector:_waiting_for_a_future",
            "the same",
        ),
        Seam(
            f"{_OUTPUT}:OutputProcessor.process_outputs",
            "output_processor:_looping_over_plain_outputs",
            "handles plain outputs in one flat loop, and appends to those that still wait",
        ),
    ),
    values={
        f"{_OUTPUT}:RequestOutputCollector": "gets `plain_output` and what its consumer waits for",
        f"{_OUTPUT}:RequestState": "gets `sparksched_is_plain` and `sparksched_extends_output`",
    },
    relied_on=(
        f"{_OUTPUT}:OutputProcessor",
        f"{_OUTPUT}:RequestOutputCollector",
        f"{_OUTPUT}:RequestState",
        f"{_STATS}:IterationStats",
        f"{_STATS}:RequestStateStats",
        "vllm.outputs:RequestOutput",
        "vllm.outputs:CompletionOutput",
        "vllm.v1.engine:EngineCoreOutput",
        "vllm.v1.engine.logprobs:LogprobsProcessor",
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer",
        "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer",
        "vllm.v1.engine.parallel_sampling:ParentRequest.get_outputs",
    ),
)

_RESPONSES: Final = "vllm.entrypoints.openai.responses.serving"

FAILURES: Final = Group(
    name="failures",
    process=_API_SERVER,
    off="`VLLM_SCHEDULER=vllm`",
    gain="errors of `/v1/responses` reach the client",
    instead="errors of `/v1/responses` in the background are told to nobody",
    prepare="failures:prepare",
    functions=(
        Seam(
            f"{_RESPONSES}:OpenAIServingResponses._run_background_request",
            "failures:_failing_in_the_background",
            "marks the stored response `failed` on an error; in vLLM it stays `queued`",
        ),
        Seam(
            f"{_RESPONSES}:OpenAIServingResponses.responses_stream_generator",
            "failures:_ending_with_the_error",
            "sends an error as the event `response.failed`; vLLM breaks the connection",
        ),
        Seam(
            f"{_RESPONSES}:OpenAIServingResponses.responses_background_stream_generator",
            "failures:_ending_streams_of_the_background",
            "ends the stream with that event; in vLLM it never ends",
        ),
    ),
    values={
        "vllm.entrypoints.anthropic.api_router:logger": (
            "gets a filter, as does that of `serving`: no traceback of a 503 of `/v1/messages`"
        ),
    },
    relied_on=("vllm.entrypoints.openai.responses.protocol:ResponsesResponse",),
)

METRICS_PAGE: Final = Group(
    name="metrics_page",
    process=_API_SERVER,
    off="`SPARKSCHED_METRICS=0`",
    gain="`/metrics` has our series",
    instead="there will be no metrics of engines",
    is_on=environment.shows_metrics,
    after=("vllm.entrypoints.serve.instrumentator.metrics",),
    any_release=True,
    prepare="metrics:prepare",
    functions=(
        Seam(
            "prometheus_client.multiprocess:MultiProcessCollector.collect",
            "metrics:_with_engines",
            "adds our series with several API servers, under any version of vLLM; a single one "
            "registers them beside vLLM's",
        ),
    ),
)

GROUPS: Final = (
    CHOICE,
    NATIVE_ENGINE,
    ARRIVAL,
    ENGINE_TRANSPORT,
    CLIENT_TRANSPORT,
    OUTPUTS,
    FAILURES,
    METRICS_PAGE,
)
