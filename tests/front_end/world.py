"""A front end that lives through a scenario, and pictures of all that it does and keeps."""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import detokenizer as vllm_detokenizer
from vllm.v1.engine import output_processor as vllm_output_processor
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputCollector,
)
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics import stats as vllm_stats
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder

from .scenario import Abort, Arrival, EngineFailure, Event, Scenario, Settings, Step, Taking

CHUNK_SIZE = 4
"""Outputs that are processed at once. In vLLM there are more, but also more requests."""

EVENTS_A_PICTURE = 10
"""After so many events all that is kept is pictured."""

_NOT_PICTURED = frozenset(
    {
        *("tokenizer", "stream", "added_token_ids"),  # of detokenizers: neither changes
        *("queue", "ready", "_waiter", "_create_future"),  # how a consumer waits
        "sparksched_is_plain",
        "sparksched_extends_output",
    }
)


class Camera:
    """Turns objects into plain data that can be compared.

    What it has seen before it pictures as a number. So two pictures are equal only if the same
    objects are shared at the same places, and if all attributes have been set in the same order.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}

    def picture(self, value: Any) -> Any:
        if value is None or isinstance(value, int | float | str | bytes | Enum):
            return type(value).__name__, repr(value)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        # With the value itself: the number of something that is gone may be given anew.
        self._seen[id(value)] = len(self._seen), value
        return type(value).__name__, self._inside(value)

    def _inside(self, value: Any) -> Any:
        if isinstance(value, np.ndarray | torch.Tensor):
            return str(value.dtype), value.tolist()
        if isinstance(value, set):
            return sorted(value)
        if isinstance(value, Mapping):
            return [(key, self.picture(item)) for key, item in value.items()]
        if isinstance(value, list | tuple | deque):
            return [self.picture(item) for item in value]
        if isinstance(value, Exception):
            return str(value)
        if isinstance(value, msgspec.Struct):
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
        else:
            fields = vars(value)
        return [
            (name, self.picture(field))
            for name, field in fields.items()
            if name not in _NOT_PICTURED
        ]


class World:
    """The front end. Afterwards `album` shows, in its order, what has happened to it."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        self.album: list[Any] = []
        self.handed_over: list[Any] = []
        self.processor = OutputProcessor(
            tokenizer,
            log_stats=settings.log_stats,
            stream_interval=settings.stream_interval,
            tracing_enabled=settings.traces,
            admission_stats=SimpleNamespace(set_num_requests=self._note),
        )
        self._settings = settings
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._camera = Camera()
        self._queues: dict[str, RequestOutputCollector] = {}

    def live(self, event: Event) -> None:
        """Let something happen, and take pictures of what it leads to."""
        match event:
            case Arrival():
                self._arrive(event)
            case Step():
                self._process(event)
            case Abort():
                self._note(self.processor.abort_requests(event.request_ids, event.is_internal))
            case Taking():
                for request_id in event.request_ids:
                    self._take(request_id)
            case EngineFailure():
                self.processor.propagate_error(RuntimeError(event.message))

    def _note(self, value: Any) -> None:
        self.album.append(self._camera.picture(value))

    def note_state(self) -> None:
        """Take a picture of all that is kept, not only of what is new."""
        processor = self.processor
        names = ("request_states", "parent_requests", "external_req_ids", "lora_states")
        queues = {name: queue.output for name, queue in self._queues.items()}
        state = [*(getattr(processor, name) for name in names), queues]
        self.album.append(Camera().picture(state))

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request()
        params = request.params
        queue = None
        if self._settings.has_queues:
            queue = self._queues.get(request.request_id)
            if queue is None:
                queue = self._new_queue(params.output_kind, request.request_id)
        if not isinstance(params, SamplingParams) or params.n == 1:
            self._add(request, None, 0, queue)
            return
        parent = ParentRequest(request)
        for index in range(params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self._add(child, parent, index, queue)

    def _new_queue(self, output_kind: RequestOutputKind, request_id: str) -> RequestOutputCollector:
        if self._settings.hears_puts:
            return NotingQueue(self, output_kind, request_id)
        return RequestOutputCollector(output_kind, request_id)

    def _add(
        self,
        request: EngineCoreRequest,
        parent: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector | None,
    ) -> None:
        self.processor.add_request(request, "a prompt", parent, index, queue)
        if queue is not None:
            self._queues[request.request_id] = queue

    def _process(self, step: Step) -> None:
        message = self._decoder.decode(step.frames)
        has_stats = self._settings.log_stats and message.outputs
        stats = IterationStats() if has_stats else None
        for start in range(0, len(message.outputs), CHUNK_SIZE):
            processed = self.processor.process_outputs(
                message.outputs[start : start + CHUNK_SIZE],
                message.timestamp,
                stats,
                weight_version=message.weight_version,
            )
            assert isinstance(processed, OutputProcessorOutput)
            self.handed_over += processed.request_outputs
            self._note(processed)
        self.processor.update_scheduler_stats(message.scheduler_stats)
        self._note([stats, message])

    def _take(self, request_id: str) -> None:
        queue = self._queues.get(request_id)
        if queue is None:
            return
        try:
            output = queue.get_nowait()
        except RuntimeError as error:
            output = error
        self._note(output)
        self.handed_over.append(output)


class NotingQueue(RequestOutputCollector):  # type: ignore[misc]
    """Shows when something is put into it: the order among all requests counts."""

    def __init__(self, world: World, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self._put_noted = world._note

    def put(self, output: Any) -> None:
        self._put_noted(["put", self.request_id, output])
        super().put(output)


def live_through(scenario: Scenario, tokenizer: Any) -> list[Any]:
    """Return the album of a front end that lives through a scenario."""
    with _surroundings(scenario.settings) as spans:
        world = World(scenario.settings, tokenizer)
        for number, event in enumerate(scenario.events):
            world.live(event)
            if number % EVENTS_A_PICTURE == 0:
                world.note_state()
        world.note_state()
        # Consumers may keep what they got while it goes on: who shares what with whom?
        states = world.processor.request_states
        world.album.append(Camera().picture([world.handed_over, states, spans]))
    return world.album


@contextmanager
def _surroundings(settings: Settings) -> Iterator[list[Any]]:
    """Make the clock, the environment and the tracer a scenario's; collect what is traced."""
    spans: list[Any] = []
    ticks = iter(range(10_000, 1_000_000))
    clock = SimpleNamespace(time=lambda: float(next(ticks)))
    nans = {"VLLM_COMPUTE_NANS_IN_LOGITS": str(int(settings.counts_nans))}
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(vllm_stats, "time", clock))
        # vLLM puts this one object into all streams, and merges into it.
        end = copy(vllm_output_processor.STREAM_FINISHED)
        end.outputs = []
        enter(mock.patch.object(vllm_output_processor, "STREAM_FINISHED", end))
        enter(mock.patch.dict(os.environ, nans))
        note_span = mock.patch.object(
            vllm_output_processor, "instrument_manual", lambda **span: spans.append(str(span))
        )
        enter(note_span)
        if settings.detokenizes_slowly:
            enter(mock.patch.object(vllm_detokenizer, "uses_fast_detokenizer", return_value=False))
        yield spans
