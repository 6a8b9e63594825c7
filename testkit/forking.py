"""vLLM's command line, with engines and workers that are forked instead of spawned.

    python testkit/forking.py serve MODEL

They needn't import vLLM again, which takes each of them 10 seconds and more. On a CPU vLLM spawns
them, whatever the user chose.
"""

import os

from vllm.config import VllmConfig
from vllm.entrypoints.cli.main import main
from vllm.platforms.cpu import CpuPlatform

check_and_update_config = CpuPlatform.check_and_update_config


def _check_and_fork(config: VllmConfig) -> None:
    check_and_update_config(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


# Not only where this is the program: vLLM spawns API servers, which import it.
CpuPlatform.check_and_update_config = staticmethod(_check_and_fork)  # type: ignore

if __name__ == "__main__":
    main()
