"""Random lives of requests in a front end: what arrives, what the engine says, who goes away."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists
from vllm.v1.serial_utils import MsgpackEncoder

PROMPT = (1, 2, 3, 4, 5)
LETTERS = "abc"
TEXT = "abcabcabc é€"
"""What is generated comes from this. Some of its letters take several tokens."""


# ----------------------------------------------------------------------------------------
# What can happen
# ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How the front end and its engine are set up."""

    log_stats: bool
    has_queues: bool
    """As in `AsyncLLM`; in `LLMEngine` outputs are returned."""
    hears_puts: bool
    """Whether queues are of a class that notes what is put into them, or vLLM's own."""
    stream_interval: int
    traces: bool
    counts_nans: bool
    detokenizes_slowly: bool


@dataclass(frozen=True)
class Arrival:
    """A request comes, or more input for one that streams it."""

    request_id: str
    params: SamplingParams | PoolingParams
    fields: dict[str, Any] = field(default_factory=dict)

    def request(self) -> EngineCoreRequest:
        is_pooling = isinstance(self.params, PoolingParams)
        defaults: dict[str, Any] = {
            "request_id": self.request_id,
            "external_req_id": f"external-{self.request_id[-1]}",
            "prompt_token_ids": list(PROMPT),
            "mm_features": None,
            "sampling_params": None if is_pooling else self.params,
            "pooling_params": self.params if is_pooling else None,
            "arrival_time": 100.0 + len(self.request_id),
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
        }
        return EngineCoreRequest(**{**defaults, **self.fields})


@dataclass(frozen=True)
class Step:
    """The engine's outputs of a step, as they come over the wire."""

    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class Abort:
    request_ids: tuple[str, ...]
    is_internal: bool


