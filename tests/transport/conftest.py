from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.harness import restored_vllm
from vllm.config import VllmConfig

from testkit.executor import engine_config, write_model_directory

from .clients import transport_log

MAX_MODEL_LEN = 1 << 17
NUM_BLOCKS = 20_000


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose texts may be long enough to outlast a test."""
    directory = tmp_path_factory.mktemp("model")
    return write_model_directory(directory, max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def config(model_directory: Path) -> VllmConfig:
    return make_config(model_directory)


def make_config(model_directory: Path, **settings: Any) -> VllmConfig:
    defaults: dict[str, Any] = {
        "async_scheduling": False,
        "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
    }
    with restored_vllm():
        return engine_config(model_directory, **{**defaults, **settings})


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Collect what the transport logs in this process."""
    with transport_log() as lines:
        yield lines
