"""The configuration of a small OPT model: tests that load no model need nothing else of one."""

from typing import Any

OPT_CONFIG: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 128,
    "max_position_embeddings": 2048,
}
