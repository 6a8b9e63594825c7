"""A tiny gpt-oss model with random weights, for tests that need a real engine but no real answers.

vLLM's own `--load-format dummy` will not do for comparing outputs: it fills every tensor from the
same seed with values below 1e-3, and greedy decoding then repeats one token for ever, whatever the
prompt. The weights written here are random as well, but scaled as a trained network's are, so that
each output depends on its prompt and varies along the sequence.
"""

import sys
from pathlib import Path
from typing import Any

from .tiny_tokenizer import END_OF_TEXT, unprintable, write_json, write_tokenizer

HIDDEN_SIZE = 64
HEAD_SIZE = 32
NUM_HEADS = 4
NUM_KV_HEADS = 2
NUM_LAYERS = 4
NUM_EXPERTS = 4
NUM_EXPERTS_PER_TOKEN = 2
INTERMEDIATE_SIZE = 64
SLIDING_WINDOW = 64
MAX_POSITIONS = 65536
SEED = 20


def write_model(directory: Path) -> Path:
    """Write the configuration, the tokenizer and the weights; return the directory.

    The same versions of torch and tokenizers write the same bytes each time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(directory, MAX_POSITIONS)
    write_json(directory / "config.json", _config(vocabulary))
    write_json(directory / "generation_config.json", {"eos_token_id": vocabulary[END_OF_TEXT]})
    _write_weights(directory / "model.safetensors", vocabulary)
    return directory


def _config(vocabulary: dict[str, int]) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": len(vocabulary),
        "eos_token_id": vocabulary[END_OF_TEXT],
        "pad_token_id": vocabulary[END_OF_TEXT],
        "hidden_size": HIDDEN_SIZE,
        "head_dim": HEAD_SIZE,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": [kinds[layer % 2] for layer in range(NUM_LAYERS)],
        "sliding_window": SLIDING_WINDOW,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS_PER_TOKEN,
        "intermediate_size": INTERMEDIATE_SIZE,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITIONS,
        },
        "torch_dtype": "float32",
    }


def _write_weights(path: Path, vocabulary: dict[str, int]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int, scale: float) -> "torch.Tensor":
        return torch.randn(*shape, generator=generator) * scale

    def linear(name: str, num_out: int, num_in: int) -> dict[str, "torch.Tensor"]:
        return {
            f"{name}.weight": normal(num_out, num_in, scale=num_in**-0.5),
            f"{name}.bias": normal(num_out, scale=0.1),
        }

    def attention(name: str) -> dict[str, "torch.Tensor"]:
        # Sharp queries: attention that picks out single tokens keeps outputs from settling.
        query = linear(f"{name}.q_proj", NUM_HEADS * HEAD_SIZE, HIDDEN_SIZE)
        query[f"{name}.q_proj.weight"] *= 2
        return {
            **query,
            **linear(f"{name}.k_proj", NUM_KV_HEADS * HEAD_SIZE, HIDDEN_SIZE),
            **linear(f"{name}.v_proj", NUM_KV_HEADS * HEAD_SIZE, HIDDEN_SIZE),
            **linear(f"{name}.o_proj", HIDDEN_SIZE, NUM_HEADS * HEAD_SIZE),
            f"{name}.sinks": normal(NUM_HEADS, scale=1),
        }

    def experts(name: str) -> dict[str, "torch.Tensor"]:
        gate_up_size = 2 * INTERMEDIATE_SIZE
        return {
            f"{name}.gate_up_proj": normal(
                NUM_EXPERTS, HIDDEN_SIZE, gate_up_size, scale=HIDDEN_SIZE**-0.5
            ),
            f"{name}.gate_up_proj_bias": normal(NUM_EXPERTS, gate_up_size, scale=0.1),
            f"{name}.down_proj": normal(
                NUM_EXPERTS, INTERMEDIATE_SIZE, HIDDEN_SIZE, scale=INTERMEDIATE_SIZE**-0.5
            ),
            f"{name}.down_proj_bias": normal(NUM_EXPERTS, HIDDEN_SIZE, scale=0.1),
        }

    def layer(name: str) -> dict[str, "torch.Tensor"]:
        return {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN_SIZE),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN_SIZE),
            **attention(f"{name}.self_attn"),
            **linear(f"{name}.mlp.router", NUM_EXPERTS, HIDDEN_SIZE),
            **experts(f"{name}.mlp.experts"),
        }

    head = normal(len(vocabulary), HIDDEN_SIZE, scale=1)
    head[unprintable(vocabulary)] = 0  # never the most likely token, so that text stays legible
    weights = {
        "model.embed_tokens.weight": normal(len(vocabulary), HIDDEN_SIZE, scale=1),
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": head,
    }
    for index in range(NUM_LAYERS):
        weights |= layer(f"model.layers.{index}")
    save_file(weights, str(path), metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m testkit.tiny_gpt_oss DIRECTORY")
    print(write_model(Path(sys.argv[1])))
