"""What sparksched supports: vLLM's versions, structures and configurations.

Support is an allow-list. Everything here answers one question, "may the native scheduler
run?", with None for yes or with an `Unsupported` that names the first thing in the way.
vLLM's modules are imported only inside the functions that look at them.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sparksched import environment, releases

if TYPE_CHECKING:
    import msgspec
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A reason for which vLLM's own scheduler has to serve."""

    feature: str
    """The short name under which a user knows the feature."""
    reason: str
    """What is in the way and, if there is one, the way out: one sentence, no full stop."""


# ----------------------------------------------------------------------------------------
# All checks, and what a failed one leads to
# ----------------------------------------------------------------------------------------


def first_unsupported(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    block_size: int,
    hash_block_size: int | None = None,
) -> Unsupported | None:
    """Return the first thing that keeps the native scheduler from running, else None."""
    return unsupported_before_loading(vllm_config) or unsupported_kv_cache(
        kv_cache_config, block_size, hash_block_size, vllm_config
    )


def unsupported_before_loading(vllm_config: "VllmConfig") -> Unsupported | None:
    """Return what of it is known before the model is loaded, which its KV cache waits for."""
    # In this order, because each check leans on what the one before it has established.
    return unsupported_version() or unsupported_shapes() or unsupported_config(vllm_config)


def refuse(problem: Unsupported) -> None:
    """Log the fallback to vLLM's own scheduler as one WARNING; in strict mode, raise instead."""
    note_refusal(problem)
    refusal = f"{problem.feature} is not supported: {problem.reason}"
    warn_or_raise(
        warning=f"sparksched: using vLLM's own scheduler: {refusal}",
        error=f"sparksched: {refusal}",
    )


_refused: Unsupported | None = None


def note_refusal(problem: Unsupported) -> None:
    """Remember what has led to vLLM's own scheduler in this process."""
    global _refused  # noqa: PLW0603 - an engine has one scheduler, and a process one engine
    _refused = problem


def refused() -> Unsupported | None:
    """Return the last that has led to vLLM's own scheduler in this process, or None."""
    return _refused


def warn_or_raise(warning: str, error: str) -> None:
    """Log `warning`; in strict mode, raise RuntimeError with `error` and the way out of it."""
    if environment.is_strict():
        raise RuntimeError(
            f"{error} ({environment.STRICT}=1 makes this an error; "
            f"unset it or set it to 0 to run with vLLM's own choice and a warning)"
        )
    from vllm.logger import init_logger

    # vLLM configures only the logger `vllm`: from any other name the line would not
    # reach vLLM's handlers.
    init_logger("vllm.sparksched").warning("%s", warning)


def stock_scheduler_cls(vllm_config: "VllmConfig") -> type[Any]:
    """Return the scheduler that vLLM chooses for this configuration if nobody asks for another."""
    is_diffusion = vllm_config.diffusion_config is not None
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    return _resolve(_STOCK_SCHEDULERS[is_diffusion, is_async])


# By whether the model is a diffusion model, and whether scheduling is asynchronous.
_STOCK_SCHEDULERS: Final = {
    (False, False): "vllm.v1.core.sched.scheduler.Scheduler",
    (False, True): "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    (True, False): "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler",
    (True, True): "vllm.v1.core.sched.diffusion_scheduler.DiffusionAsyncScheduler",
}


def _resolve(qualified_name: str) -> type[Any]:
    module_name, _, name = qualified_name.rpartition(".")
    cls: type[Any] = getattr(importlib.import_module(module_name), name)
    return cls


# ----------------------------------------------------------------------------------------
# vLLM's version
# ----------------------------------------------------------------------------------------


def unsupported_version() -> Unsupported | None:
    """Accept the supported releases in every local build of theirs, such as `0.32.0+cpu`."""
    from vllm.version import __version__

    if releases.installed() in releases.SUPPORTED:
        return None
    return Unsupported(
        f"vLLM {__version__}",
        f"sparksched knows vLLM {' and '.join(releases.SUPPORTED)}; "
        "install one of these or a sparksched made for your version",
    )


# ----------------------------------------------------------------------------------------
# The shapes of vLLM's structures
# ----------------------------------------------------------------------------------------

_REQUIRED: Final = "a field without a default"
_ANY: Final = "a default that decides nothing"

_Shape = Mapping[str, object]
_ShapeReader = Callable[[type[Any]], _Shape]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _required(names: str) -> dict[str, object]:
    return dict.fromkeys(_names(names), _REQUIRED)


def _any(names: str) -> dict[str, object]:
    return dict.fromkeys(_names(names), _ANY)


_SCHEDULER_CONFIG: Final = _any(
    """
    runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs
    max_num_active_seqs long_prefill_token_threshold long_prefill_token_threshold_adaptive
    max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill is_multimodal_model
    max_num_encoder_input_tokens encoder_cache_size policy disable_chunked_mm_input
    scheduler_cls disable_hybrid_kv_cache_manager scheduler_reserve_full_isl watermark
    prefill_schedule_interval async_scheduling stream_interval
    """
)

