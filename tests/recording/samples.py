"""Small traces, made without a scheduler: each kind of event, and sound in all that is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparksched.trace.events import (
    KEY_BYTES,
    Arrive,
    Begin,
    Difference,
    Drafts,
    End,
    Event,
    Finish,
    Group,
    Grow,
    Pause,
    Ready,
    Reset,
    Settings,
    Speculation,
    Step,
    Stop,
    Update,
)
from sparksched.trace.file import TraceFile

BLOCK_SIZE = 4


def settings(**changed: Any) -> Settings:
    fields: dict[str, Any] = {
        "sparksched": "0.1.0",
        "vllm": "0.32.0",
        "scheduler": "SparkScheduler",
        "started": 1.5,
        "has_tokens": False,
        "block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
        "num_hash_lookahead_tokens": 0,
        "num_blocks": 64,
        "retention_interval": None,
        "groups": [Group("FullAttentionSpec", group_fields(), False)],
        "scheduler_config": {
            "async_scheduling": False,
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": 0,
            "long_prefill_token_threshold_adaptive": False,
            "max_num_active_seqs": None,
            "max_num_batched_tokens": 64,
            "max_num_scheduled_tokens": None,
            "max_num_seqs": 8,
            "policy": "fcfs",
            "prefill_schedule_interval": 1,
            "scheduler_reserve_full_isl": False,
            "watermark": 0.0,
        },
        "enable_prefix_caching": True,
        "hash_algorithm": "sha256",
        "max_model_len": 64,
        "runner_type": "generate",
        "uses_mrope": False,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "use_v2_model_runner": False,
        "max_loras": None,
        "speculation": None,
    }
    return Settings(**(fields | changed))


def group_fields() -> dict[str, int | bool | str | None]:
    return {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": "float32"}


SPECULATION = Speculation(2, [(1, 8, 2)], {"use_eagle": False}, 0, False)


def arrival(number: int, num_tokens: int, with_tokens: bool, **changed: Any) -> Arrive:
    fields: dict[str, Any] = {
        "time": number / 10,
        "request_id": f"request-{number}",
        "client_index": 0,
        "arrival_time": float(number),
        "priority": 0,
        "num_prompt_tokens": num_tokens,
        "keys": b"" if with_tokens else b"k" * (num_tokens // BLOCK_SIZE * KEY_BYTES),
        "prompt": list(range(num_tokens)) if with_tokens else None,
        "salt": b"",
        "max_tokens": 16,
        "min_tokens": 0,
        "eos_token_id": 2 if with_tokens else None,
        "stop_token_ids": [],
        "repetition": None,
        "has_grammar": False,
        "is_pooling": False,
        "lora_id": 0,
        "skips_cache": False,
    }
    return Arrive(**(fields | changed))


def every_event(with_tokens: bool) -> list[Event]:
    """Return a trace in which each kind of event is, at least once."""
    tokens = [7, 8] if with_tokens else None
    grown: list[Event] = [] if with_tokens else [Grow([(0, b"g" * KEY_BYTES)]), Stop(1, 3)]
    return [
        Begin(settings(has_tokens=with_tokens, speculation=SPECULATION)),
        arrival(0, 9, with_tokens),
        arrival(1, 5, with_tokens, has_grammar=True),
        Ready(1, True),
        Step(0, 0.1, 20.0, False, [0, 1], [9, 5], None, [(0, 0, [[1, 2, 3]])], [], [], [], [], 7),
        Drafts(None, [0, -1], [2, 0], [1, 0], [5, -1] if with_tokens else None, [(1, 1)]),
        Update(0, 0.2, 30.0, None, tokens, None, [9, 4], [0, 0], [1]),
        Step(1, 0.3, 20.0, True, None, None, [1, 0], [], [None, [[4]]], [0], [1], [], 8),
        Update(1, 0.4, 30.0, [2, 0], tokens, [True, False], None, None, []),
        *grown,
        Reset(0.5, True),
        Pause(0.6, 1),
        Finish(0.7, [0], "FINISHED_ABORTED"),
        Finish(0.8, None, "FINISHED_ERROR"),
        Difference(0.9, "one block more"),
        End(1.0, "the engine was shut down"),
    ]


def write(path: Path, events: list[Event], frame_sizes: int = 4) -> Path:
    """Write a trace with so many events in each frame."""
    file = TraceFile(path, 1 << 26)
    for number, event in enumerate(events):
        file.append(event)
        if number % frame_sizes == frame_sizes - 1:
            file.flush()
    file.flush()
    file.close(None)
    return path
