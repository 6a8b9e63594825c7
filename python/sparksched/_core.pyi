"""The Rust extension. Its sources are in `rust/python/src`."""

from collections.abc import Callable, Iterable
from typing import Any, final

from typing_extensions import Buffer, disjoint_base

__all__ = [
    "CachedBlocks",
    "ClientRings",
    "EngineLinks",
    "EngineMeters",
    "EngineRings",
    "EngineSockets",
    "MeterReader",
    "NativeBlockHasher",
    "QueueWatch",
    "RingAttached",
    "RingEnd",
    "RingMessage",
    "RingRecovered",
    "RingRefused",
    "RingStuck",
    "SchedulerCore",
    "StepOutputs",
    "__version__",
    "meter_bounds_s",
    "note_fork",
    "read_prompt",
]

__version__: str

@final
class NativeBlockHasher:
    """Hashes the full blocks of a request; a drop-in for vLLM's request block hasher."""

    def __new__(
        cls,
        algorithm: str,
        block_size: int,
        none_hash: bytes,
        *,
        extra_keys: Callable[[Any], tuple[list[bytes], bytes]],
        num_lookahead_tokens: int = 0,
    ) -> NativeBlockHasher:
        """Build a hasher.

        Args:
            algorithm: `sha256`, `sha256_cbor`, `xxhash` or `xxhash_cbor`.
            block_size: Tokens a block, 1 to about 13,000.
            none_hash: Parent of each first block, at most 32 bytes.
            extra_keys: Serialises what the blocks of a request are hashed with besides their
                tokens; see `engine.extra_keys`. Called only for requests that have such keys.
            num_lookahead_tokens: Tokens behind a block that its hash covers as well.

        Raises:
            ValueError: for an argument outside of these bounds.

        """

    def __call__(self, request: Any) -> list[bytes]:
        """Return the hashes of the full blocks that `request.block_hashes` lacks, in order.

        Raises:
            OverflowError: if a token id does not fit into 32 bits.

        """

def read_prompt(
    request: Any, *, extra_keys: Callable[[Any], tuple[list[bytes], bytes]] | None
) -> None:
    """Read the prompt of a `Request` ahead of `SchedulerCore.add_request`, which then does not.

    Args:
        request: A `vllm.v1.request.Request`.
        extra_keys: As for `NativeBlockHasher`; None without prefix caching.

    Raises:
        OverflowError: if a token id does not fit into 32 bits.
        ValueError: if there is no token.

    """

@final
class StepOutputs:
    """What a step brings to one client: `EngineCoreOutputs` as the message that will be sent.

    It has the fields that vLLM's engine touches before it sends outputs, and can be asked for its
    frames any number of times.
    """

    engine_index: int
    scheduler_stats: Any | None
    finished_requests: set[str] | None
    weight_version: str | None

    @property
    def timestamp(self) -> float:
        """When the outputs were known, in seconds of `time.monotonic`."""

    def frames(self) -> list[Any]:
        """Return what vLLM's `MsgpackEncoder.encode` returns for the same content."""

@final
class CachedBlocks:
    """Which blocks are cached, for vLLM's collector of auxiliary output."""

    def __new__(cls) -> CachedBlocks: ...
    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: list[int]
    ) -> list[int] | None:
        """Return the block of each group that a hash finds, or None if one has none.

        Raises:
            RuntimeError: if the caller isn't called by a `SchedulerCore` just now.

        """

