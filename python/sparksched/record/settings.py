"""What of vLLM's configuration a trace keeps: all that a scheduler decides by, and nothing else."""

from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from sparksched import __version__
from sparksched.compat import releases
from sparksched.compat.pacing import max_graph_tokens
from sparksched.record.events import Config, Group, Settings, SpeculativeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


_Kept = TypeVar("_Kept", bound=msgspec.Struct)


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
        config=_kept(Config, *parts_of(config)),
        speculative_config=speculative and _kept(SpeculativeConfig, speculative),
        fills_in=config.num_lookahead_tokens > config.num_speculative_tokens,
        uses_mrope=bool(config.model_config.uses_mrope),
        use_v2_model_runner=bool(config.use_v2_model_runner),
        max_loras=lora and lora.max_loras,
        max_graph_tokens=max_graph_tokens(config),
    )


def parts_of(vllm_config: "VllmConfig") -> list[Any]:
    """Return vLLM's configurations that have fields of `Config`."""
    names = ("scheduler_config", "cache_config", "model_config", "parallel_config")
    return [getattr(vllm_config, name) for name in names]


def _kept(kind: type[_Kept], *parts: Any) -> _Kept:
    """Return the fields of configurations that are kept; the answers of their methods, too."""
    values = [
        next(getattr(part, name) for part in parts if hasattr(part, name))
        for name in kind.__struct_fields__
    ]
    return kind(*(it() if callable(it) else it for it in values))


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
