from importlib.util import find_spec

import pytest

ALGORITHMS = [
    "sha256",
    "sha256_cbor",
    *(["xxhash", "xxhash_cbor"] if find_spec("xxhash") else []),
]


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> str:
    """Initialise vLLM's hashing with one of its algorithms."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(get_hash_fn_by_name(request.param))
    return request.param
