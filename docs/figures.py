"""Draw the figures of the concept pages again: ``python docs/figures.py``."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from memo_sim.validation.cases import load_cases
from memo_sim.validation.validate import validate

CONCEPTS = Path(__file__).parent / "concepts"


def alpha() -> Figure:
    """Return MFU by alpha, 7B at 192K tokens on eight A800: predicted, and measured in MEMO's Table 5."""
    rows = [case for case in load_cases("memo-table5") if case.question.seq_tokens == 192 * 1024]
    cases = validate(rows).cases
    places = [case.predicted.alpha for case in cases]
    figure = Figure(figsize=(7.5, 3.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(places, [100 * (c.predicted.mfu or 0) for c in cases], "o-", color="#3b76b5", label="predicted by memo")
    axes.plot(places, [100 * (c.expected.mfu or 0) for c in cases], "s-", color="#d98a1c", label="MEMO, Table 5")
    axes.set(xlabel="alpha (fraction of the tokens that are swapped)", ylabel="MFU (%)", xticks=places)
    axes.set_title("7B, 192K tokens, eight A800 (tp 4, cp 2)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower left")
    return figure


if __name__ == "__main__":
    alpha().savefig(CONCEPTS / "alpha.png")
