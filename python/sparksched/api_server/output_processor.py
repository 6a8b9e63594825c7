"""Processes outputs: makes statistics and a `RequestOutput` of each generated token.

Read it beside vLLM's `v1/engine/output_processor.py`. It replaces:

- `OutputProcessor.process_outputs`, by one flat loop for plain outputs of plain requests;
- how `RequestOutputCollector` waits: see `request_collector.py`.

An output is plain if it brings nothing but tokens and its request goes on. A request is plain from
its second output on, unless it has logprobs or takes streaming input: see `_becomes_plain`. Any
other output goes to vLLM's own function, alone and in its turn. So vLLM handles prefills, ends,
pooling and errors.

vLLM's detokenizers and constructors also serve plain outputs. A plain output becomes what vLLM
would have made of it, in new objects as there. There is one exception: a stream of deltas lags, and
all that waits for it are plain outputs of one index. Then the loop merges the next output into
these, without an object of its own and without `RequestOutput.add`.

The loop relies on the shape of vLLM's objects, and bypasses some of vLLM's functions. The table of
seams names both. If one is not as it is known, everything stays vLLM's.
"""

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from vllm.exceptions import GenerationError
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput, PoolingRequestOutput, RequestError, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats

from sparksched.api_server import request_collector as collector
from sparksched.api_server.errors import QueueTimeoutError
from sparksched.compat import patching
from sparksched.shared.queue_timeout import CODE as QUEUE_TIMEOUT

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import (
        OutputProcessor,
        OutputProcessorOutput,
        RequestState,
    )

logger = init_logger("vllm.sparksched")

# To look up a member of an enumeration takes longer than anything else in the loop.
_DELTA: Final = RequestOutputKind.DELTA
_FINAL_ONLY: Final = RequestOutputKind.FINAL_ONLY
_ERROR: Final = FinishReason.ERROR

EMPTY_CPU_TENSOR: Final = torch.empty(0, device="cpu")


# ----------------------------------------------------------------------------------------
# Installation
# ----------------------------------------------------------------------------------------


def prepare() -> None:
    """Make room for the loop's state in vLLM's objects."""
    from vllm.v1.engine import output_processor

    output_processor.RequestState.sparksched_is_plain = False
    output_processor.RequestState.sparksched_extends_output = False
    collector.prepare(output_processor.RequestOutputCollector)


# ----------------------------------------------------------------------------------------
# OutputProcessor
# ----------------------------------------------------------------------------------------


