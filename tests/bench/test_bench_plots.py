"""The report's pictures show what was measured, and nothing else."""

from typing import Any

import pytest
import synthetic
from matplotlib.figure import Figure

from bench.reporting import plots
from bench.reporting.cells import pairs_of, steady

Row = dict[str, Any]


def itl_figure(result: Row) -> Figure:
    pairs = [it for it in steady(pairs_of([result])) if it.key.driver == "asyncllm"]
    figure = plots._itl("a title", pairs)
    assert figure is not None
    return figure


def marks(figure: Figure, colour: str) -> list[tuple[Any, float, float]]:
    """Return a side's marks in the first panel: the line, where it is and at which percent."""
    lines = [it for it in figure.axes[0].lines if it.get_marker() != "None"]
    chosen = [it for it in lines if it.get_color() == colour]
    return [(it, float(it.get_xdata()[0]), float(it.get_ydata()[0])) for it in chosen]


def test_a_latency_of_zero_is_marked_at_the_edge() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        for entry in cell["rounds"] if cell["scheduler"] == "sparksched" else ():
            entry["itl_quantiles_ms"] = {"percent": [0, 50, 80, 90, 99], "ms": [0, 0, 0, 8, 9]}
    figure = itl_figure(result)
    figure.draw_without_rendering()
    (median, _, percent), (_, p99_ms, _) = marks(figure, plots.COLOURS["sparksched"])
    panel = figure.axes[0]
    assert percent == 50
    assert median.get_window_extent().xmin == pytest.approx(panel.get_window_extent().xmin, abs=10)
    assert p99_ms == 9
    # The edge is no place of the other side's.
    assert all(at > 0 for _, at, _ in marks(figure, plots.COLOURS["stock"]))


@pytest.mark.parametrize("counts", [(1, 8, 64, 256), (1, 8, 64, 256, 1024)])
def test_panels_without_a_curve_are_not_there(counts: tuple[int, ...]) -> None:
    figure = itl_figure(synthetic.result(counts))
    assert len(figure.axes) == 6
    assert [it.get_visible() for it in figure.axes] == [n < len(counts) for n in range(6)]


def test_streams_that_get_all_tokens_at_once_can_be_drawn() -> None:
    result = synthetic.result((64,))
    for cell in result["cells"]:
        for entry in cell["rounds"]:
            entry["itl_quantiles_ms"] = {"percent": [0, 50, 99], "ms": [0, 0, 0]}
    itl_figure(result).draw_without_rendering()
