"""vLLM's Rust front end at the other end of the sockets of an engine: a stub, or one without a GPU.

`make test` fetches it. With real engines: `tests/e2e/test_rust_front_end.py`.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackEncoder

from testkit import vllm_rs
from testkit.tiny_models import write_model

from .clients import ENDLESS
from .conftest import make_config
from .engines import running_engine, send_signal, wait_until
from .holdings import anonymous_bytes
from .test_push_sockets import Waiting, until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(vllm_rs.binary() is None, reason="make test fetches it"),
]

NUM_STREAMS = 64
NUM_TOKENS = 20
READY = {
    "max_model_len": 1024,
    "num_gpu_blocks": 52,
    "block_size": 32,
    "dp_stats_address": None,
    "dtype": "float32",
    "vllm_version": "0.32.0",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": NUM_STREAMS,
    "max_num_batched_tokens": 256,
    "instance_id": "x",
    "supports_lora": False,
    "max_loras": 0,
    "kv_events_config": None,
}


class FrontEnd:
    """The front end, which waits for its engine."""

    def __init__(
        self, model: Path, requests_path: Path, outputs_path: Path, stack: ExitStack
    ) -> None:
        listeners = {
            "listen": socket.create_server(("127.0.0.1", 0)),
            "input-listener": unix_listener(requests_path),
            "output-listener": unix_listener(outputs_path),
        }
        self.url = f"http://127.0.0.1:{listeners['listen'].getsockname()[1]}"
        arguments = {
            "model_tag": str(model),
            "served_model_name": ["tiny"],
            "engine_ready_timeout_secs": 60,
            "http_timeout_keep_alive": 5,
        }
        command = [str(vllm_rs.binary()), "frontend", "--args-json", json.dumps(arguments)]
        command += ["--engine-start-index=0", "--engine-count=1", "--data-parallel-size=1"]
        fds = []
        for name, listener in listeners.items():
            fds.append(listener.fileno())
            command.append(f"--{name}-fd={listener.fileno()}")
        with outputs_path.with_name("front-end.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, pass_fds=fds, stdout=log, stderr=subprocess.STDOUT
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        for listener in listeners.values():
            listener.close()

    def wait_until_it_serves(self) -> None:
        until(lambda: self.process.poll() is not None or self.is_healthy())

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    def complete(self, prompt: list[int], **settings: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS}
        body |= {"return_token_ids": True, **settings}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


class Stub(FrontEnd):
    """The front end, and what it takes for its engine."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        super().__init__(model, folder / "in", folder / "out", stack)
        self.outputs = Waiting(f"ipc://{folder}/out")
        stack.callback(self.outputs.end)
        context = stack.enter_context(zmq.Context())
        self.requests = stack.enter_context(context.socket(zmq.DEALER))
        self.requests.setsockopt(zmq.IDENTITY, bytes(2))
        self.requests.setsockopt(zmq.LINGER, 0)
        self.requests.setsockopt(zmq.RCVTIMEO, 60_000)
        self.requests.connect(f"ipc://{folder}/in")
        self.requests.send(msgspec.msgpack.encode(READY))
        self.wait_until_it_serves()

    def take_request(self) -> str:
        """Return the id of the next request."""
        kind, *frames = self.requests.recv_multipart()
        assert kind == b"\0"
        request_id: str = msgspec.msgpack.decode(frames[0])[0]
        return request_id

    def step(self, outputs: list[EngineCoreOutput]) -> None:
        message = EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())
        assert self.outputs.send(*map(bytes, MsgpackEncoder().encode(message)))


def unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stub(model: Path, tmp_path: Path) -> Iterator[Stub]:
    with ExitStack() as stack:
        yield Stub(model, tmp_path, stack)


def test_its_death_is_noticed(stub: Stub) -> None:
    # One that ends before it takes outputs is its launcher's affair: it may come up again.
    until(lambda: stub.outputs.events)
    assert stub.outputs.events == [(0, None)]
    os.kill(stub.process.pid, 9)
    until(lambda: stub.outputs.sockets.is_deserted)


def test_it_is_told_that_the_engine_is_dead(stub: Stub) -> None:
    """A request in flight fails, and later ones do, or the front end has ended."""
    answers = []
    client = threading.Thread(target=lambda: answers.append(stub.complete([1])))
    client.start()
    stub.step([EngineCoreOutput(stub.take_request(), [40])])
    assert stub.outputs.send(EngineCoreProc.ENGINE_CORE_DEAD, regardless=True)
    client.join(60)
    assert answers[0].status_code >= 500, answers[0].text
    until(lambda: not stub.is_healthy())


