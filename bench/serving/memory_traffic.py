"""What a decode step has to read from the GPU's memory, from the model's shape and the batch.

Counted are weights, once a step, and the KV cache of all running requests; activations are left
out, which are small beside them. Which experts a batch needs is up to the router, so there are two
figures: the fewest (all tokens choose the same ones) and the number expected if tokens choose
evenly and independently, as trained routers are meant to. Random weights tend to the first.
"""

from dataclasses import dataclass
from typing import Any

PEAK_TB_S = {
    "B200": 8.0,
    "GH200 480GB": 4.0,
    "H200": 4.8,
    "H100 NVL": 3.9,
    "H100 PCIe": 2.0,
    "H100 80GB HBM3": 3.35,
    "A100-SXM4-80GB": 2.039,
    "A100 80GB PCIe": 1.935,
    "A100-SXM4-40GB": 1.555,
    "L40S": 0.864,
    "L4": 0.3,
}
"""Memory bandwidth by the name in the vendor's data sheets, most specific first."""

BF16_BYTES = 2.0
MXFP4_BYTES = 4.25 / 8
"""Four bits a weight, and eight for each block of 32."""


class UnknownShapeError(ValueError):
    """There is no formula for this architecture."""


@dataclass(frozen=True)
class StepBytes:
    """What a step reads, in bytes."""

    dense_weights: float
    experts_least: float
    experts_even: float
    kv_cache: float

    @property
    def least(self) -> float:
        """All of it, if all tokens choose the same experts."""
        return self.dense_weights + self.experts_least + self.kv_cache

    @property
    def even(self) -> float:
        """All of it, if tokens choose evenly."""
        return self.dense_weights + self.experts_even + self.kv_cache


def peak_bytes_per_s(gpu: str | None) -> float | None:
    """Return the memory bandwidth of a GPU by its name, or None if that is not known."""
    for name, tb_s in PEAK_TB_S.items():
        if gpu is not None and name in gpu:
            return tb_s * 1e12
    return None


def step_bytes(config: dict[str, Any], num_requests: int, mean_context: float) -> StepBytes:
    """Return what a step of so many decoding requests reads.

    Args:
        config: The model's config.json.
        num_requests: Requests in the batch, each with one token.
        mean_context: Tokens before it, in the mean.

    Raises:
        UnknownShapeError: if this architecture is not known.

    """
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ("GptOssForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"):
        raise UnknownShapeError(f"it is not known what {architecture} reads")
    num_layers = config["num_hidden_layers"]
    least, even = _experts(config, num_requests)
    dense = num_layers * _dense_layer(config) + config["vocab_size"] * config["hidden_size"]
    element = _element_bytes(config)
    return StepBytes(
        dense_weights=element * dense,
        experts_least=num_layers * least,
        experts_even=num_layers * even,
        kv_cache=element * num_requests * _kv_elements(config, mean_context),
    )


def _element_bytes(config: dict[str, Any]) -> float:
    kind = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return 4.0 if kind == "float32" else BF16_BYTES


def _head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _dense_layer(config: dict[str, Any]) -> int:
    """Return the weights of a layer but for its experts."""
    hidden = config["hidden_size"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    attention = hidden * heads * _head_size(config)
    if "num_local_experts" in config:
        return int(attention + hidden * config["num_local_experts"])
    return int(attention + 3 * hidden * config["intermediate_size"])


def _experts(config: dict[str, Any], num_requests: int) -> tuple[float, float]:
    """Return the bytes of experts that a layer reads: at least, and if tokens choose evenly."""
    num_experts = config.get("num_local_experts")
    if num_experts is None:
        return 0.0, 0.0
    is_mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    expert = 3 * config["hidden_size"] * config["intermediate_size"]
    expert_bytes = expert * (MXFP4_BYTES if is_mxfp4 else _element_bytes(config))
    chosen = config["num_experts_per_tok"]
    expected = num_experts * (1 - (1 - chosen / num_experts) ** num_requests)
    return chosen * expert_bytes, expected * expert_bytes


def _kv_elements(config: dict[str, Any], mean_context: float) -> float:
    """Return the elements of keys and values that a token's attention reads, all layers."""
    window = config.get("sliding_window") or float("inf")
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    tokens = sum(
        min(mean_context, window) if kind == "sliding_attention" else mean_context for kind in kinds
    )
    return float(tokens * 2 * config["num_key_value_heads"] * _head_size(config))
