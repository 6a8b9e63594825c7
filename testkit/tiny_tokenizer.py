"""The tokenizer of the tiny models: all single bytes, and syllables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
CONSONANTS = "bcdfghjklmnprstvz"
VOWELS = "aeiou"


def write_tokenizer(
    directory: Path, max_positions: int, more_tokens: Sequence[str] = (), **config: Any
) -> dict[str, int]:
    """Write a model's tokenizer; return its vocabulary."""
    vocabulary, merges = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    tokenizer.add_tokens(list(more_tokens))
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "model_max_length": max_positions,
            **config,
        },
    )
    return dict(tokenizer.get_vocab())


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """All single bytes, and syllables with and without a space before them."""
    space = "Ġ"  # how a byte-level tokenizer writes a space
    merges = [(consonant, vowel) for consonant in CONSONANTS for vowel in VOWELS]
    merges += [(space, consonant + vowel) for consonant, vowel in merges]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *map("".join, merges), END_OF_TEXT]
    return {token: index for index, token in enumerate(tokens)}, merges


def unprintable(vocabulary: dict[str, int]) -> list[int]:
    """Return the ids of the single bytes that are no printable ASCII character."""
    return [
        index
        for token, index in vocabulary.items()
        if len(token) == 1 and not (token.isascii() and token.isprintable())
    ]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file of the model's folder."""
    path.write_text(json.dumps(content, indent=2) + "\n")
