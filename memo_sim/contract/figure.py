"""A figure of a paper, computed again (``memo.figure/1``): its curves as numbers, before anything is drawn."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.units import Tokens

XKind = Literal["tokens", "number"]
YKind = Literal["tokens", "fraction", "number"]
"""What an axis counts."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value; ``y`` is null where there is none (a plan that does not fit), and ``note`` says why or how."""

    x: float
    y: float | None
    note: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one label stands for; in a figure of several panels (a model each), in that panel."""

    label: str
    points: list[Point]
    panel: str = ""

    @property
    def name(self) -> str:
        """The label, behind its panel's."""
        return f"{self.panel} {self.label}".lstrip()


class Figure(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.figure/1"
):
    """Lines over one axis. Units stand in the axes' labels; ``tokens`` and ``fraction`` are shown as 64k and 53.1 %."""

    name: str
    title: str
    x_label: str
    y_label: str
    x_kind: XKind
    y_kind: YKind
    lines: list[Line]
    findings: list[str] = []
    """What the paper reads off the figure, read off this one; one sentence each."""
    step_tokens: Tokens = 0
    """How finely lengths were searched; 0 where none were."""

    @property
    def panels(self) -> dict[str, list[Line]]:
        """The lines of each panel, in their order."""
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.panel, []).append(line)
        return found
