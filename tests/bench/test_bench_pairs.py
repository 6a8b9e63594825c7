"""Only what is alike stands side by side in the report, and what isn't is marked."""

import copy
from typing import Any

import synthetic
from reported import rows_in, section_of, texts_in

from bench.reporting.cells import OTHER_RUN, pairs_of
from bench.reporting.decode import sections
from bench.reporting.findings import findings

Row = dict[str, Any]


def result_of(tokens: int, cores: str = "all") -> Row:
    result = synthetic.result((64,))
    result["cells"] = [it for it in result["cells"] if it["driver"] == "http"]
    for cell in result["cells"]:
        cell["output_tokens"] = [tokens, tokens]
        cell["cores"] = cores
    return result


def rows_of(result: list[Row], title: str) -> list[list[str]]:
    return rows_in([section_of(sections(result), title)])


# ---- tokens a stream ----


def test_streams_of_other_lengths_are_no_pair() -> None:
    result = result_of(768)
    for cell in result["cells"]:
        if cell["scheduler"] == "sparksched":
            cell["output_tokens"] = [384, 384]
    assert [it.label for it in pairs_of([result])] == [
        "gpt-oss-20b, async, http, 64 x 384",
        "gpt-oss-20b, async, http, 64 x 768",
    ]
    assert all(it.stock.error or it.ours.error for it in pairs_of([result]))


def test_few_processors_are_compared_with_streams_of_the_same_length() -> None:
    title = "Serving: few processors"
    unlike = rows_of([result_of(768), result_of(384, cores="2")], title)
    assert [row[:2] for row in unlike] == [["gpt-oss-20b, async, decode, http, 64 x 384", "2"]]
    alike = rows_of([result_of(768), result_of(768, cores="2")], title)
    assert [row[1] for row in alike] == ["all", "2"]


def test_mixed_lengths_are_said() -> None:
    result = result_of(768)
    for cell in result["cells"]:
        cell["output_tokens"] = [100, 1024]
    assert pairs_of([result])[0].label.endswith(", 64 x 100 to 1,024")


def test_a_result_without_lengths_is_paired() -> None:
    pairs = pairs_of([synthetic.result((64,))])
    assert [it.label for it in pairs] == [
        "gpt-oss-20b, async, asyncllm, 64",
        "gpt-oss-20b, async, http, 64",
    ]


# ---- runs ----


def in_two_runs() -> Row:
    """Return a result of one file whose schedulers were measured by separate runs."""
    result = synthetic.result((64,))
    for table in ("cells", "traces", "servers"):
        for row in result[table]:
            row["run"] = 0 if row["scheduler"] == "stock" else 1
    return result


def test_sides_of_separate_runs_are_marked() -> None:
    result = in_two_runs()
    assert all(it.label.endswith(f" {OTHER_RUN}") for it in pairs_of([result]))
    for section in sections([result]):
        is_marked = any(OTHER_RUN in row[0] for row in rows_in([section]))
        notes = [it.startswith(f"{OTHER_RUN} from separate runs") for it in texts_in([section])]
        assert any(notes) == is_marked
    for title in ("Serving: tokens a second and latency", "Serving: the GPU", "Serving: CPU time"):
        assert all(
            OTHER_RUN in row[0] for row in rows_of([result], title) if row[0].startswith("gpt")
        )


def test_sides_of_one_run_are_not_marked() -> None:
    assert not any(OTHER_RUN in it.label for it in pairs_of([synthetic.result((64,))]))
    # Nor where a side is missing.
    result = in_two_runs()
    result["cells"] = [it for it in result["cells"] if it["scheduler"] == "stock"]
    assert not any(OTHER_RUN in it.label for it in pairs_of([result]))
    # Nor where it has failed.
    result = in_two_runs()
    for cell in result["cells"]:
        if cell["scheduler"] == "sparksched":
            del cell["rounds"]
            cell["error"] = "it is gone"
    assert not any(OTHER_RUN in it.label for it in pairs_of([result]))
    # Nor where both runs have measured both.
    result = synthetic.result((64,))
    again = copy.deepcopy(result["cells"])
    for cell in again:
        cell["run"] = 1
    result["cells"] += again
    assert not any(OTHER_RUN in it.label for it in pairs_of([result]))


def test_what_http_costs_is_said_within_a_run_only() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        for entry in cell["rounds"] if cell["driver"] == "http" else ():
            entry["tokens_per_s"] /= 2
    assert "HTTP and text" in "\n".join(findings([result]))
    for cell in result["cells"]:
        if cell["driver"] == "http":
            cell["run"] = 1
    assert "HTTP and text" not in "\n".join(findings([result]))
