"""Over how many GPUs a model is spread, and how: what `--layout` names."""

import math
import re
from dataclasses import dataclass

_PART = re.compile(r"(tp|pp|dp)([1-9]\d*)")
_ARGUMENTS = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
}


class LayoutError(ValueError):
    """There is no such layout."""


@dataclass(frozen=True)
class Layout:
    """Sizes by kind of parallelism: `tp`, `pp`, `dp`. None: one GPU."""

    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def named(cls, name: str) -> "Layout":
        """Return what `1` or names such as `tp2` and `tp2dp2` mean.

        Raises:
            LayoutError: if a name means nothing.

        """
        if name == "1":
            return cls()
        parts = _PART.findall(name)
        kinds = [kind for kind, _ in parts]
        if "".join(map("".join, parts)) != name or not parts or len(set(kinds)) < len(kinds):
            raise LayoutError(f"{name!r} is no layout: 1, or sizes such as tp2, pp2, dp2, tp2dp2")
        return cls(tuple((kind, int(size)) for kind, size in parts))

    @property
    def num_gpus(self) -> int:
        """How many GPUs it takes."""
        return math.prod(size for _, size in self.sizes)

    @property
    def num_stages(self) -> int:
        """How many pipeline stages there are."""
        return dict(self.sizes).get("pp", 1)

    @property
    def arguments(self) -> list[str]:
        """What `vllm serve` is to be given."""
        return [f"{_ARGUMENTS[kind]}={size}" for kind, size in self.sizes]

    def label(self, model: str) -> str:
        """Return what to call a model that is served like this."""
        return ", ".join([model, *(f"{kind.upper()} {size}" for kind, size in self.sizes)])