@final
class SchedulerCore:
    """The scheduler's state in Rust. `sparksched.scheduler.SparkScheduler` is its public face.

    Methods without a docstring do what `NativeScheduler`'s of that name do. Times are seconds of
    `time.monotonic`. After an internal error the methods that schedule, add or
    end requests, and `has_requests`, raise RuntimeError, but for `finish_requests(None, status)`.
    A panic in any function of this module is a RuntimeError that says where; one in a method that
    changes state is an internal error.
    """

    def __new__(
        cls,
        config: dict[str, Any],
        *,
        accept_tokens: Callable[[Any, list[int]], bool],
        validate_tokens: Callable[[Any, list[int]], list[int]],
        next_turn: Callable[[Any, int], bool | None],
        encoder_inputs: Any | None,
        extra_keys: Callable[[Any], tuple[list[bytes], bytes]] | None,
        block_observer: Any | None,
        kv_transfer: Any | None,
        encoder_transfer: Any | None,
        aux_outputs: Any | None,
        step_perf_stats: Callable[[Any], Any] | None,
        encode_part: Callable[[Any, list[Any]], bytes],
        include_finished_set: bool,
    ) -> SchedulerCore:
        """Build a scheduler without requests.

        Args:
            config: What `sparksched.scheduler.core_config` returns.
            accept_tokens: Advances a request's grammar; False if it rejects the tokens.
            validate_tokens: Returns draft tokens up to the first that a request's grammar rejects.
            next_turn: Gives a session that has stopped its next input; see `engine.sessions`.
            encoder_inputs: An `EncoderInputs` of `sparksched.engine`, of a multimodal model.
            extra_keys: As for `NativeBlockHasher`; None without prefix caching.
            block_observer: A `BlockObserver`, if the configuration wants
                events or metrics of blocks, or has a KV connector.
            kv_transfer: A `KVTransfer`, if there is a KV connector.
            encoder_transfer: An `EncoderTransfer`, if there is an EC connector.
            aux_outputs: An `AuxOutputs`, if workers collect auxiliary output.
            step_perf_stats: Estimates the work of a step, if statistics and MFU metrics are on.
            encode_part: Returns an object of vLLM's as msgpack, and appends the buffers of its
                large arrays and tensors to the list of the message's frames.
            include_finished_set: Outputs carry the ids of requests that ended, by client.

        Raises:
            KeyError: if a key of `config` is missing.
            ValueError: if the configuration has an unknown value.
            RuntimeError: if it contradicts itself.

        """

    @property
    def requests(self) -> dict[str, Any]:
        """Requests that are not finished, by id: vLLM's `Scheduler.requests`."""

    @property
    def finished_req_ids(self) -> set[str]:
        """Ids of requests that ended since the last step, which takes this very set with it."""

    def set_none_hash(self, none_hash: bytes) -> None:
        """Set the parent of each first block: vLLM's `NONE_HASH`, at most 32 bytes."""

    def add_request(
        self,
        request: Any,
        now: float,
        queue_timeout_s: float | None = None,
        tenant: str = "",
        ttft_s: float | None = None,
    ) -> None:
        """Read a `vllm.v1.request.Request` and put it into the queue.

        Args:
            request: After `order_by`, its `priority` is set.
            now: Seconds of `time.monotonic`.
            queue_timeout_s: How long it may wait to be scheduled for the first time: see
                `take_expired`.
            tenant: Whose it is, for `order_by`.
            ttft_s: When its first token is due, in seconds from its arrival; None for the default.

        """

    def order_by(self, order: str, *, weights: dict[str, float], seconds: float) -> None:
        """Give requests that arrive from now on their priorities. The policy must be `priority`.

        Args:
            order: `fair`, `deadline` or `aging`.
            weights: Of tenants; others weigh 1. For `fair`.
            seconds: To the first token of a request that doesn't say, for `deadline`; what a
                priority of 1 counts as, for `aging`.

        """

    def take_expired(self, now: float) -> list[Any]: ...
    def is_waiting_for_input(self, request_id: str) -> bool:
        """Return whether a session has stopped and has no more input."""

    def continue_session(
        self, request_id: str, continue_session: Callable[[Any, int], None]
    ) -> None:
        """Have a session that waits for input go on.

        Args:
            request_id: Which session.
            continue_session: Called with the `Request` and the number of tokens that stay, to put
                the new input behind them.

        """

    def pace(
        self, max_stall_s: float, max_slowdown: float, max_graph_tokens: int, log: str | None
    ) -> None:
        """Choose the knobs of each step from now on, so that long prompts keep nobody waiting.

        Args:
            max_stall_s: How long a step with prompts may take while others generate, in seconds.
            max_slowdown: How many times as late as without pacing a long prompt may come; from 1.
            max_graph_tokens: Up to so many a step with prompts runs as a CUDA graph; 0 without.
            log: A file for a line of JSON for each step while there are prompts.

        """

    def warm_up_pacing(self, goes_on: bool) -> None:
        """Let steps have the values that are configured, only to learn what they take.

        With False, pacing begins anew, and keeps what it has learned.
        """

    def learn_pacing_size(self, num_tokens: int, extra_s: float) -> None:
        """Tell pacing what so many tokens of prompts add to a step, in seconds: a simulation."""

    def set_pacing_time(self, seconds: float) -> None:
        """Have pacing take this for the time, instead of a clock's, until another is set.

        Args:
            seconds: Since whenever; never less than before.

        """

    def pacing(self) -> dict[str, Any] | None:
        """Return what pacing has done so far; None if it is off.

        `sizes` (of steps with prompts) and `chunk_tokens` (of prompts in the last one beside
        decodes) are in tokens. In seconds: `prompt_s` (of steps with prompts beside decodes),
        `contended_s` (while both had work) and `longest_stall_s` (of the last minute).
        `num_decode_steps` counts steps of decodes alone that were put in, `num_late_by_preemption`,
        `num_late_by_waiting` and `num_late_by_steps` prompts that came later than promised,
        `num_over_for_ordinary`, `num_over_for_long` and `num_over_unexpected` steps over the stall.
        `slowdown_p50` and `slowdown_max`: how many times as late as without pacing long prompts of
        the last minute came; 0 without any.
        """

    def knobs(self) -> tuple[int, int, bool, tuple[str, ...]]:
        """Return what the last step was decided with.

        They are vLLM's `max_num_scheduled_tokens`, `long_prefill_token_threshold` and
        `throttle_prefills`, and the ids of requests that were put in another order.
        """

    def are_knobs_chosen(self) -> bool:
        """Return whether the last step had knobs of its own."""

    def schedule(
        self,
        throttle_prefills: bool,
        now: float,
        knobs: tuple[int, int, tuple[str, ...]] | None = None,
    ) -> Any:
        """Decide the next step and return its `SchedulerOutput`.

        `knobs` are `max_num_scheduled_tokens`, at most what is configured,
        `long_prefill_token_threshold`, and the ids of requests that go to the end of the running
        list or the front of the queue; None for what is configured or what pacing chooses.
        """

    def decide(
        self,
        throttle_prefills: bool,
        now: float,
        knobs: tuple[int, int, tuple[str, ...]] | None = None,
    ) -> Any:
        """Decide the next step and bring all `Request` objects up to date, as they are before it.

        `update_after_schedule` has to follow before anything else is called that changes state.
        """

    def update_after_schedule(self, scheduler_output: Any) -> None:
        """Count the tokens of the step that was just decided as computed."""

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the numbers of a request's blocks, by KV cache group.

        Raises:
            ValueError: if there is no such request.

        """

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take in a step's `ModelRunnerOutput`; return outputs by client.

        They are `EngineCoreOutputs`, or `StepOutputs` for clients that these are written for.
        """

    def update_draft_token_ids(
        self, request_ids: list[str], draft_token_ids: list[list[int]]
    ) -> None:
        """Take the draft tokens of these requests for the next step."""

    def valid_drafts(self, request_id: str, draft_token_ids: list[int]) -> list[int] | None:
        """Return the drafts that a request's grammar accepts; None for an unknown request.

        It is the very list if the request has no grammar.
        """

    def encode_outputs_for(self, client_index: int) -> None:
        """Have `update_from_output` return `StepOutputs` for a client's requests from now on."""

    def finish_requests(self, request_ids: Iterable[str] | None, status: Any) -> list[Any]:
        """End requests with a finished `RequestStatus`, in this order; return the `Request`s."""

    def preempt_running(self, now: float) -> None:
        """Take the blocks of all running requests away and queue them again."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes unless a block is in use; return whether that was done."""

    def make_stats(self) -> Any | None: ...
    def has_requests(self) -> bool: ...
    def has_unfinished_requests(self) -> bool: ...
    def has_finished_requests(self) -> bool: ...
    def num_unfinished_requests(self) -> int:
        """Count requests as `NativeScheduler.get_num_unfinished_requests` does."""

    def request_counts(self) -> tuple[int, int]:
        """Count running and waiting requests."""

    def running_requests(self) -> list[Any]:
        """Return the `Request` objects that run, in their order."""

    def waiting_requests(self) -> list[Any]:
        """Return the `Request` objects that wait, in their order."""

    def kv_cache_usage(self) -> float:
        """Return the share of blocks in use, 0 to 1."""

    def num_used_blocks(self) -> int:
        """Count the blocks in use, without the null block."""

    def pause_state(self) -> int:
        """Return the value of `PauseState`."""

    def set_pause_state(self, state: int) -> None:
        """Set the value of `PauseState`, 0 to 2."""

    def structured_output_request_ids(self, request_ids: dict[str, int]) -> list[str]:
        """Return the ids that use structured output and sample a token in their last step."""

    def snapshot(self) -> dict[str, Any]: ...
    def check_invariants(self) -> None:
        """Walk the whole state; RuntimeError at the first contradiction."""

