"""Flaws of a scheduler with recurrent states or circular buffers, planted into vLLM's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager

from testkit.worlds.world import SchedulerClass

Flaw = Callable[[SchedulerClass], SchedulerClass]


def _once_built(base: SchedulerClass, change: Callable[[Any], None]) -> SchedulerClass:
    class Flawed(base):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            change(self)

    return Flawed


def _state_managers(scheduler: Any) -> list[Any]:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if hasattr(manager, "mamba_cache_mode")]


def keeps_states_one_block_off(base: SchedulerClass) -> SchedulerClass:
    """End chunks one block before the one whose state others can use."""

    class Flawed(base):  # type: ignore[misc]
        def _mamba_block_aligned_split(self, request: Any, num_tokens: int, *hits: int) -> int:
            aligned = super()._mamba_block_aligned_split(request, num_tokens, *hits)
            size = self.cache_config.block_size
            return aligned - size if aligned % size == 0 and aligned > size else aligned

    return Flawed


def frees_states_early(base: SchedulerClass) -> SchedulerClass:
    """Free a state that the step in flight still copies from."""

    def change(scheduler: Any) -> None:
        for manager in _state_managers(scheduler):
            remove = manager.remove_skipped_blocks

            def early(
                request_id: str,
                computed: int,
                *rest: Any,
                manager: Any = manager,
                remove: Any = remove,
                **named: Any,
            ) -> None:
                remove(request_id, computed + manager.block_size, *rest, **named)

            manager.remove_skipped_blocks = early

    return _once_built(base, change)


def takes_partial_hits_for_whole_ones(base: SchedulerClass) -> SchedulerClass:
    """Go on in a block that is shared up to its middle."""

    def change(scheduler: Any) -> None:
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager._has_partial_local_hit = lambda *_: False

    return _once_built(base, change)


def forgets_copies(base: SchedulerClass) -> SchedulerClass:
    """Don't tell the workers which blocks to copy."""

    class Flawed(base):  # type: ignore[misc]
        def schedule(self, *arguments: Any) -> SchedulerOutput:
            output = super().schedule(*arguments)
            output.kv_cache_block_copies = None
            return output

    return Flawed


def zeroes_nothing(base: SchedulerClass) -> SchedulerClass:
    """Don't tell the workers which blocks to fill with zeros."""

    class Flawed(base):  # type: ignore[misc]
        def _get_new_block_ids_to_zero(self) -> None:
            super()._get_new_block_ids_to_zero()

    return Flawed


def hits_states_of_the_same_step(base: SchedulerClass) -> SchedulerClass:
    """Let a request go on from a state that is computed in this very step."""

    def change(scheduler: Any) -> None:
        for manager in _state_managers(scheduler):
            manager.cached_blocks_this_step = _Empty()

    return _once_built(base, change)


class _Empty(set[Any]):
    def add(self, _key: Any) -> None:
        return None


def keeps_speculative_states_in_place(base: SchedulerClass) -> SchedulerClass:
    """Take new blocks for speculation rather than move the old ones."""

    def change(scheduler: Any) -> None:
        for manager in _state_managers(scheduler):

            def relocate(blocks: list[Any], place: int, manager: Any = manager) -> None:
                blocks.append(manager.block_pool.get_new_blocks(1)[0])
                manager.block_pool.free_blocks([blocks[place]])
                blocks[place] = manager._null_block

            manager._relocate_speculative_block = relocate

    return _once_built(base, change)


def _ring_managers(scheduler: Any) -> list[Any]:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if isinstance(manager, CircularBufferManager)]


def counts_no_rings_of_whole_sequences(base: SchedulerClass) -> SchedulerClass:
    """Forget circular buffers where the whole sequence must fit."""

    def change(scheduler: Any) -> None:
        for manager in _ring_managers(scheduler):
            count = manager.get_num_blocks_to_allocate

            def forgetful(*arguments: Any, count: Any = count, **named: Any) -> int:
                return 0 if named.get("apply_admission_cap") else int(count(*arguments, **named))

            manager.get_num_blocks_to_allocate = forgetful

    return _once_built(base, change)


def counts_rings_in_each_step(base: SchedulerClass) -> SchedulerClass:
    """Want a free block for the circular buffer of a request that has it already."""

    def change(scheduler: Any) -> None:
        for manager in _ring_managers(scheduler):
            manager.get_num_blocks_to_allocate = lambda *_arguments, **_named: 1

    return _once_built(base, change)


def frees_rings_early(base: SchedulerClass) -> SchedulerClass:
    """Free a circular buffer once the request is past its end, as if it were a window."""

    def change(scheduler: Any) -> None:
        for manager in _ring_managers(scheduler):

            def early(request_id: str, computed: int, *_rest: Any, manager: Any = manager) -> None:
                if computed >= manager.block_size:
                    manager.free(request_id)

            manager.remove_skipped_blocks = early

    return _once_built(base, change)


def zeroes_rings(base: SchedulerClass) -> SchedulerClass:
    """Have the workers fill circular buffers with zeros."""

    def change(scheduler: Any) -> None:
        for manager in _ring_managers(scheduler):
            manager._record_new_block_ids = scheduler.needs_kv_cache_zeroing

    return _once_built(base, change)


def drops_no_block_for_a_flagged_ring(base: SchedulerClass) -> SchedulerClass:
    """Forget the drafter because its only group, a circular one, is not looked up."""

    def change(scheduler: Any) -> None:
        coordinator = scheduler.kv_cache_manager.coordinator
        # vLLM 0.33.0 has the latter, too.
        coordinator.eagle_group_ids = coordinator.drop_eagle_group_ids = set()

    return _once_built(base, change)


STATE_FLAWS: list[tuple[Flaw, str]] = [
    (keeps_states_one_block_off, "async-qwen3-next"),
    (frees_states_early, "async-qwen3-next"),
    (takes_partial_hits_for_whole_ones, "states-within-blocks"),
    (forgets_copies, "states-within-blocks"),
    (zeroes_nothing, "sync-qwen3-next"),
    (hits_states_of_the_same_step, "states-within-blocks"),
    (keeps_speculative_states_in_place, "states-speculating"),
    (counts_no_rings_of_whole_sequences, "circular-where-all-must-fit"),
    (counts_rings_in_each_step, "circular-preempting"),
    (frees_rings_early, "sync-circular"),
    (zeroes_rings, "async-circular-latent-and-sliding"),
    (drops_no_block_for_a_flagged_ring, "circular-by-eagle"),
]
