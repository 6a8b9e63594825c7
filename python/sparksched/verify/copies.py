"""What vLLM's scheduler gets of its own: neither scheduler sees what the other has changed."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from sparksched.compat import releases

BlockHasher = Callable[[Request], list[Any]]

# Not kept by a request under the name of the constructor's argument; its grammar has two of them.
_WITHOUT_ATTRIBUTE = {"self", "block_hasher", "reasoning_ended", "reasoning_parser_kwargs"}
_ARGUMENTS = tuple(
    name
    for name in inspect.signature(Request.__init__).parameters
    if name not in _WITHOUT_ATTRIBUTE
)


def copy_of_request(request: Request, hasher: BlockHasher | None) -> Request:
    """Return a request with the same content that has not been scheduled yet, hashed by `hasher`.

    Both have one grammar.
    """
    arguments = {name: getattr(request, name) for name in _ARGUMENTS}
    arguments["prompt_token_ids"] = request.prompt_token_ids and list(request.prompt_token_ids)
    # The position of an item changes when it becomes part of a session.
    arguments["mm_features"] = [copy.copy(feature) for feature in request.mm_features]
    twin = Request(**arguments, block_hasher=hasher)
    twin.structured_output_request = request.structured_output_request
    return twin


def copy_of_runner_output(output: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return an output whose tokens can be cut, as schedulers do, without an effect on this one."""
    twin = copy.copy(output)
    twin.sampled_token_ids = [list(token_ids) for token_ids in output.sampled_token_ids]
    return twin


def take_over_changes(twin: SchedulerOutput, output: SchedulerOutput) -> None:
    """Give a step what the workers have changed of its counterpart: drafters in this process do."""
    twin.num_scheduled_tokens = dict(output.num_scheduled_tokens)
    twin.total_num_scheduled_tokens = output.total_num_scheduled_tokens
    twin.scheduled_spec_decode_tokens = {
        request_id: list(drafts)
        for request_id, drafts in output.scheduled_spec_decode_tokens.items()
    }
    twin.num_invalid_spec_tokens = output.num_invalid_spec_tokens


def block_hasher_of_vllm(vllm_config: VllmConfig, hash_block_size: int) -> BlockHasher | None:
    """Return the function that vLLM's engine hashes prompts with, if it does.

    `kv_cache_utils.NONE_HASH` must have been set, which the engine does after it has a scheduler.
    """
    cache_config = vllm_config.cache_config
    if not cache_config.enable_prefix_caching:
        return None
    hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
    lookahead = releases.hasher_lookahead(vllm_config)
    hasher: BlockHasher = kv_cache_utils.get_request_block_hasher(
        hash_block_size, hash_function, *lookahead
    )
    return hasher
