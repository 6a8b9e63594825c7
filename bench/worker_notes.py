"""What workers of a server note for the benchmark, in files.

`note_compilations`: a line for each Triton kernel that is compiled. A step whose batch has a new
shape waits for seconds until its kernels are there: servers are warmed up until none is compiled.

`note_experts`: a line of JSON for each step of a mixture-of-experts model: its tokens, and how many
experts of a layer it reads, the mean over the layers. Only a server with `--enforce-eager` can be
looked into; its routers decide as those of any other server with the same weights.
"""

import functools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

WORKER = "vllm.v1.worker.worker_base"
LOADER = "vllm.model_executor.model_loader.base_loader"
ROUTER = re.compile(r"(^|\.)(router|gate)$")


def note_compilations(module: ModuleType, path: Path) -> None:
    """Have each worker begin to listen to Triton once there is one."""
    original = module.WorkerBase.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _listen(path)

    module.WorkerBase.__init__ = __init__  # type: ignore[attr-defined]


def _listen(path: Path) -> None:
    try:
        from triton import knobs
    except ImportError:
        return
    before = knobs.compilation.listener

    def note(*, cache_hit: bool, **about: Any) -> None:
        if not cache_hit:  # one that is on the disk is there within milliseconds
            with path.open("a") as file:
                file.write(f"{getattr(about['src'], 'name', '')}\n")
        if before is not None:
            before(cache_hit=cache_hit, **about)

    knobs.compilation.listener = note


def note_experts(module: ModuleType, path: Path) -> None:
    """Have each model's routers be looked at once it is loaded."""
    original = module.BaseModelLoader.load_model

    @functools.wraps(original)
    def load_model(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(self, vllm_config, *args, **kwargs)
        config = vllm_config.model_config.hf_config
        chosen = getattr(config, "num_experts_per_tok", None)
        if chosen:
            Experts(model, int(chosen), path)
        return model

    module.BaseModelLoader.load_model = load_model  # type: ignore[attr-defined]


class Experts:
    """Counts the experts that a step reads, by what its routers return."""

    def __init__(self, model: Any, chosen: int, path: Path) -> None:
        """Look at a model's routers, each of which has so many experts chosen for a token."""
        self._chosen = chosen
        self._path = path
        self._counts: list[Any] = []
        routers = [it for name, it in model.named_modules() if ROUTER.search(name)]
        self._num_layers = len(routers)
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, router: Any, inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        self._counts.append(logits.topk(self._chosen, dim=-1).indices.unique().numel())
        if len(self._counts) == self._num_layers:
            line = {"tokens": logits.shape[0], "experts": sum(self._counts) / self._num_layers}
            self._counts.clear()
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