def test_a_request_that_fails_in_the_engine(tmp_path: Path) -> None:
    """Whoever waits is told. vLLM 0.32.0's Rust front end has neither messages nor responses."""
    model = write_model(tmp_path / "model", "llama")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    ways = {
        "/v1/completions": {"prompt": [1]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "ba"}]},
    }
    with ExitStack() as stack, ThreadPoolExecutor(1) as clients:
        stub = Stub(model, tmp_path, stack)
        for (path, body), stream in itertools.product(ways.items(), (False, True)):
            whole = {"model": "tiny", "max_tokens": 4, "stream": stream, **body}
            asked = clients.submit(httpx.post, stub.url + path, json=whole, timeout=60)
            request_id = stub.take_request()
            stub.step([EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)])
            answer = asked.result()
            assert answer.status_code == (200 if stream else 500)
            assert '"error":{"message":"Internal server error"' in answer.text


NUM_STOPPED = 32

BOUND_BYTES = 1 << 16
"""What may wait for a front end that takes nothing, here."""

STATE_BYTES = 16 << 20
"""Besides that: messages on their way, and what the requests have."""


def bound_what_waits() -> None:
    """Have an engine give up on a front end sooner than after 64 MiB."""
    from sparksched.engine import sockets

    sockets.MAX_BACKLOG_BYTES = BOUND_BYTES  # type: ignore[misc]


def stream_to_its_end(front_end: FrontEnd, begun: threading.Barrier) -> list[bytes]:
    """Ask for more tokens than there will be; return the last two lines of the stream."""
    body = {"model": "tiny", "prompt": [1], "max_tokens": ENDLESS, "ignore_eos": True}
    body["stream"] = True
    # There are very many lines, and httpx takes its time for each.
    connection = HTTPConnection(front_end.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    with connection.getresponse() as answer:
        last = [answer.readline()]
        begun.wait(60)
        for line in filter(bytes.strip, answer):
            last = [*last[-1:], line]
    return last


def test_one_that_is_stopped_costs_the_engine_little(
    model: Path, config: VllmConfig, tmp_path: Path
) -> None:
    """Its requests fail in the engine; when it runs again it learns that, and serves as before."""
    variables = {**vllm_rs.variables(), "SPARKSCHED_STUCK_AFTER_S": "1"}
    with (
        running_engine(config, prepare=bound_what_waits, **variables) as engine,
        ThreadPoolExecutor(NUM_STOPPED) as clients,
        ExitStack() as stack,
    ):
        front_end = FrontEnd(
            model, engine.directory / "input-0", engine.directory / "output-0", stack
        )
        front_end.wait_until_it_serves()
        begun = threading.Barrier(NUM_STOPPED + 1)
        streams = [clients.submit(stream_to_its_end, front_end, begun) for _ in range(NUM_STOPPED)]
        begun.wait(60)
        before = anonymous_bytes(engine.pid)
        send_signal(front_end.process.pid, signal.SIGSTOP)
        wait_until(lambda: engine.log_lines("takes no messages"), what="for a refusal")
        assert anonymous_bytes(engine.pid) - before < BOUND_BYTES + STATE_BYTES
        send_signal(front_end.process.pid, signal.SIGCONT)
        for stream in streams:
            last = stream.result()
            assert b"error" in last[0], last
        answer = front_end.complete([1])
        assert answer.is_success, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) == NUM_TOKENS
        assert not engine.log_lines("ERROR")


@pytest.mark.release
def test_a_request_that_waits_too_long(model: Path, model_directory: Path, tmp_path: Path) -> None:
    """Its client is told why, and whoever sets a limit that is none: by vLLM 0.33.0, not before."""
    config = make_config(model_directory, max_num_seqs=1)
    is_told = "error" in EngineCoreOutput.__struct_fields__
    with (
        running_engine(config, **vllm_rs.variables()) as engine,
        ThreadPoolExecutor(1) as clients,
        ExitStack() as stack,
    ):
        front_end = FrontEnd(
            model, engine.directory / "input-0", engine.directory / "output-0", stack
        )
        front_end.wait_until_it_serves()
        begun = threading.Barrier(2)
        running = clients.submit(stream_to_its_end, front_end, begun)
        begun.wait(60)
        for limit, status, text in (
            (0.2, 503, "The request has waited for"),
            (0, 400, "queue_timeout_s=0 in vllm_xargs is not a number of seconds"),
            ("x", 400, "queue_timeout_s='x' in vllm_xargs is not a number of seconds"),
        ):
            answer = front_end.complete([2], vllm_xargs={"queue_timeout_s": limit})
            assert answer.status_code == (status if is_told else 500), answer.text
            message = answer.json()["error"]["message"]
            assert message.startswith(text if is_told else "Internal server error")
        assert front_end.process.poll() is None
        front_end.process.kill()
        running.exception(60)
