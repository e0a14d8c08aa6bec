"""Shows which features go together as text: a table of all, or the pairs of one feature with their reasons.

+  a program is written for both       -  refused, with a reason       =  two values of one knob
"""

from __future__ import annotations

from memo_sim.contract.combinations import Combinations, Pair
from memo_sim.contract.units import counted
from memo_sim.views.text_table import text_table

TOGETHER, REFUSED, ONE_KNOB, ITSELF = "+", "-", "=", "."
LEGEND = (
    f"{TOGETHER} go together, {REFUSED} do not, {ONE_KNOB} are values of one knob. A pair says nothing about three at"
    " once, or about what memo-exec runs."
)
MORE = "Why: memo-sim list combinations FEATURE, or FEATURE OTHER."


def combinations_text(found: Combinations, *, of: str = "") -> str:
    """Return the table of all features; with ``of``, what this feature goes with and why it does not with others."""
    return _reasons(found, of) if of else _matrix(found)


def _mark(pair: Pair) -> str:
    if pair.together:
        return TOGETHER
    return ONE_KNOB if pair.one_knob else REFUSED


def _matrix(found: Combinations) -> str:
    names = [feature.name for feature in found.features]
    marks = {frozenset((pair.first, pair.second)): _mark(pair) for pair in found.pairs}
    numbers = [f"{number:2d}" for number in range(1, len(names) + 1)]
    margin = " " * (max(map(len, names)) + 4)
    lines = [margin + "".join(number[digit] for number in numbers) for digit in (0, 1)]
    for number, name in zip(numbers, names, strict=True):
        row = "".join(ITSELF if other == name else marks[frozenset((name, other))] for other in names)
        lines.append(f"{number} {name.ljust(len(margin) - 3)}{row}")
    about = [[n, each.name, each.about, each.options] for n, each in zip(numbers, found.features, strict=True)]
    together = sum(pair.together for pair in found.pairs)
    head = f"{len(names)} features, {counted(len(found.pairs), 'pair')}: {together} go together."
    listed = text_table(["", "feature", "what it is", "chosen by"], about, "rlll")
    return "\n\n".join([head, "\n".join(lines), listed, f"{LEGEND}\n{MORE}"])


def _reasons(found: Combinations, of: str) -> str:
    pairs = [(pair.second if pair.first == of else pair.first, pair) for pair in found.pairs]
    together = [other for other, pair in pairs if pair.together]
    lines = [f"{of} goes with: {', '.join(together)}."] if together else []
    refused = [(other, pair) for other, pair in pairs if not pair.together]
    if refused:
        lines.append(f"{of} does not go with:")
        width = max(len(other) for other, _ in refused)
        for other, pair in refused:
            lines.append(f"  {other.ljust(width)}  {pair.reason}")
            if pair.hint and not pair.one_knob:
                lines.append(f"  {' ' * width}  next: {pair.hint}")
    return "\n".join(lines)
