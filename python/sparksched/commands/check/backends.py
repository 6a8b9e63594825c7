"""Which kernels vLLM would choose: its own selectors are asked, without the model being loaded.

They take the machine into account, as `vllm serve` would on it. What they can't be asked, or don't
answer, is left open: nothing here may keep the command from saying the rest.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BY_VLLM: Final = "chosen by vLLM when it loads the model"

GPT_OSS: Final = "GptOssForCausalLM"
"""A model whose attention has sinks in each layer, and whose experts are known here."""


def attention(config: "VllmConfig") -> str:
    """Return the names of the attention back ends of all layers, or `BY_VLLM`."""
    explicit = getattr(config.attention_config.backend, "name", None)
    return _answer(config, _attention) or explicit or BY_VLLM


def experts(config: "VllmConfig") -> str:
    """Return the name of the back end of a mixture's experts, or `BY_VLLM`."""
    explicit: str = getattr(getattr(config, "kernel_config", None), "moe_backend", "auto")
    return _answer(config, _experts) or (BY_VLLM if explicit == "auto" else explicit)


def _answer(config: "VllmConfig", ask: "Callable[[VllmConfig], str | None]") -> str | None:
    try:
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform

        # A build for GPUs on a machine without one has no device to choose for.
        if current_platform.is_unspecified():
            return None
        with set_current_vllm_config(config):
            return ask(config)
    except Exception:
        # Selectors move between releases, and refuse what they can't serve in ways of their own.
        return None


def _attention(config: "VllmConfig") -> str | None:
    import torch
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    has_sinks = GPT_OSS in model.architectures
    if not has_sinks and any("sink" in name for name in vars(model.hf_text_config)):
        return None  # which layers have them is in the code of the model
    uses_mla = bool(model.use_mla)
    windows = {False} if uses_mla else _windows(model.hf_text_config)
    names = {
        get_attn_backend(
            model.get_head_size(),
            model.dtype if isinstance(model.dtype, torch.dtype) else torch.bfloat16,
            config.cache_config.cache_dtype,
            use_mla=uses_mla,
            use_sparse=uses_mla and hasattr(model.hf_text_config, "index_topk"),
            has_sink=has_sinks,
            use_mm_prefix=bool(model.is_mm_prefix_lm),
            has_sliding_window=has_window,
            num_heads=model.get_num_attention_heads(config.parallel_config) if uses_mla else None,
        ).get_name()
        for has_window in sorted(windows)
    }
    return ", ".join(sorted(names))


def _windows(text_config: Any) -> set[bool]:
    """Return whether layers have sliding windows: all of them, none, or some."""
    kinds = getattr(text_config, "layer_types", None)
    if kinds:
        return {kind == "sliding_attention" for kind in kinds}
    return {getattr(text_config, "sliding_window", None) is not None}


def _experts(config: "VllmConfig") -> str | None:
    """Ask for gpt-oss's experts: what other models' need is in the code of each model."""
    model, parallel = config.model_config, config.parallel_config
    if GPT_OSS not in model.architectures:
        return None
    if model.quantization is None:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
            select_unquantized_moe_backend as select,
        )
    elif model.quantization in ("mxfp4", "gpt_oss_mxfp4"):
        from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
            select_mxfp4_moe_backend as select,
        )
    else:
        return None
    # With several GPUs the selector wants to know its rank, which only workers have.
    if parallel.world_size_across_dp > 1:
        return None
    backend, _ = select(_gpt_oss_layer(config))
    return str(backend.value)


def _gpt_oss_layer(config: "VllmConfig") -> Any:
    """Describe a layer's experts as vLLM's model of gpt-oss does."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        get_routing_method_type,
    )

    model, text_config = config.model_config, config.model_config.hf_text_config
    return FusedMoEConfig(
        num_experts=text_config.num_local_experts,
        num_local_experts=text_config.num_local_experts,
        num_logical_experts=text_config.num_local_experts,
        experts_per_token=text_config.num_experts_per_tok,
        hidden_dim=text_config.hidden_size,
        intermediate_size=text_config.intermediate_size,
        activation=MoEActivation.from_str("swigluoai"),
        device=config.device_config.device,
        routing_method=get_routing_method_type(
            scoring_func="softmax",
            top_k=text_config.num_experts_per_tok,
            renormalize=True,
            num_expert_group=None,
            has_e_score_bias=False,
        ),
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=model.dtype,
        moe_backend=config.kernel_config.moe_backend,
        max_num_tokens=config.scheduler_config.max_num_batched_tokens,
        has_bias=True,
        is_lora_enabled=config.lora_config is not None,
    )
