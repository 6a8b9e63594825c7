"""The allow-list: what is supported, and by which name everything else is refused."""

import copy
import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from logs import collected, with_level
from sparksched import compat
from sparksched.compat import Unsupported, pacing, seams
from vllm.config import LoRAConfig

pytestmark = pytest.mark.release

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "vocab_size": 512,
}
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


@pytest.fixture(scope="module")
def supported_config(model_directory: Path) -> Any:
    return engine_config(model_directory)


def engine_config(model_directory: Path, **settings: Any) -> Any:
    """Build the real configuration of a tiny model, in a local directory and without weights."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model_directory),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        load_format="dummy",
        **settings,
    ).create_engine_config()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    with collected(text=with_level) as lines:
        yield lines


def changed(config: Any, path: str, value: object) -> Any:
    """Copy `config` with the attribute or property at a dotted path changed."""
    config = copy.copy(config)
    name, _, rest = path.partition(".")
    if rest:
        value = changed(getattr(config, name), rest, value)
    cls = type(config)
    if isinstance(inspect.getattr_static(cls, name, None), property):
        overridden = {name: value, "__module__": cls.__module__}
        config.__class__ = type(cls.__name__, (cls,), overridden)
    else:
        setattr(config, name, value)
    return config


def all_changed(config: Any, changes: dict[str, object]) -> Any:
    for path, value in changes.items():
        config = changed(config, path, value)
    return config


# ----------------------------------------------------------------------------------------
# Versions
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.0"])
def test_supported_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", version)
    assert compat.unsupported_version() is None


@pytest.mark.parametrize("version", ["0.32.1", "0.34.0", "0.33.0rc1", "dev"])
def test_unsupported_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", version)
    assert compat.unsupported_version() == Unsupported(
        f"vLLM {version}",
        "sparksched knows vLLM 0.32.0 and 0.33.0; "
        "install one of these or a sparksched made for your version",
    )


# ----------------------------------------------------------------------------------------
# The configuration
# ----------------------------------------------------------------------------------------


def kv_connector(name: str, connectors: Sequence[str] = ()) -> Any:
    from vllm.config import KVTransferConfig

    parts = [{"kv_connector": part, "kv_role": "kv_both"} for part in connectors]
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config={"connectors": parts}
    )


REFUSED = [
    ("running without a model configuration", {"model_config": None}),
    ("diffusion", {"diffusion_config": object()}),
    ("diffusion", {"model_config.is_diffusion": True}),
    ("an encoder-decoder model", {"model_config.is_encoder_decoder": True}),
    ("this kind of model", {"model_config.runner_type": "draft"}),
    ("an encoder-only instance", {"is_mm_encoder_only": True}),
    (
        "LoRA with pipeline parallelism",
        {"lora_config": LoRAConfig(), "parallel_config.pipeline_parallel_size": 2},
    ),
    (
        "a KV connector that manages blocks itself",
        {"kv_transfer_config": kv_connector("SimpleCPUOffloadConnector")},
    ),
    (
        "a KV connector that manages blocks itself",
        {
            "kv_transfer_config": kv_connector(
                "MultiConnector", connectors=["ExampleConnector", "MooncakeStoreConnector"]
            )
        },
    ),
    (
        "a KV connector that manages blocks itself",  # vLLM says that there is no such connector
        {"kv_transfer_config": kv_connector("NoSuchConnector")},
    ),
    ("decode context parallelism", {"parallel_config.decode_context_parallel_size": 2}),
    ("prefill context parallelism", {"parallel_config.prefill_context_parallel_size": 2}),
    ("elastic expert parallelism", {"parallel_config.enable_elastic_ep": True}),
    ("fault tolerance", {"parallel_config.enable_fault_tolerance": True}),
    ("HiSparse", {"attention_config.hisparse_config": object()}),
    ("this scheduling policy", {"scheduler_config.policy": "shortest-first"}),
    ("this prefix caching hash", {"cache_config.prefix_caching_hash_algo": "crc32"}),
    ("a limit of 2^31 or more", {"model_config.max_model_len": 2**31}),
    ("a limit of 2^31 or more", {"cache_config.prefix_cache_retention_interval": 2**31}),
]


@pytest.mark.parametrize(
    ("feature", "changes"), REFUSED, ids=lambda it: it if isinstance(it, str) else ",".join(it)
)
def test_refused_configurations(
    supported_config: object,
    feature: str,
    changes: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Later releases have less to refuse.
    monkeypatch.setattr("vllm.version.__version__", "0.32.0")
    problem = compat.unsupported_config(all_changed(supported_config, changes))
    assert problem is not None
    assert problem.feature == feature
    assert problem.reason
    assert not problem.reason.endswith(".")


UNPACED = [
    ("a pooling model", {"model_config.runner_type": "pooling"}),
    (
        "data-parallel engines of a mixture of experts",
        {"parallel_config.data_parallel_size": 2, "model_config.is_moe": True},
    ),
    ("pipeline parallelism", {"parallel_config.pipeline_parallel_size": 2}),
    ("a KV connector", {"kv_transfer_config": object()}),
    ("an encoder cache connector", {"ec_transfer_config": object()}),
    ("--no-enable-chunked-prefill", {"scheduler_config.enable_chunked_prefill": False}),
    (
        "--long-prefill-token-threshold-adaptive",
        {"scheduler_config.long_prefill_token_threshold_adaptive": True},
    ),
    ("--disable-chunked-mm-input", {"scheduler_config.disable_chunked_mm_input": True}),
    ("--prefill-schedule-interval", {"scheduler_config.prefill_schedule_interval": 2}),
]


@pytest.mark.parametrize(("feature", "changes"), UNPACED, ids=[it for it, _ in UNPACED])
def test_where_long_prompts_cannot_be_paced(
    supported_config: object, feature: str, changes: dict[str, object]
) -> None:
    assert pacing.unpaceable(supported_config) is None
    problem = pacing.unpaceable(all_changed(supported_config, changes))
    assert problem is not None
    assert problem.feature == feature


SECRET = "marked-password"


def with_secrets(config: Any) -> Any:
    """Copy a configuration, with a secret wherever one may be."""
    transfer = kv_connector("NoSuchConnector")
    transfer.kv_connector_extra_config["password"] = SECRET
    return all_changed(
        config,
        {
            "model_config.model": f"https://user:{SECRET}@host.invalid/model",
            "model_config.hf_token": SECRET,
            "additional_config": {"token": SECRET},
            "observability_config.otlp_traces_endpoint": f"https://user:{SECRET}@host.invalid",
            "kv_transfer_config": transfer,
        },
    )


def without_connector(config: Any) -> Any:
    return changed(config, "kv_transfer_config", None)


def multi_connector_with(part: dict[str, str]) -> Any:
    transfer = kv_connector("MultiConnector")
    transfer.kv_connector_extra_config["connectors"] = [part]
    return transfer


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        REFUSED[0],
        ("a KV connector that manages blocks itself", {}),
        (
            "a KV connector that manages blocks itself",
            {"kv_transfer_config": multi_connector_with({"password": SECRET})},
        ),
        ("this scheduling policy", {"scheduler_config.policy": SECRET}),
        ("this prefix caching hash", {"cache_config.prefix_caching_hash_algo": SECRET}),
        ("this kind of model", {"model_config.runner_type": SECRET}),
    ],
    ids=lambda it: it if isinstance(it, str) else ",".join(it),
)
def test_no_reason_tells_a_value(
    supported_config: object,
    feature: str,
    changes: dict[str, object],
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reasons are logged, and are labels of metrics."""
    monkeypatch.setattr("vllm.version.__version__", "0.32.0")
    monkeypatch.delenv("SPARKSCHED_STRICT", raising=False)
    config = with_secrets(supported_config)
    if changes:
        config = without_connector(config)
    problem = compat.unsupported_config(all_changed(config, changes))
    assert problem is not None
    assert problem.feature == feature
    compat.refuse(problem)
    (line,) = logged
    assert problem.reason in line
    assert SECRET not in line


