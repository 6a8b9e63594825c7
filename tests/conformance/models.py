"""The models that vLLM's scheduler tests name: a configuration is all that is read of them."""

import json
from pathlib import Path

_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 128,
    # Limits and special tokens are the real ones: tests count on them.
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

_CONFIGURATIONS = {"facebook/opt-125m": _OPT, "facebook/opt-350m": _OPT}


def write_models(folder: Path) -> Path:
    """Write them so that their names are paths below `folder`, which is how vLLM finds them."""
    for name, configuration in _CONFIGURATIONS.items():
        path = folder / name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(configuration, indent=2) + "\n")
    return folder
