"""What a measured step is made of: the engine, and what its requests have besides tokens."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from testkit.worlds.candidates import BlockHasher
from testkit.worlds.configuration import FULL_ATTENTION, Configuration
from testkit.worlds.feature import FeatureSettings
from testkit.worlds.lora import LoRASettings
from testkit.worlds.speculation import SpeculationSettings
from testkit.worlds.states import LAYOUTS, StateSettings

BLOCK_SIZE = 16

GPT_OSS = Configuration(
    name="gpt-oss",
    async_scheduling=True,
    policy="fcfs",
    sliding_windows=(128, FULL_ATTENTION),
    latent_groups=(False, False),
    block_size=BLOCK_SIZE,
    num_blocks=400_000,
    max_model_len=131_072,
    max_num_seqs=1024,
    max_num_batched_tokens=16_384,
    max_num_scheduled_tokens=None,
    max_num_active_seqs=None,
    enable_chunked_prefill=True,
    long_prefill_token_threshold=0,
    long_prefill_token_threshold_adaptive=False,
    watermark=0.0,
    scheduler_reserve_full_isl=True,
    enable_prefix_caching=True,
    prefix_caching_hash_algo="sha256",
    prefix_cache_retention_interval=0,
    use_v2_model_runner=True,
    log_stats=True,
    include_finished_set=False,
    batch_queue_size=2,
    throttles_prefills=False,
    native_block_hasher=True,
    prefill_schedule_interval=1,
)

FOUR_DRAFTS = SpeculationSettings(
    method="eagle3",
    num_tokens=4,
    num_mtp_modules=1,
    parallel_drafting=False,
    disable_eagle_block_drop=False,
    disable_lookahead_block_hashes=False,
    tokens_per_batch_size=None,
    flags_last_group=True,
    request_metrics="none",
    shortens_drafts=False,
    structured_share=0.0,
)
NUM_ADAPTERS = 4
# As vLLM makes Qwen3-Next's groups on a GPU: a state takes as much memory as attention does for so
# many tokens.
QWEN3_NEXT = StateSettings(
    layout=LAYOUTS["qwen3-next"],
    mode="align",
    block_size=544,
    small_block_size=BLOCK_SIZE,
    match_unit=None,
    window=0,
    num_speculative_blocks=0,
    keeps_junctions=False,
    mixes_precisions=False,
)


class GrammarsOfNoCost:
    """Plays vLLM's structured output manager: what grammars cost is the same for both sides."""

    _NO_ROWS = np.zeros((0, 1), dtype=np.int32)

    def accept_tokens(self, _request: Request, _token_ids: list[int]) -> bool:
        """Let any tokens pass."""
        return True

    def grammar_bitmask(self, *_arguments: Any) -> np.ndarray:
        """Return a mask that nobody looks at."""
        return self._NO_ROWS


@dataclass(frozen=True)
class Load:
    """What all requests of an engine have in common."""

    name: str
    feature: FeatureSettings | None = None
    num_adapters: int = 0
    has_grammars: bool = False
    block_size: int = BLOCK_SIZE
    policy: str = "fcfs"

    @property
    def configuration(self) -> Configuration:
        """The engine's."""
        features = () if self.feature is None else (self.feature,)
        return replace(GPT_OSS, block_size=self.block_size, features=features, policy=self.policy)

    def request(
        self, request_id: str, prompt: list[int], max_tokens: int, hasher: BlockHasher | None
    ) -> Request:
        """Build a request as the engine does, its prompt hashed."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        if self.has_grammars:
            params.structured_outputs = StructuredOutputsParams(regex=".*")
        adapter = None
        if self.num_adapters:
            number = 1 + prompt[0] % self.num_adapters
            adapter = LoRARequest(f"adapter-{number}", number, f"/adapters/{number}")
        request = Request(
            request_id, prompt, params, None, lora_request=adapter, block_hasher=hasher
        )
        if self.has_grammars:
            request.structured_output_request.grammar = object()
        return request


PLAIN = Load("nothing")
FEATURES = (
    Load("speculation, 4 drafts", FOUR_DRAFTS),
    Load("structured output", has_grammars=True),
    Load(f"LoRA, {NUM_ADAPTERS} adapters", LoRASettings(NUM_ADAPTERS, 0), NUM_ADAPTERS),
    Load("states of Qwen3-Next", QWEN3_NEXT, block_size=QWEN3_NEXT.block_size),
)
