"""What of vLLM's configuration a trace keeps: all that a scheduler decides by, and nothing else."""

from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from sparksched import __version__
from sparksched.compat import releases
from sparksched.compat.pacing import max_graph_tokens
from sparksched.record.events import (
    CacheConfig,
    Group,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Settings,
    SpeculativeConfig,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


_Part = TypeVar("_Part", bound=msgspec.Struct)


class UnrecordableError(ValueError):
    """A configuration or a request that a trace has no words for; the message names it."""


def settings_of(scheduler: Any) -> Settings:
    """Return what a scheduler decides by.

    Raises:
        UnrecordableError: if it decides by something else as well.

    """
    config, kv_cache = scheduler.vllm_config, scheduler.kv_cache_config
    _refuse_unrecordable(config, kv_cache)
    speculative, lora = config.speculative_config, config.lora_config
    return Settings(
        sparksched=__version__,
        vllm=releases.installed(),
        scheduler=type(scheduler).__name__,
        block_size=scheduler.block_size,
        hash_block_size=scheduler.hash_block_size,
        num_hash_lookahead_tokens=releases.num_hash_lookahead_tokens(config),
        num_blocks=kv_cache.num_blocks,
        retention_interval=kv_cache.prefix_cache_retention_interval,
        groups=[_group(group) for group in kv_cache.kv_cache_groups],
        scheduler_config=_part_of(config.scheduler_config, SchedulerConfig),
        cache_config=_part_of(config.cache_config, CacheConfig),
        model_config=_part_of(config.model_config, ModelConfig),
        parallel_config=_part_of(config.parallel_config, ParallelConfig),
        speculative_config=speculative and _part_of(speculative, SpeculativeConfig),
        fills_in=config.num_lookahead_tokens > config.num_speculative_tokens,
        uses_mrope=bool(config.model_config.uses_mrope),
        use_v2_model_runner=bool(config.use_v2_model_runner),
        max_loras=lora and lora.max_loras,
        max_graph_tokens=max_graph_tokens(config),
    )


def _part_of(config: Any, part: type[_Part]) -> _Part:
    """Return the fields of a configuration that are kept; the answers of its methods, too."""
    values = {name: getattr(config, name) for name in part.__struct_fields__}
    return part(**{name: it() if callable(it) else it for name, it in values.items()})


def _refuse_unrecordable(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    parallel = config.parallel_config
    features = {
        "a KV connector": config.kv_transfer_config is not None,
        "an EC connector": config.ec_transfer_config is not None,
        "auxiliary output": config.aux_output_config.enabled,
        "a diffusion model": config.diffusion_config is not None,
        "an encoder-decoder model": config.model_config.is_encoder_decoder,
        "an encoder-only instance": config.is_mm_encoder_only,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
    }
    for feature, is_used in features.items():
        if is_used:
            raise UnrecordableError(f"{feature} takes part in scheduling")
    for group in kv_cache_config.kv_cache_groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in get_args(Group.__annotations__["kind"]):
            raise UnrecordableError(f"a KV cache of the kind {kind} is scheduled in its own way")


def _group(group: "KVCacheGroupSpec") -> Group:
    kind: Any = type(group.kv_cache_spec).__name__
    fields = msgspec.to_builtins(group.kv_cache_spec, enc_hook=str)
    plain = {name: it for name, it in fields.items() if it is None or isinstance(it, int | str)}
    return Group(kind, plain, bool(group.is_eagle_group))
