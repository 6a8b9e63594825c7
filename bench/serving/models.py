"""The models that are served: named shapes with random weights, or a directory.

A shape is the configuration of a published model. vLLM fills its weights with random numbers
(`--load-format dummy`), so nothing is downloaded; its tokenizer is made up here, of the right size,
so that text is made of tokens as in a real server, and each token has a text. The tiny model has
weights of its own.

`NAME+ngram` and `NAME+eagle3` speculate. Random weights soon repeat themselves, so that the n-gram
proposer's drafts are often right; EAGLE3's head has random weights too, and is never right.
`NAME+embed` answers `/v1/embeddings` instead of generating.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Config = dict[str, Any]

TINY = "tiny"
NGRAM, EAGLE3 = METHODS = ("ngram", "eagle3")
"""What can make drafts."""
EMBED = "embed"
NUM_DRAFTS = 3
"""Of each request in a step."""

CONSONANTS, VOWELS = "bcdfghjklmnprstvz", "aeiou"
SPACE = "Ġ"
"""How a byte-level tokenizer writes a space."""


def _gpt_oss(num_layers: int, num_experts: int) -> Config:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "num_local_experts": num_experts,
        "output_router_logits": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 201088,
    }


QWEN2_1_5B: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_0_6B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_NEXT_QUARTER: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 12,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}
"""A quarter of Qwen3-Next-80B-A3B's layers and of its experts: the whole doesn't fit one GPU."""

SHAPES: dict[str, Config] = {
    "gpt-oss-120b": _gpt_oss(num_layers=36, num_experts=128),
    "gpt-oss-20b": _gpt_oss(num_layers=24, num_experts=32),
    "Qwen2-1.5B": QWEN2_1_5B,
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-Next-quarter": QWEN3_NEXT_QUARTER,
}
NAMES = (*SHAPES, TINY)


class ModelError(ValueError):
    """There is no such model."""


@dataclass(frozen=True)
class Model:
    """What `vllm serve` is given."""

    name: str
    directory: Path
    config: Config
    has_dummy_weights: bool
    speculation: Config | None = None
    """vLLM's `--speculative-config`."""
    is_pooling: bool = False
    """Whether it answers with an embedding."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return int(self.config["vocab_size"])

    @property
    def tokens_a_step(self) -> int:
        """How many of a request a decode step computes: one, and all of its drafts."""
        return 1 + (0 if self.speculation is None else NUM_DRAFTS)


def prepare(name: str, work_dir: Path) -> Model:
    """Write a shape's files, or find a model directory; `+METHOD` says what it is to do with it.

    Raises:
        ModelError: if it is neither, or there is no such method.

    """
    target, plus, method = name.rpartition("+")
    if not plus or Path(name).is_dir():
        return _prepare(name, work_dir)
    if method not in (*METHODS, EMBED):
        raise ModelError(f"{name}: {method} is none of {', '.join((*METHODS, EMBED))}")
    model = _prepare(target, work_dir)
    if method == EMBED:
        return replace(model, name=f"{model.name}+{EMBED}", is_pooling=True)
    speculation: Config = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == NGRAM:
        speculation |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    else:
        speculation["model"] = str(_write_head(model, work_dir))
    return replace(model, name=f"{model.name}+{method}", speculation=speculation)


def _prepare(name: str, work_dir: Path) -> Model:
    if name in NAMES:
        directory = work_dir / "models" / name
        if name == TINY:
            from testkit.tiny_gpt_oss import write_model

            write_model(directory)
        else:
            write_shape(directory, SHAPES[name])
        return Model(name, directory, _read_config(directory), has_dummy_weights=name != TINY)
    directory = Path(name)
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{name} is no directory with a config.json, nor one of {', '.join(NAMES)}"
        )
    has_weights = any(directory.glob("*.safetensors")) or any(directory.glob("*.bin"))
    return Model(
        directory.resolve().name,
        directory,
        _read_config(directory),
        has_dummy_weights=not has_weights,
    )


def _write_head(target: Model, work_dir: Path) -> Path:
    """Write the configuration of an EAGLE3 head that fits: one layer, with the target's sizes."""
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    directory = work_dir / "models" / f"{target.name}-head"
    directory.mkdir(parents=True, exist_ok=True)
    head = {name: target.config[name] for name in same if name in target.config}
    head |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }
    _write_json(directory / "config.json", head)
    return directory


def _read_config(directory: Path) -> Config:
    config: Config = json.loads((directory / "config.json").read_text())
    return config


def write_shape(directory: Path, config: Config) -> None:
    """Write the files of a model with this configuration, but for its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    if not (directory / "tokenizer.json").exists():
        _write_tokenizer(directory, config["vocab_size"], config["eos_token_id"])


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content) + "\n")


def _write_tokenizer(directory: Path, vocab_size: int, eos_token_id: int) -> None:
    """Write a byte-level BPE tokenizer whose tokens are words, which it finds again in a text.

    All but its few first tokens are whole words, so text of any of them has as many tokens when it
    is read again. Merges lead to each word: for some types of model, transformers takes nothing but
    vocabulary and merges from the file, and builds a tokenizer of its own around them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    end = "<|endoftext|>"
    made = dict(itertools.islice(_tokens(), vocab_size - 1))
    tokens = list(made)
    tokens.insert(eos_token_id, end)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [parts for parts in made.values() if parts is not None]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end},
    )


def _tokens() -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Yield letters, syllables, then words of one syllable and more; each with what it is made of.

    A word has a space before it.
    """
    for letter in (SPACE, *CONSONANTS, *VOWELS):
        yield letter, None
    pairs = list(itertools.product(CONSONANTS, VOWELS))
    for consonant, vowel in pairs:
        yield consonant + vowel, (consonant, vowel)
    words = [SPACE]
    while True:
        longer = [(word, "".join(pair)) for word in words for pair in pairs]
        yield from (("".join(parts), parts) for parts in longer)
        words = ["".join(parts) for parts in longer]
