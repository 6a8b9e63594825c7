"""Groups that differ: recurrent states or circular buffers beside attention, and block sizes.

A layout has the groups that vLLM makes of an architecture's layers: as many layers a group as the
rarer kind has. Sizes of blocks are smaller than in reality, so that short sequences have several.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from sparksched.compat import releases
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from .configuration import Configuration
from .feature import FeatureSettings
from .speculation import SpeculationSettings


@dataclass(frozen=True)
class Layout:
    """The groups of an architecture, in their order."""

    attention: tuple[str, ...]
    num_state_groups: int = 0
    checkpoint_alignment: int | None = None
    """Where a backend keeps a state from within a chunk, in multiples of tokens, if it does."""
    states_first: bool = False


LAYOUTS: Final = {
    # 36 layers of gated delta nets, 12 of attention; Qwen3.5 has the same share.
    "qwen3-next": Layout(("full",), num_state_groups=3),
    # 36 layers of Mamba 2, 4 of attention.
    "granite-4": Layout(("full",), num_state_groups=9, checkpoint_alignment=1),
    # 24 layers of Mamba 2, 4 of attention.
    "nemotron-h": Layout(("full",), num_state_groups=6, checkpoint_alignment=1, states_first=True),
    # 10 layers of short convolutions, 6 of attention.
    "lfm2": Layout(("full",), num_state_groups=2, states_first=True),
    # Each layer has both.
    "falcon-h1": Layout(("full",), num_state_groups=1, checkpoint_alignment=1),
    # 28 layers of Mamba 1, 4 of attention.
    "jamba": Layout(("full",), num_state_groups=7, states_first=True),
    # Kimi Linear: delta attention, which keeps states at the ends of its own chunks, and latent.
    "kimi-linear": Layout(("latent",), num_state_groups=3, checkpoint_alignment=8),
    "sliding-window-and-states": Layout(("full", "sliding"), num_state_groups=2),
    "mamba": Layout((), num_state_groups=1),
    # No states: attention whose layers need more or less memory a token.
    "two-sizes": Layout(("full", "sliding-small")),
    "two-full-sizes": Layout(("full", "full-small", "sliding-small")),
}

# The keys of tokens that wait to be compressed, in a circular buffer of each request's own.
CIRCULAR_LAYOUTS: Final = {
    "glm-5-next": Layout(("latent", "circular")),
    "deepseek-v4.1": Layout(("latent", "sliding", "circular", "circular")),
    # Delta nets besides, as many layers as in Qwen3-Next.
    "qwen4-exp": Layout(("circular", "full"), num_state_groups=3),
    "circular-and-sliding": Layout(("circular", "sliding")),
}

_ALL_LAYOUTS: Final = LAYOUTS | CIRCULAR_LAYOUTS


@dataclass(frozen=True)
class StateSettings(FeatureSettings):
    """The groups of a configuration, and how states are kept."""

    layout: Layout
    mode: str
    block_size: int
    """Of states and of the attention beside them."""
    small_block_size: int
    """Of attention whose layers need more memory a token."""
    match_unit: int | None
    """Tokens a hash, if that is set: then hits may end within a block."""
    window: int
    num_speculative_blocks: int
    keeps_junctions: bool
    mixes_precisions: bool
    """Whether groups without states must be zeroed, too."""
    ring_size: int = 8
    """Tokens that a circular buffer holds. vLLM's models take divisors of the block size."""

    @classmethod
    def draw(
        cls, rng: random.Random, configuration: Configuration, scenario: Mapping[str, Any]
    ) -> StateSettings:
        fixed = scenario["states"]

        def choose(setting: str, *values: Any) -> Any:
            # Drawn even when fixed, so that fixing one setting leaves the others as they were.
            drawn = rng.choice(values)
            return fixed.get(setting, drawn)

        layout = _ALL_LAYOUTS[choose("layout", *LAYOUTS)]
        is_cached = configuration.enable_prefix_caching
        mode = choose("mode", "align") if is_cached else "none"
        if mode == "all" and not releases.caches_states_of_all_modes():
            mode = "align"
        block_size = choose("block_size", 16, 16, 32)
        unit = choose("match_unit", None, 4, 8)
        if len(layout.attention) + layout.num_state_groups == 1 or mode == "all":
            unit = None
        return cls(
            layout=layout,
            mode=mode,
            block_size=block_size,
            small_block_size=choose("small_block_size", 4, 8),
            match_unit=unit if is_cached and layout.num_state_groups else None,
            window=choose("window", 5, 12, 32, 64),
            num_speculative_blocks=0,
            keeps_junctions=choose("keeps_junctions", False, True),
            mixes_precisions=choose("mixes_precisions", False, False, True),
            ring_size=choose("ring_size", 4, 8, 8, 12),
        )

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The kind and the block size of each group."""
        small = self.small_block_size
        sizes_of_kinds = {"sliding-small": small, "full-small": small, "circular": self.ring_size}
        sizes = [
            (kind.removesuffix("-small"), sizes_of_kinds.get(kind))
            for kind in self.layout.attention
        ]
        attention = [(kind, size or self._attention_block_size(kind)) for kind, size in sizes]
        states = [("state", self.block_size)] * self.layout.num_state_groups
        return states + attention if self.layout.states_first else attention + states

    def _attention_block_size(self, kind: str) -> int:
        if kind == "sliding" and self.match_unit is not None:
            return self.match_unit  # or no hit may end within a block
        is_free = self.layout.num_state_groups and self.mode == "none"
        return self.small_block_size if is_free else self.block_size

    def adjust(self, configuration: Configuration) -> Configuration:
        num_drafts = max(
            (it.num_tokens for it in configuration.features if isinstance(it, SpeculationSettings)),
            default=0,
        )
        settings = self
        if num_drafts:
            unit = self.match_unit
            if self.layout.checkpoint_alignment is not None and unit is not None:
                # vLLM would keep a state at a draft token, which has no hash: with units so short
                # that the drafts of a step fill one.
                unit = max(unit, 8)
            settings = dataclasses.replace(self, match_unit=unit, num_speculative_blocks=num_drafts)
        if self.mode == "none" and self.layout.num_state_groups:
            # One block holds the state of a whole sequence.
            settings = dataclasses.replace(settings, block_size=configuration.max_model_len)
        scheduler_block_size = math.lcm(*(size for _, size in settings.groups))
        interval = configuration.prefix_cache_retention_interval
        if interval:
            interval = 2 * scheduler_block_size if self._is_sparse else 0
        smallest_pool = settings._smallest_pool(configuration)
        scarce = configuration.num_blocks < 64
        features = tuple(settings if it is self else it for it in configuration.features)
        return dataclasses.replace(
            configuration,
            block_size=settings.block_size if self.mode != "none" else self.small_block_size,
            num_blocks=int(smallest_pool * (1.0 if scarce else 2.5)) + 1,
            prefix_cache_retention_interval=interval,
            features=features,
            sliding_windows=tuple(
                self.window if kind == "sliding" else None for kind, _ in settings.groups
            ),
            latent_groups=(False,) * len(settings.groups),
        )

    @property
    def _is_sparse(self) -> bool:
        return any(kind in ("state", "sliding") for kind, _ in self.groups)

    def _smallest_pool(self, configuration: Configuration) -> int:
        longest = configuration.max_model_len
        num_in_flight = 2 * configuration.max_num_batched_tokens
        num_blocks = 0
        for kind, size in self.groups:
            if kind == "state" and self.mode == "align":
                num_blocks += 4 + self.num_speculative_blocks
            elif kind == "circular":
                num_blocks += 1
            elif kind == "sliding":
                held = min(self.window - 1 + num_in_flight, longest)
                num_blocks += -(-held // size) + 2
            else:
                num_blocks += -(-longest // size) + 1 + self.num_speculative_blocks
        return num_blocks

    def configure(self, vllm_config: Any) -> None:
        cache_config = vllm_config.cache_config
        cache_config.mamba_cache_mode = self.mode
        cache_config.prefix_match_unit = self.match_unit
        cache_config.enable_mamba_shared_prefix_checkpoint = self.keeps_junctions
        if not self.layout.attention:
            cache_config.block_size = self.block_size

    def configure_groups(self, groups: list[KVCacheGroupSpec]) -> None:
        groups[:] = [
            KVCacheGroupSpec([f"layer.{index}"], self._spec(kind, size, index))
            for index, (kind, size) in enumerate(self.groups)
        ]

    def _spec(self, kind: str, block_size: int, index: int) -> Any:
        if kind == "state":
            alignment = self.layout.checkpoint_alignment if self.mode == "align" else None
            return MambaSpec(
                block_size=block_size,
                shapes=((4, 4),),
                dtypes=(torch.float32,),
                mamba_cache_mode=self.mode,
                num_speculative_blocks=self.num_speculative_blocks,
                num_prefill_checkpoint_blocks=int(alignment is not None),
                prefill_checkpoint_alignment=alignment,
            )
        dtype = torch.float16 if self.mixes_precisions and index else torch.float32
        shape: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": dtype,
        }
        if kind == "sliding":
            return SlidingWindowSpec(**shape, sliding_window=self.window)
        if kind == "circular":
            return CircularBufferSpec(**shape)
        return (MLAAttentionSpec if kind == "latent" else FullAttentionSpec)(**shape)
