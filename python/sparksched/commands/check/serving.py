"""What a server with these arguments would be like: read from vLLM's own configuration of it."""

import argparse
import contextlib
import io
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pydantic
import vllm.envs

from sparksched import compat, environment, plugin
from sparksched.commands.check.finding import ArgumentError, Finding, ok, problem, warning
from sparksched.commands.check.quotes import without_quotes
from sparksched.compat.configuration import unverifiable
from sparksched.compat.pacing import unpaceable
from sparksched.shared import queue_timeout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

USE_RUST: Final = "VLLM_USE_RUST_FRONTEND"


def findings(arguments: Sequence[str]) -> Iterator[Finding]:
    """Build the configuration as `vllm serve` would, and look at it. Nothing is loaded.

    Raises:
        ArgumentError: if vLLM's parser refuses the arguments.

    """
    try:
        parsed, asked = _engine_arguments(arguments)
        config = asked.create_engine_config()
    except ArgumentError:
        raise
    except Exception as error:
        text = without_quotes(_first_line(error))
        yield problem("arguments", text, "vLLM wouldn't start with them either")
        return
    yield _scheduler(config)
    if environment.verification() is not None:
        yield _verification(config)
    yield _front_end(parsed)
    yield _transport(config)
    yield _asynchronous(config, asked.async_scheduling)
    yield _pacing(config)
    yield _order()
    yield _queue()
    yield _graphs(config)


def _engine_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, "AsyncEngineArgs"]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed: argparse.Namespace = parser.parse_args([serve.name, *arguments])
    except SystemExit:  # the parser has said why
        raise ArgumentError from None
    finally:
        sys.stderr.write(without_quotes(said.getvalue()))
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    return parsed, AsyncEngineArgs.from_cli_args(parsed)


