"""SparkScheduler decides exactly as vLLM's own scheduler does, on seeded scenarios.

One scenario in three compares the outputs themselves, one what workers in other processes get, and
one the messages for clients, with `SPARKSCHED_VERIFY` beside, which must raise no false alarm.
"""

from __future__ import annotations

import pytest
from scale import FULL
from sparksched.compat import releases

from testkit.worlds.candidates import sparksched_scheduler_class, verifying_scheduler_class
from testkit.worlds.scenarios import NAMED_SETTINGS, is_verifiable

from .runner import Coverage, run_scenario

NUM_SEEDS = 18 if FULL else 3
NUM_STEPS = 120
# Rare situations need scenarios of their own, where three of each configuration don't reach them:
# here, outputs of preempted pooling requests.
PINNED = [("pooling-preempting", 3), ("async-pooling", 6)]
SCENARIOS = [
    *((name, seed) for name in NAMED_SETTINGS for seed in range(NUM_SEEDS)),
    *(scenario for scenario in PINNED if scenario[1] >= NUM_SEEDS),
]

# What ten scenarios of each configuration reach, and how often at the least; fewer reach their
# share. A change of the trace generator that stops exercising one of these would otherwise go
# unnoticed.
EXPECTED_SITUATIONS = {
    "steps": 15_000,
    "empty steps": 50,
    "steps while PAUSED_NEW": 20,
    "steps while PAUSED_ALL": 20,
    "prefill chunks": 500,
    "prefix cache hits": 200,
    "cached blocks in use again": 200,
    "blocks behind a window": 500,
    "preemptions": 1000,
    "preemptions ahead of a running request": 20,
    "preemptions between equal requests": 3,
    "prefills limited by the threshold": 200,
    "prefills exempt from the threshold": 50,
    "resumptions": 200,
    "stale outputs delivered": 30,
    "stale outputs dropped": 10,
    "outputs of finished requests": 50,
    "steps whose output was lost": 5,
    "stops by EOS": 50,
    "stops by stop token": 50,
    "stops by max_tokens": 200,
    "stops by max_model_len": 10,
    "stops by repetition": 10,
    "stops by rejected token": 5,
    "stops by grammar that does not compile": 10,
    "requests that wait for a grammar": 100,
    "grammar bitmasks": 200,
    "sampling deferred for a grammar": 100,
    "aborts of all requests": 3,
    "aborts of a single string": 10,
    "aborts of duplicates": 10,
    "aborts of unknown or finished": 50,
    "aborts of WAITING": 20,
    "aborts of RUNNING": 50,
    "aborts of PREEMPTED": 5,
    "aborts of WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": 5,
    "aborts of requests in flight": 50,
    "aborts while the model runs": 30,
    "resets that succeed": 10,
    "resets that fail": 5,
    "resets that preempt running requests": 5,
    "request ids used again": 5,
    "outputs to several clients": 100,
    "outputs with logprobs": 100,
    "outputs with prompt logprobs": 10,
    "outputs with NaN counts": 50,
    "outputs with trace headers": 100,
    "outputs with events": 100,
    "finished request sets": 50,
    "scheduler statistics": 1000,
}

