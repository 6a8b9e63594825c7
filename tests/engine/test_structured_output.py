"""vLLM's real structured output manager and xgrammar, between an engine and either scheduler."""

import re
from pathlib import Path
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest, FinishReason

from testkit.device import EOS_TOKEN_ID, UNRULY

from .harness import ASYNC_SCHEDULING, DrivenEngine, new_request, run_both

REGEX = r"[a-f]{3}-[0-9]{5}"
COLOURS = ["red", "green", "blue", "ultraviolet"]
SCHEMA = {"type": "object", "properties": {"lit": {"type": "boolean"}}, "required": ["lit"]}
UNCLOSED = r"[a-f"


def structured_request(
    request_id: str, prompt_token_ids: list[int], max_tokens: int = 80, **constraint: Any
) -> EngineCoreRequest:
    """Return a request as the front end sends it once it has chosen xgrammar."""
    params = StructuredOutputsParams(**constraint)
    params._backend = "xgrammar"
    return new_request(request_id, prompt_token_ids, max_tokens, structured_outputs=params)


def choice_grammar(choices: list[str]) -> str:
    """Write the grammar that the front end makes of choices."""
    return "root ::= " + " | ".join(f'"{choice}"' for choice in choices)


def text_of(token_ids: list[int]) -> str:
    """Decode tokens of the byte-level tokenizer, which sorts its letters."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    return "".join(alphabet[token_id] for token_id in token_ids if token_id != EOS_TOKEN_ID)


def grammars(engine: DrivenEngine) -> None:
    engine.add(structured_request("regex", [1] * 20, regex=REGEX))
    engine.add(new_request("free", [2] * 120, max_tokens=30, ignore_eos=True))
    engine.step(3)
    engine.add(structured_request("choice", [3] * 40, grammar=choice_grammar(COLOURS)))
    engine.add(structured_request("json", [4] * 100, json=SCHEMA))
    engine.add(structured_request("cut", [5] * 20, max_tokens=4, regex=REGEX))
    engine.add(structured_request("broken", [6] * 40, regex=UNCLOSED))
    engine.add(structured_request("unruly", [UNRULY] * 20, regex=REGEX))
    engine.step(3)
    engine.note(engine.core.reset_prefix_cache(reset_running_requests=True))
    engine.run()


@ASYNC_SCHEDULING
def test_grammars_of_all_kinds(async_scheduling: bool, model_directory: Path) -> None:
    record = run_both(grammars, model_directory, async_scheduling=async_scheduling)
    assert re.fullmatch(REGEX, text_of(record.tokens["regex"]))
    assert text_of(record.tokens["choice"]) in COLOURS
    assert re.match(REGEX[:8], text_of(record.tokens["cut"]))
    assert record.finish_reasons["regex"] == FinishReason.STOP
    assert record.finish_reasons["cut"] == record.finish_reasons["free"] == FinishReason.LENGTH
    assert record.finish_reasons["broken"] == record.finish_reasons["unruly"] == FinishReason.ERROR
    assert record.tokens["broken"] == []
    assert record.num_preemptions > 1
    assert any(bitmask is not None for bitmask in record.bitmasks)
