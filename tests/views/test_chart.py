"""A figure as a picture and as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from memo_sim.contract.errors import UsageError
from memo_sim.contract.figure import Figure, Line, Point
from memo_sim.views.chart import draw_chart, style
from memo_sim.views.chart_table import chart_table

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
    with pytest.raises(UsageError, match="not a kind of picture"):
        draw_chart(LONGEST, tmp_path / "figure.txt")


def test_as_many_lines_as_a_figure_has_are_told_apart() -> None:
    """METP's have five systems and four models."""
    assert len({style(number) for number in range(20)}) == 20
    assert len({style(number)[1] for number in range(5)}) == 5  # and the first few by marker alone
