"""The configurations that sparksched leaves to vLLM's own scheduler."""

import dataclasses
from typing import TYPE_CHECKING, Final

from sparksched.compat import releases
from sparksched.compat.rule import TOO_MANY, Rule, Unsupported
from sparksched.compat.seams import SECTIONS

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


def unsupported_config(vllm_config: "VllmConfig") -> Unsupported | None:
    """Return the first feature in the configuration that the native scheduler lacks, else None."""
    for rule in CONFIG_RULES:
        if rule.applies(vllm_config):
            return rule.problem()
    return _foreign_section(vllm_config)


def _foreign_section(vllm_config: "VllmConfig") -> Unsupported | None:
    """Find a section whose class isn't vLLM's: it may have settings that sparksched doesn't know.

    Plugins put such ones there. Fingerprints are of vLLM's own classes.
    """
    for section in SECTIONS:
        cls = type(getattr(vllm_config, section))
        if dataclasses.is_dataclass(cls) and not cls.__module__.startswith("vllm."):
            return Unsupported(
                f"{cls.__name__} as {section}", "sparksched knows the settings of vLLM's class only"
            )
    return None


def unverifiable(vllm_config: "VllmConfig") -> Unsupported | None:
    """Return what keeps vLLM's scheduler from running beside ours, or None."""
    if (kv := vllm_config.kv_transfer_config) is not None:
        name = f"KV connector {kv.kv_connector}"
    elif (ec := vllm_config.ec_transfer_config) is not None:
        name = f"EC connector {ec.ec_connector}"
    else:
        return None
    reason = "it has one scheduler's side, and what that tells it moves data"
    return Unsupported(f"the {name}", reason)