# The same for the configurations of one feature. Where not all of them are among NAMED_SETTINGS,
# `test_harness_catches.py` holds that vLLM's own schedulers reach it.
EXPECTED_OF_FEATURES: dict[tuple[str, ...], dict[str, int]] = {
    ("sync-kv-events", "async-kv-events", "kv-events-hybrid", "kv-events-preempting"): {
        "events: batches": 1000,
        "events: batches under sha256": 100,
        "events: batches under sha256_cbor": 100,
        "events: batches under xxhash": 100,
        "events: batches under xxhash_cbor": 50,
        "events: hashes of type bytes": 500,
        "events: hashes of type int": 500,
        "events: stored": 3000,
        "events: stored after a parent": 1000,
        "events: stored with a salt": 50,
        "events: stored for a session": 1000,
        "events: stored, but not all blocks": 50,
        "events: stored, but without any block": 300,
        "events: hits that are reported": 100,
        "events: removed": 3000,
        "events: all cleared": 100,
    },
    ("kv-cache-metrics",): {
        "metrics: evictions": 400,
        "metrics: evictions of a sample": 150,
        "metrics: evictions after an access": 30,
        "metrics: evictions after reuse": 10,
    },
    ("mfu-metrics", "speculating-mfu-metrics"): {
        "MFU metrics: steps with prefills": 200,
        "MFU metrics: steps with decodes": 50,
        "MFU metrics: steps without requests": 4,
        "MFU metrics: steps in detail": 300,
        "MFU metrics: steps without detail": 300,
    },
    ("prompt-embeds", "prompt-embeds-preempting", "prompt-embeds-by-eagle"): {
        "embeddings: prompts of vectors": 200,
        "embeddings: prompts of vectors and tokens": 200,
        "embeddings: prompts of tokens": 100,
        "embeddings: hits": 50,
        "embeddings: told again after a preemption": 50,
    },
    ("sampling-masks", "sampling-masks-speculating"): {
        "masks: of one token": 1000,
        "masks: of several tokens": 500,
    },
    ("sync-pooling", "async-pooling", "pooling-preempting", "pooling-without-cache"): {
        "stops by pooling output": 1000,
        "pooling: steps that leave a prompt unfinished": 1000,
        "pooling: outputs after a prefix hit": 200,
        "pooling: outputs for whole contexts": 100,
        "pooling: outputs that skip the cache": 100,
        "pooling: outputs of preempted requests delivered": 2,
        "pooling: outputs of preempted requests dropped": 1,
    },
    (
        "sync-multimodal",
        "async-multimodal",
        "multimodal-preempting",
        "multimodal-kv-events",
        "multimodal-speculating",
    ): {
        "multimodal: inputs scheduled": 500,
        "multimodal: inputs found in the cache": 1000,
        "multimodal: inputs that find no room": 500,
        "multimodal: inputs evicted": 400,
        "multimodal: inputs twice in a step": 40,
        "multimodal: inputs stripped of their data": 50,
        "multimodal: inputs that a set holds out of order": 30,
        "multimodal: chunks cut by an input": 400,
        "multimodal: chunks that begin in an input": 100,
        "multimodal: chunks that end in an input": 100,
        "multimodal: requests held up by an input": 200,
        "multimodal: waiting requests held up, that keep inputs": 20,
        "multimodal: waiting requests that give back inputs": 200,
        "multimodal: requests with mismatched inputs": 5,
        "multimodal: resets of the encoder cache": 10,
        "multimodal: statistics of inputs": 50,
        "multimodal: text requests scheduled": 1000,
    },
    (
        "sync-connector",
        "async-connector",
        "connector-preempting",
        "connector-failures",
        "connector-failures-hybrid",
        "connector-kv-events",
        "connector-speculating",
        "connector-multimodal",
    ): {
        "aborts of WAITING_FOR_REMOTE_KVS": 50,
        "resets that end in an exception": 50,
        "transfer: matches": 1000,
        "transfer: matches beyond a local hit": 200,
        "transfer: matches not known yet": 100,
        "transfer: asynchronous matches of all tokens": 200,
        "transfer: loads": 400,
        "transfer: loads for preempted requests": 50,
        "transfer: loads that end": 200,
        "transfer: loads that fail by blocks": 5,
        "transfer: loads that fail by request": 20,
        "transfer: synchronous loads that fail": 10,
        "transfer: requests failed by a load": 15,
        "transfer: ends that delay the free": 300,
        "transfer: ends by abort that delay the free": 100,
        "transfer: sends that end": 300,
        "transfer: steps with synchronous loads": 100,
        "transfer: steps with deferred frees": 80,
        "transfer: steps while blocks are sent": 500,
        "transfer: steps for the connector alone": 5,
        "transfer: steps in which all that run wait for blocks": 15,
        "transfer: requests counted as waiting_to_start": 1000,
        "transfer: requests counted as in_progress": 300,
        "transfer: requests counted as completed_waiting": 100,
        "transfer: sources of hits": 200,
        "transfer: statistics of both sides": 100,
        "transfer: outputs with parameters": 200,
        "transfer: outputs with the prefill's hits": 30,
    },
    ("offloading", "offloading-preempting"): {
        "offloading: loads": 25,
        "offloading: tokens loaded from the host": 100,
        "offloading: stores": 150,
        "offloading: jobs that are flushed": 40,
        "offloading: statistics": 300,
    },
    (
        "ec-connector",
        "ec-connector-preempting",
        "ec-connector-v2",
        "ec-connector-speculating",
        "ec-and-kv-connectors",
        "ec-connector-of-texts",
    ): {
        "EC transfer: requests that are kept": 12,
        "EC transfer: inputs found elsewhere": 200,
        "EC transfer: waiting requests held up": 500,
        "EC transfer: running requests held up": 150,
        "EC transfer: requests given up": 50,
        "EC transfer: update_state_after_alloc": 600,
        "EC transfer: update_state_after_free": 1200,
        "EC transfer: outputs with parameters": 250,
        "EC transfer: statistics": 700,
    },
    (
        "sync-experts",
        "async-experts",
        "experts-preempting",
        "experts-speculating",
        "experts-sessions",
        "experts-states",
        "experts-connector",
    ): {
        "experts: hashes of scheduled requests": 1400,
        "experts: hashes of others": 80,
        "experts: of a prompt": 1000,
        "experts: of single tokens": 4000,
        "experts: of no token": 40,
        "experts: requests that are preempted": 400,
        "experts: requests that end": 1400,
        "experts: resets": 90,
    }
    | (
        {
            "experts: prefixes that are known": 1500,
            "experts: external hits that are taken": 15,
            "experts: external hits that are left": 130,
            "experts: loads": 3,
        }
        if releases.is_since("0.33.0")
        else {}
    ),
    ("example-connector",): {
        "example connector: loads": 10,
        "example connector: stores": 50,
    },
    (
        "sync-speculating",
        "async-speculating",
        "sync-eagle",
        "async-eagle",
        "async-eagle-v2",
        "eagle-hybrid",
        "speculating-by-draft-model",
        "multi-module-mtp",
        "dynamic-speculation",
        "speculating-preempting",
        "speculating-structured",
    ): {
        "speculation: steps with draft tokens": 4000,
        "speculation: accepted tokens": 10_000,
        "speculation: rejected tokens": 5000,
        "speculation: drafts accepted whole": 3000,
        "speculation: drafts cut by a budget": 100,
        "speculation: drafts for finished requests": 500,
        "speculation: drafts for prefill chunks": 1000,
        "speculation: drafts that a grammar cut": 300,
        "speculation: drafts that the runner shortened": 50,
        "speculation: empty drafts": 100,
        "speculation: scheduled tokens that a grammar refused": 200,
        "speculation: padded decodes": 50,
        "speculation: preempted with draft tokens": 100,
        "speculation: stale rejections delivered": 30,
        "speculation: stale rejections dropped": 40,
        "speculation: chunks that spare the lookahead": 20,
        "speculation: fewer tokens for the batch size": 500,
        "speculation: outputs with several tokens": 3000,
        "speculation: outputs with logprobs of several tokens": 300,
        "speculation: stops before the last token": 500,
        "speculation: statistics": 1500,
        "speculation: metrics of a request": 500,
        "speculation: metrics of a request's steps": 150,
    },
    ("sync-lora", "async-lora", "lora-by-priority"): {
        "lora: requests with an adapter": 700,
        "lora: salted requests with an adapter": 100,
        "lora: batches with several adapters": 250,
        "lora: batches with two adapters of a name": 20,
        "lora: hits of requests with an adapter": 50,
        "lora: WAITING while others' adapters fill the batch": 3000,
        "lora: PREEMPTED while others' adapters fill the batch": 50,
    },
    (
        "sync-sessions",
        "async-sessions",
        "sessions-preempting",
        "sessions-by-priority",
        "sessions-speculating",
    ): {
        "sessions: begun": 700,
        "sessions: continued while RUNNING": 60,
        "sessions: continued while WAITING": 200,
        "sessions: continued while PREEMPTED": 5,
        "sessions: continued while WAITING_FOR_STREAMING_REQ": 200,
        "sessions: continued while WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": 30,
        "sessions: closed while RUNNING": 10,
        "sessions: closed while WAITING": 60,
        "sessions: closed while WAITING_FOR_STREAMING_REQ": 40,
        "sessions: given up while WAITING_FOR_STREAMING_REQ": 40,
        "sessions: idle ones in all slots": 50,
        "sessions: preempted": 80,
        "sessions: resumed with their blocks": 300,
        "sessions: scheduled with draft tokens of the turn before": 20,
        "sessions: turns that end in idleness": 300,
        "sessions: turns with the next chunk at hand": 100,
        "sessions: turns that end with output in flight": 60,
        "sessions: last turns": 40,
        "resets that end in an exception": 10,
    },
    (
        "sync-pipeline",
        "async-pipeline",
        "async-pipeline-v2",
        "pipeline-preempting",
        "pipeline-speculating",
        "sync-pipeline-speculating",
    ): {
        "pipeline: scheduled again while in flight": 3000,
        "pipeline: not scheduled while in flight": 2000,
        "pipeline: decodes that wait for their turn": 1000,
        "pipeline: steps that bring tokens to the first stage": 500,
        "pipeline: steps that bring parts of a prompt": 100,
    },
    ("data-parallel",): {
        "data parallel: throttled steps": 300,
        "data parallel: new requests in their steps": 30,
        "data parallel: new requests in spite of that": 50,
        "data parallel: chunks that are put off": 5,
    },
    (
        "sync-chunked-local",
        "async-chunked-local",
        "chunked-local-alone",
        "chunked-local-and-windows",
    ): {
        "chunked local: hits": 150,
        "chunked local: hits within a chunk": 80,
        "chunked local: hits that skip chunks": 80,
        "chunked local: hits without a block": 20,
        "chunked local: snapshots with aligned chunks": 3000,
        "chunked local: snapshots with unaligned chunks": 700,
    },
    (
        "sync-qwen3-next",
        "async-qwen3-next",
        "async-granite-4",
        "sync-nemotron-h",
        "states-within-blocks",
        "states-kept-sparsely",
        "states-of-every-block",
        "states-without-cache",
    ): {
        "states: hits": 60,
        "states: hits within a block": 8,
        "states: junctions": 100,
        "states: checkpoints": 8,
        "states: blocks to be zeroed": 1000,
        "states: blocks to be copied": 60,
        "states: steps in mode align": 500,
        "states: steps in mode none": 100,
    },
    (
        "sync-circular",
        "async-circular",
        "circular-and-sliding",
        "async-circular-latent-and-sliding",
        "circular-and-states",
        "circular-without-cache",
        "circular-preempting",
        "circular-where-all-must-fit",
    ): {
        "circular: given": 1500,
        "circular: given beside a hit": 150,
        "circular: given to the resumed": 80,
        "circular: kept while others grow": 1000,
        "circular: left as they are while others are zeroed": 600,
        "circular: taken from the preempted": 200,
    },
}


