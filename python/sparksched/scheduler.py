"""`SparkScheduler`: the name by which vLLM is told to schedule with sparksched.

What an engine gets for it is decided here and nowhere else. A configuration that the Rust core does
not implement gets vLLM's own scheduler; `SPARKSCHED_VERIFY` has the native one verified; and
`SPARKSCHED_RECORD` has whichever it is recorded.
"""

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager

from sparksched import compat, environment
from sparksched.compat.configuration import unverifiable

if TYPE_CHECKING or compat.unsupported_vllm() is None:
    from sparksched.engine import hashing
    from sparksched.engine.scheduler import NativeScheduler
else:
    # vLLM's own will be chosen. Ours takes functions of vLLM's that this one may not have.
    hashing, NativeScheduler = None, SchedulerInterface


class _Choosing(type(SchedulerInterface)):  # type: ignore[misc]
    """Has the construction of a class give the scheduler that is chosen in its place."""

    def __call__(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        **others: Any,
    ) -> SchedulerInterface:
        if hashing is not None:
            hashing.forget_pending_scheduler()
        arguments = {
            "vllm_config": vllm_config,
            "kv_cache_config": kv_cache_config,
            "structured_output_manager": structured_output_manager,
            "block_size": block_size,
            "hash_block_size": hash_block_size,
            **others,
        }
        chosen = cls.choose(vllm_config, kv_cache_config, block_size, hash_block_size)
        scheduler = super().__call__(**arguments) if chosen is cls else chosen(**arguments)
        if hashing is not None and isinstance(scheduler, NativeScheduler):
            hashing.prepare_engine(scheduler)
            if (order := environment.order()) is not None:
                scheduler.order_by(order)
            if (pacing := environment.pacing()) is not None:
                scheduler.pace(pacing)
        # What `--scheduler-cls` alone has asked for isn't recorded.
        is_recorded = environment.is_selected() and environment.recording() is not None
        if cls is SparkScheduler and is_recorded:
            from sparksched.record.recorder import record

            record(scheduler)
        return scheduler

    def choose(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        block_size: int,
        hash_block_size: int | None,
    ) -> type[Any]:
        """Return the class to build: this one, one that verifies it, or vLLM's; log why vLLM's.

        Raises:
            RuntimeError: for a configuration that isn't supported, or can't be verified as
                `SPARKSCHED_VERIFY` asks for, with `SPARKSCHED_STRICT=1`.

        """
        problem = compat.first_unsupported(
            vllm_config, kv_cache_config, block_size, hash_block_size
        )
        if problem is None:
            if environment.order() is not None:
                # An order is one of priorities; vLLM's other policy has none.
                vllm_config.scheduler_config.policy = "priority"
            return verifying_cls(cls, vllm_config)
        compat.refuse(problem)
        if environment.order() is not None:
            compat.warn("sparksched: requests are not ordered: vLLM's own scheduler runs")
        if environment.pacing() is not None:
            compat.warn("sparksched: long prompts are not paced: vLLM's own scheduler runs")
        return compat.stock_scheduler_cls(vllm_config)


class SparkScheduler(NativeScheduler, metaclass=_Choosing):
    """Schedules as vLLM's `Scheduler` and `AsyncScheduler` do, in Rust.

    Takes their constructor's arguments and decides between synchronous and asynchronous scheduling
    by `vllm_config.scheduler_config.async_scheduling`. Constructing it gives an instance of vLLM's
    own scheduler for a configuration that is not supported, and one that is verified if the
    environment asks for that. Classes below it are chosen for in the same way, but not verified.
    """


def verifying_cls(cls: type[Any], vllm_config: VllmConfig) -> type[Any]:
    """Return the class to build in the place of `SparkScheduler` or a class below it.

    Raises:
        RuntimeError: if `SPARKSCHED_STRICT=1` and what `SPARKSCHED_VERIFY` asks for can't be had.

    """
    if environment.verification() is None:
        return cls
    problem = unverifiable(vllm_config)
    if cls is not SparkScheduler:
        problem = compat.Unsupported(
            f"--scheduler-cls {cls.__module__}.{cls.__qualname__}",
            "what a class of one's own decides is not meant to be what vLLM's scheduler does",
        )
    if problem is None:
        from sparksched.verify.scheduler import VerifyingScheduler

        return VerifyingScheduler
    compat.warn_or_raise(
        warning=f"sparksched: running without verification: {problem.feature}: {problem.reason}",
        error=f"sparksched can't be verified: {problem.feature}: {problem.reason}",
    )
    return cls
