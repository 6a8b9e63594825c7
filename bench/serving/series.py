"""Measures what docs/results.md tells of real servers: `bench.serving.decode`, time and again.

    python -m bench.serving.series [NAME...] [--out DIR] [--minutes M] [--list]

A NAME is one of those that `--list` prints, or a pattern such as `'*_sync'`; without any, all that
need one GPU are measured. Each has a file of its own in DIR, which a later run goes on with, as
long as it is of the same commit. With `--minutes` nothing is begun that would end later, so that a
machine can be given back in time; put first what matters most.

Where there are several GPUs, several series may run side by side, each with one GPU and processors
of its own: `CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 python -m bench.serving.series ...`.

Then put the new files into bench/results in the place of older ones that have the same, those of
`*_orders` into its folder `again`, and run `make tables`.
"""

import argparse
import fnmatch
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from bench.header import ask_driver, describe_run, gpu_model

_FOUR = "--driver http --front-end python,rust --rounds 2 --compare-streams"
_ON_TWO = "--driver http --cores 2 --rounds 2"
_SYNC = "--mode sync --driver asyncllm --compare-streams"
ONE_GPU = {
    "gpt_oss_120b_http": f"--model gpt-oss-120b --concurrency 1,8,64,256 {_FOUR}",
    "gpt_oss_120b": "--model gpt-oss-120b --driver asyncllm --concurrency 1,8,64,256",
    "gpt_oss_120b_sync": f"--model gpt-oss-120b --concurrency 1,8,64,256 {_SYNC}",
    "gpt_oss_120b_cores": f"--model gpt-oss-120b --concurrency 64,256 {_FOUR} --cores 2",
    "gpt_oss_120b_sync_cores": f"--model gpt-oss-120b --mode sync --concurrency 1,64,256 {_ON_TWO}",
    "gpt_oss_20b_http": f"--model gpt-oss-20b --concurrency 1,64,256 --tokens 512 {_FOUR}",
    "gpt_oss_20b": "--model gpt-oss-20b --driver asyncllm --concurrency 1,64,256",
    "gpt_oss_20b_sync": f"--model gpt-oss-20b --concurrency 1,64,256 {_SYNC}",
    "gpt_oss_20b_cores": f"--model gpt-oss-20b --concurrency 1,64,256 {_ON_TWO}",
    "gpt_oss_20b_sync_cores": f"--model gpt-oss-20b --mode sync --concurrency 1,64,256 {_ON_TWO}",
    # It takes so long to begin with 1,024 streams that the first one must last longer.
    "qwen2_1_5b_http": f"--model Qwen2-1.5B --concurrency 1,64,256,1024 --tokens 768 {_FOUR}",
    "qwen2_1_5b": "--model Qwen2-1.5B --driver asyncllm --concurrency 1,64,256,1024",
    "qwen2_1_5b_sync": f"--model Qwen2-1.5B --concurrency 1,64,256,1024 {_SYNC}",
    "qwen2_1_5b_cores": f"--model Qwen2-1.5B --concurrency 64,256 --tokens 768 {_FOUR} --cores 2",
    "qwen2_1_5b_sync_cores": (
        f"--model Qwen2-1.5B --mode sync --concurrency 1,64,256,1024 --tokens 768 {_ON_TWO}"
    ),
    "gpt_oss_120b_orders": "--model gpt-oss-120b --concurrency 1 --visits 2 --rounds 5",
    "qwen2_1_5b_sync_orders": (
        f"--model Qwen2-1.5B --concurrency 1,64,256 --visits 2 --rounds 5 {_SYNC}"
    ),
}
"""Options by name. Servers take longer to start than to be measured: what can do so shares one.

Those of `*_orders` tell what comes of the order: each scheduler is served first once.
"""

_SPREAD = "--driver asyncllm --concurrency 1,64,256,1024 --rounds 2 --compare-streams"
TWO_GPUS = {
    f"{model.replace('-', '_')}_{layout}": f"--model {model} --layout {layout} {_SPREAD}"
    for model, layout in (
        ("gpt-oss-120b", "tp2"),
        ("gpt-oss-120b", "pp2"),
        ("gpt-oss-120b", "dp2"),
        ("gpt-oss-20b", "dp2"),
    )
}
ALL = ONE_GPU | TWO_GPUS

