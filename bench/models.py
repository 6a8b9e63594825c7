"""The models that are served: shapes of `bench/models` with random weights, or a directory.

A shape is the configuration of a published model, so nothing is downloaded. Its tokenizer is made
up here, of the right size: text is made of tokens as in a real server, and each token has a text.
`tiny` has weights of its own, and runs on a CPU, as `moe-small` does.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).with_suffix("")
TINY = "tiny"
CONSONANTS, VOWELS = "bcdfghjklmnprstvz", "aeiou"
SPACE = "Ġ"
"""How a byte-level tokenizer writes a space."""


class ModelError(ValueError):
    """There is no such model."""


@dataclass(frozen=True)
class Model:
    """What `vllm serve` is given."""

    name: str
    directory: Path
    config: dict[str, Any]
    has_dummy_weights: bool

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return int(self.config["vocab_size"])


def prepare(name: str, work_dir: Path) -> Model:
    """Write a shape's files, or find a model directory.

    Raises:
        ModelError: if it is neither.

    """
    shape = SHAPES / f"{name}.json"
    if name == TINY:
        from testkit.tiny_models import write_model

        directory = write_model(work_dir / "models" / TINY)
    elif shape.exists():
        directory = work_dir / "models" / name
        _write_shape(directory, json.loads(shape.read_text()))
    elif (Path(name) / "config.json").is_file():
        directory = Path(name).resolve()
    else:
        known = sorted([TINY, *(it.stem for it in SHAPES.glob("*.json"))])
        raise ModelError(f"{name} has no config.json, and is none of {', '.join(known)}")
    config = json.loads((directory / "config.json").read_text())
    has_weights = any(itertools.chain(directory.glob("*.safetensors"), directory.glob("*.bin")))
    return Model(Path(name).name, directory, config, not has_weights)


def _write_shape(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    if not (directory / "tokenizer.json").exists():
        _write_tokenizer(directory, config["vocab_size"], config["eos_token_id"])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n")


def _write_tokenizer(directory: Path, vocab_size: int, eos_token_id: int) -> None:
    """Write a byte-level BPE tokenizer whose tokens are words, which it finds again in a text.

    Merges lead to each word: for some types of model, transformers takes nothing but vocabulary and
    merges from the file, and builds a tokenizer of its own around them.
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