_CACHE_CONFIG: Final = _any(
    """
    block_size user_specified_block_size kv_cache_layout prefix_match_unit
    gpu_memory_utilization cache_dtype is_attention_free num_gpu_blocks_override
    sliding_window enable_prefix_caching prefix_caching_hash_algo
    prefix_cache_retention_interval kv_cache_dtype_skip_layers mamba_page_size_padded
    skip_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype
    mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len
    use_replayssm use_kda_recoverssm num_gpu_blocks num_cpu_blocks
    effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency
    hash_block_size cache_hit_alignment_tokens kv_sharing_fast_prefill swa_bounded_replay
    kv_cache_memory_bytes kv_offloading_size kv_offloading_backend _block_size_resolved
    """
)

_ATTENTION_SPEC: Final = _any(
    """
    block_size dcp_sharded block_stride_alignment max_tp_shards num_kv_heads head_size
    dtype head_size_v kv_quant_mode page_size_padded num_head_slots state_content_bytes
    tokens_per_state
    """
)

_LATENT_ATTENTION_SPEC: Final = {
    **_ATTENTION_SPEC,
    **_any(
        """
        sliding_window attention_chunk_size non_causal cache_dtype_str alignment
        model_version cache_role is_index_group_leader non_causal_multi_token_decode
        """
    ),
}

_PREFIX_CACHE_STATS: Final = {"reset": False, "requests": 0, "queries": 0, "hits": 0}

# The tables are those of vLLM 0.32.0; what later releases have added is in `_ADDED`, below.

