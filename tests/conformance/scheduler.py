"""`SparkScheduler` with the attributes that vLLM's tests read."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sparksched.scheduler import SparkScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from . import names, settings
from .census import CENSUS
from .mirror import Mirror

# What may be read of the scheduler that mirrors the native one: the configuration, what is written
# there, and managers of features that the native scheduler has not. Nothing else, because what is
# not kept up to date would let tests pass that should not.
_READABLE = frozenset(
    {
        "policy",
        "max_model_len",
        "max_num_running_reqs",
        "max_num_scheduled_tokens",
        "max_num_encoder_input_tokens",
        "spec_decode_metrics_level",
        "use_v2_model_runner",
        "pp_size",
        "use_pp",
        "kv_holding_waiting",
        "num_waiting_for_streaming_input",
        "prefill_capacity_bound",
        "current_step",
        "num_executed_steps",
        "last_prefill_step",
        "local_prefill_interval",
        "num_prefill_lookahead",
        "num_hash_lookahead_tokens",
        "can_skip_drafts",
    }
)

# What `SparkScheduler` itself assigns after its construction.
_OWN_STATE = frozenset({"_core", "_needs_none_hash"})


class AssignsToTheScheduler(Exception):
    """A test has assigned to an attribute: in the native scheduler nobody would look at it."""


class _WithFunctionsOfVllm(type(SparkScheduler)):  # type: ignore[misc]
    """Tests that call a function of vLLM's class without a scheduler get that function."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(names.Scheduler, name)

    def choose(cls, vllm_config: Any, *args: Any) -> type[Any]:
        with names.bound_to_vllms_own(), cls._mode_of(vllm_config):
            chosen: type[Any] = super().choose(vllm_config, *args)
            return chosen


