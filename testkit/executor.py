"""An executor without a GPU and without a model, and the configuration of engines that run on it.

The engine process of an `AsyncLLM` imports this module by its name: it depends on vLLM only.
"""

import copy
import json
import pickle
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from .device import EOS_TOKEN_ID, VOCAB_SIZE, Device

BLOCK_SIZE = 16
SLIDING_WINDOW = 40
NUM_BLOCKS = 256
MAX_MODEL_LEN = 256

END_OF_TEXT = "<|endoftext|>"

ASYNC_SCHEDULING = "async_scheduling"

STEP_S = 0.001
"""How long an `AsynchronousExecutor` takes for a step."""


class FakeExecutor(Executor):  # type: ignore[misc]
    """Reports the KV cache of gpt-oss and computes and samples on a `Device`.

    It runs in the engine's own process and finishes each step at once, so that a run is determined
    by the order of the engine's calls. All that the engine asked for is kept: see `steps`.
    """

    uses_ray = False
    sliding_window = SLIDING_WINDOW

    def _init_executor(self) -> None:
        # The CPU platform has switched it off; the engine has not looked at it yet.
        wanted = self.vllm_config.additional_config[ASYNC_SCHEDULING]
        self.scheduler_config.async_scheduling = wanted
        self.device: Device
        self._executing: list[SchedulerOutput] = []
        self.steps: list[SchedulerOutput] = []
        self.bitmasks: list[tuple[list[str], list[list[int]]] | None] = []
        self.calls: list[str] = []

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        shape: dict[str, Any] = {
            "block_size": self.cache_config.block_size,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": torch.float32,
        }
        full = FullAttentionSpec(**shape)
        sliding = SlidingWindowSpec(**shape, sliding_window=self.sliding_window)
        specs: list[KVCacheSpec] = [sliding, full, sliding, full]
        return [{f"layers.{index}.attn": spec for index, spec in enumerate(specs)}]

    def determine_available_memory(self) -> list[int]:
        return [1 << 24]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC", "LBHNC"]]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.note_step(scheduler_output)
        self.device.execute(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return _finished(EMPTY_MODEL_RUNNER_OUTPUT, non_block)
        self._executing.append(scheduler_output)
        return _finished(None, non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        if not self._executing:
            return _finished(None, non_block)  # vLLM then asks why `execute_model` has failed
        allowed = _allowed_tokens(grammar_output)
        output = self.device.sample(self._executing.pop(0), allowed)
        self.note_sample(grammar_output, output)
        return _finished(output, non_block)

    def note_step(self, step: SchedulerOutput) -> None:
        """Keep what is to be computed."""
        self.steps.append(copy.deepcopy(step))

    def note_sample(self, grammar_output: GrammarOutput | None, output: ModelRunnerOutput) -> None:
        """Keep what grammars allow."""
        self.bitmasks.append(_bitmask_as_lists(grammar_output))

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        if method == "get_supported_tasks":
            return [("generate",)]
        if method == "compile_or_warm_up_model":
            return []
        if method == "initialize_from_config":
            # Those of a pipeline's stages have the same groups, of other layers.
            self.device = Device(args[0][0])
        self.calls.append(method)
        return [None]

    def check_health(self) -> None:
        """Do nothing: it can't fall ill."""

    def shutdown(self) -> None:
        """Do nothing: there are no workers."""


class AsynchronousExecutor(FakeExecutor):
    """Computes in a thread of its own, beside the engine's loop, as a GPU does.

    What the engine asks for is packed at once: vLLM uses the buffer of a grammar's bitmask again.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self._thread = ThreadPoolExecutor(1, "device")

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        return self._ask(self._execute, scheduler_output, non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        return self._ask(super().sample_tokens, grammar_output, non_block)

    def _ask(self, carry_out: Any, request: object, non_block: bool) -> Any:
        message = pickle.dumps(request)
        answer = self._thread.submit(lambda: carry_out(pickle.loads(message)))
        return answer if non_block else answer.result()

    def _execute(self, step: SchedulerOutput) -> Any:
        time.sleep(STEP_S)
        return super().execute_model(step)

    def note_step(self, step: SchedulerOutput) -> None:
        """Keep nothing: servers live for long."""

    def note_sample(self, grammar_output: GrammarOutput | None, output: ModelRunnerOutput) -> None:
        """Keep nothing."""


def _finished(result: Any, non_block: bool) -> Any:
    if not non_block:
        return result
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _bitmask_as_lists(output: GrammarOutput | None) -> tuple[list[str], list[list[int]]] | None:
    if output is None:
        return None
    return list(output.structured_output_request_ids), output.grammar_bitmask.tolist()


def _allowed_tokens(output: GrammarOutput | None) -> dict[str, list[int]]:
    """Return the tokens that a grammar leaves to each request that has one."""
    if output is None:
        return {}
    bits = np.unpackbits(output.grammar_bitmask.view(np.uint8), axis=1, bitorder="little")
    ids = output.structured_output_request_ids
    # Since vLLM 0.33.0 each has rows for draft tokens as well, behind its first one.
    rows = bits[:: len(bits) // len(ids), :VOCAB_SIZE]
    return {
        request_id: np.flatnonzero(row).tolist() for request_id, row in zip(ids, rows, strict=True)
    }


MIXTURE: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
"""Makes the model one of experts: its engines step together."""


def write_model_directory(directory: Path, **changes: Any) -> Path:
    """Write what vLLM reads of a model that is never loaded: configuration and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS_TOKEN_ID,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "float32",
    } | changes
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    _write_byte_tokenizer(directory / "tokenizer.json")
    return directory


IMAGE: Final = "<image>"
IMAGE_SIZE: Final = 84
"""In pixels, both ways."""


def write_model_that_sees(directory: Path, **changes: Any) -> Path:
    """Write the same of a LLaVA, for which an image is 36 tokens, more than two blocks."""
    write_model_directory(directory, vocab_size=VOCAB_SIZE + 1, **changes)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    patches = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    config_path = directory / "config.json"
    text_config = json.loads(config_path.read_text())
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "torch_dtype": "float32",
        "image_token_index": VOCAB_SIZE,
        "text_config": text_config,
        "vision_config": {
            "model_type": "clip_vision_model",
            "image_size": IMAGE_SIZE,
            "patch_size": 14,
        },
    }
    preprocessor = {"image_processor_type": "CLIPImageProcessor", "crop_size": size, "size": size}
    processor = patches | {"processor_class": "LlavaProcessor", "num_additional_image_tokens": 1}
    config_path.write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (directory / "processor_config.json").write_text(json.dumps(processor))
    _write_byte_tokenizer(directory / "tokenizer.json", IMAGE)
    return directory


def _write_byte_tokenizer(path: Path, *others: str) -> None:
    """Write a tokenizer whose tokens are the single bytes, the end of the text, and others."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: token_id for token_id, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(it, special=True) for it in (END_OF_TEXT, *others)])
    tokenizer.save(str(path))


def engine_args(
    model_directory: Path, *, async_scheduling: bool, **settings: Any
) -> AsyncEngineArgs:
    """Return the arguments of a small engine over a `FakeExecutor`."""
    defaults: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "distributed_executor_backend": FakeExecutor,
    }
    return AsyncEngineArgs(
        model=str(model_directory),
        dtype="float32",
        load_format="dummy",
        additional_config={ASYNC_SCHEDULING: async_scheduling},
        **{**defaults, **settings},
    )


def engine_config(model_directory: Path, *, async_scheduling: bool, **settings: Any) -> VllmConfig:
    """Return the configuration of such an engine."""
    args = engine_args(model_directory, async_scheduling=async_scheduling, **settings)
    return args.create_engine_config()