# Fields in their order, with their defaults where sparksched relies on them: it builds
# these structures by position and leaves trailing fields at their defaults.
_STRUCTURES: Final[Mapping[str, _Shape]] = {
    "vllm.v1.core.sched.output.SchedulerOutput": {
        **_required(
            """
            scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
            total_num_scheduled_tokens scheduled_spec_decode_tokens
            scheduled_encoder_inputs finished_req_ids free_encoder_mm_hashes
            """
        ),
        "scheduled_encoder_input_stats": None,
        "preempted_req_ids": None,
        "has_structured_output_requests": False,
        "pending_structured_output_tokens": False,
        "num_invalid_spec_tokens": None,
        "kv_connector_metadata": None,
        "has_sync_kv_loads": False,
        "aux_output_connector_metadata": None,
        "ec_connector_metadata": None,
        "ec_manager_metadata": None,
        "new_block_ids_to_zero": None,
        "kv_cache_block_copies": None,
        "kv_connector_block_state": None,
        "num_spec_tokens_to_schedule": 0,
        "num_common_prefix_blocks": list,
    },
    "vllm.v1.core.sched.output.CachedRequestData": _required(
        """
        req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids
        num_computed_tokens num_output_tokens
        """
    ),
    "vllm.v1.core.sched.output.NewRequestData": {
        **_required(
            """
            req_id prompt_token_ids mm_features sampling_params pooling_params block_ids
            num_computed_tokens lora_request
            """
        ),
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "prefill_token_ids": None,
        "replay_start": 0,
    },
    "vllm.v1.core.sched.output.GrammarOutput": {
        **_required("structured_output_request_ids grammar_bitmask"),
        "num_acceptable_drafts": None,
    },
    "vllm.v1.outputs.ModelRunnerOutput": {
        **_required("req_ids req_id_to_index"),
        "sampled_token_ids": list,
        "logprobs": None,
        "prompt_logprobs_dict": dict,
        "prompt_token_id_logprobs_dict": dict,
        "pooler_output": None,
        "kv_connector_output": None,
        "ec_connector_output": None,
        "num_nans_in_logits": None,
        "cudagraph_stats": None,
        "aux_output_connector_output": None,
        "sampling_masks": None,
    },
    "vllm.v1.engine.EngineCoreOutput": {
        **_required("request_id new_token_ids"),
        "new_logprobs": None,
        "new_prompt_logprobs_tensors": None,
        "pooling_output": None,
        "finish_reason": None,
        "stop_reason": None,
        "events": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "trace_headers": None,
        "prefill_stats": None,
        "routed_experts": None,
        "num_nans_in_logits": 0,
        "mm_cache_miss_hashes": None,
        "new_sampling_mask": None,
        "spec_decode_metrics": None,
        "prompt_token_id_logprobs": None,
    },
    "vllm.v1.engine.EngineCoreOutputs": {
        "engine_index": 0,
        "outputs": list,
        "scheduler_stats": None,
        "timestamp": 0.0,
        "utility_output": None,
        "finished_requests": None,
        "wave_complete": None,
        "start_wave": None,
        "weight_version": None,
    },
    "vllm.v1.engine.EngineCoreEvent": _required("type timestamp"),
    "vllm.v1.metrics.stats.SchedulerStats": {
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "num_skipped_waiting_reqs": 0,
        "num_kv_fetch_reqs_by_stage": dict,
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": 0.0,
        "iteration_details": None,
        "prefix_cache_stats": _ANY,
        "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": list,
        "spec_decoding_stats": None,
        "kv_connector_stats": None,
        "ec_connector_stats": None,
        "waiting_lora_adapters": dict,
        "running_lora_adapters": dict,
        "cudagraph_stats": None,
        "perf_stats": None,
    },
    "vllm.v1.metrics.stats.BaseCacheStats": _PREFIX_CACHE_STATS,
    "vllm.v1.metrics.stats.PrefixCacheStats": {
        **_PREFIX_CACHE_STATS,
        "preempted_requests": 0,
        "preempted_queries": 0,
        "preempted_hits": 0,
        "hits_by_source": dict,
    },
    "vllm.v1.metrics.stats.PrefillStats": {
        "num_prompt_tokens": 0,
        "num_computed_tokens": 0,
        "num_cached_tokens": 0,
        "num_local_cached_tokens": 0,
        "num_external_cached_tokens": 0,
        "num_cache_creation_tokens": 0,
    },
    "vllm.v1.metrics.stats.RequestSpecDecodeMetrics": {
        "num_spec_tokens": _REQUIRED,
        "histogram": list,
        "num_draft_tokens": 0,
        "per_step_accepted": list,
        "per_step_drafted": list,
    },
    "vllm.v1.spec_decode.metrics.SpecDecodingStats": {
        "num_spec_tokens": _REQUIRED,
        "num_drafts": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "num_accepted_tokens_per_pos": list,
        "num_draft_tokens_per_pos": list,
    },
    "vllm.distributed.kv_events.BlockStored": {
        **_required("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name"),
        "extra_keys": None,
        "group_idx": None,
        "kv_cache_spec_kind": None,
        "kv_cache_spec_sliding_window": None,
        "locality": None,
        "ownership": None,
        "session_id": None,
    },
    "vllm.v1.outputs.DraftTokenIds": _required("req_ids draft_token_ids"),
    "vllm.v1.kv_cache_interface.KVCacheConfig": _any(
        """
        num_blocks kv_cache_tensors kv_cache_groups prefix_cache_retention_interval
        kv_cache_layout hash_block_size cache_hit_alignment_tokens hisparse_host_num_blocks
        hisparse_host_block_stride hisparse_shared_host_pool kv_tp_replicas
        """
    ),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": _any(
        "layer_names kv_cache_spec is_eagle_group host_resident enable_kv_transfer role"
    ),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": {
        **_ATTENTION_SPEC,
        **_any("sliding_window attention_chunk_size non_causal"),
    },
    "vllm.v1.kv_cache_interface.MLAAttentionSpec": _LATENT_ATTENTION_SPEC,
    "vllm.v1.kv_cache_interface.HiddenStateCacheSpec": _LATENT_ATTENTION_SPEC,
    "vllm.v1.kv_cache_interface.ChunkedLocalAttentionSpec": {
        **_ATTENTION_SPEC,
        **_any("attention_chunk_size"),
    },
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": {
        **_ATTENTION_SPEC,
        **_any("sliding_window extra_retained_tokens"),
    },
    "vllm.v1.kv_cache_interface.SlidingWindowMLASpec": {
        **_ATTENTION_SPEC,
        **_any(
            """
            sliding_window extra_retained_tokens cache_dtype_str alignment model_version
            bounded_replay
            """
        ),
    },
    "vllm.config.scheduler.SchedulerConfig": _SCHEDULER_CONFIG,
    "vllm.config.cache.CacheConfig": _CACHE_CONFIG,
    # The scheduler reads few of these, but any new one may be a new way to stop.
    "vllm.sampling_params.SamplingParams": _any(
        """
        n presence_penalty frequency_penalty repetition_penalty temperature watermarking
        top_p top_k min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs
        prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprob_token_ids
        flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
        include_stop_str_in_output output_kind stream_interval skip_clone
        output_text_buffer_length _eos_token_id _all_stop_token_ids _watermarking_skipped
        structured_outputs logit_bias allowed_token_ids extra_args bad_words
        _bad_words_token_ids skip_reading_prefix_cache thinking_token_budget
        repetition_detection routed_experts_prompt_start trace_decode_token_ids
        """
    ),
    "vllm.sampling_params.RepetitionDetectionParams": _any(
        "max_pattern_size min_pattern_size min_count"
    ),
}

# Members and their values: these numbers cross the process boundary and are compared by size.
_ENUMS: Final[Mapping[str, _Shape]] = {
    "vllm.v1.request.RequestStatus": {
        "WAITING": 1,
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": 2,
        "WAITING_FOR_REMOTE_KVS": 3,
        "WAITING_FOR_STREAMING_REQ": 4,
        "RUNNING": 5,
        "PREEMPTED": 6,
        "FINISHED_STOPPED": 7,
        "FINISHED_LENGTH_CAPPED": 8,
        "FINISHED_ABORTED": 9,
        "FINISHED_IGNORED": 10,
        "FINISHED_ERROR": 11,
        "FINISHED_REPETITION": 12,
    },
    "vllm.v1.engine.FinishReason": {
        "STOP": 0,
        "LENGTH": 1,
        "ABORT": 2,
        "ERROR": 3,
        "REPETITION": 4,
    },
    "vllm.v1.engine.EngineCoreEventType": {"QUEUED": 1, "SCHEDULED": 2, "PREEMPTED": 3},
    "vllm.v1.core.sched.interface.PauseState": {
        "UNPAUSED": 0,
        "PAUSED_NEW": 1,
        "PAUSED_ALL": 2,
    },
}