def _looping_over_plain_outputs(  # noqa: PLR0915
    original: patching.Function,
) -> patching.Function:
    from vllm.v1.engine.output_processor import (
        OutputProcessor,
        OutputProcessorOutput,
        RequestOutputCollector,
    )

    put = RequestOutputCollector.put  # ours, which is replaced first

    @functools.wraps(original)
    def process_outputs(  # noqa: PLR0912, PLR0915
        self: "OutputProcessor",
        engine_core_outputs: Sequence[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> "OutputProcessorOutput":
        if type(self) is not OutputProcessor:  # one that may have changed what is written out here
            return original(
                self, engine_core_outputs, engine_core_timestamp, iteration_stats, weight_version
            )
        request_outputs: list[RequestOutput | PoolingRequestOutput] = []
        reqs_to_abort: list[str] = []
        request_states = self.request_states
        # Flat and long on purpose: written out is what vLLM has spread over a dozen functions,
        # since here each call is a percent or two of all that a token costs.
        for output in engine_core_outputs:
            state = request_states.get(output.request_id)
            if state is None:
                continue
            if (
                state.is_prefilling
                or output.finish_reason is not None
                or output.new_logprobs is not None
                or output.new_prompt_logprobs_tensors is not None
                or output.prompt_token_id_logprobs is not None
                or output.pooling_output is not None
                or output.events is not None
                or output.kv_transfer_params is not None
                or output.ec_transfer_params is not None
                or output.routed_experts is not None
                or output.new_sampling_mask is not None
                or output.spec_decode_metrics is not None
                or output.num_nans_in_logits
                or not (state.sparksched_is_plain or _becomes_plain(state, put))
            ):
                if output.finish_reason is _ERROR and _is_failure(state, output):
                    reqs_to_abort += _give_up(self, state, output, iteration_stats, request_outputs)
                    continue
                processed = original(
                    self, [output], engine_core_timestamp, iteration_stats, weight_version
                )
                request_outputs += processed.request_outputs
                reqs_to_abort += processed.reqs_to_abort
                # Whatever has changed in it is looked at when its next plain output comes.
                state.sparksched_is_plain = False
                continue

            new_token_ids = output.new_token_ids
            if iteration_stats is not None:
                assert engine_core_timestamp is not None
                stats = state.stats
                num_new_tokens = len(new_token_ids)
                iteration_stats.num_generation_tokens += num_new_tokens
                stats.num_generation_tokens += num_new_tokens
                iteration_stats.inter_token_latencies_iter.append(
                    engine_core_timestamp - stats.last_token_ts
                )
                stats.last_token_ts = engine_core_timestamp

            if weight_version is not None and new_token_ids:
                starts = state.weight_version_starts
                if not starts or starts[-1][0] != weight_version:
                    state.track_weight_version(weight_version)
            detokenizer = state.detokenizer
            has_text = type(detokenizer) is not IncrementalDetokenizer
            if has_text:
                num_prev_tokens = detokenizer.num_output_tokens()
                stop_string = detokenizer.update(new_token_ids, False)
                if stop_string:
                    last_output = _finish_at_stop_string(
                        self, state, output, num_prev_tokens, stop_string, iteration_stats
                    )
                    if last_output is not None:
                        request_outputs.append(last_output)
                    reqs_to_abort.append(output.request_id)
                    continue
            else:
                detokenizer.token_ids.extend(new_token_ids)

            output_kind = state.output_kind
            if output_kind is _FINAL_ONLY:
                continue
            is_delta = output_kind is _DELTA
            if state.stream_interval > 1:
                num_tokens = detokenizer.num_output_tokens()
                num_sent = state.sent_tokens_offset
                if num_sent and num_tokens - num_sent < state.stream_interval:
                    continue
                if is_delta:
                    new_token_ids = detokenizer.output_token_ids[num_sent:]
                    state.sent_tokens_offset = num_tokens
            text = detokenizer.get_next_output_text(False, is_delta) if has_text else ""
            queue = state.queue
            if queue is not None:
                waiting = queue.plain_output
                if waiting is not None and waiting is queue.output:
                    completion = waiting.outputs[0]
                    if completion.index == state.request_index:
                        # What `RequestOutput.add` does for a plain output behind plain outputs.
                        completion.text += text
                        completion.token_ids.extend(new_token_ids)
                        continue
            # By position: to name the arguments would more than double what these calls take.
            completion = CompletionOutput(
                state.request_index,
                text,
                new_token_ids if is_delta else detokenizer.output_token_ids,
                None,  # cumulative_logprob
                None,  # logprobs
            )
            request_output = RequestOutput(
                state.external_req_id,
                state.prompt,
                state.prompt_token_ids,
                None,  # prompt_logprobs
                [completion],
                False,  # finished
                state.stats,
                state.lora_request,
                None,  # encoder_prompt
                None,  # encoder_prompt_token_ids
                state.num_cached_tokens,
                state.num_cache_creation_tokens,
            )
            if queue is None:
                request_outputs.append(request_output)
                continue
            queue.put(request_output)
            if is_delta and queue.output is request_output and state.sparksched_extends_output:
                queue.plain_output = request_output
        return OutputProcessorOutput(request_outputs, reqs_to_abort)

    return process_outputs


def _becomes_plain(state: "RequestState", put: patching.Function) -> bool:
    """Return whether the loop's shortcuts hold for a request, and remember it if they do.

    What is looked at here changes only when vLLM's code handles an output of the request, after
    which the loop asks again, or when streaming input puts the request back into prefill, which the
    loop leaves to vLLM's code.
    """
    from vllm.v1.engine.output_processor import RequestOutputCollector as known

    logprobs = state.logprobs_processor
    state.sparksched_is_plain = (
        (state.parent_req is None or _is_unfinished_child(state, state.parent_req))
        and state.detokenizer is not None
        and logprobs is not None
        and logprobs.logprobs is None
        and logprobs.cumulative_logprob is None
        and logprobs.prompt_logprobs is None
        and logprobs.prompt_token_id_logprobs is None
        and state.prompt_token_ids is not None
        and not state.sampling_mask_chunks
        and not state.streaming_input
        and state.input_chunk_queue is None
        # Of a queue that is somebody's own, only `put` is known.
        and (state.queue is None or hasattr(state.queue, "plain_output"))
    )
    # To write into an output that waits bypasses `put`, which another may have replaced. A subclass
    # may do anything with what comes.
    state.sparksched_extends_output = type(state.queue) is known and known.put is put
    is_plain: bool = state.sparksched_is_plain
    return is_plain


def _is_unfinished_child(state: "RequestState", parent: ParentRequest) -> bool:
    """Return whether a request is one of its parent's n, whose outputs the parent passes on."""
    is_child: bool = (
        state.request_id in parent.child_requests
        and state.external_req_id == parent.external_req_id
        and state.output_kind == parent.sampling_params.output_kind
    )
    return is_child


def _finish_at_stop_string(
    processor: "OutputProcessor",
    state: "RequestState",
    output: EngineCoreOutput,
    num_prev_tokens: int,
    stop_string: str,
    iteration_stats: IterationStats | None,
) -> RequestOutput | None:
    """Finish a request as vLLM does; return its last output if there is no queue to put it into."""
    processor._trim_surplus_tokens(state, output, num_prev_tokens)
    request_output = state.make_request_output(
        output.new_token_ids, None, FinishReason.STOP, stop_string
    )
    if state.queue is not None and request_output is not None:
        state.queue.put(request_output)
        request_output = None
    processor._finish_request(state)
    processor._update_stats_from_finished(state, FinishReason.STOP, iteration_stats)
    if processor.tracing_enabled:
        processor.do_tracing(output, state, iteration_stats)
    return request_output


def _is_failure(state: "RequestState", output: EngineCoreOutput) -> bool:
    """Return whether an output is the end of a request in an error that vLLM can't tell of.

    vLLM 0.32.0 knows no reason but one. A pooling request without a result would end its loop.
    """
    if output.stop_reason == QUEUE_TIMEOUT and state.queue is not None:
        return True
    if state.queue is not None and getattr(output, "error", None) is not None:
        return False  # vLLM 0.33.0 tells of what an engine rejects on arrival
    has_result = output.pooling_output is not None or output.mm_cache_miss_hashes
    return state.detokenizer is None and not has_result


def _give_up(
    processor: "OutputProcessor",
    state: "RequestState",
    output: EngineCoreOutput,
    iteration_stats: IterationStats | None,
    request_outputs: list[RequestOutput | PoolingRequestOutput],
) -> list[str]:
    """Fail a request and tell whoever waits for it; return the ids that are to be aborted.

    Of a request with `n` outputs all are failed: an HTTP answer is of all of them.
    """
    error = _error_of(state, output)
    processor._update_stats_from_finished(state, FinishReason.ERROR, iteration_stats)
    aborted: list[str] = []
    if state.parent_req is None:
        processor._finish_request(state)
    else:
        aborted = processor.abort_requests([state.parent_req.request_id], internal=True)
        aborted.remove(state.request_id)
    if state.queue is not None:
        # Last: it takes the place of whatever waits there.
        state.queue.put(error)
    else:
        why = RequestError(
            str(output.stop_reason), str(error), retryable=isinstance(error, QueueTimeoutError)
        )
        empty = state._new_pooling_output(EMPTY_CPU_TENSOR)
        request_outputs.append(
            state._new_request_output(state.external_req_id, [empty], finished=True, error=why)
        )
    return aborted


def _error_of(state: "RequestState", output: EngineCoreOutput) -> GenerationError:
    if output.stop_reason == QUEUE_TIMEOUT:
        # Without statistics vLLM doesn't keep when it came.
        return QueueTimeoutError(
            None if state.stats is None else time.time() - state.stats.arrival_time
        )
    why = getattr(output, "error", None)  # since vLLM 0.33.0
    error: GenerationError = GenerationError() if why is None else why.to_exception()
    return error
