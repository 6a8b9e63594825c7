"""Counts the experts of a layer that a decode step reads.

For servers with `--enforce-eager`, in which `bench.worker_notes` counts. A round's metrics:

- `experts`: the mean over layers and decode steps of all streams.
- `expected_experts`: where each token takes any of the layer's experts with the same chance.
- `distinct_tokens`: what share of a stream's output tokens it has only once. With vLLM's own filler
  greedy decoding repeats one token for ever.
"""

import asyncio
import random
import statistics
from typing import Any

from bench.serving.client import Reply, complete
from bench.serving.mixed import random_prompt
from bench.serving.servers import Server

NAMES = ("num_local_experts", "num_experts", "n_routed_experts")
"""What a configuration calls how many experts a layer has."""


def measure(server: Server, point: dict[str, Any], seed: int) -> dict[str, float]:
    """Measure one round."""
    before = len(server.steps())
    replies = asyncio.run(stream_all(server, point, random.Random(seed)))
    steps = [it for it in server.steps()[before:] if it["tokens"] == point["streams"]]
    variety = [len(set(it.ids)) / len(it.ids) for it in replies]
    metrics = {"distinct_tokens": statistics.mean(variety)}
    if steps:
        metrics["experts"] = statistics.mean(it["experts"] for it in steps)
    config = server.model.config
    layer = next((config[it] for it in NAMES if it in config), None)
    if layer:
        missed = (1 - config["num_experts_per_tok"] / layer) ** point["streams"]
        metrics["expected_experts"] = layer * (1 - missed)
    return metrics


async def stream_all(server: Server, point: dict[str, Any], chance: random.Random) -> list[Reply]:
    """Send a point's streams at once; return what they have brought, ids among it."""
    replies = [Reply("stream") for _ in range(point["streams"])]
    model = server.model
    await asyncio.gather(
        *(
            complete(
                server.port,
                model.name,
                random_prompt(chance, model.vocab_size, point["input"]),
                point["output"],
                reply,
                return_token_ids=True,
            )
            for reply in replies
        )
    )
    return replies