def test_a_section_of_another_class_is_refused(supported_config: Any) -> None:
    """Its settings are in no fingerprint."""
    own = copy.copy(supported_config.scheduler_config)
    own.__class__ = dataclasses.make_dataclass(
        "OwnConfig", [("new_knob", int, 0)], bases=(type(own),)
    )
    config = changed(supported_config, "scheduler_config", own)
    assert compat.unsupported_config(config) == Unsupported(
        "OwnConfig as scheduler_config", "sparksched knows the settings of vLLM's class only"
    )


def test_each_section_is_known_or_concerns_no_decision() -> None:
    from vllm.config import VllmConfig

    types = get_type_hints(VllmConfig)
    sections = {
        field.name: cls.__name__
        for field in dataclasses.fields(VllmConfig)
        for cls in (types[field.name], *get_args(types[field.name]))
        if isinstance(cls, type) and dataclasses.is_dataclass(cls)
    }
    assert seams.SECTIONS.items() <= sections.items()
    # And diffusion, which a rule refuses.
    assert sections.keys() - seams.SECTIONS.keys() <= {
        *("device_config", "load_config", "kernel_config", "compilation_config", "profiler_config"),
        *("logging_config", "weight_transfer_config", "watchdog_config", "diffusion_config"),
    }


# ----------------------------------------------------------------------------------------
# The KV cache
# ----------------------------------------------------------------------------------------


def spec(name: str, **fields: object) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface

    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    return getattr(kv_cache_interface, name)(**{**common, **fields})


