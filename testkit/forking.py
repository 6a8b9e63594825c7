"""vLLM's command line, with engines and workers that take little of a processor.

    python testkit/forking.py serve MODEL

They are forked instead of spawned, and so needn't import vLLM again, which takes each of them
10 seconds and more. On a CPU vLLM spawns them, whatever the user chose. And they doze while they
wait for each other, where vLLM's spin: several servers share two processors.
"""

import os
import time

from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.entrypoints.cli.main import main
from vllm.platforms.cpu import CpuPlatform

NAP_S = 1e-4

check_and_update_config = CpuPlatform.check_and_update_config


def _check_and_fork(config: VllmConfig) -> None:
    check_and_update_config(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


# Not only where this is the program: vLLM spawns API servers, which import it.
CpuPlatform.check_and_update_config = staticmethod(_check_and_fork)  # type: ignore
shm_broadcast.sched_yield = lambda: time.sleep(NAP_S)

if __name__ == "__main__":
    main()