def expected_situations() -> dict[str, int]:
    """Return how often each situation must have been reached by the scenarios that run here."""
    expected = dict(EXPECTED_SITUATIONS)
    for situations in EXPECTED_OF_FEATURES.values():
        expected |= situations
    return {situation: share(count) for situation, count in expected.items()}


def share(count: int) -> int:
    """Return how often at the least what ten scenarios reach is reached by as many as run here."""
    return max(count * min(NUM_SEEDS, 10) // 10, 1)


class CoveredScenarios:
    """What the scenarios of this test run have reached so far."""

    def __init__(self) -> None:
        self.coverage = Coverage()
        self.finished: set[tuple[str, int]] = set()


@pytest.fixture(scope="module")
def covered() -> CoveredScenarios:
    return CoveredScenarios()


@pytest.mark.parametrize(("name", "seed"), SCENARIOS)
def test_decides_as_vllm_does(name: str, seed: int, covered: CoveredScenarios) -> None:
    broadcast, encoded = seed % 3 == 1, seed % 3 == 2
    verified = encoded and is_verifiable(name)
    run_scenario(
        name,
        seed,
        NUM_STEPS,
        verifying_scheduler_class if verified else sparksched_scheduler_class,
        coverage=covered.coverage,
        broadcast=broadcast,
        encoded=encoded,
    )
    covered.finished.add((name, seed))


def test_scenarios_reach_every_situation(covered: CoveredScenarios) -> None:
    if covered.finished != set(SCENARIOS):
        pytest.skip("only meaningful after all scenarios have passed")
    too_rare = {
        situation: (covered.coverage[situation], expected)
        for situation, expected in expected_situations().items()
        if covered.coverage[situation] < expected
    }
    assert not too_rare
