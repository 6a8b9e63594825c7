"""A tiny Llama with random weights, and LoRA adapters for it.

vLLM's CPU build runs no adapters on models with a mixture of experts, such as `tiny_gpt_oss`.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .tiny_tokenizer import END_OF_TEXT, unprintable, write_json, write_tokenizer

HIDDEN_SIZE = 64
HEAD_SIZE = 32
NUM_HEADS = 4
NUM_KV_HEADS = 2
NUM_LAYERS = 2
INTERMEDIATE_SIZE = 128
MAX_POSITIONS = 65536
RANK = 8
SEED = 21

# What is adapted, with the sizes of its outputs and inputs.
ADAPTED = {
    "q_proj": (NUM_HEADS * HEAD_SIZE, HIDDEN_SIZE),
    "v_proj": (NUM_KV_HEADS * HEAD_SIZE, HIDDEN_SIZE),
    "o_proj": (HIDDEN_SIZE, NUM_HEADS * HEAD_SIZE),
}


def write_model(directory: Path, **tokenizer: Any) -> Path:
    """Write the configuration, the tokenizer and the weights; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(directory, MAX_POSITIONS, **tokenizer)
    write_json(directory / "config.json", _config(vocabulary))
    write_json(directory / "generation_config.json", {"eos_token_id": vocabulary[END_OF_TEXT]})
    save_file(_weights(vocabulary), str(directory / "model.safetensors"), {"format": "pt"})
    return directory


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter whose outputs differ from the model's; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(NUM_LAYERS):
        for module, (num_out, num_in) in ADAPTED.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = _normal(generator, RANK, num_in)
            weights[f"{name}.lora_B.weight"] = _normal(generator, num_out, RANK)
    save_file(weights, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(ADAPTED),
        "bias": "none",
    }
    write_json(directory / "adapter_config.json", config)
    return directory


def _config(vocabulary: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "eos_token_id": vocabulary[END_OF_TEXT],
        "pad_token_id": vocabulary[END_OF_TEXT],
        "hidden_size": HIDDEN_SIZE,
        "head_dim": HEAD_SIZE,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "intermediate_size": INTERMEDIATE_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _weights(vocabulary: dict[str, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    # Greater than a trained network's, so that each token depends on all before it.
    head = _normal(generator, len(vocabulary), HIDDEN_SIZE) * 8
    head[unprintable(vocabulary)] = 0  # never the most likely token, so that text stays legible
    weights = {
        "model.embed_tokens.weight": _normal(generator, len(vocabulary), HIDDEN_SIZE) * 8,
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": head,
    }
    for layer in range(NUM_LAYERS):
        weights |= _layer_weights(f"model.layers.{layer}", generator)
    return weights


def _layer_weights(name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    kv_size = NUM_KV_HEADS * HEAD_SIZE
    shapes = {
        "self_attn.q_proj": ADAPTED["q_proj"],
        "self_attn.k_proj": (kv_size, HIDDEN_SIZE),
        "self_attn.v_proj": ADAPTED["v_proj"],
        "self_attn.o_proj": ADAPTED["o_proj"],
        "mlp.gate_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }
    weights = {f"{name}.{it}.weight": _normal(generator, *shape) for it, shape in shapes.items()}
    # Sharp queries: attention that picks out single tokens keeps outputs from settling.
    weights[f"{name}.self_attn.q_proj.weight"] *= 2
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.{norm}.weight"] = torch.ones(HIDDEN_SIZE)
    return weights


def _normal(generator: torch.Generator, num_out: int, num_in: int) -> torch.Tensor:
    """Return weights that keep the size of what goes through them."""
    return torch.randn(num_out, num_in, generator=generator) * num_in**-0.5
