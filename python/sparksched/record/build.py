"""Builds from a trace what schedulers are built from, and the requests that they are given."""

import dataclasses
import enum
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import torch
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from sparksched import compat
from sparksched.engine.scheduler import NativeScheduler
from sparksched.record.events import Arrive, Group, Settings, TraceError
from sparksched.record.keys import STOP
from sparksched.record.settings import parts_of

STOCK: Final = "vllm"

_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"

# No weights of it are ever loaded: schedulers ask a model for little, and that is replaced.
_MODEL: Final = {"architectures": ["OPTForCausalLM"], "model_type": "opt"}


class Grammars:
    """In the place of vLLM's structured output manager: says what the recorded one said."""

    def __init__(self) -> None:
        self.rejected: list[str] = []
        """Ids of the requests whose grammar rejects what was sampled."""
        self.num_valid: dict[str, int] = {}
        """How many drafts a request's grammar lets pass, by its id."""

    def accept_tokens(self, request: Request, _token_ids: list[int]) -> bool:
        """Return whether a grammar accepts what was sampled."""
        return request.request_id not in self.rejected

    def clear_backend(self) -> None:
        """Do nothing: there is no backend."""

    def validate_tokens(self, request: Request, token_ids: list[int]) -> list[int]:
        """Return the drafts up to the first that a grammar rejects."""
        if not request.use_structured_output:
            return token_ids
        return token_ids[: self.num_valid.get(request.request_id, len(token_ids))]


def build_scheduler(name: str, settings: Settings) -> Any:
    """Build a scheduler, `sparksched` or `vllm`, of recorded settings.

    Raises:
        TraceError: if it can't be built of them.

    """
    try:
        with _model_runner(settings.use_v2_model_runner):
            return _build_scheduler(name, settings)
    except TraceError:
        raise
    except Exception as error:
        # Of vLLM's constructors, and of many kinds: the settings are at fault.
        raise TraceError(f"no scheduler can be built of these settings: {error}") from error


def _build_scheduler(name: str, settings: Settings) -> Any:
    vllm_config, kv_cache_config = _vllm_config(settings), _kv_cache_config(settings)
    if settings.config.enable_prefix_caching:
        init_none_hash(get_hash_fn_by_name(settings.config.prefix_caching_hash_algo))
    scheduler_cls: type[Any] = NativeScheduler
    if name == STOCK:
        scheduler_cls = compat.stock_scheduler_cls(vllm_config)
    elif problem := compat.first_unsupported(
        vllm_config, kv_cache_config, settings.block_size, settings.hash_block_size
    ):
        raise TraceError(
            f"sparksched doesn't schedule this configuration: {problem.feature} is not supported: "
            f"{problem.reason}; replay it by vllm alone"
        )
    return scheduler_cls(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=Grammars(),
        block_size=settings.block_size,
        hash_block_size=settings.hash_block_size,
        log_stats=True,
    )


@contextmanager
def _model_runner(is_second: bool) -> Iterator[None]:
    before = os.environ.get(_RUNNER)
    os.environ[_RUNNER] = str(int(is_second))
    try:
        yield
    finally:
        del os.environ[_RUNNER]
        os.environ.update({} if before is None else {_RUNNER: before})


def _vllm_config(settings: Settings) -> VllmConfig:
    with _model_runner(False):  # the other one wants a GPU here; schedulers ask when they are built
        config = VllmConfig(
            model_config=ModelConfig(
                model=_model_folder().name,
                skip_tokenizer_init=True,
                dtype="float16",
                max_model_len=1024,
            ),
            cache_config=CacheConfig(
                block_size=settings.hash_block_size,
                prefix_cache_retention_interval=settings.retention_interval,
            ),
            scheduler_config=SchedulerConfig(
                max_model_len=settings.config.max_model_len, is_encoder_decoder=False
            ),
        )
    # Now, because the platform adjusts what it is given.
    for name, value in msgspec.structs.asdict(settings.config).items():
        for part in parts_of(config):
            if hasattr(part, name):
                setattr(part, name, value)
    config.cache_config.block_size = settings.hash_block_size
    config.cache_config.num_gpu_blocks = settings.num_blocks
    if settings.uses_mrope:
        config.model_config.hf_config.rope_parameters = {"mrope_section": [1, 1, 1]}
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = [settings.max_graph_tokens]
    if settings.max_loras is not None:
        config.lora_config = LoRAConfig(max_loras=settings.max_loras)
    config.speculative_config = _speculative_config(settings)
    return config


