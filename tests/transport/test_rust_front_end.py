"""vLLM's Rust front end at the other end of the engine's sockets; the engine is a stub.

`make vllm-rs` fetches it. With real engines: `tests/e2e/test_rust_front_end.py`.
"""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackEncoder

from testkit import vllm_rs
from testkit.tiny_gpt_oss import write_model

from .test_push_sockets import Waiting, until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(vllm_rs.binary() is None, reason="make vllm-rs fetches it"),
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


class Stub:
    """The front end, and what it takes for its engine."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        listeners = {
            "listen": socket.create_server(("127.0.0.1", 0)),
            "input-listener": unix_listener(folder / "in"),
            "output-listener": unix_listener(folder / "out"),
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
        self.log_path = folder / "log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, pass_fds=fds, stdout=log, stderr=subprocess.STDOUT
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        for listener in listeners.values():
            listener.close()
        self.outputs = Waiting(f"ipc://{folder}/out")
        stack.callback(self.outputs.end)
        context = stack.enter_context(zmq.Context())
        self.requests = stack.enter_context(context.socket(zmq.DEALER))
        self.requests.setsockopt(zmq.IDENTITY, bytes(2))
        self.requests.setsockopt(zmq.LINGER, 0)
        self.requests.setsockopt(zmq.RCVTIMEO, 60_000)
        self.requests.connect(f"ipc://{folder}/in")
        self.requests.send(msgspec.msgpack.encode(READY))
        until(lambda: self.process.poll() is not None or self.is_healthy())

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    def take_request(self) -> str:
        """Return the id of the next request."""
        kind, *frames = self.requests.recv_multipart()
        assert kind == b"\0"
        request_id: str = msgspec.msgpack.decode(frames[0])[0]
        return request_id

    def step(self, outputs: list[EngineCoreOutput]) -> None:
        message = EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())
        assert self.outputs.send(*map(bytes, MsgpackEncoder().encode(message)))

    def complete(self, prompt: list[int]) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS}
        body["return_token_ids"] = True
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


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


def test_streams_get_their_tokens_in_order(stub: Stub) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        answers = [clients.submit(stub.complete, [index + 1]) for index in range(NUM_STREAMS)]
        ids = [stub.take_request() for _ in range(NUM_STREAMS)]
        for step in range(NUM_TOKENS):
            ending = FinishReason.LENGTH if step == NUM_TOKENS - 1 else None
            stub.step([EngineCoreOutput(it, [40 + step], finish_reason=ending) for it in ids])
        for answer in answers:
            (choice,) = answer.result().json()["choices"]
            assert choice["token_ids"] == [40 + step for step in range(NUM_TOKENS)]
            assert choice["finish_reason"] == "length"


def test_its_death_is_noticed(stub: Stub) -> None:
    os.kill(stub.process.pid, 9)
    until(lambda: stub.outputs.sockets.is_deserted)
    assert stub.outputs.events[0] == (0, None)


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