def full_attention(**fields: object) -> Any:
    return spec("FullAttentionSpec", **fields)


def sliding_window(**fields: object) -> Any:
    return spec("SlidingWindowSpec", **{"sliding_window": 32, **fields})


def latent_attention(**fields: object) -> Any:
    return spec("MLAAttentionSpec", num_kv_heads=1, **fields)


def latent_sliding_window(**fields: object) -> Any:
    return spec("SlidingWindowMLASpec", **{"num_kv_heads": 1, "sliding_window": 32, **fields})


def chunked_attention(**fields: object) -> Any:
    return spec("ChunkedLocalAttentionSpec", **{"attention_chunk_size": 32, **fields})


def mamba(**fields: object) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    settings = {"block_size": BLOCK_SIZE, "mamba_cache_mode": "align", **fields}
    return MambaSpec(shapes=((4,),), dtypes=(torch.float32,), **settings)


def half_precision() -> Any:
    import torch

    return full_attention(dtype=torch.float16)


def circular_buffer(**fields: object) -> Any:
    return spec("CircularBufferSpec", **{"block_size": 8, "head_size_v": 0, **fields})


def group(kv_cache_spec: object, **fields: object) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return KVCacheGroupSpec(["layer"], kv_cache_spec, **fields)


def kv_cache(*groups: object, **fields: object) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=list(groups), **fields)


def subclass_of(kv_cache_spec: Any, **attributes: object) -> Any:
    """Give a spec a class that vLLM's own passes for, with some properties overridden."""
    cls = type(kv_cache_spec)
    subclass = type(cls.__name__, (cls,), attributes)
    fields = {field.name: getattr(kv_cache_spec, field.name) for field in dataclasses.fields(cls)}
    return subclass(**fields)


def unsupported_kv_cache(
    config: object,
    vllm_config: object,
    block_size: int = BLOCK_SIZE,
    hash_block_size: int | None = BLOCK_SIZE,
) -> Unsupported | None:
    return compat.unsupported_kv_cache(config, block_size, hash_block_size, vllm_config)


REFUSED_KV_CACHES: list[tuple[str, Callable[[], Any]]] = [
    ("prefix caching without a KV cache", kv_cache),
    ("prefix caching without a KV cache", lambda: kv_cache(group(circular_buffer()))),
    (
        "EAGLE with chunked local attention",
        lambda: kv_cache(group(full_attention(), is_eagle_group=True), group(chunked_attention())),
    ),
    (
        "a KV cache of type EncoderOnlyAttentionSpec",
        lambda: kv_cache(group(spec("EncoderOnlyAttentionSpec"))),
    ),
    (
        "a KV cache of type CrossAttentionSpec",
        lambda: kv_cache(group(full_attention()), group(spec("CrossAttentionSpec"))),
    ),
    (
        "a KV cache of type SinkFullAttentionSpec",
        lambda: kv_cache(group(spec("SinkFullAttentionSpec", sink_len=BLOCK_SIZE))),
    ),
    (
        "prefix replay",  # outside the prefix cache as well
        lambda: kv_cache(
            group(latent_attention()),
            group(latent_sliding_window(bounded_replay=True)),
            group(circular_buffer()),
        ),
    ),
    (
        "a KV cache of type FullAttentionSpec",  # a subclass that only borrows the name
        lambda: kv_cache(group(subclass_of(full_attention()))),
    ),
    (
        "this sliding window or chunk",
        lambda: kv_cache(group(sliding_window(sliding_window=0))),
    ),
    (
        "this prefix cache retention interval",  # vLLM refuses to start
        lambda: kv_cache(group(full_attention()), prefix_cache_retention_interval=64),
    ),
    (
        "this prefix cache retention interval",
        lambda: kv_cache(group(mamba()), prefix_cache_retention_interval=17),
    ),
    (
        "these block sizes",
        lambda: kv_cache(group(full_attention()), group(sliding_window(block_size=32))),
    ),
    (
        "prefix caching in this Mamba cache mode",
        lambda: kv_cache(group(full_attention()), group(mamba(mamba_cache_mode="none"))),
    ),
]


@pytest.mark.parametrize(("feature", "config"), REFUSED_KV_CACHES)
def test_refused_kv_caches(
    supported_config: object, feature: str, config: Callable[[], Any]
) -> None:
    problem = unsupported_kv_cache(config(), supported_config)
    assert problem is not None
    assert problem.feature == feature
    assert problem.reason
    assert not problem.reason.endswith(".")


def test_chunks_are_refused_with_a_drafter_that_flags_no_group(supported_config: object) -> None:
    """Every group is the drafter's then, the chunked one too."""
    chunked = kv_cache(group(full_attention()), group(chunked_attention()))
    config = copy.copy(supported_config)
    drafter = SimpleNamespace(
        use_eagle_block_drop=lambda: True, disable_lookahead_block_hashes=True
    )
    object.__setattr__(config, "speculative_config", drafter)
    problem = unsupported_kv_cache(chunked, config)
    assert problem is not None
    assert problem.feature == "EAGLE with chunked local attention"
    assert unsupported_kv_cache(kv_cache(group(full_attention())), config) is None


