"""The shapes of vLLM's structures that sparksched relies on, release by release."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

REQUIRED: Final = "a field without a default"
ANY: Final = "a default that decides nothing"

Shape = Mapping[str, object]
"""Names in their order, and what each stands for: a default, a value."""


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


def _required(names: str) -> dict[str, object]:
    return dict.fromkeys(words(names), REQUIRED)


def _any(names: str) -> dict[str, object]:
    return dict.fromkeys(words(names), ANY)


SCHEDULER_CONFIG: Final = _any(
    """
    runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs
    max_num_active_seqs long_prefill_token_threshold long_prefill_token_threshold_adaptive
    max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill is_multimodal_model
    max_num_encoder_input_tokens encoder_cache_size policy disable_chunked_mm_input
    scheduler_cls disable_hybrid_kv_cache_manager scheduler_reserve_full_isl watermark
    prefill_schedule_interval async_scheduling stream_interval
    """
)

CACHE_CONFIG: Final = _any(
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

# The tables are those of vLLM 0.32.0; what later releases have added is in `ADDED`, below.

# Fields in their order, with their defaults where sparksched relies on them: it builds
# these structures by position and leaves trailing fields at their defaults.
STRUCTURES: Final[Mapping[str, Shape]] = {
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
        "prefix_cache_stats": ANY,
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
        "num_spec_tokens": REQUIRED,
        "histogram": list,
        "num_draft_tokens": 0,
        "per_step_accepted": list,
        "per_step_drafted": list,
    },
    "vllm.v1.spec_decode.metrics.SpecDecodingStats": {
        "num_spec_tokens": REQUIRED,
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
    "vllm.v1.kv_cache_interface.CircularBufferSpec": _ATTENTION_SPEC,
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
    "vllm.config.scheduler.SchedulerConfig": SCHEDULER_CONFIG,
    "vllm.config.cache.CacheConfig": CACHE_CONFIG,
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
ENUMS: Final[Mapping[str, Shape]] = {
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

FUNCTIONS: Final[Mapping[str, Shape]] = {
    "vllm.v1.core.kv_cache_utils.get_request_block_hasher": _any("hash_block_size caching_hash_fn"),
}

CONSTRUCTORS: Final[Mapping[str, Shape]] = {
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

ABSTRACT_METHODS: Final[Mapping[str, Shape]] = {
    "vllm.v1.core.sched.interface.SchedulerInterface": _any(
        """
        __init__ add_request finish_requests get_grammar_bitmask get_num_unfinished_requests
        get_request_counts has_finished_requests make_stats pause_state reset_encoder_cache
        reset_prefix_cache schedule set_pause_state shutdown update_draft_token_ids
        update_draft_token_ids_in_output update_from_output
        """
    ),
}

FRONT_END: Final[Mapping[str, Shape]] = {
    "vllm.v1.engine.output_processor.RequestState": _any(
        """
        request_id external_req_id parent_req request_index lora_request lora_name output_kind
        prompt prompt_token_ids prompt_embeds prompt_len logprobs_processor detokenizer
        max_tokens_param top_p n temperature is_prefilling queue num_cached_tokens
        num_cache_creation_tokens remote_prefill_cached_tokens spec_decode_metrics stats
        routed_experts_chunks sampling_mask_chunks weight_version_starts stream_interval
        sent_tokens_offset streaming_input input_chunk_queue
        """
    ),
    "vllm.v1.engine.logprobs.LogprobsProcessor": _any(
        """
        tokenizer logprobs prompt_logprobs cumulative_logprob num_logprobs num_prompt_logprobs
        prompt_token_id_logprobs
        """
    ),
    "vllm.v1.metrics.stats.RequestStateStats": _any(
        """
        num_generation_tokens num_preemptions arrival_time queued_ts scheduled_ts first_token_ts
        last_token_ts first_token_latency is_corrupted is_watermarked is_watermark_skipped
        """
    ),
    "vllm.v1.metrics.stats.IterationStats": _any(
        """
        iteration_timestamp num_generation_tokens prompt_token_stats num_preempted_reqs
        finished_requests max_num_generation_tokens_iter n_params_iter time_to_first_tokens_iter
        inter_token_latencies_iter num_corrupted_reqs num_watermarked_reqs
        num_watermark_skipped_reqs num_not_watermarked_reqs
        """
    ),
    "vllm.outputs.CompletionOutput": _any(
        """
        index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason
        lora_request sampling_mask spec_decode_metrics weight_versions
        """
    ),
    "vllm.outputs.RequestOutput": _any(
        """
        request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request
        encoder_prompt encoder_prompt_token_ids num_cached_tokens num_cache_creation_tokens
        prompt_token_id_logprobs kv_transfer_params ec_transfer_params kwargs
        """
    ),
    "vllm.v1.engine.output_processor.RequestOutputCollector": _any(
        """
        aggregate request_id output ready _input_stream_task
        """
    ),
}
"""What only the API server's output processing relies on, attributes or parameters: where one is
not as known, outputs are processed by vLLM's code, whoever schedules."""


@dataclass(frozen=True, slots=True)
class Added:
    """What a release has added to a shape, and the name that it stands behind."""

    behind: str
    shape: Shape


_DRAFT_FLAG: Final = Added("block_stride_alignment", _any("is_draft"))
_TOP_K_BUFFER: Final = Added("cache_dtype_str", _any("topk_buffer_width"))

# By release and structure. None has taken anything away
# or changed an order so far.
ADDED: Final[Mapping[str, Mapping[str, tuple[Added, ...]]]] = {
    "0.33.0": {
        "vllm.v1.core.sched.output.SchedulerOutput": (
            Added("free_encoder_mm_hashes", {"encoder_input_updates": dict}),
            Added("num_common_prefix_blocks", {"skip_drafts": False}),
        ),
        "vllm.v1.engine.EngineCoreOutput": (Added("prompt_token_id_logprobs", {"error": None}),),
        "vllm.distributed.kv_events.BlockStored": (
            Added("session_id", {"lookahead_token_ids": None}),
        ),
        "vllm.v1.kv_cache_interface.FullAttentionSpec": (_DRAFT_FLAG,),
        "vllm.v1.kv_cache_interface.MLAAttentionSpec": (_DRAFT_FLAG, _TOP_K_BUFFER),
        "vllm.v1.kv_cache_interface.HiddenStateCacheSpec": (_DRAFT_FLAG, _TOP_K_BUFFER),
        "vllm.v1.kv_cache_interface.ChunkedLocalAttentionSpec": (_DRAFT_FLAG,),
        "vllm.v1.kv_cache_interface.CircularBufferSpec": (_DRAFT_FLAG,),
        "vllm.v1.kv_cache_interface.SlidingWindowSpec": (_DRAFT_FLAG,),
        "vllm.v1.kv_cache_interface.SlidingWindowMLASpec": (_DRAFT_FLAG,),
        "vllm.config.cache.CacheConfig": (
            Added("num_cpu_blocks", _any("simple_cpu_offload_num_blocks")),
        ),
        "vllm.v1.metrics.stats.IterationStats": (
            Added("iteration_timestamp", _any("compute_nans_in_logits")),
        ),
        "vllm.v1.core.kv_cache_utils.get_request_block_hasher": (
            Added("caching_hash_fn", _any("num_hash_lookahead_tokens")),
        ),
        "vllm.v1.core.sched.interface.SchedulerInterface": (
            Added("has_finished_requests", _any("has_request")),
        ),
    },
}
