"""What `test_offline.py` runs twice: one engine after the other, in this process.

Its arguments are GPT_OSS HYBRIDS RESULT: folders that the tests wrote, and the file to write.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from scale import FULL

from testkit.tiny_models import HYBRIDS

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "block_size": 32,
}
NUM_WAVES = 2
VOCAB_SIZE = 400  # ids below this are in the tiny models' vocabulary
NUM_WITH_STATES, PREFIX_LENGTHS = 10, (0, 40, 130, 300, 520)
BLOCK_SIZE_WITH_STATES = 128  # vLLM's on a CPU
# By whether there is a prefix cache, blocks that a few requests fill: with it, those of states are
# as long as those of attention; without it, a request has one state in each group.
NUM_BLOCKS = {True: 20, False: 16}
CACHED = "-cached"
ALL_HYBRIDS = [name + suffix for name in HYBRIDS for suffix in ("", CACHED)]
FEW_HYBRIDS = ("lfm2-cached",)
"""Those of `make test`."""

Result = TypeVar("Result")


def embed(model: str) -> list[list[float]]:
    """Embed prompts from one token to several chunks long, some with a prefix in common."""
    from vllm import LLM

    engine = LLM(model=model, runner="pooling", convert="embed", **ENGINE)
    tokens = [it % VOCAB_SIZE for it in range(1, 1000)]
    prompts = [
        [at, *tokens[: length - 1]] for at, length in enumerate((1, 2, 33, 33, 64, 300, 700))
    ]
    prompts += [[*range(100), 5], [*range(100), 6]]
    waves = [engine.embed([{"prompt_token_ids": it} for it in prompts]) for _ in range(2)]
    return [output.outputs.embedding for wave in waves for output in wave]


def states(hybrids: Path, name: str) -> dict[str, Any]:
    """Return streams, prefix hits and preemptions of a model with recurrent states.

    Prompts are from one block to several chunks long, with beginnings in common.
    """
    from vllm import LLM, SamplingParams

    architecture, has_prefix_cache = name.removesuffix(CACHED), name.endswith(CACHED)
    # A longer chunk may keep a state from within it, but vLLM's CPU kernel of Mamba 2 returns only
    # the last one, and mamba_mixer2.py fails.
    longest_chunk = BLOCK_SIZE_WITH_STATES if architecture == "granitemoehybrid" else 0
    engine = LLM(
        model=str(hybrids / architecture),
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        long_prefill_token_threshold=longest_chunk,
        enable_prefix_caching=has_prefix_cache,
        disable_log_stats=False,
        num_gpu_blocks_override=NUM_BLOCKS[has_prefix_cache],
    )
    rng = random.Random(1)
    shared = [it % VOCAB_SIZE for it in range(1, 1000)]
    prompts = [
        [*shared[: rng.choice(PREFIX_LENGTHS)], *(rng.randrange(9) for _ in range(1 + number * 7))]
        for number in range(NUM_WITH_STATES)
    ]
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    streams, num_cached = [], 0
    for _ in range(NUM_WAVES):
        requests = [{"prompt_token_ids": it} for it in prompts]
        outputs = engine.generate(requests, params, use_tqdm=False)
        streams += [list(output.outputs[0].token_ids) for output in outputs]
        num_cached += sum(output.num_cached_tokens or 0 for output in outputs)
        rng.shuffle(prompts)
    metrics = {it.name: it for it in engine.get_metrics()}
    num_preemptions = metrics["vllm:num_preemptions"].value
    return {"streams": streams, "num_cached": num_cached, "num_preemptions": num_preemptions}


def alone(part: Callable[..., Result], *arguments: Any) -> Result:
    """Run a part, and clear away the distributed groups that its engine leaves in the process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    result = part(*arguments)
    cleanup_dist_env_and_memory()
    return result


def main() -> None:
    gpt_oss, hybrids, result = sys.argv[1:]
    vectors = alone(embed, gpt_oss)
    names = ALL_HYBRIDS if FULL else FEW_HYBRIDS
    found = {
        "vectors": vectors,
        "states": {name: alone(states, Path(hybrids), name) for name in names},
    }
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
