"""vLLM's own client, `vllm bench serve`: its command, and the metrics that it finds.

There are two of them with the same options and the same result: one in Python, and `vllm-rs bench
serve`, which starts at once and takes less of a processor. The one in Rust is taken where it is.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.serving.client import RequestError
from bench.serving.servers import Server
from testkit import vllm_rs

LIMIT_S = 900.0
PERCENTILES = ("50", "90", "99")
FIGURES = ("ttft", "tpot", "itl")


def run(server: Server, options: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Have the client send requests to a server; return metrics of its result.

    Args:
        server: Its model and its address.
        options: More of `vllm bench serve`, by name.
        seed: Of its prompts.

    Raises:
        RequestError: if it fails, or one of its requests has.

    """
    model = server.model
    result = server.folder / "client.json"
    result.unlink(missing_ok=True)
    given = {
        "backend": "openai",
        "endpoint": "/v1/completions",
        "base-url": server.launched.base_url,
        "model": model.name,
        "tokenizer": str(model.directory.resolve()),
        "seed": str(seed),
        "temperature": "0",
        "percentile-metrics": ",".join(FIGURES),
        "metric-percentiles": ",".join(PERCENTILES),
        "result-dir": str(server.folder),
        "result-filename": result.name,
        **options,
    }
    command = [*client(), "bench", "serve"]
    command += [f"--{name}={value}" for name, value in given.items() if value is not True]
    command += [f"--{name}" for name, value in given.items() if value is True]
    command += ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    log = server.folder / "client.log"
    with log.open("wb") as file:
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
        ).returncode
    if status or not result.exists():
        words = log.read_text(errors="replace").splitlines()[-20:]
        raise RequestError("\n".join([f"{command[0]} ended with status {status}", *words]))
    return metrics(json.loads(result.read_text()))


def client() -> list[str]:
    """Return the command of the client: the one in Rust if it is there."""
    for path in (os.environ.get("VLLM_RUST_FRONTEND_PATH"), vllm_rs.binary(), _in_package()):
        if path and Path(path).exists():
            return [str(path)]
    program = shutil.which("vllm")
    return [program] if program else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _in_package() -> Path | None:
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0]) / "vllm-rs" if folders else None


def metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a result file.

    Raises:
        RequestError: if not all requests were answered.

    """
    completed, wanted = int(result["completed"]), int(result["num_prompts"])
    if completed != wanted:
        reason = next(filter(None, result.get("errors") or ()), "nothing says why")
        raise RequestError(f"{wanted - completed} of {wanted} requests failed: {reason}")
    tokens = int(result["total_output_tokens"])
    found = {
        "requests_per_s": float(result["request_throughput"]),
        "tokens_per_s": float(result["output_throughput"]),
        "tokens": float(tokens),
        "seconds": float(result["duration"]),
    }
    for figure in FIGURES:
        for percentile in PERCENTILES:
            value = result.get(f"p{percentile}_{figure}_ms")
            if value is not None:
                found[f"{figure}_ms_p{percentile}"] = float(value)
    gaps = [len(it) for it in result.get("itls") or ()]
    if gaps and sum(gaps):
        found["tokens_per_output"] = tokens / (sum(gaps) + len(gaps))
        found["itl_ms_max"] = 1e3 * max(max(it, default=0.0) for it in result["itls"])
    return found
