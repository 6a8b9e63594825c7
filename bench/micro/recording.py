"""What does it cost to record a scheduler? Steps with and without a recorder, in one process.

Each step is followed by a pause in the place of the GPU's work: then the recorder's thread writes.
`step_p99_us` is the 99th percentile of `schedule()` and `update_from_output()` together,
`processor_us` the time of all threads a step, that of the benchmark's own model among it.

    python -m bench.micro.recording [--requests 64,256] [--steps 2000] [--out DIR]
"""

import argparse
import tempfile
import time
from operator import add
from pathlib import Path

from sparksched.record.recorder import Recorder

from bench.micro.loads import PLAIN
from bench.micro.steps import SIDES, Engine, Metrics, spread
from bench.results import Results
from testkit.worlds.world import vllm_environment

GPU_S = 0.005
STEPS_A_TURN = 50
KINDS = {"off": False, "without tokens": True}


class Subject:
    """A scheduler of generating requests, recorded in one of the ways."""

    def __init__(self, side: str, num_requests: int, path: Path, is_recorded: bool) -> None:
        self.engine = engine = Engine(side)
        self._path, self._recorder, self._processor_s = path, None, 0.0
        if is_recorded:
            self._recorder = Recorder(engine.scheduler, path)
        engine.start_decoding(num_requests)
        self.run()  # warms up
        engine.forget_times()
        self._processor_s = 0.0
        self._num_bytes_before = self._num_bytes()

    def run(self) -> None:
        """Go on for some steps."""
        start = time.process_time()
        for _ in range(STEPS_A_TURN):
            self.engine.step()
            time.sleep(GPU_S)
        self._processor_s += time.process_time() - start

    def result(self) -> Metrics:
        """End the recording, and say what a step has cost."""
        if self._recorder is not None:
            self._recorder.close()
        schedule, update = self.engine.schedule_times, self.engine.update_times
        steps = sorted(map(add, schedule, update))
        return {
            **spread("schedule", schedule),
            **spread("update", update),
            "step_p99_us": steps[int(0.99 * len(steps))] / 1000,
            "processor_us": self._processor_s * 1e6 / len(steps),
            "bytes_a_step": (self._num_bytes() - self._num_bytes_before) / len(steps),
        }

    def _num_bytes(self) -> int:
        return 0 if self._recorder is None else self._path.stat().st_size


def measure(side: str, num_requests: int, num_steps: int) -> dict[str, Metrics]:
    """Time the steps of so many generating requests, by kind: in turns, on the same machine."""
    with tempfile.TemporaryDirectory() as folder:
        subjects = {
            kind: Subject(side, num_requests, Path(folder) / kind, is_recorded)
            for kind, is_recorded in KINDS.items()
        }
        for _ in range(max(num_steps // STEPS_A_TURN, 1)):
            for subject in subjects.values():
                subject.run()
        return {kind: subject.result() for kind, subject in subjects.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", default="64,256", help="running requests")
    parser.add_argument("--steps", type=int, default=2000, help="of each kind")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where recording.csv is to be")
    arguments = parser.parse_args()
    results = Results(arguments.out, "recording")
    with vllm_environment(PLAIN.configuration):
        for side in SIDES:
            for num_requests in map(int, arguments.requests.split(",")):
                for kind, result in measure(side, num_requests, arguments.steps).items():
                    results.add(f"{num_requests}, {kind}", side, None, result)
    results.show()


if __name__ == "__main__":
    main()