@functools.cache
def _model_folder() -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="sparksched-replay-")
    (Path(folder.name) / "config.json").write_text(json.dumps(_MODEL))
    return folder


def _speculative_config(settings: Settings) -> Any:
    """Return as much of vLLM's as a scheduler asks for."""
    if settings.speculative_config is None:
        return None
    # A class of ours would be taken for another plugin's.
    config = SimpleNamespace(**msgspec.structs.asdict(settings.speculative_config))
    for name, answer in vars(config).items():
        if isinstance(answer, bool):
            setattr(config, name, functools.partial(bool, answer))
    config.disable_lookahead_block_hashes = settings.num_hash_lookahead_tokens == 0
    drafter = SimpleNamespace(sample_from_anchor=not settings.fills_in)
    config.draft_model_config = SimpleNamespace(hf_config=drafter)
    # vLLM 0.33.0 asks for these two to warn of a setting, of which the replay needs no warning.
    config.needs_eagle_block_drop = config.use_eagle_block_drop
    config.disable_eagle_block_drop = False
    return config


def _kv_cache_config(settings: Settings) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=settings.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layers.{index}"], _spec(group), is_eagle_group=group.is_eagle_group)
            for index, group in enumerate(settings.groups)
        ],
        prefix_cache_retention_interval=settings.retention_interval,
    )


def _spec(group: Group) -> Any:
    spec_cls = getattr(kv_cache_interface, group.kind)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(spec_cls):
        if field.name in group.fields:
            value: Any = group.fields[field.name]
            if isinstance(field.default, enum.Enum):
                value = type(field.default)(value)
            elif isinstance(value, str):
                dtype = value.removeprefix("torch.")
                value = Fraction(value) if dtype == value else getattr(torch, dtype)
            arguments[field.name] = value
    return spec_cls(**arguments)


def build_request(arrival: Arrive, prompt: list[int], hasher: Any) -> Request:
    """Return a scheduler's own request, as it was when it arrived.

    Raises:
        TraceError: if vLLM has no such requests.

    """
    lora = LoRARequest(f"adapter {arrival.lora_id}", arrival.lora_id or 1, "-")
    try:
        return Request(
            request_id=arrival.request_id,
            prompt_token_ids=prompt,
            sampling_params=None if arrival.is_pooling else _sampling_params(arrival),
            pooling_params=_pooling_params(arrival) if arrival.is_pooling else None,
            client_index=arrival.client_index,
            arrival_time=arrival.arrival_time,
            lora_request=lora if arrival.lora_id else None,
            priority=arrival.priority,
            block_hasher=hasher,
        )
    except ValueError as error:
        raise TraceError(f"request {arrival.request_id!r} can't be built: {error}") from error


def _sampling_params(arrival: Arrive) -> SamplingParams:
    return SamplingParams(
        max_tokens=arrival.max_tokens,
        stop_token_ids=[STOP],
        structured_outputs=StructuredOutputsParams(regex=".*") if arrival.has_grammar else None,
        skip_reading_prefix_cache=arrival.skips_cache,
        detokenize=False,
    )


def _pooling_params(arrival: Arrive) -> PoolingParams:
    return PoolingParams(task="embed", skip_reading_prefix_cache=arrival.skips_cache)
