"""A scheduler with a trace's requests, and with what a model makes of its steps."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from sparksched.record.build import Grammars, build_request, build_scheduler
from sparksched.record.events import Arrive, Settings, Update
from sparksched.record.keys import STOP, StandIns
from sparksched.record.load import Load
from sparksched.verify.copies import block_hasher_of_vllm


class Live:
    """A request, with what the model and the compiler of grammars have to say of it."""

    def __init__(self, number: int, request: Request, tokens: StandIns) -> None:
        self.number = number
        self.num_prompt_tokens = int(request.num_prompt_tokens)
        self.num_output_tokens = 0
        self._tokens = tokens
        self._grammar: Future[object] = Future()
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = self._grammar

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    def compile(self, succeeds: bool) -> None:
        """Have the grammar ready, or failed."""
        if self._grammar.done():
            return
        if succeeds:
            self._grammar.set_result(object())
        else:
            self._grammar.set_exception(ValueError("the grammar does not compile"))

    def sampled(self, count: int, stop: int | None) -> list[int]:
        """Return what stands for the next tokens, that which ends the request among them."""
        tokens = self._tokens.between(self.num_tokens, self.num_tokens + count)
        if stop is not None:
            tokens[stop : stop + 1] = [STOP]
        return tokens


class Player:
    """Gives a scheduler requests of a trace, and outputs of its steps."""

    def __init__(self, name: str, settings: Settings, load: Load) -> None:
        self.scheduler: Any = build_scheduler(name, settings)
        self.grammars: Grammars = self.scheduler.structured_output_manager
        self.live: dict[str, Live] = {}
        """The latest request of each id."""
        self.update_us: list[float] = []
        self._load = load
        self._hasher = block_hasher_of_vllm(self.scheduler.vllm_config, settings.hash_block_size)

    def add(self, number: int, arrival: Arrive) -> None:
        """Add the request of that number, which arrives like this."""
        tokens = self._load.tokens(number)
        prompt = tokens.between(0, arrival.num_prompt_tokens)
        request = build_request(arrival, prompt, self._hasher)
        self.live[arrival.request_id] = Live(number, request, tokens)
        self.scheduler.add_request(request)

    def update(self, output: SchedulerOutput, update: Update) -> Sequence[EngineCoreOutputs]:
        """Give a step its output; return what the clients get."""
        ids = list(output.num_scheduled_tokens)
        counts = [1] * len(ids) if update.num_sampled is None else update.num_sampled
        stops = dict(update.stops)
        rows = [
            self.live[request_id].sampled(count, stops.get(request_id))
            for request_id, count in zip(ids, counts, strict=False)
        ]
        pooled = None
        if update.pooled is not None:
            pooled = [torch.zeros(1) if is_there else None for is_there in update.pooled]
        runner_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=rows,
            pooler_output=pooled,
        )
        start = time.perf_counter()
        outputs = self.scheduler.update_from_output(output, runner_output)
        self.update_us.append((time.perf_counter() - start) * 1e6)
        return list(outputs.values())

    def count(self, outputs: EngineCoreOutputs) -> None:
        """Take note of the tokens that requests got."""
        for it in outputs.outputs:
            self.live[it.request_id].num_output_tokens += len(it.new_token_ids)
