"""What `test_states.py` runs twice: an engine with recurrent states, in this process.

    python -m e2e.states_program MODEL CACHING RESULT

CACHING is 1 or 0, and RESULT the file to write.
"""

import json
import random
import sys
from pathlib import Path

NUM_REQUESTS, NUM_WAVES = 10, 3
PREFIX_LENGTHS = (0, 40, 130, 300, 520)
VOCAB_SIZE = 400  # ids below this are in the tiny model's vocabulary


def prompts(rng: random.Random) -> list[list[int]]:
    """Return prompts with beginnings in common, from one block to several chunks long."""
    shared = [it % VOCAB_SIZE for it in range(1, 1000)]
    return [
        [*shared[: rng.choice(PREFIX_LENGTHS)], *(rng.randrange(9) for _ in range(1 + number * 7))]
        for number in range(NUM_REQUESTS)
    ]


def main(model: str, caching: str, result: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_prefix_caching=caching == "1",
        disable_log_stats=False,
        # A few requests fill it.
        num_gpu_blocks_override=int(sys.argv[4]) if len(sys.argv) > 4 else None,
    )
    params = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
    rng = random.Random(1)
    wave = prompts(rng)
    streams, num_cached = [], 0
    for _ in range(NUM_WAVES):
        requests = [{"prompt_token_ids": it} for it in wave]
        outputs = engine.generate(requests, params, use_tqdm=False)
        streams += [list(output.outputs[0].token_ids) for output in outputs]
        num_cached += sum(output.num_cached_tokens or 0 for output in outputs)
        rng.shuffle(wave)
    metrics = {it.name: it for it in engine.get_metrics()}
    num_preemptions = metrics["vllm:num_preemptions"].value
    Path(result).write_text(
        json.dumps(
            {"streams": streams, "num_cached": num_cached, "num_preemptions": num_preemptions}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:4])
