"""Compares what servers answer to the same requests, token for token.

A round's metrics: `streams`, and `same` of the server that is measured second: how many of its
streams have the tokens of the first one. Decoding is greedy, and all streams decode at once.
"""

import asyncio
import random
from typing import Any

from bench.serving.experts import stream_all
from bench.serving.servers import Server

_first: dict[int, list[list[int]]] = {}
"""What the first server of a round has answered, by seed."""


def measure(server: Server, point: dict[str, Any], seed: int) -> dict[str, float]:
    """Measure one round."""
    replies = asyncio.run(stream_all(server, point, random.Random(seed)))
    tokens = [reply.ids for reply in replies]
    if seed not in _first:
        _first[seed] = tokens
        return {"streams": len(tokens)}
    same = sum(a == b for a, b in zip(tokens, _first[seed], strict=True))
    return {"streams": len(tokens), "same": same}