@final
class QueueWatch:
    """Notices that the head of a scheduler's queue doesn't move."""

    def __new__(cls, after_s: float) -> QueueWatch:
        """Make a watch that tells of requests that are the head for `after_s` seconds."""

    def look(self, scheduler: SchedulerCore, now: float) -> tuple[dict[str, Any] | None, float]:
        """Look at a scheduler, from whatever thread; return what is found, and when time is up.

        None if there is nothing to tell, or if the scheduler is in the middle of a call. Else keys
        `request_id`, `reason` (None if a request that was told of has moved) and `waits_s`. Of one
        that waits also `num_running`, `num_waiting`, `num_sessions` (between two turns), `lora_id`
        and `lora_ids` (its adapter, those of the last step) and `blocks`: `all`, `free`, those held
        by `running` requests, `sessions`, others that are `waiting` and `ended` ones, and of the
        last request that didn't get blocks the number `wanted`, with those `reserved` for others.
        The second value is the time of the first `take_expired` with a result, infinity for never.
        """

def note_fork() -> None:
    """Say, in a forked child, that the rings which it has inherited are its parent's.

    Sending on them then fails, receiving gives nothing, and closing does nothing.
    """

@final
class RingMessage:
    """A message that has arrived."""

    client: int
    """The client's index: who sent it to an engine, or who has received it."""
    kind: int
    """0 to 255; what kinds there are is up to sender and receiver."""
    frames: list[bytes | bytearray]
    """At least one. The first is `bytes`, the others are writable: tensors may be made of them."""

