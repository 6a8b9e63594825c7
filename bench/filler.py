"""Random weights under which a model's steps cost what they cost with trained ones.

The filler of vLLM 0.32.0 (`--load-format dummy`) makes mixture-of-experts models too fast. It
leaves packed weights at zero, and the weights of norms near it, so that the router's bias alone
decides: each token of a step takes the same experts, and the step reads 4 of 128 where 16 tokens
should read about 51. Greedy decoding repeats one token for ever. The filler of 0.33.0 has neither
fault with gpt-oss-120b (case `experts` counts); this one gives both releases the same weights.

Here norms are ones, biases are zeros, and matrices are normal with a variance of one over what they
sum up, each from a seed of its own name. So activations have a plausible size, experts differ, and
what a router decides depends on the token and on what came before it.

It runs in vLLM's workers, after vLLM's own filler, and leaves what it doesn't know as that made it.
"""

import functools
import math
import zlib
from types import ModuleType
from typing import Any

OURS, VLLMS = FILLERS = ("bench", "vllm")
LOADER = "vllm.model_executor.model_loader.dummy_loader"
EMBEDDING_SCALE = 0.02
"""Small: a token's own embedding must not decide by itself what comes next."""
MXFP4_BLOCK = 32
"""Weights that share a scale."""
E8M0_BIAS = 127
E2M1_RMS = math.sqrt(sum(it * it for it in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
"""Of a random code of four bits."""


def install(loader: ModuleType) -> None:
    """Have vLLM's dummy loader fill weights this way."""
    original = loader.DummyModelLoader.load_weights

    @functools.wraps(original)
    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        original(self, model, model_config)
        fill(model)

    loader.DummyModelLoader.load_weights = load_weights  # type: ignore[attr-defined]


def fill(model: Any) -> None:
    """Fill a module's parameters, the same ones for the same names and shapes."""
    import torch

    for name, tensor in model.named_parameters():
        if tensor.device.type == "meta" or hasattr(tensor, "dummy_weight_value"):
            continue
        generator = torch.Generator(device=tensor.device)
        generator.manual_seed(zlib.crc32(name.encode()))
        _fill(name, tensor.data, generator)


def _fill(name: str, tensor: Any, generator: Any) -> None:
    import torch

    leaf = name.rpartition(".")[2]
    exponents = tensor.dtype == getattr(torch, "float8_e8m0fnu", None)
    if exponents or (tensor.dtype == torch.uint8 and "scale" in leaf):
        wanted = 1 / math.sqrt(tensor.shape[-1] * MXFP4_BLOCK) / E2M1_RMS
        tensor.view(torch.uint8).fill_(E8M0_BIAS + round(math.log2(wanted)))
    elif tensor.dtype == torch.uint8:
        tensor.random_(0, 256, generator=generator)
    elif tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) or "scale" in leaf:
        return
    elif "norm" in name and tensor.dim() == 1:
        tensor.fill_(1.0)
    elif leaf.endswith("bias") or leaf == "sinks":
        tensor.zero_()
    elif "embed" in name:
        tensor.normal_(0.0, EMBEDDING_SCALE, generator=generator)
    elif tensor.dim() > 1:
        tensor.normal_(0.0, 1 / math.sqrt(tensor.shape[-1]), generator=generator)
