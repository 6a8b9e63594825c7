"""What a load sees of a vLLM server: completions as a stream of events, `/metrics`, `/health`."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STEP_S = 0.002
METRICS = "\n".join(
    f'vllm:{name}_total{{engine="0"}} 0'
    for name in ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
)


@contextmanager
def serving() -> Iterator[int]:
    """Serve in a thread; yield the port."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(_answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_hang_up(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _hang_up() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [it for it in head.lower().split(b"\r\n") if it.startswith(b"content-length:")]
    length = int(lengths[0].partition(b":")[2]) if lengths else 0
    body = await reader.readexactly(length)
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    if head.startswith(b"POST"):
        await _complete(json.loads(body), writer)
    elif b" /metrics " in head:
        writer.write(METRICS.encode())
    await writer.drain()
    writer.close()


async def _complete(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
    number = int(str(request["max_tokens"]))
    if number > 10**6:
        writer.write(b'data: {"error": {"message": "too many"}}\n\n')
        return
    for index in range(number):
        await asyncio.sleep(STEP_S)
        choice = {"index": 0, "text": " ba", "token_ids": [index % 7 + 3]}
        event = {"choices": [choice], "usage": {"completion_tokens": index + 1}}
        writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    writer.write(b"data: [DONE]\n\n")
