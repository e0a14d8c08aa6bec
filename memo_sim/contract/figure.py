"""A figure of a paper, computed again (``memo.figure/1``): its curves as numbers, without a drawing."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.units import Tokens

XKind = Literal["tokens", "number"]
YKind = Literal["tokens", "fraction", "number"]
"""The kind of quantity on an axis."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value. ``y`` is null when there is no value (a plan does not fit); ``note`` says why or how."""

    x: float
    y: float | None
    note: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The points of one label; in a figure with several panels (one per model), the points within that panel."""

    label: str
    points: list[Point]
    panel: str = ""

    @property
    def name(self) -> str:
        """The label, with its panel's name in front."""
        return f"{self.panel} {self.label}".lstrip()


class Figure(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.figure/1"
):
    """Lines over one axis. The axis labels name the units; ``tokens`` and ``fraction`` are shown as 64k and 53.1 %."""

    name: str
    title: str
    x_label: str
    y_label: str
    x_kind: XKind
    y_kind: YKind
    lines: list[Line]
    findings: list[str] = []
    """The paper's conclusions from the figure, checked on this figure; one sentence each."""
    step_tokens: Tokens = 0
    """Granularity of the searched lengths; 0 when no lengths were searched."""

    @property
    def panels(self) -> dict[str, list[Line]]:
        """The lines of each panel, in order."""
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.panel, []).append(line)
        return found
