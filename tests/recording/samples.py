"""Small traces, made without a scheduler: each kind of event."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
from sparksched.compat.pacing import StepKnobs
from sparksched.record.events import (
    KEY_BYTES,
    VERSION,
    Arrive,
    Begin,
    Config,
    Drafts,
    End,
    Event,
    Finish,
    Group,
    Pause,
    Ready,
    Reset,
    Settings,
    SpeculativeConfig,
    Step,
    Update,
)

BLOCK_SIZE = 4
ENDED = "the engine was shut down"

_GROUP = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": "torch.float32"}
_CONFIG: dict[str, Any] = {
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
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256",
    "max_model_len": 64,
    "runner_type": "generate",
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
}
_SETTINGS: dict[str, Any] = {
    "sparksched": "0.1.0",
    "vllm": "0.32.0",
    "scheduler": "SparkScheduler",
    "block_size": BLOCK_SIZE,
    "hash_block_size": BLOCK_SIZE,
    "num_hash_lookahead_tokens": 0,
    "num_blocks": 64,
    "retention_interval": None,
    "groups": [Group(kind="FullAttentionSpec", fields=dict(_GROUP), is_eagle_group=False)],
    "speculative_config": None,
    "fills_in": False,
    "uses_mrope": False,
    "use_v2_model_runner": False,
    "max_loras": None,
    "max_graph_tokens": 0,
}
_SPECULATION: dict[str, Any] = {
    "speculative_config": SpeculativeConfig(2, [(1, 8, 2)], 0, *[False] * 6)
}


def settings(config: dict[str, Any] | None = None, **changed: Any) -> Settings:
    return Settings(config=Config(**(_CONFIG | (config or {}))), **(_SETTINGS | changed))


def arrival(number: int, num_tokens: int, **changed: Any) -> Arrive:
    fields: dict[str, Any] = {
        "time": number / 10,
        "request_id": f"request-{number}",
        "arrival_time": float(number),
        "num_prompt_tokens": num_tokens,
        "keys": b"k" * (num_tokens // BLOCK_SIZE * KEY_BYTES),
        "max_tokens": 16,
    }
    return Arrive(**(fields | changed))


def every_event() -> list[Event]:
    """Return a trace in which each kind of event is, at least once."""
    first, second = "request-0", "request-1"
    return [
        Begin(VERSION, settings(**_SPECULATION)),
        arrival(0, 9),
        arrival(1, 5, has_grammar=True),
        Ready(second, True),
        Step(0, 0.1, 20.0, ids=[first, second], num_tokens=[9, 5], new=[(first, 0, [[1, 2, 3]])]),
        Drafts(None, [first, "another"], [2, 0], [1, 0], {second: 1}),
        Update(0, 0.2, 30.0, None, None, [9, 4], [0, 0], [second]),
        Step(
            1,
            0.3,
            20.0,
            knobs=StepKnobs(8, 4, True),
            num_drafts=[1, 0],
            new_block_ids=[None, [[4]]],
            resumed=[first],
            preempted=[second],
        ),
        Update(1, 0.4, 30.0, [2, 0], [True, False], stops={0: 1}, keys={0: b"g" * KEY_BYTES}),
        Reset(0.5, True),
        Pause(0.6, 1),
        Finish(0.7, [first], "FINISHED_ABORTED"),
        Finish(0.8, None, "FINISHED_ERROR"),
        End(1.0, ENDED),
    ]


def write(path: Path, events: list[Event], piece: int = 4) -> Path:
    """Write a trace with so many events in each piece."""
    lines = [msgspec.json.encode(event) + b"\n" for event in events]
    pieces = [b"".join(lines[begin : begin + piece]) for begin in range(0, len(lines), piece)]
    path.write_bytes(b"".join(map(gzip.compress, pieces)))
    return path
