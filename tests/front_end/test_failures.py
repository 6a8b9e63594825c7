"""Whoever waits is told: each way to ask for something, times each error, in one table.

vLLM's serving classes, `AsyncLLM` and `LLM` run here over an engine that only fails. Its own tables
say what vLLM makes of the same errors, where that is something else.

A Ray actor has no way of its own: it calls `AsyncLLM`. What vLLM's Rust front end answers is in
`tests/transport/test_rust_front_end.py`.
"""

import asyncio
import gc
import json
import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from engine.harness import restored_vllm
from scale import FULL
from sparksched import plugin
from sparksched.api_server.errors import EngineBusyError
from sparksched.shared import queue_timeout
from vllm import LLM
from vllm.config import VllmConfig
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers import run_batch
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

from testkit.executor import FakeExecutor, engine_config, write_model_directory

PATIENCE_S = {"vllm": 0.5, "sparksched": 60}
"""How long a background stream without an end is read: only vLLM's own has none."""


class Client:
    """Stands in for vLLM's client of an engine."""

    engine_ranks_managed = (0,)

    def __init__(self, fault: str, tasks: tuple[str, ...]) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._fault = fault
        self._tasks = tasks
        self._outputs: list[Any] = []
        self._has_outputs = asyncio.Event()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return self._tasks

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self._tasks

    def add_request(self, request: Any) -> None:
        match self._fault:
            case "full ring":
                raise EngineBusyError(1.0)
            case "dead engine":
                self.resources.engine_dead = True
                self._outputs.append(EngineDeadError())
            case "failing loop":
                self._reply(SimpleNamespace(request_id=request.request_id))
            case "lost request":
                self._reply(_failed(request))
            case "queue timeout":
                text = queue_timeout.message(1.0)
                self._reply(_failed(request, queue_timeout.CODE, **_error(text)))
        self._has_outputs.set()

    def _reply(self, output: Any) -> None:
        self._outputs.append(EngineCoreOutputs(outputs=[output], timestamp=1.0))

    async def add_request_async(self, request: Any) -> None:
        self.add_request(request)

    async def get_output_async(self) -> Any:
        while not self._outputs:
            self._has_outputs.clear()
            await self._has_outputs.wait()
        return self.get_output()

    def dp_engines_running(self) -> bool:
        return False

    def get_output(self) -> Any:
        output = self._outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output

    async def abort_requests_async(self, request_ids: Any) -> None:
        pass

    def abort_requests(self, request_ids: Any) -> None:
        pass

    def reset_mm_cache(self) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def _failed(request: Any, stop_reason: str | None = None, **error: Any) -> EngineCoreOutput:
    ending = FinishReason.ERROR
    return EngineCoreOutput(
        request.request_id, [], finish_reason=ending, stop_reason=stop_reason, **error
    )


def _error(text: str) -> dict[str, Any]:
    if not queue_timeout.outputs_say_why():
        return {}
    from vllm.outputs import RequestError

    return {"error": RequestError(queue_timeout.CODE, text, retryable=True)}


# ----------------------------------------------------------------------------------------
# Ways to ask
# ----------------------------------------------------------------------------------------

PROMPT = {"prompt_token_ids": [1, 2, 3]}
CHAT = {"messages": [{"role": "user", "content": "ba"}], "max_tokens": 4}
RESPONSE = {"input": "ba", "max_output_tokens": 4, "store": True}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["ba", "bo"], "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/embeddings": {"input": ["ba", "bo"]},
    "/pooling": {"input": "ba"},
    "/score": {"text_1": "ba", "text_2": ["bo", "bu"]},
    "/rerank": {"query": "ba", "documents": ["bo", "bu"]},
}


async def over_http(llm: AsyncLLM, args: Namespace, path: str, options: dict[str, Any]) -> str:
    """Return the status; of a stream and of a stored response, whether it ends with an error."""
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    app.state.server = SimpleNamespace()
    await init_app_state(llm, app.state, args, tasks)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        try:
            patience_s = PATIENCE_S[os.environ["VLLM_SCHEDULER"]]
            async with asyncio.timeout(patience_s if "background" in options else None):
                answer = await client.post(path, json={"model": "tiny", **BODIES[path], **options})
        except TimeoutError:
            return "no end"
        if options.get("stream"):
            return _end_of_stream(answer.text)
        if "background" in options:
            tasks = app.state.openai_serving_responses.background_tasks.values()
            await asyncio.gather(*tasks, return_exceptions=True)
            stored = (await client.get(f"{path}/{answer.json()['id']}")).json()
            assert ("error" in stored) == (stored["status"] == "failed")
            return str(stored["status"])
    if answer.status_code == 503 and path != "/v1/messages":
        return "503" if int(answer.headers.get("Retry-After", 0)) >= 1 else "503 without a time"
    return str(answer.status_code)


def _end_of_stream(text: str) -> str:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "data: {" in line]
    last = json.loads(lines[-1])
    return "error" if last.get("error") or last["response"].get("error") else "cut"


