"""What of vLLM's configuration a trace keeps: all that a scheduler decides by, and nothing else."""

import dataclasses
import enum
import time
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
    SpeculativeAnswers,
    SpeculativeConfig,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


_Part = TypeVar("_Part", bound=msgspec.Struct)


class UnrecordableError(ValueError):
    """A configuration or a request that a trace has no words for; the message names it."""


def settings_of(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    block_size: int,
    hash_block_size: int | None,
    scheduler: str,
) -> Settings:
    """Return what a scheduler of this configuration decides by.

    Raises:
        UnrecordableError: if it decides by something else as well.

    """
    _refuse_unrecordable(vllm_config, kv_cache_config)
    speculative = vllm_config.speculative_config
    is_speculating = speculative is not None
    lora = vllm_config.lora_config
    return Settings(
        sparksched=__version__,
        vllm=releases.installed(),
        scheduler=scheduler,
        started=time.time(),
        block_size=block_size,
        hash_block_size=block_size if hash_block_size is None else hash_block_size,
        num_hash_lookahead_tokens=releases.num_hash_lookahead_tokens(vllm_config),
        num_blocks=kv_cache_config.num_blocks,
        retention_interval=kv_cache_config.prefix_cache_retention_interval,
        groups=[_group(group) for group in kv_cache_config.kv_cache_groups],
        scheduler_config=_part_of(vllm_config.scheduler_config, SchedulerConfig),
        cache_config=_part_of(vllm_config.cache_config, CacheConfig),
        model_config=_part_of(vllm_config.model_config, ModelConfig),
        parallel_config=_part_of(vllm_config.parallel_config, ParallelConfig),
        speculative_config=_part_of(speculative, SpeculativeConfig) if is_speculating else None,
        speculative_answers=_part_of(speculative, SpeculativeAnswers) if is_speculating else None,
        fills_in=vllm_config.num_lookahead_tokens > vllm_config.num_speculative_tokens,
        uses_mrope=bool(vllm_config.model_config.uses_mrope),
        use_v2_model_runner=bool(vllm_config.use_v2_model_runner),
        max_loras=None if lora is None else lora.max_loras,
        max_graph_tokens=max_graph_tokens(vllm_config),
    )


def _part_of(config: Any, part: type[_Part]) -> _Part:
    """Return the fields of a configuration that are kept; the answers of its methods, too."""
    values = {name: getattr(config, name) for name in part.__struct_fields__}
    return part(**{name: it() if callable(it) else it for name, it in values.items()})


def _refuse_unrecordable(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    parallel = vllm_config.parallel_config
    features = {
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "an EC connector": vllm_config.ec_transfer_config is not None,
        "auxiliary output": vllm_config.aux_output_config.enabled,
        "a diffusion model": vllm_config.diffusion_config is not None,
        "an encoder-decoder model": vllm_config.model_config.is_encoder_decoder,
        "an encoder-only instance": vllm_config.is_mm_encoder_only,
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
    spec = group.kv_cache_spec
    fields: dict[str, int | bool | str | None] = {}
    for field in dataclasses.fields(spec):
        value: Any = getattr(spec, field.name)
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None or isinstance(value, int | str):
            fields[field.name] = value
        elif field.name == "dtype":
            fields[field.name] = str(value).removeprefix("torch.")
    kind: Any = type(spec).__name__
    return Group(kind=kind, fields=fields, is_eagle_group=bool(group.is_eagle_group))