REFUSED_PROPERTIES = [
    ("prefix_cacheable", False, "a KV cache group outside the prefix cache"),
    ("prefix_replay_tokens", 8, "prefix replay"),
]


@pytest.mark.parametrize(("name", "value", "feature"), REFUSED_PROPERTIES)
def test_refused_spec_properties(
    supported_config: object,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: object,
    feature: str,
) -> None:
    monkeypatch.setattr(f"vllm.v1.kv_cache_interface.FullAttentionSpec.{name}", value)
    problem = unsupported_kv_cache(kv_cache(group(full_attention())), supported_config)
    assert problem is not None
    assert problem.feature == feature


def test_custom_manager_is_refused(
    supported_config: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    class OtherManager(FullAttentionManager):
        pass

    monkeypatch.setattr(
        KVCacheSpecRegistry, "get_manager_class", lambda spec, role=None: OtherManager
    )
    problem = unsupported_kv_cache(kv_cache(group(full_attention())), supported_config)
    assert problem == Unsupported(
        "a custom KV cache manager",
        "OtherManager is registered for FullAttentionSpec in the place of vLLM's own",
    )


def one_group() -> Any:
    return kv_cache(group(full_attention()))


def hexagonal() -> Any:
    # A circular buffer need not be hashed, but a block of the scheduler holds whole ones.
    return kv_cache(group(full_attention()), group(circular_buffer(block_size=6)))


@pytest.mark.parametrize(
    ("make", "block_size", "hash_block_size", "feature"),
    [
        (one_group, 32, 16, "these block sizes"),
        (one_group, 16, 8, "these block sizes"),
        (one_group, 32, 32, "these block sizes"),
        (lambda: kv_cache(group(full_attention()), group(mamba(block_size=32))), 32, 8, None),
        (hexagonal, 48, 16, None),
        (hexagonal, 16, 16, "these block sizes"),
        (
            lambda: kv_cache(group(chunked_attention()), group(full_attention(block_size=8))),
            16,
            8,
            "chunked local attention beside blocks of another size",
        ),
    ],
)
def test_block_sizes(
    make: Callable[[], Any],
    block_size: int,
    hash_block_size: int,
    feature: str | None,
    supported_config: object,
) -> None:
    problem = unsupported_kv_cache(make(), supported_config, block_size, hash_block_size)
    assert (problem and problem.feature) == feature


@pytest.mark.parametrize("other", [half_precision, circular_buffer, mamba])
def test_groups_that_differ_are_refused_with_a_connector(
    supported_config: object, other: Callable[[], Any]
) -> None:
    config = changed(supported_config, "kv_transfer_config", object())
    problem = unsupported_kv_cache(kv_cache(group(full_attention()), group(other())), config)
    assert problem is not None
    assert problem.feature == "a KV connector for KV cache groups that differ"


@pytest.mark.parametrize(("size", "fits"), [(13_081, True), (13_082, False)])
def test_a_block_must_fit_in_one_pickle_frame(
    supported_config: object, size: int, fits: bool
) -> None:
    config = kv_cache(group(full_attention(block_size=size)))
    problem = unsupported_kv_cache(config, supported_config, size, size)
    assert (problem is None) == fits
    if problem is not None:
        assert problem.feature == f"a block size of {size}"
    uncached = changed(supported_config, "cache_config.enable_prefix_caching", False)
    assert unsupported_kv_cache(config, uncached, size, size) is None


# ----------------------------------------------------------------------------------------
# All checks, and what a failed one leads to
# ----------------------------------------------------------------------------------------


def test_first_unsupported_goes_from_the_version_to_the_kv_cache(
    supported_config: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_feature() -> str:
        problem = compat.first_unsupported(config, kv_cache(), BLOCK_SIZE, BLOCK_SIZE)
        assert problem is not None
        return problem.feature

    config = supported_config
    assert first_feature() == "prefix caching without a KV cache"
    config = changed(config, "parallel_config.enable_elastic_ep", True)
    assert first_feature() == "elastic expert parallelism"
    monkeypatch.delattr("vllm.v1.core.sched.output.GrammarOutput")
    assert first_feature() == "this build of vLLM"
    monkeypatch.setattr("vllm.version.__version__", "0.34.0")
    assert first_feature() == "vLLM 0.34.0"


def test_importing_compat_imports_neither_vllm_nor_torch() -> None:
    package_root = Path(compat.__file__).parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(package_root)!r}); import sparksched.compat; "
        "assert not {'vllm', 'torch', 'msgspec'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
