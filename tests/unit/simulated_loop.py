"""vLLM's real engine loop around a clock, a queue, a scheduler and a GPU that are simulated.

Time passes only where the loop waits, and while it is at work on a launch. A run is determined by
its scenario.
"""

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sparksched.engine import launch_times
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

WAKE_S = 0.00005
"""How late whoever sleeps wakes up."""


class Over(Exception):
    """Nothing will ever come again, and the loop has nothing to do."""


class Clock:
    """Simulated time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep_until(self, time_s: float) -> None:
        """Wait; a time that has passed is none to wait for."""
        if time_s > self.now:
            self.now = time_s + WAKE_S


@dataclass
class Request:
    """What the simulated scheduler keeps of a request."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int = 8
    arrival_s: float = 0.0
    num_launched: int = 0
    num_received: int = 0
    client_index: int = 0
    pooling_params: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    abort_immediately: bool = False


Message = tuple[EngineCoreRequestType, Any]


class Inputs:
    """The engine's input queue, into which messages come at times that are known before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: deque[tuple[float, Message]] = deque()

    def fill(self, items: list[tuple[float, Message]]) -> None:
        """Set what will come."""
        self._items.extend(sorted(items, key=lambda it: it[0]))

    def empty(self) -> bool:
        return not self._items or self._items[0][0] > self._clock.now

    def put_nowait(self, message: Message) -> None:
        self._items.appendleft((self._clock.now, message))

    def get_nowait(self) -> Message:
        if self.empty():
            raise queue.Empty
        return self._items.popleft()[1]

    def get(self, block: bool = True, timeout: float | None = None) -> Message:
        if block and timeout is None and not self._items:
            raise Over
        if block and self.empty():
            latest_s = float("inf") if timeout is None else self._clock.now + timeout
            next_s = self._items[0][0] if self._items else float("inf")
            self._clock.sleep_until(min(latest_s, next_s))
        return self.get_nowait()


class Scheduler:
    """Gives each running request a token a step, asynchronously, and each waiting one room."""

    connector = None

    def __init__(self, clock: Clock, room: int) -> None:
        self._clock = clock
        self._room = room
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.pause_state = PauseState.UNPAUSED
        self._ended: set[str] = set()
        self.needs_grammar = False

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def add_request(self, request: Request) -> None:
        request.arrival_s = self._clock.now
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, request_ids: Any, status: Any) -> list[Any]:
        ids = list(self.requests) if request_ids is None else request_ids
        for request_id in ids:
            request = self.requests.pop(request_id, None)
            if request is not None:
                self._ended.add(request_id)
                if request in self.running:
                    self.running.remove(request)
                else:
                    self.waiting.remove(request)
        return []

    def has_unfinished_requests(self) -> bool:
        return bool(self.get_num_unfinished_requests())

    def get_num_unfinished_requests(self) -> int:
        if self.pause_state is PauseState.PAUSED_ALL:
            return 0
        is_open = self.pause_state is PauseState.UNPAUSED
        return len(self.requests if is_open else self.running)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def has_finished_requests(self) -> bool:
        return bool(self._ended)

    def has_requests(self) -> bool:
        return self.has_unfinished_requests() or self.has_finished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def schedule(self, throttle_prefills: bool) -> Any:
        self._ended.clear()
        num_tokens = {}
        if self.pause_state is PauseState.UNPAUSED:
            while self.waiting and len(self.running) < self._room:
                self.running.append(self.waiting.popleft())
        if self.pause_state is not PauseState.PAUSED_ALL:
            for request in self.running:
                if request.num_launched < request.num_tokens:
                    is_first = not request.num_launched
                    num_tokens[request.request_id] = request.num_prompt_tokens if is_first else 1
                    request.num_launched += 1
        return SimpleNamespace(
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            has_structured_output_requests=self.needs_grammar,
            pending_structured_output_tokens=False,
        )

    def get_grammar_bitmask(self, step: Any) -> None:
        return None

    def update_from_output(self, step: Any, output: Any) -> dict[int, Any]:
        for request_id in step.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None:
                request.num_received += 1
                if request.num_received == request.num_tokens:
                    self.finish_requests([request_id], None)
        return {}


@dataclass
class Launch:
    """A step as the simulated GPU has made it."""

    launch_s: float
    start_s: float
    end_s: float
    request_ids: list[str]


class Executor:
    """Launches steps on a GPU that makes one after the other."""

    def __init__(
        self, clock: Clock, host_s: Callable[[Any], float], step_s: Callable[[int, Any], float]
    ) -> None:
        self._clock = clock
        self._host_s = host_s
        self._step_s = step_s
        self.launches: list[Launch] = []

    def execute_model(self, step: Any, non_block: bool) -> Any:
        self._clock.now += self._host_s(step)
        return self._launch(step, self._clock.now)

    def _launch(self, step: Any, now_s: float) -> Any:
        number = len(self.launches)
        if not step.total_num_scheduled_tokens:
            return _Future(self._clock, now_s)
        start_s = max(now_s, self.launches[-1].end_s) if self.launches else now_s
        end_s = start_s + self._step_s(number, step)
        self.launches.append(Launch(now_s, start_s, end_s, list(step.num_scheduled_tokens)))
        return None

    def sample_tokens(self, grammar_output: Any, non_block: bool) -> Any:
        return _Future(self._clock, self.launches[-1].end_s)


class Workers(Executor):
    """Hands steps to workers: they launch them later, and tell when with the output."""

    HAND_OVER_S = 0.00002

    def execute_model(self, step: Any, non_block: bool) -> Any:
        self._clock.now += self.HAND_OVER_S
        return self._launch(step, self._clock.now + self._host_s(step))

    def sample_tokens(self, grammar_output: Any, non_block: bool) -> Any:
        launch = self.launches[-1]
        output = SimpleNamespace(**{launch_times.ATTRIBUTE: launch.launch_s})
        return _Future(self._clock, launch.end_s, output)


class _Future:
    """The result of a step: something, as soon as it has ended."""

    def __init__(self, clock: Clock, end_s: float, output: Any = None) -> None:
        self._clock = clock
        self._end_s = end_s
        self._output = output or object()

    def done(self) -> bool:
        return self._clock.now >= self._end_s

    def result(self) -> Any:
        self._clock.sleep_until(self._end_s)
        return self._output


@dataclass
class Handled:
    """A message and when the loop has handled it."""

    message: Message
    time_s: float


@dataclass
class Scenario:
    """What happens to an engine."""

    step_s: Callable[[int, Any], float]
    host_s: Callable[[Any], float] = lambda step: 0.0003
    messages: list[tuple[float, Message]] = field(default_factory=list)
    room: int = 1024
    executor_class: type["Executor"] = Executor
    engine: "Engine" = field(init=False)
    """The last one that was made for it."""

    def add(
        self, time_s: float, request_id: str, num_tokens: int, num_prompt_tokens: int = 8
    ) -> None:
        """Have a request come."""
        request = Request(request_id, num_tokens, num_prompt_tokens)
        self.messages.append((time_s, (EngineCoreRequestType.ADD, (request, 0))))

    def abort(self, time_s: float, request_id: str) -> None:
        """Have a request aborted."""
        self.messages.append((time_s, (EngineCoreRequestType.ABORT, [request_id])))

    def call(self, time_s: float, method: str, *arguments: Any) -> None:
        """Have a method of the engine called."""
        call = (0, 0, method, arguments)
        self.messages.append((time_s, (EngineCoreRequestType.UTILITY, call)))


class Engine(EngineCoreProc):
    """An engine of which only the loop is vLLM's."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        scenario.engine = self
        self.clock = Clock()
        self.scheduler = Scheduler(self.clock, scenario.room)
        self.model_executor = scenario.executor_class(self.clock, scenario.host_s, scenario.step_s)
        self.input_queue = Inputs(self.clock)
        self.input_queue.fill(scenario.messages)
        self.output_queue = queue.Queue()
        self.aborts_queue = queue.Queue()
        self.handled: list[Handled] = []
        self.vllm_config = SimpleNamespace(shutdown_timeout=0)
        self.vllm_config.observability_config = SimpleNamespace(
            enable_logging_iteration_details=False
        )
        self.log_stats = False
        self.engines_running = self.reject_new_requests = False
        self.shutdown_state = EngineShutdownState.RUNNING
        self.publish_dp_lb_stats = False
        self.process_input_queue_block = True
        self.batch_queue_size = 2
        self.batch_queue = deque(maxlen=2)
        self.is_mm_encoder_only = self.is_pooling_model = False
        self.check_for_draft_tokens = self.use_spec_decode = False
        self.async_scheduling = True
        self.enable_fault_tolerance = False
        self._idle_state_callbacks = []
        self.step_fn = self.step_with_batch_queue

    @property
    def launches(self) -> list[Launch]:
        launches: list[Launch] = self.model_executor.launches
        return launches

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        self.handled.append(Handled((request_type, request), self.clock.now))
        if request_type is EngineCoreRequestType.WAKEUP:
            # Only a signal wakes this engine.
            self.shutdown_state = EngineShutdownState.REQUESTED
        super()._handle_client_request(request_type, request)

    def run(self) -> None:
        """Run until all is done."""
        try:
            self.run_busy_loop()
        except Over:
            return