async def by_batch(llm: AsyncLLM, args: Namespace, path: str, _: dict[str, Any]) -> str:
    body = {"model": "tiny", **BODIES[path]}
    line = {"custom_id": "1", "method": "POST", "url": path, "body": body}
    Path(args.input_file).write_text(json.dumps(line))
    with mock.patch.object(entry, "build_async_engine_client", return_value=nullcontext(llm)):
        try:
            await run_batch.main(args)
        except Exception as error:
            return type(error).__name__
    output = json.loads(Path(args.output_file).read_text())
    assert output["error"]
    return str(output["response"]["status_code"])


async def by_async_llm(llm: AsyncLLM, _: Namespace, method: str, __: dict[str, Any]) -> str:
    params = SamplingParams() if method == "generate" else PoolingParams(task="embed")
    try:
        async for output in getattr(llm, method)(PROMPT, params, "request"):
            return f"finish_reason {output.outputs[0].finish_reason}"
    except Exception as error:
        return type(error).__name__
    return "nothing"


def by_llm(llm: LLM, method: str) -> str:
    try:
        (output,) = getattr(llm, method)([PROMPT], use_tqdm=False)
    except Exception as error:
        return type(error).__name__
    if method == "generate":
        return f"finish_reason {output.outputs[0].finish_reason}"
    return "error" if output.error else "nothing"


STREAMED = {"stream": True}
STORED = {"background": True}

WAYS: dict[str, tuple[Any, ...]] = {
    "completions": (over_http, "/v1/completions", {}),
    "completions, streamed": (over_http, "/v1/completions", STREAMED),
    "chat": (over_http, "/v1/chat/completions", {}),
    "chat, streamed": (over_http, "/v1/chat/completions", STREAMED),
    "messages": (over_http, "/v1/messages", {}),
    "messages, streamed": (over_http, "/v1/messages", STREAMED),
    "responses": (over_http, "/v1/responses", {}),
    "responses, streamed": (over_http, "/v1/responses", STREAMED),
    "responses, background": (over_http, "/v1/responses", STORED),
    "responses, background, streamed": (over_http, "/v1/responses", STORED | STREAMED),
    "embeddings": (over_http, "/v1/embeddings", {}),
    "pooling": (over_http, "/pooling", {}),
    "score": (over_http, "/score", {}),
    "rerank": (over_http, "/rerank", {}),
    "batch of chats": (by_batch, "/v1/chat/completions", {}),
    "batch of embeddings": (by_batch, "/v1/embeddings", {}),
    "AsyncLLM.generate": (by_async_llm, "generate", {}),
    "AsyncLLM.encode": (by_async_llm, "encode", {}),
    "LLM.generate": (by_llm, "generate"),
    "LLM.embed": (by_llm, "embed"),
}

# ----------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------

FAULTS = ("queue timeout", "full ring", "lost request", "failing loop", "dead engine")
"""After the last two a front end serves nobody any more: `!`. A lost request is one that the engine
can't prepare, or whose client took no outputs."""

SPARKSCHED = """
completions                     | 503   | 503   | 500   | 500 !   | 500 !
completions, streamed           | error | error | error | error ! | error !
chat                            | 503   | 503   | 500   | 500 !   | 500 !
chat, streamed                  | error | error | error | error ! | error !
messages                        | 503   | 503   | 500   | 500 !   | 500 !
messages, streamed              | error | error | error | error ! | error !
responses                       | 503   | 503   | 500   | 500 !   | 500 !
responses, streamed             | error | error | error | error ! | error !
responses, background           | failed | failed | failed | failed ! | failed !
responses, background, streamed | error | error | error | error ! | error !
embeddings                      | 503   | 503   | 500   | 500 !   | 500 !
pooling                         | 503   | 503   | 500   | 500 !   | 500 !
score                           | 503   | 503   | 500   | 500 !   | 500 !
rerank                          | 503   | 503   | 500   | 500 !   | 500 !
batch of chats                  | 503   | 503   | 500   | 500 !   | 500 !
batch of embeddings             | 503   | 503   | 500   | 500 !   | 500 !
AsyncLLM.generate | QueueTimeoutError | EngineBusyError | finish_reason error | \
    EngineGenerateError ! | EngineDeadError !
AsyncLLM.encode | QueueTimeoutError | EngineBusyError | EngineGenerateError | \
    EngineGenerateError ! | EngineDeadError !
LLM.generate | finish_reason error | | finish_reason error | AttributeError | EngineDeadError
LLM.embed | error | | error | AttributeError | EngineDeadError
"""

VLLM_LOOP = """
completions                     | 500   | 503   | 500   | 500 !   | 500 !
responses, streamed             | error | error | error | error ! | error !
responses, background           | failed | failed | failed | failed ! | failed !
responses, background, streamed | error | error | error | error ! | error !
embeddings                      |       | 503   | 500 ! | 500 !   | 500 !
AsyncLLM.generate | finish_reason error | EngineBusyError | finish_reason error | \
    EngineGenerateError ! | EngineDeadError !
LLM.embed                       |       |       | AssertionError | AttributeError | EngineDeadError
"""
"""With `SPARKSCHED_FRONT_END=vllm`. One lost pooling request ends vLLM 0.32.0's loop, and with it
the server; so an engine lets none wait in vain (`engine/arrival.py`)."""