@final
class RingAttached:
    """A client has come."""

    client: int
    pid: int

@final
class RingRefused:
    """Something that tried to connect to an engine was refused."""

    reason: str

@final
class RingStuck:
    """The other process hasn't run for longer than `stuck_after_s`."""

    client: int
    seconds: float

@final
class RingRecovered:
    """The other process, which was stuck, runs again."""

    client: int

@final
class RingEnd:
    """The last event of a link: the other side is gone, or has sent something that is damaged."""

    client: int
    reason: str
    is_goodbye: bool
    """Whether the other side said that it goes."""

_LinkEvent = RingMessage | RingStuck | RingRecovered | RingEnd

@disjoint_base
class EngineLinks:
    """What an engine sends through to its clients: `EngineRings` or `EngineSockets`.

    All methods may be called by any thread. Those that take a client's index raise RuntimeError if
    the client has no link.
    """

    @property
    def is_deserted(self) -> bool:
        """Whether each client has come, and has gone."""

    def is_attached(self, client: int) -> bool:
        """Whether a client has a link, even if it has gone.

        One has a ring as soon as it has come, and a socket if its address is on this host.
        """

    def send(
        self, client: int, kind: int, frames: Iterable[Buffer], *, regardless: bool = False
    ) -> bool:
        """Send a message without ever waiting; what finds no room is kept.

        A message to a client that is gone is dropped. After one that was not accepted none is,
        until `unblock`, unless it is sent regardless: nothing overtakes what is lost.

        Args:
            client: The client's index.
            kind: 0 to 255. A socket doesn't send it.
            frames: Contiguous buffers, copied before the call returns. A ring takes 1 to 65,536
                of them, at most 4 GiB together.
            regardless: Accept it however much waits.

        Returns:
            False if the message is not accepted, because too much waits already or did.

        Raises:
            ValueError: if a ring gets no frames, too many, or too many bytes.

        """

    def send_outputs(self, client: int, kind: int, outputs: StepOutputs) -> bool:
        """Send a step's outputs as `send` does, straight from where they were written.

        Args:
            client: The client's index.
            kind: 0 to 255.
            outputs: What `SchedulerCore.update_from_output` returned for this client.

        """

    def backlog_bytes(self, client: int) -> int:
        """Return how many bytes of messages wait for a client to make room."""

    def take_back_newest(self, client: int, *, max_bytes: int) -> list[RingMessage]:
        """Take back messages of which nothing was sent yet, the newest first.

        As many as have `max_bytes`; empty if none is left. What was sent `regardless` stays.
        """

    def unblock(self, client: int) -> None:
        """Let `send` accept messages again."""

    def close(self, *, linger_s: float = 0.0) -> None:
        """End all links, when clients have taken what waits or `linger_s` is over."""

