"""Engines that vLLM starts as for several API servers, with their coordinator."""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.utils import CoreEngineLaunch, EngineZmqAddresses, launch_core_engines

from .clients import Addresses, engines_of_clients
from .engines import PacedExecutor, wait_until


@dataclass(frozen=True)
class Launch:
    """What one `vllm serve` has started beside its API servers."""

    core: CoreEngineLaunch
    directory: Path
    log_path: Path
    processes: list[Any]
    """The engines."""

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for_line(self, text: str) -> None:
        wait_until(lambda: text in self.log, what=f"for {text!r} in {self.log_path}")

    def addresses(self, index: int) -> Addresses:
        """Return what vLLM calls `client_addresses`."""
        addresses = {
            "input_address": self.core.addresses.inputs[index],
            "output_address": self.core.addresses.outputs[index],
        }
        if self.core.coordinator is not None:
            stats_address = self.core.coordinator.get_stats_publish_address()
            addresses["stats_update_address"] = stats_address
        return addresses

    def stop(self) -> None:
        """End engines and coordinator as vLLM does: it asks them, and kills who doesn't listen."""
        self.core.engine_manager.shutdown()
        if self.core.coordinator is not None:
            self.core.coordinator.shutdown()


@contextmanager
def launched(
    configs: Sequence[VllmConfig],
    prepare: Callable[[], None] | None = None,
    *,
    num_clients: int = 1,
    **variables: str,
) -> Iterator[list[Launch]]:
    """Start what so many servers start, which wait for each other as far as vLLM's do."""
    with (
        tempfile.TemporaryDirectory(prefix="rings-") as name,
        engines_of_clients(Path(name) / "log", prepare, **variables) as processes,
        ThreadPoolExecutor(len(configs)) as threads,
    ):
        directory = Path(name)
        starts = [threads.submit(_launch, it, directory, num_clients) for it in configs]
        try:
            yield [start.result() for start in starts]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            print((directory / "log").read_text(errors="replace"))


def _launch(config: VllmConfig, directory: Path, num_clients: int) -> Launch:
    rank = config.parallel_config.data_parallel_rank
    inputs, outputs = (
        [f"ipc://{directory}/{kind}-{rank}-{index}" for index in range(num_clients)]
        for kind in ("input", "output")
    )
    addresses = EngineZmqAddresses(inputs=inputs, outputs=outputs)
    with launch_core_engines(copy.deepcopy(config), PacedExecutor, True, addresses) as core:
        # They are ready at the end of this block.
        pass
    return Launch(core, directory, directory / "log", core.engine_manager.processes)