class MirroredScheduler(SparkScheduler, metaclass=_WithFunctionsOfVllm):
    """Stands in the place of vLLM's `Scheduler`; falls back as `SparkScheduler` does."""

    stock_class = names.Scheduler
    async_scheduling = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        CENSUS.num_native += 1
        with CENSUS.paused():
            self.__dict__["_mirror"] = Mirror(self.stock_class(vllm_config, *args, **kwargs))
        self.__dict__["_arguments"] = (vllm_config, *args), kwargs
        self._build()

    def _build(self) -> None:
        args, kwargs = self._arguments
        self.__dict__["_is_built"] = False
        mirror = self._mirror
        configured = settings.assigned(args[0], mirror.settings, mirror.stock)
        with self._mode_of(args[0]), configured:
            super().__init__(*args, **kwargs)
        self._mirror.defer_frees(self.defer_block_free)
        self.__dict__["_is_built"] = True

    @classmethod
    @contextmanager
    def _mode_of(cls, vllm_config: Any) -> Iterator[None]:
        """Say in the configuration what the test says by the class.

        Platforms change the setting (the CPU's switches asynchronous scheduling off), and vLLM's
        classes don't look at it.
        """
        scheduler_config = vllm_config.scheduler_config
        with mock.patch.object(scheduler_config, "async_scheduling", cls.async_scheduling):
            yield

    # ---- attributes ----

    def __setattr__(self, name: str, value: Any) -> None:
        if name in settings.NAMES:
            self._change_setting(name, value)
        elif name == "use_pp" and value == (self.pp_size > 1):
            self._mirror.stock.use_pp = value
        elif name == "_preempt_request":
            self._mirror.preemption_observer = value
        elif name in _OWN_STATE or not self.__dict__.get("_is_built", False):
            self.__dict__[name] = value
        elif isinstance(value, bool) and getattr(self._mirror.stock, name, None) is value:
            pass  # It is so already.
        else:
            raise AssignsToTheScheduler(name)

    def __getattr__(self, name: str) -> Any:
        if name in _READABLE and "_mirror" in self.__dict__:
            return getattr(self._mirror.stock, name)
        if name == "_preempt_request":
            return self._mirror.note_preemption
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _change_setting(self, name: str, value: Any) -> None:
        """Build the scheduler anew: what vLLM's reads at any time is part of our configuration."""
        if value == getattr(self, name, None):
            return
        if self.requests:
            raise AssignsToTheScheduler(name)
        setattr(self._mirror.stock, name, value)
        self._mirror.settings[name] = value
        self._build()

    @property
    def requests(self) -> dict[str, Request]:
        return self._mirror.stock.requests

    @property
    def running(self) -> list[Request]:
        return self._mirror.stock.running

    @property
    def waiting(self) -> Any:
        return self._mirror.stock.waiting

    @property
    def deferred_waiting(self) -> set[Request]:
        stats = self._take_stats()
        if stats is not None:
            self._mirror.show_deferred(stats)
        return self._mirror.stock.deferred_waiting

    @property
    def kv_cache_manager(self) -> Any:
        manager = self._mirror.show_kv_cache()
        self._take_stats()
        return manager

    @property
    def encoder_cache_manager(self) -> Any:
        """The native scheduler's own. One for text has none, where vLLM's has an empty one."""
        if self._encoder_inputs is None:
            return self._mirror.stock.encoder_cache_manager
        return self._encoder_inputs.encoder_cache_manager

    @property
    def encoder_cache_mismatch_reqs(self) -> set[str]:
        return self._encoder_inputs.encoder_cache_mismatch_reqs

    # ---- KV transfers ----

    @property
    def defer_block_free(self) -> bool:
        return self._kv_transfer is not None and self._kv_transfer.core_config["defer_block_free"]

    @property
    def requires_kv_delivery(self) -> bool:
        transfer = self._kv_transfer
        return transfer is not None and transfer.core_config["requires_kv_delivery"]

    @property
    def finished_recving_kv_req_ids(self) -> set[str]:
        stats = self._take_stats()
        if stats is not None:
            self._mirror.check_num_loaded(stats)
        return self._mirror.stock.finished_recving_kv_req_ids

    @property
    def deferred_frees(self) -> Any:
        return self._mirror.show_deferred_frees()

    @property
    def sched_step_seq(self) -> int:
        return self._mirror.num_steps()[0]

    @property
    def processed_step_seq(self) -> int:
        return self._mirror.num_steps()[1]

    def _take_stats(self) -> SchedulerStats | None:
        """Return the statistics, and move those of the prefix cache to where vLLM keeps them.

        They are then missing in the next outputs: a test that looks for them there, too, fails.
        """
        transfer = self._kv_transfer
        counted_of_transfers = {} if transfer is None else dict(vars(transfer))
        stats = self.core.make_stats()
        if transfer is not None:
            vars(transfer).update(counted_of_transfers)
        if stats is not None:
            self._mirror.add_prefix_cache_stats(stats.prefix_cache_stats)
        return stats

    # ---- calls that change the state ----

    @contextmanager
    def _changing_state(self, *, drops_stale_output: bool = False) -> Iterator[None]:
        self._mirror.check_untouched()
        yield
        self._mirror.write(
            self.core.requests,
            self.snapshot(),
            drops_stale_output=drops_stale_output or self.requires_kv_delivery,
        )

    def add_request(self, request: Request) -> None:
        num_lookahead_tokens = settings.hash_lookahead_of(request)
        if num_lookahead_tokens != getattr(self._mirror.stock, "num_hash_lookahead_tokens", 0):
            self._change_setting("num_hash_lookahead_tokens", num_lookahead_tokens)
        with self._changing_state():
            super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        with self._changing_state():
            output = super().schedule(throttle_prefills)
        self._mirror.note_schedule(output, throttled=throttle_prefills)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        with self._changing_state():
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self._mirror.note_report(scheduler_output, model_runner_output)
            self._mirror.note_outputs(outputs, scheduler_output)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        with self._changing_state():
            super().update_draft_token_ids(draft_token_ids)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        with self._changing_state():
            super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        with self._changing_state():
            finished = super().finish_requests(request_ids, finished_status)
            self._mirror.note_finished(finished)
        return finished

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        with self._changing_state(drops_stale_output=True):
            return super().reset_prefix_cache(reset_running_requests, reset_connector)


class MirroredAsyncScheduler(MirroredScheduler):
    """Stands in the place of vLLM's `AsyncScheduler`."""

    stock_class = names.AsyncScheduler
    async_scheduling = True


def accept_fallbacks() -> None:
    """Let one of vLLM's schedulers pass for an instance of what was asked for, after a fallback.

    It then passes for a `SparkScheduler` as well: not in a process that has other tests.
    """
    MirroredScheduler.register(names.Scheduler)
    MirroredAsyncScheduler.register(names.AsyncScheduler)