_FUNCTIONS: Final[Mapping[str, _Shape]] = {
    "vllm.v1.core.kv_cache_utils.get_request_block_hasher": _any("hash_block_size caching_hash_fn"),
}

_CONSTRUCTORS: Final[Mapping[str, _Shape]] = {
    "vllm.v1.request.Request": _any(
        """
        request_id prompt_token_ids sampling_params pooling_params client_index arrival_time
        prompt_embeds prompt_is_token_ids mm_features lora_request cache_salt priority
        trace_headers block_hasher resumable session_id reasoning_ended
        reasoning_parser_kwargs abort_immediately kv_hints
        """
    ),
    "vllm.v1.core.sched.scheduler.Scheduler": _any(
        """
        vllm_config kv_cache_config structured_output_manager block_size hash_block_size
        mm_registry include_finished_set log_stats
        """
    ),
}

_ABSTRACT_METHODS: Final[Mapping[str, _Shape]] = {
    "vllm.v1.core.sched.interface.SchedulerInterface": _any(
        """
        __init__ add_request finish_requests get_grammar_bitmask get_num_unfinished_requests
        get_request_counts has_finished_requests make_stats pause_state reset_encoder_cache
        reset_prefix_cache schedule set_pause_state shutdown update_draft_token_ids
        update_draft_token_ids_in_output update_from_output
        """
    ),
}


@dataclass(frozen=True, slots=True)
class _Added:
    """What a release has added to a shape, and the name that it stands behind."""

    behind: str
    shape: _Shape


_DRAFT_FLAG: Final = _Added("block_stride_alignment", _any("is_draft"))
_TOP_K_BUFFER: Final = _Added("cache_dtype_str", _any("topk_buffer_width"))

# By release and structure, those of `output_processor` among them. None has taken anything away
# or changed an order so far.
_ADDED: Final[Mapping[str, Mapping[str, tuple[_Added, ...]]]] = {
    "0.33.0": {
        "vllm.v1.core.sched.output.SchedulerOutput": (
            _Added("free_encoder_mm_hashes", {"encoder_input_updates": dict}),
            _Added("num_common_prefix_blocks", {"skip_drafts": False}),
        ),
        "vllm.v1.engine.EngineCoreOutput": (_Added("prompt_token_id_logprobs", {"error": None}),),
        "vllm.distributed.kv_events.BlockStored": (
            _Added("session_id", {"lookahead_token_ids": None}),
        ),
        "vllm.v1.kv_cache_interface.FullAttentionSpec": (_DRAFT_FLAG,),
        "vllm.v1.kv_cache_interface.MLAAttentionSpec": (_DRAFT_FLAG, _TOP_K_BUFFER),
        "vllm.v1.kv_cache_interface.HiddenStateCacheSpec": (_DRAFT_FLAG, _TOP_K_BUFFER),
        "vllm.v1.kv_cache_interface.ChunkedLocalAttentionSpec": (_DRAFT_FLAG,),
        "vllm.v1.kv_cache_interface.SlidingWindowSpec": (_DRAFT_FLAG,),
        "vllm.v1.kv_cache_interface.SlidingWindowMLASpec": (_DRAFT_FLAG,),
        "vllm.config.cache.CacheConfig": (
            _Added("num_cpu_blocks", _any("simple_cpu_offload_num_blocks")),
        ),
        "vllm.v1.metrics.stats.IterationStats": (
            _Added("iteration_timestamp", _any("compute_nans_in_logits")),
        ),
        "vllm.v1.core.kv_cache_utils.get_request_block_hasher": (
            _Added("caching_hash_fn", _any("num_hash_lookahead_tokens")),
        ),
        "vllm.v1.core.sched.interface.SchedulerInterface": (
            _Added("has_finished_requests", _any("has_request")),
        ),
    },
}


def known_shape(qualified_name: str, shape: _Shape) -> _Shape:
    """Return a shape of the tables as it is in the installed release."""
    for release, additions in _ADDED.items():
        if releases.is_since(release):
            for added in additions.get(qualified_name, ()):
                shape = _with_added(shape, added)
    return shape


def _with_added(shape: _Shape, added: _Added) -> _Shape:
    extended: dict[str, object] = {}
    for name, value in shape.items():
        extended[name] = value
        if name == added.behind:
            extended |= added.shape
    return extended