@final
class EngineRings(EngineLinks):
    """An engine's end of the rings to its clients."""

    def __new__(
        cls,
        name: str,
        *,
        num_clients: int,
        ring_bytes: int,
        max_idle_backlog_bytes: int,
        max_backlog_bytes: int,
        stuck_after_s: float,
    ) -> EngineRings:
        """Wait for clients under a name in the host's abstract namespace.

        Args:
            name: New in the system; at most 107 bytes.
            num_clients: Clients have indices below this.
            ring_bytes: Bytes of each ring, of which a client has two: a power of two.
            max_idle_backlog_bytes: What may wait for a client that has taken nothing for
                `stuck_after_s`. One message more is accepted, of whatever size.
            max_backlog_bytes: The same for a client that reads, however slowly.
            stuck_after_s: A client that doesn't run for so many seconds is reported.

        Raises:
            ConnectionError: if the system has no memory, sockets or threads for it.
            ValueError: if `stuck_after_s` is negative or not finite.

        """

    @property
    def name(self) -> str: ...
    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""

    def receive(
        self, *, timeout_s: float | None = None
    ) -> list[_LinkEvent | RingAttached | RingRefused]:
        """Wait, without the GIL, and return what has happened. One thread at a time may wait.

        Empty if time is up, after a signal, `interrupt` or `close`.
        """

    def report_to(self, meters: EngineMeters) -> None:
        """Report there what goes through the rings, about once a second; the first call counts."""

    def interrupt(self) -> None:
        """End the wait of a thread in `receive`, or else the next one."""

    def hang_up(self, client: int) -> None:
        """End the link to a client; its `RingEnd` follows.

        Raises:
            RuntimeError: if the client has not come yet.

        """

@final
class EngineSockets(EngineLinks):
    """PUSH sockets to clients that stay on ZMQ."""

    def __new__(
        cls,
        addresses: list[str],
        *,
        max_idle_backlog_bytes: int,
        max_backlog_bytes: int,
        stuck_after_s: float,
    ) -> EngineSockets:
        """Make a socket for each client that listens on this host; `wait` connects them.

        Args:
            addresses: ZMQ's, by client index.
            max_idle_backlog_bytes: What may wait for a client, as for `EngineRings`.
            max_backlog_bytes: The same for a client that reads, however slowly.
            stuck_after_s: How long a client may take nothing, in seconds.

        Raises:
            ConnectionError: if the system has no more descriptors.
            ValueError: if `stuck_after_s` is negative or not finite.

        """

    def wait(self) -> list[tuple[int, str | None]]:
        """Send what waits and return what has happened, without the GIL. One thread may wait.

        A client with None has shaken hands; one with a reason is gone. Empty after `close`.
        """

