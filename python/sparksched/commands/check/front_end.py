"""Which front end there would be, and what vLLM's Rust one lacks for these arguments.

vLLM's Rust front end says itself which arguments it doesn't know: it is asked, without anything to
serve.
"""

import argparse
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Final

import vllm
import vllm.envs

from sparksched.commands.check.finding import Finding, ok, problem, warning
from sparksched.commands.check.quotes import HIDDEN

USE_RUST: Final = "VLLM_USE_RUST_FRONTEND"
REFUSED_REQUESTS: Final = "it refuses n above 1, use_beam_search and suffix"
"""What `vllm-rs` of both releases says of requests."""

_ANSWER_S: Final = 20.0
_NO_DESCRIPTOR: Final = "999999"
_NO_MODEL: Final = os.devnull
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"|`[^`]*`')
"""A value in a message of `vllm-rs`."""
_REFUSED: Final = 2
"""The exit status with arguments that `vllm-rs` doesn't take."""


def finding(parsed: argparse.Namespace) -> Finding:
    """Look at the front end of a server with these arguments of `vllm serve`."""
    return _rust(parsed) if vllm.envs.VLLM_USE_RUST_FRONTEND else _python(parsed)


def _rust(parsed: argparse.Namespace) -> Finding:
    topic = "front end"
    refusal = why_not_rust(parsed)
    if refusal is not None:
        return problem(topic, f"vLLM wouldn't start: {refusal}", f"correct it or unset {USE_RUST}")
    if (parsed.api_server_count or 1) > 1:
        text = "vLLM's, in Rust, one for all engines: it ignores --api-server-count"
        return warning(topic, text, "leave it away")
    return ok(topic, f"vLLM's, in Rust; {REFUSED_REQUESTS}")


def _python(parsed: argparse.Namespace) -> Finding:
    refusal = why_not_rust(parsed)
    if refusal is not None:
        return ok("front end", f"vLLM's, in Python; its Rust one can't be had: {refusal}")
    return ok(
        "front end",
        f"vLLM's, in Python; for hundreds of streams its Rust one is faster: {USE_RUST}=1, "
        f"but {REFUSED_REQUESTS}",
    )


def why_not_rust(parsed: argparse.Namespace) -> str | None:
    """Return why vLLM's Rust front end can't be had with these arguments, or None.

    It reads its arguments first, then fails for want of a model and of descriptors.
    """
    descriptors = ("--listen-fd", "--input-listener-fd", "--output-listener-fd")
    command = [_binary(), "frontend"]
    for name in descriptors:
        command += [name, _NO_DESCRIPTOR]
    command += ["--args-json", json.dumps(_as_json(parsed))]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
        )
    except OSError as error:
        return f"vllm-rs can't be asked: {error.strerror}"
    except subprocess.TimeoutExpired:  # whose text has the arguments in it
        return f"vllm-rs can't be asked: no answer within {_ANSWER_S:g} s"
    return _refusal(done.stderr) if done.returncode == _REFUSED else None


def _binary() -> str:
    chosen = os.environ.get("VLLM_RUST_FRONTEND_PATH", "auto")
    if chosen.lower() not in ("auto", "1", "true"):
        return chosen
    return str(Path(vllm.__file__).with_name("vllm-rs"))


def _as_json(parsed: argparse.Namespace) -> dict[str, object]:
    """Return what vLLM's launcher would hand over, but for secrets, and what would be loaded."""
    try:
        from vllm.entrypoints.serve.utils.api_utils import jsonify_non_default_args
    except ImportError:  # its place since 0.33.0
        from vllm.entrypoints.common.startup import jsonify_non_default_args
    left_out = {"api_server_count", "data_parallel_rank", "tokenizer", "api_key", "hf_token"}
    left_out |= {"data_parallel_external_lb", "data_parallel_hybrid_lb"}
    arguments: dict[str, object] = jsonify_non_default_args(parsed, exclude=left_out)
    return arguments | {"model_tag": _NO_MODEL}


def _refusal(said: str) -> str:
    """Return what `vllm-rs` says of arguments that it doesn't take."""
    names = [line[2:].strip() for line in said.splitlines() if line.startswith("- ")]
    if names:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        return f"vllm-rs doesn't know {options}"
    # What is in front of it are the arguments.
    reason = said.split("'--args-json <JSON>': ", 1)[-1].strip().splitlines()
    text = _QUOTED.sub(HIDDEN, reason[0]) if reason else "it says nothing"
    return f"vllm-rs refuses the arguments: {text}"
