"""What the native scheduler changes in the engine around it.

It replaces `vllm.v1.engine.core.get_request_block_hasher`, and only in a process that has built a
native scheduler. Requests are checked where they arrive: see `arrival`.

The engine's constructor builds the scheduler, and then asks for a hasher without naming scheduler
or engine. So the thread keeps what the hasher needs, from the one call to the other.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from sparksched._core import NativeBlockHasher
from sparksched.compat import patching, seams
from sparksched.engine.extra_keys import extra_keys_writer
from sparksched.engine.scheduler import NativeScheduler

BlockHasher = Callable[[Request], list[bytes]]

_ENGINE_MODULE = "vllm.v1.engine.core"


class _Pending(threading.local):
    """The scheduler whose engine is being built in this thread, and has not asked for a hasher."""

    scheduler: "weakref.ref[NativeScheduler] | None" = None


_pending = _Pending()


def native_block_hasher(
    algorithm: str, block_size: int, num_lookahead_tokens: int = 0
) -> BlockHasher:
    """Return a drop-in for what vLLM's `get_request_block_hasher` returns.

    `kv_cache_utils.NONE_HASH` must have been set by `init_none_hash`.

    Args:
        algorithm: A value of `prefix_caching_hash_algo`.
        block_size: Tokens a block.
        num_lookahead_tokens: Tokens behind a block that its hash covers as well.

    """
    return NativeBlockHasher(
        algorithm,
        block_size,
        kv_cache_utils.NONE_HASH,
        extra_keys=extra_keys_writer(algorithm, block_size, num_lookahead_tokens),
        num_lookahead_tokens=num_lookahead_tokens,
    )


def forget_pending_scheduler() -> None:
    """Forget a scheduler whose engine never asked for a hasher: another one is being built."""
    _pending.scheduler = None


def prepare_engine(scheduler: NativeScheduler) -> None:
    """Replace functions of the engine, if one is what has had this scheduler built."""
    if _ENGINE_MODULE not in sys.modules:
        return
    if scheduler.vllm_config.cache_config.enable_prefix_caching:
        _pending.scheduler = weakref.ref(scheduler)
    patching.apply(seams.NATIVE_ENGINE)
    # This is done before, unless the scheduler is asked for by its name.
    patching.apply(seams.ARRIVAL)


def _preferring_native_hasher(original: patching.Function) -> patching.Function:
    @functools.wraps(original)
    def get_request_block_hasher(
        hash_block_size: int,
        caching_hash_fn: Callable[[Any], bytes],
        *lookahead: int,  # `num_hash_lookahead_tokens`, where vLLM has that
    ) -> BlockHasher:
        # The engine asks once, right after it has built its scheduler and in the same thread.
        pending, _pending.scheduler = _pending.scheduler, None
        scheduler = None if pending is None else pending()
        if scheduler is not None and scheduler.hash_block_size == hash_block_size:
            algorithm = scheduler.vllm_config.cache_config.prefix_caching_hash_algo
            if get_hash_fn_by_name(algorithm) is caching_hash_fn:
                scheduler.set_none_hash(kv_cache_utils.NONE_HASH)
                return native_block_hasher(algorithm, hash_block_size, *lookahead)
        hasher: BlockHasher = original(hash_block_size, caching_hash_fn, *lookahead)
        return hasher

    return get_request_block_hasher
