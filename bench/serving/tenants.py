"""Measures how long a tenant waits whose neighbour floods the server.

Tenant `flood` sends `flood` requests at once. Tenant `steady` sends one each second meanwhile. An
output has `output` tokens, give or take half. Requests name their tenant in `vllm_xargs`; where the
operator sets priorities by hand (`vllm-priority`), those of `steady` come first. A round's metrics:

- `steady_ttft_ms`, `flood_ttft_ms`: from sending a request to its first token.
- `steady_gap_ms`: between outputs of the steady tenant's requests.
- `requests_per_s`, `tokens_per_s`: of both tenants, until the last request has ended.
"""

import asyncio
import random
import time
from typing import Any

from bench.serving.client import Reply, complete, percentiles
from bench.serving.mixed import random_prompt
from bench.serving.servers import Server

FLOOD, STEADY = "flood", "steady"
PRIORITIES = {FLOOD: 1, STEADY: 0}
"""vLLM takes the lowest number first."""


def measure(server: Server, point: dict[str, Any], seed: int) -> dict[str, float]:
    """Measure one round."""
    return asyncio.run(_measure(server, point, random.Random(seed)))


async def _measure(
    server: Server, point: dict[str, Any], chance: random.Random
) -> dict[str, float]:
    replies: list[Reply] = []
    by_hand = "--scheduling-policy=priority" in server.side.arguments

    def send(tenant: str) -> asyncio.Task[None]:
        reply = Reply(tenant)
        replies.append(reply)
        prompt = random_prompt(chance, server.model.vocab_size, point["input"])
        max_tokens = chance.randint(point["output"] // 2, point["output"] * 3 // 2)
        more: dict[str, Any] = {"vllm_xargs": {"tenant": tenant}}
        if by_hand:
            more["priority"] = PRIORITIES[tenant]
        return asyncio.create_task(
            complete(server.port, server.model.name, prompt, max_tokens, reply, **more)
        )

    began = time.perf_counter()
    flood = [send(FLOOD) for _ in range(point["flood"])]
    tasks = list(flood)
    while not all(it.done() for it in flood):
        tasks.append(send(STEADY))
        await asyncio.wait(flood, timeout=point.get("every_s", 1.0))
    await asyncio.gather(*tasks)
    seconds = max(it.times[-1] for it in replies) - began
    tokens = sum(sum(it.tokens) for it in replies)
    metrics = {"requests_per_s": len(replies) / seconds, "tokens_per_s": tokens / seconds}
    for tenant in (FLOOD, STEADY):
        waits = [1e3 * it.ttft_s for it in replies if it.kind == tenant]
        metrics |= percentiles(f"{tenant}_ttft_ms", waits, 50, 99)
    gaps = [gap for it in replies if it.kind == STEADY for gap in it.gaps_ms()]
    metrics |= percentiles(f"{STEADY}_gap_ms", gaps, 50, 99)
    return metrics