def _first_line(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _scheduler(config: "VllmConfig") -> Finding:
    topic = "scheduler"
    chosen = config.scheduler_config.scheduler_cls
    if not plugin.chooses_spark_scheduler(chosen) and config.diffusion_config is None:
        return problem(topic, f"--scheduler-cls asks for {chosen}", "leave --scheduler-cls away")
    unsupported = compat.unsupported_before_loading(config)
    if unsupported is None:
        return ok(
            topic,
            "sparksched, in Rust, unless the model's KV cache says otherwise when it is loaded",
        )
    stock = compat.stock_scheduler_cls(config).__name__
    would = "vLLM wouldn't start" if environment.is_strict() else f"vLLM's own {stock}"
    return problem(topic, f"{would}: {unsupported.feature} is not supported", unsupported.reason)


def _verification(config: "VllmConfig") -> Finding:
    topic = "verification"
    without = f"unset {environment.VERIFY}"
    problem_of_it = unverifiable(config)
    if problem_of_it is None:
        stock = compat.stock_scheduler_cls(config).__name__
        return warning(topic, f"vLLM's {stock} checks each step, which costs time", without)
    text = f"{problem_of_it.feature}: {problem_of_it.reason}"
    if environment.is_strict():
        return problem(topic, f"vLLM wouldn't start: {text}", without)
    return warning(topic, f"sparksched would run without it: {text}", without)


def _front_end(parsed: argparse.Namespace) -> Finding:
    topic = "front end"
    refused = "it refuses n above 1, use_beam_search and suffix, and some arguments"
    if not vllm.envs.VLLM_USE_RUST_FRONTEND:
        faster = f"for hundreds of streams its Rust one is faster: {USE_RUST}=1, but {refused}"
        return ok(topic, f"vLLM's, in Python; {faster}")
    if (parsed.api_server_count or 1) > 1:
        text = "vLLM's, in Rust, one for all engines: it ignores --api-server-count"
        return warning(topic, text, "leave it away")
    return ok(topic, f"vLLM's, in Rust; {refused}")


def _transport(config: "VllmConfig") -> Finding:
    topic = "transport"
    from sparksched.shared.offer import RUST_FRONT_END, why_no_rings

    reason = why_no_rings(config.parallel_config) or _why_no_memory()
    if reason is None:
        size = environment.ring_bytes() >> 20
        return ok(topic, f"shared memory, 2 rings of {size} MiB for each API server and engine")
    if reason == RUST_FRONT_END:
        return ok(topic, f"ZMQ: {reason}; outputs go into its sockets straight from the engine")
    if environment.transport() == "shm":
        return problem(
            topic,
            f"vLLM wouldn't start: {reason}",
            f"{environment.TRANSPORT}=shm insists on shared memory; auto would use ZMQ",
        )
    if environment.transport() in ("zmq", "libzmq"):
        return warning(topic, f"ZMQ: {reason}", "unset it for shared memory")
    return warning(topic, f"ZMQ: {reason}", "messages cost more; all else stays as it is")


def _why_no_memory() -> str | None:
    """Make rings as an engine would, and drop them."""
    from sparksched.shared.offer import make_rings

    try:
        make_rings(f"sparksched-check-{uuid.uuid4()}", num_clients=1).close()
    except ConnectionError as error:
        return str(error)
    return None


def _asynchronous(config: "VllmConfig", asked: bool | None) -> Finding:
    """Look at the mode; `asked` is what the arguments say of it, if anything."""
    topic = "scheduling"
    if config.scheduler_config.async_scheduling:
        return ok(topic, "asynchronous: a step is prepared while the GPU works on the one before")
    if _is_on_a_processor():
        return ok(topic, "synchronous: on a processor vLLM has nothing else")
    if asked is None and config.model_config.runner_type == "pooling":
        return ok(topic, "synchronous: so vLLM serves pooling models")
    return warning(
        topic,
        "synchronous: the GPU waits while a step is prepared",
        "vLLM chose that for these arguments; its log says why when it serves"
        if asked is None
        else "drop --no-async-scheduling, unless something needs it",
    )


def _is_on_a_processor() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


_LONG_PROMPT_TOKENS = 32_768
"""A longer prompt keeps others waiting for seconds."""


def _pacing(config: "VllmConfig") -> Finding:
    topic = "long prompts"
    settings = environment.pacing()
    in_the_way = compat.unsupported_before_loading(config) or unpaceable(config)
    way = "" if in_the_way is None else f"{in_the_way.feature}: {in_the_way.reason}"
    if settings is not None:
        if in_the_way is not None:
            without = f"unset {environment.MAX_STALL_MS} and {environment.MAX_SLOWDOWN}"
            return warning(topic, f"not paced: {way}", without)
        return ok(
            topic,
            f"paced: while others generate, no step with prompts takes longer than"
            f" {settings.max_stall_s * 1e3:g} ms, unless a prompt's first token would come more"
            f" than {settings.max_slowdown:g} times as late as without pacing",
        )
    length = config.model_config.max_model_len
    threshold = config.scheduler_config.long_prefill_token_threshold
    if length <= _LONG_PROMPT_TOKENS or in_the_way is not None:
        return ok(topic, f"not paced{way and f': {way}'}; {length:,} tokens at most")
    if 0 < threshold < config.scheduler_config.max_num_batched_tokens:
        return ok(topic, f"not paced; {threshold:,} tokens of each a step")
    return warning(
        topic,
        f"up to {length:,} tokens, and while one is computed all others nearly stand still",
        f"set {environment.MAX_STALL_MS}=200: docs/paced-prefill.md says what it costs",
    )


def _order() -> Finding:
    order = environment.order()
    if order is None:
        return ok("order", "as --scheduling-policy says")
    how = {
        "fair": "fair between tenants"
        + "".join(f", {name} weighs {weight:g}" for name, weight in order.weights.items()),
        "deadline": f"by deadline, {order.seconds:g} s to the first token unless it says ttft_s",
        "aging": f"by priority; a priority of 1 counts as {order.seconds:g} s of waiting",
    }
    return ok("order", how[order.kind])


def _queue() -> Finding:
    seconds = environment.queue_timeout_s()
    if seconds is None:
        return ok("queue", "a request waits as long as it takes, unless it says queue_timeout_s")
    text = f"a request that is not scheduled within {seconds:g} s ends with HTTP"
    is_ours = environment.replaces_front_end() and not vllm.envs.VLLM_USE_RUST_FRONTEND
    if is_ours or queue_timeout.outputs_say_why():
        return ok("queue", f"{text} 503")
    return warning(
        "queue",
        f"{text} 500: before 0.33.0, vLLM's own front ends tell no reason",
        f"unset {USE_RUST} and {environment.FRONT_END}, and clients get 503 and are told "
        "when to try again",
    )


def _graphs(config: "VllmConfig") -> Finding:
    topic = "CUDA graphs"
    if _is_on_a_processor():
        return ok(topic, "none on a processor")
    mode = config.compilation_config.cudagraph_mode
    if config.model_config.enforce_eager or mode is None or mode.name == "NONE":
        return warning(
            topic,
            "off: each step launches its kernels one by one",
            "leave --enforce-eager away; the host is the limit without graphs",
        )
    largest = max(config.compilation_config.cudagraph_capture_sizes or (), default=0)
    num_tokens = config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens)
    if largest < num_tokens:
        return warning(
            topic,
            f"{mode.name}, up to {largest:,} tokens, and {num_tokens:,} may decode at once",
            "raise --max-cudagraph-capture-size, or lower --max-num-seqs",
        )
    return ok(topic, mode.name)
