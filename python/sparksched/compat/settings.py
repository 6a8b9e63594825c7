"""The settings of vLLM that sparksched knows, by section of its configuration.

Each is supported as it is, refused by a rule of `configuration`, seen in the KV cache
configuration, or of no concern to the scheduler: it configures the front end, the executor or the
workers.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from sparksched.compat.known_shapes import CACHE_CONFIG, SCHEDULER_CONFIG, words
from sparksched.compat.rule import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN_SETTINGS: Final[Mapping[str, Collection[str]]] = {
    "": words(
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
    "scheduler_config": SCHEDULER_CONFIG,
    # The last one since 0.33.0. It says how large a KV connector's pool is.
    "cache_config": (*CACHE_CONFIG, "simple_cpu_offload_num_blocks"),
    "parallel_config": words(
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
    "observability_config": words(
        """
        show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
        per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
        custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
        enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details
        jit_monitor_mode jit_monitor_verbose
        """
    ),
    "model_config": words(
        """
        model model_weights runner convert tokenizer tokenizer_mode trust_remote_code dtype seed
        hf_config hf_text_config is_submodel_config word_embeddings_untied_by_checkpoint
        hf_config_path allowed_local_media_path allowed_media_domains revision code_revision
        tokenizer_revision max_model_len spec_target_max_model_len quantization
        quantization_config allow_deprecated_quantization enforce_eager return_sampling_mask
        max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay disable_sliding_window
        disable_cascade_attn skip_tokenizer_init enable_prompt_embeds served_model_name
        config_format hf_token hf_overrides model_class_overrides generation_config
        override_generation_config enable_sleep_mode sleep_preserve_parameter_names
        sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend
        enable_cumem_allocator model_impl logits_processors io_processor_plugin
        renderer_num_workers pooler_config multimodal_config
        """
    ),
    "speculative_config": words(
        """
        enforce_eager num_speculative_tokens model method draft_tensor_parallel_size
        tensor_parallel_size quantization moe_backend attention_backend kv_cache_dtype
        max_model_len revision code_revision index_share_for_mtp_iteration
        disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction
        use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
        target_model_config target_parallel_config num_speculative_tokens_per_batch_size
        draft_model_config draft_parallel_config suffix_decoding_max_tree_depth
        suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_min_token_prob draft_load_config rejection_sample_method
        synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
        draft_sample_method dspark_draft_topk
        """
        # Since 0.33.0.
        """
        disable_lookahead_block_hashes draft_lm_head_quantization xpress_topc
        fly_window_size fly_entropy_threshold fly_entropy_top_k
        """
    ),
    "lora_config": words(
        """
        max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype target_modules
        default_mm_loras enable_tower_connector_lora specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
        """
    ),
    "attention_config": words(
        """
        backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
        flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
        tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization
        mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype
        indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa
        sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n
        flex_attn_q_block_size flex_attn_kv_block_size
        """
        # Since 0.33.0.
        """
        trtllm_ragged_backend indexer_tp_shard_min_rows minimax_m3_indexer_cp
        """
    ),
    "mamba_config": words(
        """
        backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm
        """
    ),
    "engram_config": words("cpu_offload embedding_across_dp dp_shared_memory use_thp"),
    "structured_outputs_config": words(
        """
        backend disable_any_whitespace disable_additional_properties reasoning_parser
        reasoning_parser_plugin enable_in_reasoning
        """
    ),
    "reasoning_config": words(
        """
        reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids
        _reasoning_end_token_ids _natural_reasoning_end_token_ids _enabled
        """
    ),
    "watermark_config": words(
        """
        key algorithm alpha context_width deduplicate_contexts deduplicate_contexts_max_history
        prf allow_target_only_watermarking
        """
    ),
    "aux_output_config": words("enable_return_routed_experts max_bytes"),
    "offload_config": words("offload_backend uva prefetch"),
    "kv_transfer_config": words(
        """
        kv_connector engine_id kv_buffer_device kv_role kv_port kv_connector_extra_config
        kv_connector_module_path enable_permute_local_kv kv_load_failure_policy
        """
    ),
    "kv_events_config": words(
        """
        enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm
        max_queue_size topic
        """
    ),
    "ec_transfer_config": words(
        """
        ec_connector engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port
        ec_connector_extra_config ec_connector_module_path mm_encoder_output_widths
        """
    ),
    "ec_manager_config": words("encoder_cache_manager_cls manager_config"),
}
"""The section without a name is the configuration itself."""

OTHER_SECTIONS: Final = words(
    """
    device_config load_config kernel_config compilation_config profiler_config logging_config
    weight_transfer_config diffusion_config
    """
    # Since 0.33.0.
    "watchdog_config"
)
"""Sections that no decision depends on, and diffusion's, which a rule refuses."""


def unknown_setting(vllm_config: "VllmConfig") -> Unsupported | None:
    """Find a setting that sparksched doesn't know and that somebody has changed."""
    for section, known in KNOWN_SETTINGS.items():
        config = getattr(vllm_config, section) if section else vllm_config
        if config is None:
            continue
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
