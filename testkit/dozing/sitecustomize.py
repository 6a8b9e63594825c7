"""Has what vLLM spawns doze where it spins.

Python imports a module of this name when it starts, if its directory is on PYTHONPATH. vLLM's
processes yield the processor in a loop while they wait for each other. A dozen of them on two
processors can keep Linux 6.18 from running anything else, for minutes.
"""

import os
import time

NAP_S = 1e-4

os.sched_yield = lambda: time.sleep(NAP_S)