def unsupported_shapes() -> Unsupported | None:
    """Compare the structures that sparksched reads or builds with those that it knows."""
    for noun, known_shapes, shape_of in _SHAPE_TABLES:
        for qualified_name, shape in known_shapes.items():
            known = known_shape(qualified_name, shape)
            difference = _shape_difference(qualified_name, known, noun, shape_of)
            if difference is not None:
                return Unsupported(f"vLLM's {qualified_name.rpartition('.')[2]}", difference)
    return None


def _shape_difference(
    qualified_name: str, known: _Shape, noun: str, shape_of: _ShapeReader
) -> str | None:
    try:
        cls = _resolve(qualified_name)
    except (ImportError, AttributeError):
        return f"is not found where sparksched looks for it ({qualified_name})"
    return _difference(shape_of(cls), known, noun)


def _difference(found: _Shape, known: _Shape, noun: str) -> str | None:
    """Return in words how a shape departs from the known one, None if it doesn't."""
    for name in found:
        if name not in known:
            return f"has a {noun} {name!r} that sparksched does not know"
    for name in known:
        if name not in found:
            return f"lacks the {noun} {name!r} that sparksched relies on"
    if list(found) != list(known):
        return f"has each {noun} that sparksched knows, but in another order"
    for name, value in known.items():
        if value is not _ANY and (type(found[name]), found[name]) != (type(value), value):
            return (
                f"has {found[name]!r} as the value of its {noun} {name!r}, "
                f"where sparksched knows {value!r}"
            )
    return None


def _structure_shape(cls: type[Any]) -> _Shape:
    if dataclasses.is_dataclass(cls):
        return {field.name: _dataclass_default(field) for field in dataclasses.fields(cls)}
    import msgspec

    return {field.name: _struct_default(field) for field in msgspec.structs.fields(cls)}


def _dataclass_default(field: "dataclasses.Field[Any]") -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return _REQUIRED


def _struct_default(field: "msgspec.structs.FieldInfo") -> object:
    import msgspec

    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory
    return _REQUIRED


def _enum_shape(cls: type[Any]) -> _Shape:
    return {name: member.value for name, member in cls.__members__.items()}


def _signature_shape(function: Callable[..., Any]) -> _Shape:
    return dict.fromkeys(inspect.signature(function).parameters, _ANY)


def _abstract_methods_shape(cls: type[Any]) -> _Shape:
    return dict.fromkeys(sorted(cls.__abstractmethods__), _ANY)


_SHAPE_TABLES: Final[
    tuple[tuple[str, Mapping[str, _Shape], Callable[[type[Any]], _Shape]], ...]
] = (
    ("field", _STRUCTURES, _structure_shape),
    ("member", _ENUMS, _enum_shape),
    ("parameter", _FUNCTIONS, _signature_shape),
    ("constructor parameter", _CONSTRUCTORS, _signature_shape),
    ("required method", _ABSTRACT_METHODS, _abstract_methods_shape),
)


# ----------------------------------------------------------------------------------------
# The configuration
# ----------------------------------------------------------------------------------------


