"""The configurations that sparksched leaves to vLLM's own scheduler, and all that it knows."""

import dataclasses
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, Final

from sparksched.compat import releases
from sparksched.compat.known_shapes import CACHE_CONFIG, SCHEDULER_CONFIG, words
from sparksched.compat.rule import TOO_MANY, Rule, Unsupported

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


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


DIFFUSION: Final = Unsupported(
    "diffusion", "diffusion language models decode a canvas, not one token after the other"
)

CONFIG_RULES: Final = (
    Rule(
        "running without a model configuration",
        "the scheduler takes its limits from it",
        lambda config: config.model_config is None,
    ),
    Rule(
        DIFFUSION.feature,
        DIFFUSION.reason,
        lambda config: config.diffusion_config is not None or config.model_config.is_diffusion,
    ),
    Rule(
        "an encoder-decoder model",
        "only decoder-only models are supported",
        lambda config: config.model_config.is_encoder_decoder,
    ),
    Rule(
        "this kind of model",
        "only text generation and pooling are supported (--runner)",
        lambda config: (
            config.model_config.runner_type not in ("generate", "pooling")
            or config.scheduler_config.runner_type not in ("generate", "pooling")
        ),
    ),
    Rule(
        "an encoder-only instance",
        "it publishes embeddings and generates nothing",
        lambda config: config.is_mm_encoder_only,
    ),
    Rule(
        "LoRA with pipeline parallelism",
        "vLLM counts the adapters of a step wrongly then; vLLM 0.33.0 doesn't",
        lambda config: (
            not releases.is_since("0.33.0")
            and config.lora_config is not None
            and config.parallel_config.pipeline_parallel_size > 1
        ),
    ),
    Rule(
        "a KV connector that manages blocks itself",
        "it takes vLLM's block pool into its own hands, and sparksched has another one",
        lambda config: (
            config.kv_transfer_config is not None and _manages_blocks(config.kv_transfer_config)
        ),
    ),
    Rule(
        "decode context parallelism",
        "KV blocks that are spread over ranks are managed only by vLLM's own scheduler",
        lambda config: config.parallel_config.decode_context_parallel_size > 1,
    ),
    Rule(
        "prefill context parallelism",
        "prefills that are spread over ranks are scheduled only by vLLM's own scheduler",
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
    ),
    Rule(
        "elastic expert parallelism",
        "engines that join and leave are known only to vLLM's own scheduler",
        lambda config: config.parallel_config.enable_elastic_ep,
    ),
    Rule(
        # Of the scheduler, recovery asks only for finish_requests(None). But it may have
        # been the scheduler that failed, in mid-step, and the steps in flight are dropped:
        # the loop goes on with a scheduler to which no output of theirs ever comes back.
        # vLLM offers it for data-parallel mixture-of-experts deployments alone.
        "fault tolerance",
        "after a fault the engine continues with steps whose outputs never arrive",
        lambda config: config.parallel_config.enable_fault_tolerance,
    ),
    Rule(
        "HiSparse",
        "its host-resident KV cache has a block pool of its own",
        lambda config: config.attention_config.hisparse_config is not None,
    ),
    Rule(
        "this scheduling policy",
        "only fcfs and priority are supported (--scheduling-policy)",
        lambda config: config.scheduler_config.policy not in ("fcfs", "priority"),
    ),
    Rule(
        "this prefix caching hash",
        "only sha256, sha256_cbor, xxhash and xxhash_cbor are supported "
        "(--prefix-caching-hash-algo)",
        lambda config: (
            config.cache_config.prefix_caching_hash_algo
            not in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
        ),
    ),
    Rule(
        "a limit of 2^31 or more",
        "the Rust core counts tokens and requests in 32 bits",
        lambda config: any(
            limit is not None and limit >= TOO_MANY
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
}


def unsupported_config(vllm_config: "VllmConfig") -> Unsupported | None:
    """Return the first feature in the configuration that the native scheduler lacks, else None."""
    for rule in CONFIG_RULES:
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