VLLM = """
completions                     |   |   | 500    | 500 !     | 500 !
responses, streamed             |   |   | cut    | cut !     | cut !
responses, background           |   |   | queued | queued !  | queued !
responses, background, streamed |   |   | no end | no end !  | no end !
embeddings                      |   |   | 500 !  | 500 !     | 500 !
"""
"""Without sparksched. What the other rows' ways make of these errors is as above."""

DEAD = dict.fromkeys(("failing loop", "dead engine"), "EngineDeadError !")
SINCE_0_33 = {
    ("sparksched", "batch of chats"): DEAD,
    ("sparksched", "batch of embeddings"): DEAD,
    ("sparksched", "AsyncLLM.encode"): {"lost request": "GenerationError"},
    ("vLLM's loop", "completions"): {"queue timeout": "503 without a time"},
    ("vLLM's loop", "AsyncLLM.generate"): {"queue timeout": "RetryableRequestError"},
}
"""Cells that are others since vLLM 0.33.0, whose outputs say what an error is."""

SIDES = {
    "sparksched": (SPARKSCHED, {"VLLM_SCHEDULER": "sparksched"}),
    "vLLM's loop": (VLLM_LOOP, {"VLLM_SCHEDULER": "sparksched", "SPARKSCHED_FRONT_END": "vllm"}),
    "vLLM": (VLLM, {"VLLM_SCHEDULER": "vllm"}),
}


def cases() -> Iterator[Any]:
    for side, (table, variables) in SIDES.items():
        for row in table.replace("\\\n", "").strip().splitlines():
            way, *cells = (cell.strip() for cell in row.split("|"))
            assert len(cells) == len(FAULTS), row
            expected = {fault: end for fault, end in zip(FAULTS, cells, strict=True) if end}
            newer = SINCE_0_33.get((side, way), {})
            if queue_timeout.outputs_say_why():
                expected |= newer
            # The others say the same of both releases: only `test-all` asks each of them.
            marks = pytest.mark.release if newer or (FULL and side != "vLLM") else ()
            yield pytest.param(variables, way, expected, id=f"{side}-{way}", marks=marks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("variables", "way", "expected"), cases())
def test_whoever_waits_is_told(
    variables: dict[str, str], way: str, expected: dict[str, str], model: Path, tmp_path: Path
) -> None:
    with restored_vllm():
        os.environ |= {"VLLM_ENABLE_RESPONSES_API_STORE": "1", **variables}
        plugin.register()
        with tracebacks() as noise:
            seen = {fault: ask(way, fault, model, tmp_path) for fault in FAULTS[:2]}
        if "vllm" not in variables.values():
            assert not noise, "an error that is expected"
        seen |= {fault: ask(way, fault, model, tmp_path) for fault in FAULTS[2:]}
    assert {fault: seen[fault] for fault in expected} == expected


def ask(way: str, fault: str, model: Path, folder: Path) -> str:
    """Ask an engine that fails in this way; return what whoever asked is told."""
    kind, *what = WAYS[way]
    is_pooling = any(name in way for name in ("embed", "encode", "pooling", "score", "rerank"))
    settings = {"runner": "pooling", "convert": "embed"} if is_pooling else {}
    client = Client(fault, ("embed",) if is_pooling else ("generate",))
    with ExitStack() as stack:
        for name in ("make_client", "make_async_mp_client"):
            stack.enter_context(mock.patch.object(EngineCoreClient, name, return_value=client))
        if kind is by_llm:
            llm = LLM(model=str(model), dtype="float32", load_format="dummy", **settings)
            return by_llm(llm, *what)
        config = engine_config(model, async_scheduling=False, **settings)
        return asyncio.run(ask_async(kind, what, config, arguments(model, folder)))


async def ask_async(kind: Any, what: list[Any], config: VllmConfig, args: Namespace) -> str:
    llm = AsyncLLM(vllm_config=config, executor_class=FakeExecutor, log_stats=True)
    try:
        told: str = await kind(llm, args, *what)
        return told if llm.is_running else f"{told} !"
    finally:
        llm.shutdown()


def arguments(model: Path, folder: Path) -> Namespace:
    template = "{{ messages[0].content }}"
    options = [str(model), "--served-model-name=tiny", f"--chat-template={template}"]
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    args.input_file, args.output_file = str(folder / "input"), str(folder / "output")
    args.output_tmp_dir = args.max_inflight = None
    return args


@contextmanager
def tracebacks() -> Iterator[list[str]]:
    """Collect what is logged with a traceback, and lines of asyncio."""
    seen: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info or record.name == "asyncio":
                seen.append(record.getMessage())

    handler = Collector(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("vllm", "asyncio", "uvicorn")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield seen
        gc.collect()  # of a task whose error nobody took, asyncio complains then
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
