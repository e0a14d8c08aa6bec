"""Shows a verdict as text: the answer in a sentence, what was reduced, differences by kind, the checks of programs."""

from __future__ import annotations

from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import counted, format_seconds
from memo_sim.contract.verdict import Against, Compared, Verdict
from memo_sim.views.plan_table import layout_label
from memo_sim.views.stage_numbers import from_one
from memo_sim.views.text_table import text_table


def verdict_table(verdict: Verdict) -> str:
    """Return the verdict as text, without a final newline."""
    blocks = ["\n".join([_sentence(verdict), *_plan(verdict), _setting(verdict)])]
    rows = [[each.what, each.plan, each.here] for each in verdict.reductions]
    if rows:
        blocks.append(text_table(["reduced", "in the plan", "here"], rows, "lrr"))
    blocks.append(_differences(verdict.against))
    blocks.append("\n".join(_notes(verdict)))
    checks = [[from_one(check.name), from_one(check.text)] for check in verdict.checks]
    if checks:
        blocks.append(text_table(["program", "checkers at full size"], checks))
    return "\n\n".join(blocks)


def _sentence(verdict: Verdict) -> str:
    """Return the answer and what it rests on.

    Of what differs, the largest difference from the first reference is named: the references differ by rounding.
    """
    found = [(against, [each for each in against.compared if not each.fine]) for against in verdict.against]
    found = [(against, differ) for against, differ in found if differ]
    if verdict.verified:
        names = " and of ".join(_name(against) for against in verdict.against if not against.skipped)
        partly = [check for check in verdict.checks if check.name in ("checked with", "not checked")]
        but = f"\nAt full size: {partly[0].name} {partly[0].text}." if partly else ""
        return f"VERIFIED: the plan's gradients and losses are those of {names}.{but}"
    if not found:
        faulty = next(check for check in verdict.checks if not check.fine)
        return f"DIFFERS: the gradients are right, but a program of the plan at full size is {from_one(faulty.text)}."
    against, differ = found[0]
    worst = max(differ, key=_size)
    text = (
        f"DIFFERS: the {worst.what} is not that of {_name(against)}: {_number(worst)} of its largest value, "
        f"at {worst.where}."
    )
    if verdict.references_agree:
        return f"{text}\nKeep-everything agrees with plain autograd, so the plan's own program is wrong."
    if verdict.references_agree is False:
        return f"{text}\nKeep-everything differs from plain autograd too, so a kernel or the layout is wrong."
    return text


def _name(against: Against) -> str:
    return "plain autograd" if against.reference == "autograd" else against.reference


def _plan(verdict: Verdict) -> list[str]:
    """Return which plan it is, in one line; nothing for a verdict of an older version."""
    if verdict.layout is None:
        return []
    policy = f"recompute {verdict.recompute}, alpha {verdict.alpha:.3f}"
    return [f"The plan: {one_line(verdict.model)}, {layout_label(verdict.layout)}, {policy}."]


def _setting(verdict: Verdict) -> str:
    on = f" on {verdict.machine}" if verdict.machine else ""
    parts = [counted(verdict.ranks, "process", "es"), counted(verdict.steps, "step"), f"seed {verdict.seed}"]
    return f"Played at reduced size in {verdict.dtype}{on}: {', '.join(parts)}, {format_seconds(verdict.seconds)}."


def _differences(references: list[Against]) -> str:
    """Return the table of largest differences; a difference above the tolerance has an exclamation mark."""
    shown = [against for against in references if not against.skipped]
    rows: list[list[str | None]] = []
    for i, first in enumerate(shown[0].compared if shown else []):
        cells = [against.compared[i] for against in shown]
        worst = max(cells, key=_size)
        marks = [_number(each) + ("" if each.fine else " !") for each in cells]
        rows.append([first.what, *marks, worst.where])
    rows.append(["tolerance", *(f"{against.tolerance:.1e}" for against in shown), ""])
    headers = ["largest difference", *(_name(against) for against in shown), "at"]
    return text_table(headers, rows, "l" + "r" * len(shown))


def _notes(verdict: Verdict) -> list[str]:
    lines = ["A difference is relative to the largest entry of the tensor."]
    reasons = {f"Tolerance {each.tolerance:.1e}: {each.why}.": None for each in verdict.against if not each.skipped}
    lines += reasons
    lines += [f"Not compared with {_name(each)}: {each.skipped}." for each in verdict.against if each.skipped]
    return lines


def _size(compared: Compared) -> float:
    return float("inf") if compared.difference is None else compared.difference


def _number(compared: Compared) -> str:
    if compared.difference is None:
        return "not a number"
    return f"{compared.difference:.1e}" if compared.difference else "0"
