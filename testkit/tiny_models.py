"""Tiny models with random weights, for tests that need a real engine but no real answers.

vLLM's own `--load-format dummy` will not do for comparing outputs: it fills every tensor from the
same seed with values below 1e-3, and greedy decoding then repeats one token for ever, whatever the
prompt. The weights written here are random as well, but scaled as a trained network's are, so that
each output depends on its prompt and varies along the sequence.

Transformers knows the layers of each architecture; vLLM loads what it writes. The shapes are the
smallest that vLLM's CPU kernels take: those of gated delta nets want heads of 64 and bfloat16.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

MAX_POSITIONS = 65536
HIDDEN_SIZE = 64
HEAD_SIZE = 32
SEED = 34

END_OF_TEXT = "<|endoftext|>"
CONSONANTS = "bcdfghjklmnprstvz"
VOWELS = "aeiou"

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_SIZE,
    "num_hidden_layers": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED: Final[dict[str, Any]] = {
    **{name: value for name, value in _COMMON.items() if name != "head_dim"},
    "num_attention_heads": 2,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "dtype": "bfloat16",
}
_DELTA_NETS: Final[dict[str, Any]] = _MIXED | {
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
HYBRIDS: Final[dict[str, dict[str, Any]]] = {
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
    | _EXPERTS
    | {
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "shared_intermediate_size": 64,
    },
}
"""Some of their layers keep a state, beside attention."""

CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = HYBRIDS | {
    "gpt_oss": _COMMON
    | _EXPERTS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITIONS,
        },
    },
    "llama": _COMMON | {"num_hidden_layers": 2, "intermediate_size": 128},
}
"""By the names that transformers has for the architectures."""


def write_model(directory: Path, architecture: str = "gpt_oss", **tokenizer: Any) -> Path:
    """Write the configuration, the tokenizer and the weights; return the directory.

    `tokenizer` may have `more_tokens`, `output_tokens`, which no text is encoded as, and fields of
    the tokenizer's configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(directory, **tokenizer)
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
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                # Sharp queries: attention that picks out single tokens keeps outputs from settling.
                scale = 2 if "q_proj" in name else 1
                weights.normal_(std=scale * weights.shape[-1] ** -0.5)
        # Never the most likely token, so that text stays legible.
        model.get_output_embeddings().weight[_unprintable(vocabulary)] = 0
    model.save_pretrained(directory)
    return directory


def _write_tokenizer(
    directory: Path,
    more_tokens: Sequence[str] = (),
    output_tokens: Sequence[str] = (),
    **fields: Any,
) -> dict[str, int]:
    """Write a tokenizer of all single bytes, and of syllables; return its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    space = "Ġ"  # how a byte-level tokenizer writes a space
    merges = [(consonant, vowel) for consonant in CONSONANTS for vowel in VOWELS]
    merges += [(space, consonant + vowel) for consonant, vowel in merges]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *map("".join, merges), END_OF_TEXT, *output_tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    tokenizer.add_tokens(list(more_tokens))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
        **fields,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return dict(tokenizer.get_vocab())


def _unprintable(vocabulary: dict[str, int]) -> list[int]:
    """Return the ids of the single bytes that are no printable ASCII character."""
    return [
        index
        for token, index in vocabulary.items()
        if len(token) == 1 and not (token.isascii() and token.isprintable())
    ]