@final
class ClientRings:
    """A client's end of the rings to one engine. All methods may be called by any thread.

    After a panic in a method that uses the rings the link ends: `RingEnd` follows.
    """

    def __new__(cls, name: str, *, client_index: int, stuck_after_s: float) -> ClientRings:
        """Connect to the engine that waits under a name.

        Args:
            name: As given to the engine.
            client_index: Which of the engine's clients this is.
            stuck_after_s: An engine that doesn't run for so many seconds is reported.

        Raises:
            ConnectionError: if there is no such engine, or if it refuses: because of another
                version or user, or because it has a client with this index.
            RuntimeError: if the engine fell silent at the very end. It may use the rings now, so
                there is no going on without them.
            ValueError: if `stuck_after_s` is negative or not finite.

        """

    @property
    def ring_bytes(self) -> int: ...
    @property
    def stuck_for_s(self) -> float | None:
        """Seconds for which the engine's process hasn't run, if it is stuck; else None."""

    @property
    def without_room_for_s(self) -> float | None:
        """Seconds since the ring last took a part of what waits for room; None if nothing waits."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` should be called."""

    def receive(self, *, max_messages: int = 64) -> list[_LinkEvent]:
        """Return what has happened, without waiting, and send what waits if there is room.

        With `max_messages` or more the rest may be left; the descriptor is readable then.
        """

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait, without the GIL, until the descriptor is readable; it may return early."""

    def send(self, kind: int, frames: Iterable[Buffer]) -> int:
        """Send a message without ever waiting; what finds no room in the ring is kept.

        However much is kept already: whoever sends keeps that within bounds. Arguments are those
        of `EngineLinks.send`.

        Returns:
            A ticket: all of the message is in the ring once `sent_before()` is greater.

        Raises:
            ConnectionError: if the engine is gone.
            ValueError: if there are no frames, too many, or too many bytes.

        """

    def sent_before(self) -> int:
        """Return a ticket: messages with lower ones are in the ring."""

    def close(self, *, linger_s: float = 0.0) -> None:
        """Say goodbye, when the engine has taken what waits or `linger_s` is over."""

def meter_bounds_s() -> list[float]:
    """Return the upper bounds of the buckets of all histograms, in seconds, ascending: 45."""

@final
class EngineMeters:
    """A page of shared memory on which an engine counts, and which others may read.

    Counting goes on in a forked child, on the same page.
    """

    def __new__(cls, id: int) -> EngineMeters:
        """Make a page.

        Args:
            id: What readers know it by, below 2**128.

        Raises:
            ConnectionError: if the system has no memory for it.
            OverflowError: if `id` is out of range.

        """

    def fileno(self) -> int:
        """Return the descriptor that readers open."""

    def time_steps(self, scheduler: SchedulerCore) -> None:
        """Have a scheduler report here from now on, instead of where it did before.

        Raises:
            RuntimeError: if the scheduler is in the middle of a call.

        """

    def count_queue_timeouts(self, count: int) -> None:
        """Count requests that have waited for too long."""

@final
class MeterReader:
    """Another process's page, mapped so that it can't be written.

    What is read may be anything if that process goes wrong; it is as long as is said here.
    """

    def __new__(cls, *, pid: int, fd: int, id: int) -> MeterReader:
        """Open descriptor `fd` of process `pid`.

        Raises:
            ConnectionError: if the system doesn't open it, or it isn't the page with this `id`.
            OverflowError: if a number is out of range.

        """

    def steps(self) -> dict[str, Any] | None:
        """Return what the scheduler has reported, None if none reports.

        Keys: `schedule`, `update_from_output` and `step_gap`, each a pair of counts, one for each
        of `meter_bounds_s()` and one for what is above, and of all times' sum in seconds;
        `num_running` and `num_waiting` requests; `waiting_for`, these by reason;
        `num_queue_timeouts`; `pacing`, None without it, else the present chunk, times in seconds
        and steps, as `SchedulerCore.pacing` has them.
        """

    def tenants(self) -> str | None:
        """Return up to 20 tenants with the most requests, and the others as one without a name.

        A line each: how many of its requests were never scheduled, how many have not ended, and
        its name. None if requests aren't ordered.
        """

    def rings(self) -> dict[str, Any] | None:
        """Return what has gone through the rings, as of a second ago; None without rings.

        Keys: `to_engine` and `to_client`, each with `waiting_bytes`, `high_water_bytes` of one
        ring, `backlog_bytes` (0 to the engine, which can't know) and `num_without_room`;
        `num_rescues` and `num_clients_lost`.
        """
