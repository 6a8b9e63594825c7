"""What an engine and its front end hold when nothing is going on, and whether it grows."""

import ctypes
import gc
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc


def anonymous_bytes(pid: int) -> int:
    """Return a process's resident memory that is its own: neither files nor rings."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} has no memory")


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = [(name, ctypes.c_size_t) for name in (*_names, "fordblks", "keepcost")]


def heap_bytes() -> int:
    """Return what is allocated in this process, garbage aside; 0 where the C library can't tell.

    A little that is lost fills holes in the heap for long, before more memory is resident.
    """
    gc.collect()
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def python_blocks() -> int:
    """Return how many blocks Python's objects take in this process, garbage aside."""
    gc.collect()
    return sys.getallocatedblocks()


def show_books() -> None:
    """Give an engine the utility methods of this module."""
    EngineCoreProc.books = books
    EngineCoreProc.num_requests = num_requests
    EngineCoreProc.heap_bytes = staticmethod(heap_bytes)
    EngineCoreProc.python_blocks = staticmethod(python_blocks)


def num_requests(self: EngineCoreProc) -> int:
    """Return how many requests an engine has, whatever its scheduler."""
    return len(self.scheduler.requests)


def books(self: EngineCoreProc) -> dict[str, Any]:
    """Return what the engine keeps of requests, and how many blocks are free."""
    snapshot = self.scheduler.snapshot()
    return {
        "requests": sorted(snapshot["requests"]),
        "running": snapshot["running"],
        "waiting": snapshot["waiting"],
        "blocks in use": len(snapshot["ref_counts"]),
        "free blocks": len(snapshot["free_blocks"]),
        "sequences": self.model_executor.on_count_sequences(),
        "has work": self.has_work(),
    }


def front_end_books(llm: AsyncLLM) -> dict[str, Any]:
    """Return what a front end keeps of requests and of calls."""
    processor = llm.output_processor
    rings = llm.engine_core.resources.sparksched_rings
    return {
        "states": sorted(processor.request_states),
        "parents": sorted(processor.parent_requests),
        "external ids": sorted(processor.external_req_ids),
        "utility calls": sorted(llm.engine_core.utility_results),
        "outputs": llm.engine_core.outputs_queue.qsize(),
        "waiting for room": sum(len(it._waiting) for it in rings.channels.values()),
    }


def growth(num_requests: Sequence[int], values: Sequence[int]) -> float:
    """Return the median of the growths a request between any two quiet points.

    What a single point shows, such as memory that is given back later, does not count.
    """
    pairs = itertools.combinations(zip(num_requests, values, strict=True), 2)
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs)