BENCHMARK = ("-m", "bench.serving.decode")
DONE, LEFT = 0, 3
"""What `bench.serving.decode` ends with; anything else is a failure."""


def main() -> int:
    """Measure; return the exit status: 1 if something failed, 3 if something is left to do."""
    options = _options()
    if options.list:
        for name, arguments in ALL.items():
            print(f"{name:24} {arguments}")
        return DONE
    if reason := _why_not(options.names, options.out):
        sys.exit(f"error: {reason}")
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        signal.signal(signal.SIGHUP, _leave)
    statuses = measure(options.names, options.out, 60 * options.minutes)
    for name, status in statuses.items():
        word = {DONE: "done", LEFT: "to be gone on with"}.get(status, f"failed ({status})")
        print(f"{name:24} {word}", file=sys.stderr)
    found = set(statuses.values())
    return DONE if found <= {DONE} else LEFT if found <= {DONE, LEFT} else 1


def _why_not(names: Sequence[str], out: Path) -> str | None:
    """Return why nothing can be measured, before the first server has been waited for."""
    if gpu_model() is None:
        return "there is no GPU; without one, `make bench` says what there is to say"
    if _num_gpus() == 1 and (spread := TWO_GPUS.keys() & names):
        return f"there is one GPU, and two are needed for {', '.join(sorted(spread))}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{out} can't be made: {error.strerror}"
    if not os.access(out, os.W_OK):
        return f"nothing may be written to {out}"
    return next(filter(None, (_why_not_go_on(_path(out, name)) for name in names)), None)


def _num_gpus() -> int | None:
    listed = ask_driver("index", "csv,noheader")
    return None if listed is None else len(listed.split())


def _why_not_go_on(path: Path) -> str | None:
    """Return why a file can't be gone on with; its cells don't say which commit they are of."""
    if not path.exists():
        return None
    try:
        commits = {run["commit"] for run in json.loads(path.read_text())["runs"]}
    except (OSError, ValueError, LookupError, TypeError):
        return f"{path} is no result of `bench.serving.decode`"
    commits.discard(commit := describe_run()["commit"])
    return f"{path} is of {', '.join(commits)}, and this is {commit}" if commits else None


def _path(out: Path, name: str) -> Path:
    return out / f"decode_{name}.json"


def measure(names: Sequence[str], out: Path, seconds: float) -> dict[str, int]:
    """Measure one after the other for so long; return the exit status of each.

    What fails holds up nothing, and a signal leaves what comes after it.
    """
    deadline = time.monotonic() + seconds
    statuses = dict.fromkeys(names, LEFT)
    try:
        for name in names:
            remaining_s = deadline - time.monotonic()
            if remaining_s > 0:
                statuses[name] = _run(name, _path(out, name), remaining_s)
    except KeyboardInterrupt:
        print("interrupted: run it again to go on", file=sys.stderr)
    return statuses


def _run(name: str, path: Path, remaining_s: float) -> int:
    """Return the exit status; SIGINT, SIGTERM and SIGHUP end the benchmark, too, and its server."""
    limits = ("--json", str(path), "--minutes", f"{remaining_s / 60:.2f}")
    arguments = [*BENCHMARK, *shlex.split(ALL[name]), *limits]
    print(f"{name}: {shlex.join(arguments)}", file=sys.stderr, flush=True)
    # In a group of its own: a Ctrl-C would reach it a second time while it cleans up.
    with subprocess.Popen([sys.executable, *arguments], process_group=0) as benchmark:
        try:
            return benchmark.wait()
        except KeyboardInterrupt:
            benchmark.terminate()
            benchmark.wait()
            raise


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of one GPU")
    parser.add_argument(
        "--out", type=Path, default=Path("measured"), metavar="DIR", help="default: measured/"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e6, metavar="M", help="begin nothing that ends later"
    )
    parser.add_argument("--list", action="store_true", help="print names and options")
    options = parser.parse_args()
    chosen = {}
    for pattern in options.names:
        found = fnmatch.filter(ALL, pattern)
        if not found:
            parser.error(f"{pattern} is none of {', '.join(ALL)}")
        chosen |= dict.fromkeys(found)
    options.names = list(chosen or ONE_GPU)
    return options


if __name__ == "__main__":
    sys.exit(main())
