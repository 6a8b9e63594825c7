"""The Rust extension. Its sources are in `rust/python/src`."""

from collections.abc import Callable, Iterable
from typing import Any, final

__all__ = ["NativeBlockHasher", "SchedulerCore", "__version__", "read_prompt"]

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
        hash_first_block: Callable[[Any], bytes],
        fallback: Callable[[Any], list[bytes]],
    ) -> NativeBlockHasher:
        """Build a hasher.

        Args:
            algorithm: `sha256`, `sha256_cbor`, `xxhash` or `xxhash_cbor`.
            block_size: Tokens a block, 1 to about 13,000.
            none_hash: Parent of each first block, at most 32 bytes.
            hash_first_block: Hashes the first block of a request that has a cache salt.
            fallback: Hashes all blocks of a request with LoRA, multimodal features or prompt
                embeddings.

        Raises:
            ValueError: for an argument outside of these bounds.

        """

    def __call__(self, request: Any) -> list[bytes]:
        """Return the hashes of the full blocks that `request.block_hashes` lacks, in order.

        Raises:
            OverflowError: if a token id does not fit into 32 bits.

        """

def read_prompt(request: Any) -> None:
    """Read the tokens of a `Request` ahead of `SchedulerCore.add_request`, which then does not.

    Raises:
        OverflowError: if a token id does not fit into 32 bits.
        ValueError: if there is no token.

    """

@final
class SchedulerCore:
    """The scheduler's state in Rust. `sparksched.scheduler.SparkScheduler` is its public face.

    Times are seconds of `time.monotonic`. After an internal error the methods that schedule, add or
    end requests raise RuntimeError, but for `finish_requests(None, status)`.
    """

    def __new__(
        cls,
        config: dict[str, Any],
        *,
        accept_tokens: Callable[[Any, list[int]], bool],
        hash_first_block: Callable[[Any], bytes],
        include_finished_set: bool,
    ) -> SchedulerCore:
        """Build a scheduler without requests.

        Args:
            config: What `sparksched.scheduler.core_config` returns.
            accept_tokens: Advances a request's grammar; False if it rejects the tokens.
            hash_first_block: Hashes the first block of a request that has a cache salt.
            include_finished_set: Outputs carry the ids of requests that ended, by client.

        Raises:
            KeyError: if a key of `config` is missing.
            ValueError: if the configuration contradicts itself.

        """

    @property
    def requests(self) -> dict[str, Any]:
        """Requests that are not finished, by id: vLLM's `Scheduler.requests`."""

    def set_none_hash(self, none_hash: bytes) -> None:
        """Set the parent of each first block: vLLM's `NONE_HASH`, at most 32 bytes."""

    def add_request(self, request: Any, now: float) -> None:
        """Read a `vllm.v1.request.Request` and put it into the queue."""

    def schedule(self, throttle_prefills: bool, now: float) -> Any:
        """Decide the next step and return its `SchedulerOutput`."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take in a step's `ModelRunnerOutput`; return `EngineCoreOutputs` by client."""

    def finish_requests(self, request_ids: Iterable[str] | None, status: Any) -> list[Any]:
        """End requests with a finished `RequestStatus`, in this order; return the `Request`s."""

    def preempt_running(self, now: float) -> None:
        """Take the blocks of all running requests away and queue them again."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes unless a block is in use; return whether that was done."""

    def make_stats(self) -> Any | None:
        """Return `SchedulerStats`, or None if statistics are off."""

    def has_requests(self) -> bool:
        """Return whether a step has anything to do or to tell."""

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has work to do in the current pause state."""

    def has_finished_requests(self) -> bool:
        """Return whether requests ended since the last step."""

    def num_unfinished_requests(self) -> int:
        """Count the requests that have work to do in the current pause state."""

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

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as plain data; see `SparkScheduler.snapshot`."""

    def check_invariants(self) -> None:
        """Walk the whole state; RuntimeError at the first contradiction."""