def _manages_blocks(transfer_config: "KVTransferConfig") -> bool:
    """Whether a KV connector asks for vLLM's block pool, or there is none as it is described.

    In the latter case vLLM's own scheduler is the one to say so.
    """
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    try:
        if transfer_config.kv_connector == "MultiConnector":
            parts = transfer_config.kv_connector_extra_config.get("connectors", ())
            return any(_manages_blocks(KVTransferConfig(**part)) for part in parts)
        connector_cls = KVConnectorFactory.get_connector_class(transfer_config)
    except Exception:
        return True
    binding = ("bind_kv_cache_manager", "bind_gpu_block_pool", "register_finished_partial_tail")
    return any(
        getattr(connector_cls, name) is not getattr(KVConnectorBase_V1, name) for name in binding
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """A feature that is left to vLLM's own scheduler, and how to see that it is in use."""

    feature: str
    reason: str
    applies: Callable[[Any], bool]

    def problem(self) -> Unsupported:
        return Unsupported(self.feature, self.reason)


DIFFUSION: Final = Unsupported(
    "diffusion", "diffusion language models decode a canvas, not one token after the other"
)

_TOO_MANY: Final = 2**31

_CONFIG_RULES: Final = (
    _Rule(
        "running without a model configuration",
        "the scheduler takes its limits from it",
        lambda config: config.model_config is None,
    ),
    _Rule(
        DIFFUSION.feature,
        DIFFUSION.reason,
        lambda config: config.diffusion_config is not None or config.model_config.is_diffusion,
    ),
    _Rule(
        "an encoder-decoder model",
        "only decoder-only models are supported",
        lambda config: config.model_config.is_encoder_decoder,
    ),
    _Rule(
        "this kind of model",
        "only text generation and pooling are supported (--runner)",
        lambda config: (
            config.model_config.runner_type not in ("generate", "pooling")
            or config.scheduler_config.runner_type not in ("generate", "pooling")
        ),
    ),
    _Rule(
        "an encoder-only instance",
        "it publishes embeddings and generates nothing",
        lambda config: config.is_mm_encoder_only,
    ),
    _Rule(
        "LoRA with pipeline parallelism",
        "vLLM counts the adapters of a step wrongly then; vLLM 0.33.0 doesn't",
        lambda config: (
            not releases.is_since("0.33.0")
            and config.lora_config is not None
            and config.parallel_config.pipeline_parallel_size > 1
        ),
    ),
    _Rule(
        "a KV connector that manages blocks itself",
        "it takes vLLM's block pool into its own hands, and sparksched has another one",
        lambda config: (
            config.kv_transfer_config is not None and _manages_blocks(config.kv_transfer_config)
        ),
    ),
    _Rule(
        "an EC connector",
        "transfer of encoder outputs takes part in scheduling",
        lambda config: config.ec_transfer_config is not None,
    ),
    _Rule(
        "decode context parallelism",
        "KV blocks that are spread over ranks are managed only by vLLM's own scheduler",
        lambda config: config.parallel_config.decode_context_parallel_size > 1,
    ),
    _Rule(
        "prefill context parallelism",
        "prefills that are spread over ranks are scheduled only by vLLM's own scheduler",
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
    ),
    _Rule(
        "elastic expert parallelism",
        "engines that join and leave are known only to vLLM's own scheduler",
        lambda config: config.parallel_config.enable_elastic_ep,
    ),
    _Rule(
        # Of the scheduler, recovery asks only for finish_requests(None). But it may have
        # been the scheduler that failed, in mid-step, and the steps in flight are dropped:
        # the loop goes on with a scheduler to which no output of theirs ever comes back.
        # vLLM offers it for data-parallel mixture-of-experts deployments alone.
        "fault tolerance",
        "after a fault the engine continues with steps whose outputs never arrive",
        lambda config: config.parallel_config.enable_fault_tolerance,
    ),
    _Rule(
        "prompt embedding input",
        "prompts must be token ids; start without --enable-prompt-embeds to use sparksched",
        lambda config: config.model_config.enable_prompt_embeds,
    ),
    _Rule(
        "auxiliary output",
        "routed experts are collected only by vLLM's own scheduler; "
        "start without --enable-return-routed-experts to use sparksched",
        lambda config: config.aux_output_config.enabled,
    ),
    _Rule(
        "returning sampling masks",
        "only vLLM's own scheduler passes them on; "
        "start without --return-sampling-mask to use sparksched",
        lambda config: config.model_config.return_sampling_mask,
    ),
    _Rule(
        "measuring MFU",
        "it is computed only by vLLM's own scheduler; "
        "start without --enable-mfu-metrics to use sparksched",
        lambda config: config.observability_config.enable_mfu_metrics,
    ),
    _Rule(
        "HiSparse",
        "its host-resident KV cache has a block pool of its own",
        lambda config: config.attention_config.hisparse_config is not None,
    ),
    _Rule(
        "Mamba or linear attention",
        "only models whose layers all have attention with a KV cache are supported",
        lambda config: (
            config.model_config.is_hybrid
            or config.model_config.has_inner_state
            or config.model_config.is_attention_free
            or config.cache_config.is_attention_free
        ),
    ),
    _Rule(
        "this scheduling policy",
        "only fcfs and priority are supported (--scheduling-policy)",
        lambda config: config.scheduler_config.policy not in ("fcfs", "priority"),
    ),
    _Rule(
        "this prefix caching hash",
        "only sha256, sha256_cbor, xxhash and xxhash_cbor are supported "
        "(--prefix-caching-hash-algo)",
        lambda config: (
            config.cache_config.prefix_caching_hash_algo
            not in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
        ),
    ),
    _Rule(
        "a limit of 2^31 or more",
        "the Rust core counts tokens and requests in 32 bits",
        lambda config: any(
            limit is not None and limit >= _TOO_MANY
            for limit in (
                config.model_config.max_model_len,
                config.scheduler_config.max_num_batched_tokens,
                config.scheduler_config.max_num_scheduled_tokens,
                config.scheduler_config.max_num_seqs,
                config.cache_config.prefix_cache_retention_interval,
            )
        ),
    ),
)

# The settings that are known: each is supported as it is, checked by a rule above, seen in
# the KV cache configuration, or of no concern to the scheduler (it configures the front end,
# the executor or the workers).
_KNOWN_SETTINGS: Final[Mapping[str, Container[str]]] = {
    "": _names(
        """
        model_config cache_config parallel_config scheduler_config device_config load_config
        offload_config attention_config aux_output_config engram_config mamba_config
        kernel_config lora_config speculative_config watermark_config diffusion_config
        structured_outputs_config observability_config logging_config quant_config
        compilation_config profiler_config kv_transfer_config kv_events_config
        ec_transfer_config ec_manager_config reasoning_config additional_config instance_id
        optimization_level performance_mode weight_transfer_config shutdown_timeout
        """
        # Since 0.33.0.
        "watchdog_config"
    ),
    "scheduler_config": _SCHEDULER_CONFIG,
    # The last one since 0.33.0. It says how large a KV connector's pool is.
    "cache_config": (*_CACHE_CONFIG, "simple_cpu_offload_num_blocks"),
    "parallel_config": _names(
        """
        pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size
        data_parallel_size data_parallel_size_local data_parallel_rank
        data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port
        dp_sync_interval data_parallel_master_port data_parallel_backend
        data_parallel_external_lb data_parallel_hybrid_lb is_moe_model enable_hc_sp
        enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter
        enable_eplb eplb_config expert_placement_strategy all2all_backend
        max_parallel_loading_workers disable_custom_all_reduce enable_shm_tensor_arena
        enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size
        dbo_decode_token_threshold dbo_prefill_token_threshold
        disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env
        placement_group distributed_executor_backend worker_cls worker_extension_cls
        master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus
        assigned_physical_gpu_ids distributed_timeout_seconds
        cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list
        _coord_store_port decode_context_parallel_size dcp_kv_cache_interleave_size
        dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size
        _allow_auto_resolve_cp_interleave_size data_parallel_index _api_process_count
        _api_process_rank enable_fault_tolerance fault_tolerance_config
        """
    ),
    "observability_config": _names(
        """
        show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
        per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
        custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
        enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details
        jit_monitor_mode jit_monitor_verbose
        """
    ),
}


def unsupported_config(vllm_config: "VllmConfig") -> Unsupported | None:
    """Return the first feature in the configuration that the native scheduler lacks, else None."""
    for rule in _CONFIG_RULES:
        if rule.applies(vllm_config):
            return rule.problem()
    return _unknown_setting(vllm_config)


def _unknown_setting(vllm_config: "VllmConfig") -> Unsupported | None:
    """Find a setting that sparksched doesn't know and that somebody has changed."""
    for section, known in _KNOWN_SETTINGS.items():
        config = getattr(vllm_config, section) if section else vllm_config
        for field in dataclasses.fields(config):
            if field.name not in known and getattr(config, field.name) != _setting_default(field):
                path = f"{section}.{field.name}" if section else field.name
                return Unsupported(
                    f"the setting {path}",
                    "sparksched does not know it; leave it at its default to use sparksched",
                )
    return None


def _setting_default(field: "dataclasses.Field[Any]") -> object:
    default: Any = field.default
    if hasattr(default, "get_default"):  # pydantic keeps its own description of a field there
        value: object = default.get_default(call_default_factory=True)
        return value
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


# ----------------------------------------------------------------------------------------
# The KV cache
# ----------------------------------------------------------------------------------------

# The block hashes that pickle has a part in are computed over one pickle frame: a token
# takes up to five bytes in it, the rest of the record less than the margin.
_PICKLE_FRAME_BYTES: Final = 64 * 1024
_PICKLED_TOKEN_BYTES: Final = 5
_PICKLE_MARGIN_BYTES: Final = 128


def room_for_extra_keys(num_tokens: int) -> int:
    """Return how many bytes a block's hash may cover besides tokens; negative: not even those."""
    pickled_bytes = num_tokens * _PICKLED_TOKEN_BYTES + _PICKLE_MARGIN_BYTES
    return _PICKLE_FRAME_BYTES - 1 - pickled_bytes


_SPEC_MANAGERS: Final = {
    "FullAttentionSpec": "FullAttentionManager",
    "HiddenStateCacheSpec": "FullAttentionManager",
    "MLAAttentionSpec": "FullAttentionManager",
    "ChunkedLocalAttentionSpec": "ChunkedLocalAttentionManager",
    "SlidingWindowSpec": "SlidingWindowManager",
    "SlidingWindowMLASpec": "SlidingWindowManager",
}

_KV_CACHE_RULES: Final = (
    _Rule(
        "Mamba or linear attention",
        "only models whose layers all have attention with a KV cache are supported",
        lambda kv_cache: kv_cache.has_mamba_layers,
    ),
    _Rule(
        "HiSparse",
        "its host-resident KV cache has a block pool of its own",
        lambda kv_cache: kv_cache.hisparse_host_num_blocks is not None,
    ),
    _Rule(
        "zeroing of new KV cache blocks",
        "a KV cache of mixed precision needs it, and only vLLM's own scheduler asks for it",
        lambda kv_cache: kv_cache.needs_kv_cache_zeroing,
    ),
    _Rule(
        "this prefix cache retention interval",
        "vLLM takes 0 and, for models with sliding-window attention, multiples of the block size",
        lambda kv_cache: _is_refused_by_vllm(
            kv_cache.prefix_cache_retention_interval, kv_cache.kv_cache_groups
        ),
    ),
)


def eagle_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> list[int]:
    """Return the ids of the groups whose last cached block is computed again for the drafter."""
    if not releases.drops_eagle_blocks(vllm_config):
        return []
    return _drafter_groups(vllm_config, kv_cache_config)


def _drafter_groups(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> list[int]:
    """Return the ids of the groups that EAGLE, or another drafter of its kind, takes part in."""
    groups = kv_cache_config.kv_cache_groups
    flagged = [group_id for group_id, group in enumerate(groups) if group.is_eagle_group]
    config = vllm_config.speculative_config
    if not flagged and config is not None and config.use_eagle_block_drop():
        return list(range(len(groups)))
    return flagged


def _has_chunks(groups: "Sequence[KVCacheGroupSpec]") -> bool:
    return any(
        type(group.kv_cache_spec).__name__ == "ChunkedLocalAttentionSpec" for group in groups
    )


def _is_refused_by_vllm(interval: int | None, groups: "Sequence[KVCacheGroupSpec]") -> bool:
    """Whether vLLM's own scheduler would not start: then it is the one to say so."""
    specs = [group.kv_cache_spec for group in groups]
    has_window = any(
        _SPEC_MANAGERS.get(type(spec).__name__) == "SlidingWindowManager" for spec in specs
    )
    if not interval:
        return False
    return not has_window or any(interval % spec.block_size != 0 for spec in specs)


_GROUP_RULES: Final = (
    _Rule(
        "a host-resident KV cache group",
        "it has a block pool of its own",
        lambda group: group.host_resident,
    ),
    _Rule(
        "a KV cache group with a special role",
        "only groups of the default role are supported",
        lambda group: group.role.value != "default",
    ),
    _Rule(
        "a KV cache group outside the prefix cache",
        "every group must be cacheable",
        lambda group: not group.kv_cache_spec.prefix_cacheable,
    ),
    _Rule(
        "prefix replay",
        "only vLLM's own scheduler recomputes the last window after a prefix hit",
        lambda group: group.kv_cache_spec.prefix_replay_tokens != 0,
    ),
    _Rule(
        "this sliding window or chunk",
        "it has at least one token, and fewer than 2^31",
        lambda group: any(
            span is not None and not 1 <= span < _TOO_MANY
            for span in (
                getattr(group.kv_cache_spec, "sliding_window", None),
                getattr(group.kv_cache_spec, "attention_chunk_size", None),
            )
        ),
    ),
)


def unsupported_kv_cache(
    kv_cache_config: "KVCacheConfig",
    block_size: int,
    hash_block_size: int | None,
    vllm_config: "VllmConfig",
) -> Unsupported | None:
    """Return the first property of the KV cache that the native scheduler lacks, else None.

    `block_size` and `hash_block_size` are those that vLLM hands to the scheduler's
    constructor, where no `hash_block_size` means that it is the block size.
    """
    for rule in _KV_CACHE_RULES:
        if rule.applies(kv_cache_config):
            return rule.problem()
    if vllm_config.cache_config.enable_prefix_caching and not kv_cache_config.kv_cache_groups:
        return Unsupported("prefix caching without a KV cache", "there are no blocks to be found")
    has_chunks = _has_chunks(kv_cache_config.kv_cache_groups)
    if has_chunks and _drafter_groups(vllm_config, kv_cache_config):
        return Unsupported(
            "EAGLE with chunked local attention", "vLLM does not combine the two either"
        )
    for group in kv_cache_config.kv_cache_groups:
        problem = _unsupported_group(group)
        if problem is not None:
            return problem
    block_sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if hash_block_size is None:
        hash_block_size = block_size
    return _unsupported_block_sizes(block_sizes | {block_size, hash_block_size}, vllm_config)


def _unsupported_group(group: "KVCacheGroupSpec") -> Unsupported | None:
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import single_type_kv_cache_manager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    spec_cls = type(group.kv_cache_spec)
    # A subclass would be managed by code of its own: only the very classes will do.
    if spec_cls is not getattr(kv_cache_interface, spec_cls.__name__, None) or (
        spec_cls.__name__ not in _SPEC_MANAGERS
    ):
        return Unsupported(
            f"a KV cache of type {spec_cls.__name__}",
            "only full, sliding-window and chunked local attention are supported, "
            "multi-head latent or not",
        )
    for rule in _GROUP_RULES:
        if rule.applies(group):
            return rule.problem()
    manager_cls = KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, role=group.role)
    stock_manager_cls = getattr(single_type_kv_cache_manager, _SPEC_MANAGERS[spec_cls.__name__])
    if manager_cls is not stock_manager_cls:
        return Unsupported(
            "a custom KV cache manager",
            f"{getattr(manager_cls, '__name__', manager_cls)} is registered "
            f"for {spec_cls.__name__} in the place of vLLM's own",
        )
    return None


def _unsupported_block_sizes(sizes: set[int], vllm_config: "VllmConfig") -> Unsupported | None:
    if len(sizes) > 1:
        return Unsupported(
            "KV cache groups with different block sizes",
            "all groups, the scheduler and the prefix cache must use one size, "
            f"not {', '.join(map(str, sorted(sizes)))}",
        )
    (size,) = sizes
    num_hashed_tokens = size + releases.num_hash_lookahead_tokens(vllm_config)
    enable_prefix_caching = vllm_config.cache_config.enable_prefix_caching
    if enable_prefix_caching and room_for_extra_keys(num_hashed_tokens) < 0:
        return Unsupported(
            f"a block size of {size}",
            "blocks of this size are too large to be hashed; choose a smaller --block-size "
            "or start with --no-enable-prefix-caching",
        )
    return None
