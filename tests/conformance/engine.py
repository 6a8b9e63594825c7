"""A pytest plugin: vLLM's tests of its engine and its server, on a CPU and without a network.

The scheduler is chosen as users choose it, by the environment.
"""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer

from testkit import preloaded

from .models import write_tiny_llamas

PROGRAM = "vllm.entrypoints.cli.main"
NUM_BATCHED_TOKENS = 8192
"""Room for all prompts that a test sends at once."""
_ARGUMENTS = (
    "--dtype=float32",
    "--enforce-eager",
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "--num-gpu-blocks-override=1024",  # more take time to clear
)


def pytest_configure(config: pytest.Config) -> None:
    """Have models computed as the CPU build can: at once, in float32, in the engine's process."""
    write_tiny_llamas(Path.cwd())
    preloaded.start()
    import tests.utils  # looks at the platform
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    load_general_plugins()
    tests.utils.VLLM_PATH = Path.cwd()  # for a file of its examples
    HfApi.snapshot_download = lambda self, repo_id, **_: str(Path.cwd() / repo_id)
    make = EngineArgs.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.enforce_eager, self.dtype = True, "float32"
        # vLLM sets a seeded generator back when a step has part of a prompt; a CPU's can't be.
        self.max_num_batched_tokens = self.max_num_batched_tokens or NUM_BATCHED_TOKENS
        if self.tensor_parallel_size == self.data_parallel_size == 1:
            self.distributed_executor_backend = UniProcExecutor
        return make(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config
    tests.utils.RemoteOpenAIServer._start_server = _start_server
    preloaded._fork_what_is_spawned()


def pytest_runtest_setup() -> None:
    """Have a test see the same whatever ran before."""
    # With some numbers, two tokens are the same.
    random.seed(0)
    torch.manual_seed(0)
    # In a process that is forked, torch crashes at the end of a group that an engine has left.
    if torch.distributed.is_initialized():
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


class _Server(preloaded.Command):
    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def _start_server(
    self: Any, model: str, arguments: list[str], environment: dict[str, str] | None
) -> None:
    arguments = ["serve", model, *arguments, *_ARGUMENTS]
    log = Path.cwd() / "server.log"
    self.proc = _Server(PROGRAM, arguments, log, os.environ | (environment or {}))


@pytest.fixture(scope="session")
def hf_runner() -> Any:
    """Return what stands in for vLLM's fixture, which is asked for embeddings of prompts."""
    return _hf_model


@contextmanager
def _hf_model(name: str) -> Iterator[Any]:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    weights = model.get_input_embeddings().weight.detach()
    yield SimpleNamespace(
        tokenizer=tokenizer,
        model=model,
        wrap_device=lambda inputs: inputs,
        get_prompt_embeddings=lambda prompts: [weights[tokenizer.encode(it)] for it in prompts],
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Collect tests that ask for a GPU, and stand in for the image that one fetches."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    from PIL import Image
    from vllm.assets.image import ImageAsset
    from vllm.platforms import current_platform

    with ExitStack() as patches:
        for name in ("is_cuda", "is_cuda_alike"):
            patches.enter_context(
                mock.patch.object(type(current_platform), name, return_value=True)
            )
        image = Image.new("RGB", (64, 64))
        patches.enter_context(mock.patch.object(ImageAsset, "pil_image", image))
        return (yield)