@dataclass(frozen=True)
class Taking:
    """The consumers of some requests take what there is. Others lag behind."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class EngineFailure:
    """All streams are told; here its outputs go on."""

    message: str


Event = Arrival | Step | Abort | Taking | EngineFailure


# ----------------------------------------------------------------------------------------
# What does happen
# ----------------------------------------------------------------------------------------


@dataclass
class _Sequence:
    """What the engine knows of a request, or of one of its n."""

    request_id: str
    params: SamplingParams | PoolingParams
    streams_input: bool = False
    num_outputs: int = 0

    @property
    def is_pooling(self) -> bool:
        return isinstance(self.params, PoolingParams)


class Scenario:
    """All that happens in one front end, the same for each iteration."""

    def __init__(self, seed: int, tokens: Sequence[int], num_events: int = 150) -> None:
        self._rng = random.Random(seed)
        self._tokens = tokens
        self._encoder = MsgpackEncoder()
        self._clock = 1000.0
        self._num_requests = 0
        self._live: list[_Sequence] = []
        self._ended: list[_Sequence] = []
        self.settings = self._settings()
        self.events = tuple(self._event() for _ in range(num_events))
        if self.settings.has_queues:
            everyone = tuple(it.request_id for it in self._live + self._ended)
            self.events += (EngineFailure("the engine is dead"), Taking(everyone))

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _settings(self) -> Settings:
        log_stats = self._chance(0.85)
        return Settings(
            log_stats=log_stats,
            has_queues=self._chance(0.75),
            hears_puts=self._chance(0.5),
            stream_interval=self._rng.choice([1, 1, 1, 2, 3]),
            traces=log_stats and self._chance(0.3),
            counts_nans=self._chance(0.5),
            detokenizes_slowly=self._chance(0.25),
        )

    def _event(self) -> Event:
        if len(self._live) < 3 or self._chance(0.1):
            return self._arrival()
        if self._chance(0.03):
            return self._abort()
        if self.settings.has_queues and self._chance(0.3):
            takers = [self._rng.choice(self._live + self._ended)]
            if self._chance(0.3):
                takers = self._live
            return Taking(tuple(it.request_id for it in takers))
        if self.settings.has_queues and self._chance(0.01):
            return EngineFailure("the engine is ill")
        # Now and then also for one that began without.
        streaming = [it for it in self._live if it.streams_input or self._chance(0.05)]
        if streaming and self._chance(0.1):
            return self._more_input(self._rng.choice(streaming))
        return self._step()

    # Requests

    def _arrival(self) -> Arrival:
        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        fields: dict[str, Any] = {}
        # vLLM asserts that requests with an interval have tokens.
        if self.settings.stream_interval == 1 and self._chance(0.05):
            pooling = Arrival(request_id, PoolingParams(task="embed"))
            self._live.append(_Sequence(request_id, pooling.params))
            return pooling
        params = self._sampling_params()
        streams_input = (
            params.n == 1
            and not params.stop
            and params.output_kind != RequestOutputKind.FINAL_ONLY
            and self._chance(0.1)
        )
        if streams_input:
            fields["resumable"] = True
        elif not params.detokenize and self._chance(0.1):
            fields |= {"prompt_token_ids": None, "prompt_embeds": torch.zeros(3, 2)}
        if self._chance(0.2):
            fields["lora_request"] = LoRARequest("adapter", 1, "/adapter")
        for index in range(params.n):
            name = request_id if params.n == 1 else f"{index}_{request_id}"
            self._live.append(_Sequence(name, params, streams_input))
        return Arrival(request_id, params, fields)

    def _sampling_params(self) -> SamplingParams:
        rng = self._rng
        settings: dict[str, Any] = {"detokenize": self._chance(0.5)}
        settings["output_kind"] = RequestOutputKind.DELTA
        if self._chance(0.3):
            settings["output_kind"] = rng.choice(list(RequestOutputKind))
        if settings["detokenize"] and self._chance(0.5):
            settings["stop"] = ["".join(rng.choices(LETTERS, k=rng.choice([1, 2, 2, 3])))]
            settings["include_stop_str_in_output"] = self._chance(0.3)
            settings["min_tokens"] = rng.choice([0, 0, 6])
        if self._chance(0.2):
            settings["stream_interval"] = rng.choice([1, 2, 4])
        if self._chance(0.5):
            return SamplingParams(max_tokens=100, **settings)
        if self._chance(0.2):
            settings["n"] = rng.choice([2, 3])
        if self._chance(0.2):
            settings |= {"logprobs": rng.choice([0, 2]), "flat_logprobs": self._chance(0.3)}
        if self._chance(0.1):
            settings["prompt_logprobs"] = 1
        if self._chance(0.1):
            transfer = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 4}
            settings["extra_args"] = {"kv_transfer_params": transfer}
        return SamplingParams(max_tokens=100, **settings)

    def _more_input(self, sequence: _Sequence) -> Event:
        if not isinstance(sequence.params, SamplingParams) or sequence.params.n > 1:
            return self._step()
        goes_on = self._chance(0.6)
        sequence.streams_input = goes_on
        return Arrival(sequence.request_id, sequence.params, {"resumable": goes_on})

    def _abort(self) -> Abort:
        is_internal = self._chance(0.5)
        name = self._rng.choice(self._live).request_id
        # One of n is not its parent, and external ids stand for several requests.
        request_id = self._rng.choice([name, name.partition("_")[2] or name])
        if not is_internal:
            request_id = f"external-{request_id[-1]}"
        return Abort((request_id, "nobody"), is_internal)

    # Outputs

    def _step(self) -> Step:
        rng = self._rng
        self._clock += rng.random()
        sequences = [it for it in self._live if self._chance(0.8)]
        sequences += [it for it in self._ended if self._chance(0.02)]
        outputs = [self._output(sequence) for sequence in sequences]
        if self._chance(0.1):
            outputs.append(EngineCoreOutput("nobody", [1]))
        rng.shuffle(outputs)
        message = EngineCoreOutputs(
            outputs=outputs,
            scheduler_stats=SchedulerStats(num_running_reqs=len(sequences)),
            timestamp=self._clock,
            weight_version=rng.choice([None, "v1", "v1", "v2"]),
        )
        return Step(tuple(bytes(frame) for frame in self._encoder.encode(message)))

    def _output(self, sequence: _Sequence) -> EngineCoreOutput:
        is_first = sequence.num_outputs == 0
        sequence.num_outputs += 1
        if sequence.is_pooling:
            return self._pooling_output(sequence)
        num_tokens = self._rng.choice([0, 2, 3, 4]) if self._chance(0.15) else 1
        token_ids = self._rng.choices(self._tokens, k=num_tokens)
        output = EngineCoreOutput(sequence.request_id, token_ids)
        assert isinstance(sequence.params, SamplingParams)
        if is_first or self._chance(0.02):
            output.prefill_stats = PrefillStats(5, 3, 2, 2, 0, 1)
        if is_first and sequence.params.prompt_logprobs is not None:
            output.new_prompt_logprobs_tensors = new_prompt_logprobs(len(PROMPT) - 1)
        if sequence.params.logprobs is not None and num_tokens:
            output.new_logprobs = new_logprobs(token_ids, sequence.params.logprobs + 1)
        if is_first or self._chance(0.1):
            self._add_something(output)
        if self._chance(0.04):
            self._finish(sequence, output)
        return output

    def _add_something(self, output: EngineCoreOutput) -> None:
        """Make an output other than plain, or not: two of these make no difference."""
        num_tokens = len(output.new_token_ids)
        match self._rng.randrange(12):
            case 0:
                output.events = list(self._engine_events())
            case 1:
                output.num_nans_in_logits = 2
            case 2:
                output.kv_transfer_params = {"block": 1}
            case 3:
                output.ec_transfer_params = {"block": 2}
            case 4:
                output.routed_experts = np.arange(num_tokens * 2).reshape(num_tokens, 1, 2)
            case 5 if num_tokens > 1:
                offsets = np.arange(num_tokens + 1)
                output.new_sampling_mask = SamplingMaskLists(offsets[1:] * 7, offsets)
            case 5 if num_tokens == 1:
                output.new_sampling_mask = SamplingMaskLists(np.array([3, 4]))
            case 6:
                output.spec_decode_metrics = RequestSpecDecodeMetrics(1, [3, 2])
            case 7:
                output.prompt_token_id_logprobs = torch.ones(2, 3)
            case 8:
                output.trace_headers = {"traceparent": "00-1-2-01"}
            case 9:
                output.stop_reason = 7
            case 10:
                output.pooling_output = torch.arange(2)

    def _engine_events(self) -> Iterator[EngineCoreEvent]:
        for kind in self._rng.sample(list(EngineCoreEventType), k=2):
            yield EngineCoreEvent(kind, self._clock - 0.5)

    def _finish(self, sequence: _Sequence, output: EngineCoreOutput) -> None:
        output.finish_reason = self._rng.choice(list(FinishReason))
        if output.finish_reason == FinishReason.STOP:
            output.stop_reason = self._rng.choice([None, 5])
        if not sequence.streams_input:
            self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        if sequence in self._live:
            self._live.remove(sequence)
            self._ended.append(sequence)

    def _pooling_output(self, sequence: _Sequence) -> EngineCoreOutput:
        self._end(sequence)
        output = EngineCoreOutput(sequence.request_id, [], finish_reason=FinishReason.STOP)
        if self._chance(0.3):
            output.finish_reason = FinishReason.ERROR
            output.mm_cache_miss_hashes = ["missing"]
        else:
            output.pooling_output = torch.arange(3)
        return output


def new_logprobs(token_ids: list[int], width: int) -> LogprobsLists:
    rows = len(token_ids)
    columns = np.arange(rows * width).reshape(rows, width)
    columns[:, 0] = token_ids
    return LogprobsLists(columns, -columns / 8, np.ones(rows, dtype=np.int64))


def new_prompt_logprobs(rows: int) -> LogprobsTensors:
    columns = torch.arange(rows * 2).reshape(rows, 2)
    return LogprobsTensors(columns, -columns / 8, torch.ones(rows, dtype=torch.int64))
