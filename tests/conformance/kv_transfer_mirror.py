"""KV transfers in vLLM's scheduler: blocks that nobody has yet, and what tests assign."""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from sparksched.engine import scheduler as native_scheduler
from sparksched.engine.kv_transfer import KVTransfer
from vllm.config import KVTransferConfig, VllmConfig

from .kv_cache_mirror import Snapshot

# What tests assign that is part of the native scheduler's configuration.
SETTINGS = frozenset({"connector", "defer_block_free"})


@contextmanager
def assigned(vllm_config: VllmConfig, settings: dict[str, Any]) -> Iterator[None]:
    """Have the next scheduler be built with the connector and the setting that a test assigned.

    Where a test wants these without any connector, it gets one that has nothing and keeps nothing.
    """
    has_connector = vllm_config.kv_transfer_config is not None

    def build(*args: Any) -> KVTransfer:
        transfer = KVTransfer(*args)
        if "connector" in settings:
            transfer.connector = settings["connector"]
        # Only from its own configuration does vLLM's scheduler conclude anything.
        default = has_connector and transfer.core_config["defer_block_free"]
        transfer.core_config["defer_block_free"] = settings.get("defer_block_free", default)
        return transfer

    with ExitStack() as patches:
        if settings.keys() & SETTINGS:
            patches.enter_context(mock.patch.object(native_scheduler, "KVTransfer", build))
            if not has_connector:
                patches.enter_context(_with_connector(vllm_config))
        yield


@contextmanager
def _with_connector(vllm_config: VllmConfig) -> Iterator[None]:
    config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_consumer")
    # vLLM would have done so itself for this connector.
    hybrid = {"disable_hybrid_kv_cache_manager": True}
    with (
        mock.patch.object(vllm_config, "kv_transfer_config", config),
        mock.patch.multiple(vllm_config.scheduler_config, **hybrid),
    ):
        yield


class DeferredFrees:
    """Blocks that are in use although no request has them, by the request that had them."""

    def __init__(self) -> None:
        self.num_scheduled_steps = 0
        self.num_processed_steps = 0
        self.entries: deque[tuple[int, list[int]]] = deque()
        """As in vLLM's: the step that the blocks wait for, and their numbers."""
        self._ownerless: Counter[int] = Counter()

    def note(self, before: Snapshot, after: Snapshot) -> None:
        """Take notice of what a call has changed."""
        while self.entries and self.entries[0][0] <= self.num_processed_steps:
            self.entries.popleft()
        owned = Counter(block for it in after["requests"].values() for block in _blocks(it))
        self._ownerless = Counter(after["ref_counts"]) - owned
        unexplained = self._ownerless - self._explained()
        for request_id, state in before["requests"].items():
            blocks = _blocks(state)
            is_gone = not _blocks(after["requests"].get(request_id, {"block_ids": []}))
            if blocks and is_gone and Counter(blocks) <= unexplained:
                unexplained -= Counter(blocks)
                self.entries.append((self.num_scheduled_steps, blocks))

    @property
    def is_right(self) -> bool:
        """Whether exactly these blocks are in use although no request has them."""
        return self._explained() == self._ownerless

    def _explained(self) -> Counter[int]:
        return Counter(block for _, blocks in self.entries for block in blocks)


def _blocks(state: dict[str, Any]) -> list[int]:
    """Return the blocks that a request has: 0 stands for those that it had."""
    return [block for table in state["block_ids"] for block in table if block != 0]
