"""What `--layout` means."""

import pytest

from bench.serving.layouts import Layout, LayoutError


@pytest.mark.parametrize(
    ("name", "num_gpus", "label", "arguments"),
    [
        ("1", 1, "model", []),
        ("tp2", 2, "model, TP 2", ["--tensor-parallel-size=2"]),
        ("pp4", 4, "model, PP 4", ["--pipeline-parallel-size=4"]),
        (
            "tp2dp4",
            8,
            "model, TP 2, DP 4",
            ["--tensor-parallel-size=2", "--data-parallel-size=4"],
        ),
    ],
)
def test_a_layout_is_named_by_its_sizes(
    name: str, num_gpus: int, label: str, arguments: list[str]
) -> None:
    layout = Layout.named(name)
    assert layout.num_gpus == num_gpus
    assert layout.label("model") == label
    assert layout.arguments == arguments


@pytest.mark.parametrize("name", ["", "2", "tp", "tp0", "tp2x", "x2", "tp2tp2", "tp-2", "tp2 dp2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(LayoutError, match="no layout"):
        Layout.named(name)
