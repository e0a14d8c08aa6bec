"""Figures of SPPO, each with what the paper reads off it."""

from __future__ import annotations

import pytest

from memo_sim.papers import sppo_figures
from memo_sim.papers.figures import figure


def test_short_subsequences_cost_kernels_and_long_ones_a_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sppo_figures, "PARTS", (8, 16, 32, 64, 256))
    found = figure("sppo-7")
    forward, bubble, both = ([p.y or 0.0 for p in line.points] for line in found.lines)
    assert [p.x for p in found.lines[0].points] == [16384, 8192, 4096, 2048, 512]
    assert forward[0] == pytest.approx(forward[1], rel=0.01)  # compute-bound: more tokens do not help
    assert forward[1] < forward[2] < forward[3] < forward[4]
    assert bubble == sorted(bubble, reverse=True)
    assert bubble[0] / forward[0] == pytest.approx(3 / 8)
    assert both == pytest.approx([f + b for f, b in zip(forward, bubble, strict=True)])
    # The paper's range of good lengths, 2K to 16K tokens.
    assert 2048 <= found.lines[2].points[both.index(min(both))].x <= 16384
    assert "4k tokens each" in found.findings[0]
