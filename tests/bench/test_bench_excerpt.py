"""What is kept of a server that doesn't start: the reason, from a log like vLLM's."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving import server as server_module
from bench.serving.benchmark import MAX_REASON, _reason
from bench.serving.excerpt import LAST_LINES, log_excerpt, shortened

TRACEBACK = "Traceback (most recent call last):"
AT = "11-22 21:40:52 [multiproc_executor.py:1063]"
LOADS = "(Worker_DP0 pid=8196) INFO 11-22 21:40:40 [default_loader.py:397] Loading weights took 9 s"
INNERMOST = """  File "/site/vllm/distributed/cuda_communicator.py", line 913, in all_gatherv
    assert pynccl_comm is not None and not pynccl_comm.disabled
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
WORKERS = {"Worker_DP0": 8196, "Worker_DP1": 8197}


def logged(process: str, level_and_place: str, text: str) -> list[str]:
    prefix = f"({process} pid={WORKERS.get(process, 8000)}) {level_and_place}"
    return [f"{prefix} {line}" for line in text.splitlines()]


def traceback_of(num_frames: int, reason: str) -> str:
    frames = "".join(
        f'  File "/site/vllm/model_executor/layers/layer_{it}.py", line {it}, in forward\n'
        "    return self.quant_method.apply(hidden_states, router_logits)\n"
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^~~~~~~~~~~~~~~~~~~~~~~~~~~~~\n"
        for it in range(num_frames)
    )
    return f"{TRACEBACK}\n{frames}{INNERMOST}{reason}\n"


def failed_start(num_frames: int = 30) -> str:
    """Return the log of two workers that fail at once, and of engines that then fail, too."""
    texts = {
        process: "WorkerProc hit an exception.\n" + traceback_of(num_frames, f"{error}: {process}")
        for process, error in (("Worker_DP1", "AssertionError"), ("Worker_DP0", "OtherError"))
    }
    workers = [logged(process, f"ERROR {AT}", text) for process, text in texts.items()]
    mixed = [line for pair in zip(*workers, strict=True) for line in pair]
    later = logged(
        "EngineCore_DP0",
        "ERROR 11-22 21:40:53 [core.py:1320]",
        f"{TRACEBACK}\n    raise\nRuntimeError: Worker failed with error 'see above'",
    )
    own = logged("Worker_DP1", "INFO 11-22 21:40:54 [worker.py:9]", "Worker_DP1 is leaving")
    again = logged("Worker_DP1", f"ERROR {AT}", traceback_of(1, "AssertionError: again"))
    return "\n".join([LOADS, *mixed, *own, *again, *later])


def test_the_reason_of_a_failed_start_is_kept(tmp_path: Path) -> None:
    log_path = tmp_path / "serve.log"
    log_path.write_text(failed_start())
    nothing: Any = None
    process: Any = SimpleNamespace(poll=lambda: 1)
    server = server_module.Server(nothing, process, 0, log_path, tmp_path)
    with pytest.raises(server_module.ServerError) as raised:
        server_module._wait_until(lambda: False, server, time.monotonic())
    assert len(f"{raised.value}") > MAX_REASON
    reason = _reason(raised.value)
    assert len(reason) <= MAX_REASON
    lines = reason.splitlines()
    assert lines[0] == (
        f"vllm serve ended with status 1; from {log_path}: "
        f"(Worker_DP1 pid=8197) ERROR {AT} {TRACEBACK}"
    )
    assert lines[1] == "..."
    # As much of what led there as fits.
    assert '  File "/site/vllm/model_executor/layers/layer_29.py", line 29, ' in lines[-5]
    assert lines[-3:] == [*INNERMOST.splitlines()[:2], "AssertionError: Worker_DP1"]
    assert sum("layer_" in line for line in lines) >= 5


def test_a_short_traceback_is_kept_as_a_whole() -> None:
    assert log_excerpt(failed_start(1)).splitlines() == [
        f"(Worker_DP1 pid=8197) ERROR {AT} {TRACEBACK}",
        '  File "/site/vllm/model_executor/layers/layer_0.py", line 0, in forward',
        "    return self.quant_method.apply(hidden_states, router_logits)",
        *INNERMOST.splitlines()[:2],
        "AssertionError: Worker_DP1",
    ]


def test_all_lines_of_a_reason_are_kept_and_those_of_an_earlier_one() -> None:
    first = f"{TRACEBACK}\n    load()\nOSError: no file\n"
    reason = "AcceleratorError: CUDA error\n\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"
    chain = f"\nThe above exception was the direct cause of this one:\n\n{TRACEBACK}\n    x()\n"
    log = [LOADS, *logged("Worker_DP0", f"ERROR {AT}", first + chain + reason)]
    # A line of nothing, too, is written with its prefix, and some tools cut off its last space.
    log = [line.rstrip() for line in log]
    assert log_excerpt("\n".join(log)).splitlines()[1:] == (first + chain + reason).splitlines()[1:]


def test_a_traceback_of_a_warning_is_not_the_reason() -> None:
    warned = logged(
        "APIServer", "WARNING 11-22 21:40:39 [nccl.py:106]", traceback_of(1, "Harmless")
    )
    excerpt = log_excerpt("\n".join([*warned, failed_start()]))
    assert excerpt.endswith("AssertionError: Worker_DP1")
    assert "Harmless" not in excerpt


def test_what_python_itself_writes_has_no_prefix() -> None:
    text = f'{TRACEBACK}\n  File "serve.py", line 1\n    main()\nValueError: no such model'
    assert log_excerpt("\n".join([LOADS, text, LOADS, "resources have leaked"])) == text


def test_without_a_traceback_the_last_lines_are_kept() -> None:
    log = "\n".join(f"line {it}" for it in range(100))
    lines = log_excerpt(log).splitlines()
    assert lines == ["its last lines:", *(f"line {it}" for it in range(100 - LAST_LINES, 100))]
    assert log_excerpt("") == "its last lines:"


def test_a_text_is_shortened_to_its_first_line_and_its_last_ones() -> None:
    text = "\n".join(["what failed", *(f"frame {it:02}" for it in range(20)), "the reason"])
    assert shortened(text, len(text)) == text
    for limit in range(48, len(text)):
        short = shortened(text, limit)
        first, gap, *last = short.splitlines()
        assert (first, gap) == ("what failed", "...")
        assert text.endswith("\n".join(["", *last]))
        assert last[-1] == "the reason"
        # One line more would have been too many.
        assert limit - len("\nframe 00") < len(short) <= limit


def test_a_long_line_is_shortened_to_its_beginning() -> None:
    reason = "NotImplementedError: none of " + "these backends, " * 1000
    short = shortened(f"what failed\n{reason}", 300)
    assert short == f"what failed\n{reason[:97]}..."
    assert shortened("x" * 1000, 300) == "x" * 97 + "..."
