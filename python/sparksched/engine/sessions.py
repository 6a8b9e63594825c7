"""Streaming-input sessions: requests that stop, and go on with more input from their client.

vLLM's `Request` holds the inputs that have not had their turn. The core asks here for the next one,
and reads from the `Request` what it has become. Mirrors `_handle_stopped_request()` and
`_update_request_as_session()` of vLLM's `v1/core/sched/scheduler.py`.
"""

from collections import deque
from dataclasses import replace

from vllm.v1.request import Request, StreamingUpdate


def open_session(request: Request) -> None:
    """Prepare a request that may get more input."""
    if request.resumable:
        request.streaming_queue = deque()


def next_turn(request: Request, num_kept_tokens: int) -> bool | None:
    """Give a session its next input: True if there is one, None if not yet, False at its end."""
    if not request.streaming_queue:
        return None
    update = request.streaming_queue.popleft()
    if update is None:
        return False
    continue_session(request, update, num_kept_tokens)
    return True


def continue_session(request: Request, update: StreamingUpdate, num_kept_tokens: int) -> None:
    """Make the first tokens of a session, and its new input behind them, its prompt.

    Args:
        request: The session; its token lists are up to date.
        update: The new input.
        num_kept_tokens: Tokens that stay, of prompt and output together.

    """
    tokens, prompt = request._all_token_ids, request.prompt_token_ids
    kept_output = tokens[request.num_prompt_tokens : num_kept_tokens]
    del tokens[num_kept_tokens:]
    request._output_token_ids.clear()
    prompt.extend(kept_output)
    for feature in update.mm_features or ():
        position = feature.mm_position
        feature.mm_position = replace(position, offset=position.offset + len(tokens))
        request.mm_features.append(feature)
    new_tokens = update.prompt_token_ids or ()
    tokens.extend(new_tokens)
    prompt.extend(new_tokens)
    request.num_prompt_tokens = len(prompt)
    # The core has them; whoever shows this request to a KV connector fills them in again.
    request.block_hashes.clear()
    request.arrival_time = update.arrival_time
    request.sampling_params = update.sampling_params
    request.max_tokens = update.max_tokens
