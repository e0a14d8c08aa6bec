"""A figure as a picture and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_sim.contract.errors import UsageError
from memo_sim.contract.figure import Figure, Line, Point
from memo_sim.views.chart import chart_table, draw_chart, picture, style
from tests.refusals import refused

LONGEST = Figure(
    name="11a",
    title="The longest sequence",
    x_label="GPUs",
    y_label="sequence length (tokens)",
    x_kind="number",
    y_kind="tokens",
    lines=[
        Line(label="memo", points=[Point(x=8, y=2**20, note="tp4"), Point(x=16, y=2**21)]),
        Line(label="other", points=[Point(x=8, y=None), Point(x=16, y=2**19)]),
    ],
    findings=["memo is linear."],
)


def test_the_text_has_every_value_and_a_dash_where_there_is_none() -> None:
    assert chart_table(LONGEST).splitlines() == [
        "Figure 11a. The longest sequence; sequence length (tokens)",
        "",
        "GPUs  memo  other",
        "   8    1m      -",
        "  16    2m   512k",
        "",
        "memo, 8: tp4",
        "",
        "memo is linear.",
    ]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_picture_is_the_same_bytes_each_time(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / f"{n}{suffix}" for n in "ab"]
    for path in paths:
        draw_chart(LONGEST, path)
    assert paths[0].read_bytes() == paths[1].read_bytes() != b""
    if suffix == ".svg":
        drawn = paths[0].read_text()
        assert all(text in drawn for text in ("memo is linear.", "512k", "other", "GPUs"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with refused(UsageError, where="figure.txt", got="'.txt'", wanted=".png, .svg, .pdf"):
        draw_chart(LONGEST, tmp_path / "figure.txt")


def test_lines_of_a_figure_differ_in_colour_and_marker() -> None:
    assert len({style(number) for number in range(20)}) == 20
    assert len({style(number)[1] for number in range(6)}) == 6  # and the first few by marker alone


def in_panels(**changes: object) -> Figure:
    """Return a figure of METP's size: four models, six systems, lengths from 4K to 1M."""
    lines = [
        Line(panel=f"model {m}", label=f"system {s}", points=[Point(x=4096 << i, y=1.0 + m + s) for i in range(9)])
        for m in range(4)
        for s in range(6)
    ]
    return msgspec.structs.replace(LONGEST, x_kind="tokens", y_kind="number", lines=lines, **changes)


def test_each_panel_has_its_own_table() -> None:
    blocks = chart_table(in_panels()).split("\n\n")
    assert [block.splitlines()[0] for block in blocks[1:5]] == [f"model {m}" for m in range(4)]
    assert all(len(block.splitlines()) == 11 for block in blocks[1:5])


def test_an_axis_with_many_places_has_few_ticks() -> None:
    pytest.importorskip("matplotlib")

    def axes(count: int) -> Any:
        points = [Point(x=1.5 * i + 0.5, y=1.0 + i) for i in range(count)]
        figure = msgspec.structs.replace(LONGEST, x_kind="number", lines=[Line(label="a", points=points)])
        return picture(figure).axes[0]

    assert axes(16).get_xticks().tolist() == [1.5 * i + 0.5 for i in range(16)]
    assert axes(16).get_xscale() == "log"
    assert len(axes(40).get_xticks()) <= 16
    assert axes(40).get_xscale() == "linear"


def test_panels_do_not_overlap() -> None:
    """With any number of findings, axes keep their size, and titles, ticks and text do not overlap."""
    pytest.importorskip("matplotlib")
    findings = [f"Finding {n} is a sentence of some length. " * 4 for n in range(20)]
    drawn = picture(in_panels(title="What is compared, " * 7, findings=findings))
    drawn.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in drawn.axes]
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    whole = drawn.bbox
    for ax, box in zip(drawn.axes, boxes, strict=True):
        assert ax.get_window_extent().width > 0.25 * whole.width
        assert ax.get_window_extent().height > 2.0 * drawn.dpi
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    (legend,) = drawn.legends
    assert not any(legend.get_window_extent().overlaps(box) for box in boxes)
    assert not legend.get_window_extent().overlaps(drawn._suptitle.get_window_extent())
    told = drawn._supxlabel.get_window_extent()
    assert told.y0 >= 0
    assert not any(told.overlaps(box) for box in boxes)
