"""Tiny models with random weights, some of whose layers keep a state, beside attention.

Transformers knows the layers of each; vLLM loads what it writes. The shapes are the smallest that
vLLM's CPU kernels take: those of gated delta nets want heads of 64 and bfloat16.
"""

from pathlib import Path
from typing import Any, Final

from .tiny_tokenizer import END_OF_TEXT, unprintable, write_tokenizer

MAX_POSITIONS = 65536
SEED = 34
HIDDEN_SIZE = 64

_MIXED: Final[dict[str, Any]] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_DELTA_NETS: Final[dict[str, Any]] = _MIXED | {
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    # Short convolutions. vLLM wants all the sizes of blocks that checkpoints have.
    "lfm2": _MIXED
    | {
        "layer_types": ["conv", "full_attention"] * 2,
        "tie_embedding": False,
        "conv_L_cache": 3,
        "conv_dim": HIDDEN_SIZE,
        "conv_dim_out": HIDDEN_SIZE,
        "block_dim": HIDDEN_SIZE,
        "block_ff_dim": 128,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
    },
    "qwen3_next": _DELTA_NETS
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    # Qwen3.5: no experts, and projections of their own for queries, gates and decays.
    "qwen3_5_text": _DELTA_NETS,
    # Granite 4: Mamba 2, and experts.
    "granitemoehybrid": _MIXED
    | {
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
}
"""By the names that transformers has for the architectures."""


def write_model(directory: Path, architecture: str) -> Path:
    """Write the configuration, the tokenizer and the weights; return the directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(directory, MAX_POSITIONS)
    special = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"), vocabulary[END_OF_TEXT]
    )
    config = AutoConfig.for_model(
        architecture, vocab_size=len(vocabulary), **special, **CONFIGURATIONS[architecture]
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        # Greater than what training begins with, so that each token depends on all before it.
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=weights.shape[-1] ** -0.5)
        model.get_output_embeddings().weight[unprintable(vocabulary)] = 0
    model.save_pretrained(directory)
    return directory
