"""Makes random weights lively for as long as tokens are compared, and then puts them back.

vLLM's own (`--load-format dummy`) are below 1e-3: greedy decoding then repeats a token for ever,
whatever the prompt. Here they are scaled to what a trained network's are like, so that tokens
depend on what came before them. Factors are powers of two, which change no digit: what is scaled
back is what it was.
"""

import math
from types import ModuleType
from typing import Any

DUMMY_LIMIT = 1e-3
"""Of the values that vLLM draws, evenly."""
ONE = 10
"""Exponent that brings them to about 1."""
HEAD = "lm_head"
"""Its tokens change places: vLLM draws the same numbers for it as for the embedding, and then
greedy decoding ends in two tokens that follow each other."""
SHARPER = 2
"""More for queries and keys: attention that picks out few tokens keeps outputs from settling."""


def install(module: ModuleType) -> None:
    """Give workers a method that engines call."""
    module.WorkerBase.bench_scale_weights = _scale_weights  # type: ignore[attr-defined]


def _scale_weights(worker: Any, is_back: bool) -> int:
    """Scale all weights, or scale them back, while nothing runs; return how many tensors."""
    import torch

    changed = 0
    with torch.inference_mode():
        for name, weight in worker.get_model().named_parameters():
            is_wide = weight.is_floating_point() and weight.element_size() > 1
            exponent = exponent_of(name, tuple(weight.shape)) if is_wide else 0
            if exponent:
                weight.mul_(2.0 ** (-exponent if is_back else exponent))
                if HEAD in name:
                    weight.copy_(weight.roll(-1 if is_back else 1, 0))
                changed += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # steps may run in another stream
    return changed


def exponent_of(name: str, shape: tuple[int, ...]) -> int:
    """Return the power of two that makes a tensor of weights lively; 0 for a single number.

    Args:
        name: The parameter's, which tells embeddings, biases and queries.
        shape: Its shape, with the inputs last.

    """
    if math.prod(shape) == 1:
        return 0
    if len(shape) == 1 or "embed" in name or "bias" in name:
        return ONE
    deviation = DUMMY_LIMIT / math.sqrt(3)
    exponent = round(-math.log2(deviation * math.sqrt(shape[-1])))
    return exponent + (SHARPER if "qkv" in name else 0)
