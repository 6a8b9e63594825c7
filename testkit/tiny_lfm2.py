"""A tiny LFM2 with random weights: short convolutions, which keep a state, beside attention."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from .tiny_tokenizer import END_OF_TEXT, unprintable, write_json, write_tokenizer

HIDDEN_SIZE = 64
HEAD_SIZE = 32
NUM_HEADS = 2
LAYER_TYPES = ("conv", "full_attention", "conv", "full_attention")
FEED_FORWARD_SIZE = 128
KERNEL_SIZE = 3
MAX_POSITIONS = 65536
SEED = 34


def write_model(directory: Path) -> Path:
    """Write the configuration, the tokenizer and the weights; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(directory, MAX_POSITIONS)
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": len(vocabulary),
        "bos_token_id": vocabulary[END_OF_TEXT],
        "eos_token_id": vocabulary[END_OF_TEXT],
        "pad_token_id": vocabulary[END_OF_TEXT],
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": FEED_FORWARD_SIZE,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": list(LAYER_TYPES),
        "max_position_embeddings": MAX_POSITIONS,
        "conv_L_cache": KERNEL_SIZE,
        "conv_bias": False,
        "conv_dim": HIDDEN_SIZE,
        "conv_dim_out": HIDDEN_SIZE,
        "block_dim": HIDDEN_SIZE,
        "block_ff_dim": FEED_FORWARD_SIZE,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    write_json(directory / "config.json", config)
    save_file(_weights(vocabulary), str(directory / "model.safetensors"), {"format": "pt"})
    return directory


def _weights(vocabulary: dict[str, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    # Greater than a trained network's, so that each token depends on all before it.
    embeddings = normal(len(vocabulary), HIDDEN_SIZE) * 8
    embeddings[unprintable(vocabulary)] = 0
    weights = {
        "model.embed_tokens.weight": embeddings,
        "model.embedding_norm.weight": torch.ones(HIDDEN_SIZE),
    }
    for layer, kind in enumerate(LAYER_TYPES):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.operator_norm.weight": torch.ones(HIDDEN_SIZE),
            f"{name}.ffn_norm.weight": torch.ones(HIDDEN_SIZE),
            f"{name}.feed_forward.w1.weight": normal(FEED_FORWARD_SIZE, HIDDEN_SIZE),
            f"{name}.feed_forward.w2.weight": normal(HIDDEN_SIZE, FEED_FORWARD_SIZE) * 4,
            f"{name}.feed_forward.w3.weight": normal(FEED_FORWARD_SIZE, HIDDEN_SIZE),
        }
        if kind == "conv":
            weights |= {
                f"{name}.conv.conv.weight": normal(HIDDEN_SIZE, 1, KERNEL_SIZE),
                f"{name}.conv.in_proj.weight": normal(3 * HIDDEN_SIZE, HIDDEN_SIZE),
                f"{name}.conv.out_proj.weight": normal(HIDDEN_SIZE, HIDDEN_SIZE) * 8,
            }
            continue
        size = NUM_HEADS * HEAD_SIZE
        weights |= {
            f"{name}.self_attn.q_layernorm.weight": torch.ones(HEAD_SIZE),
            f"{name}.self_attn.k_layernorm.weight": torch.ones(HEAD_SIZE),
            f"{name}.self_attn.q_proj.weight": normal(size, HIDDEN_SIZE),
            f"{name}.self_attn.k_proj.weight": normal(size, HIDDEN_SIZE),
            f"{name}.self_attn.v_proj.weight": normal(size, HIDDEN_SIZE),
            f"{name}.self_attn.out_proj.weight": normal(HIDDEN_SIZE, size) * 8,
        }
    return weights
