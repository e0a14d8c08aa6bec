"""The page ``lost.md`` of an export, and its summary on a terminal."""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.contract.interchange import Export
from memo_sim.contract.plain_text import in_markdown, one_line
from memo_sim.contract.plan import PlanRow
from memo_sim.contract.summary import DeviceMemory
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds
from memo_sim.views.plan_table import short_of
from memo_sim.views.summary_text import device_text


def lost_page(document: Export) -> str:
    """Return ``lost.md``: first whether the exported plan fits, then what it costs, and each decision that is lost."""
    cluster = in_markdown(document.cluster)
    title = in_markdown(f"What {document.framework} does not keep of the plan")
    lines = [f"# {title}", ""]
    if document.there.status != "ok":
        lines += [f"**IT DOES NOT FIT.** {in_markdown(verdict(document))}", ""]
    else:
        lines += [in_markdown(verdict(document)), ""]
    lines += [
        f"Options as in {in_markdown(document.version)}. Both columns are memo's predictions for {cluster},",
        f"the second one under the system `{document.system}`.",
        "",
        "| | the plan | as exported |",
        "| --- | --- | --- |",
        *(f"| {name} | {one} | {other} |" for name, one, other in _figures(document)),
        "",
    ]
    if document.lost:
        lines += [
            "## Lost",
            "",
            "| decision | in the plan | instead | why |",
            "| --- | --- | --- | --- |",
            *(
                _cells(f"`{lost.option or lost.path}`", *map(in_markdown, (lost.wanted, lost.instead, lost.why)))
                for lost in document.lost
            ),
            "",
        ]
    else:
        lines += ["Every decision of the plan is kept.", ""]
    if document.own:
        lines += [
            "## Kept, but by no exact option",
            "",
            "The prediction assumes these; the files cannot fix them.",
            "",
            "| decision | in the plan | |",
            "| --- | --- | --- |",
            *(
                _cells(f"`{own.option or own.path}`", in_markdown(own.value), in_markdown(own.why))
                for own in document.own
            ),
            "",
        ]
    if document.notes:
        lines += ["## Before you train", "", *(f"- {in_markdown(note)}" for note in document.notes), ""]
    return "\n".join(lines)


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def verdict(document: Export) -> str:
    """Return in a sentence or two whether the exported plan fits, and what the losses cost."""
    plan, there, name = document.plan, document.there, document.framework
    if there.status != "ok":
        short = f"{format_bytes(there.shortfall_bytes)} of " if there.shortfall_bytes else ""
        ours = " The plan itself does." if plan.status == "ok" else " Nor does the plan itself."
        what = f"short of {short}{short_of(there.status)}"
        return f"What {name} can run of this plan does not fit on {document.cluster} ({what}).{ours}"
    if there.step_s is None or plan.step_s is None:
        what = f"short of {short_of(plan.status)}"
        return f"The plan itself does not fit on {document.cluster} ({what}); as exported it does."
    lost = counted(len(document.lost), "decision")
    if not document.lost:
        return f"{name} runs this plan as it is: {format_seconds(there.step_s)} a step."
    change = there.step_s / plan.step_s - 1
    slower = f"{format_percent(abs(change))} {'more' if change >= 0 else 'less'}"
    return (
        f"{name} runs it with {lost} changed: {format_seconds(there.step_s)} a step in place of"
        f" {format_seconds(plan.step_s)} ({slower}), by memo's prediction."
    )


def export_summary(document: Export, folder: str) -> str:
    """Return what a terminal shows after an export."""
    lines = [] if document.there.status == "ok" else ["IT DOES NOT FIT."]
    lines.append(one_line(verdict(document)))
    rows = [("predicted", "the plan", "as exported"), *_figures(document)]
    name_width, width = (max(len(row[at]) for row in rows) for at in (0, 1))
    lines += [
        one_line(f"  {name:{name_width}}  {one:{width}}  {'the same' if other == one else other}")
        for name, one, other in rows
    ]
    for lost in document.lost:
        why = f" ({lost.why})" if lost.why else ""
        lines.append(one_line(f"lost  {lost.option or lost.path}: {lost.wanted} -> {lost.instead}{why}"))
    lines += map(one_line, document.notes)
    lines.append(one_line(f"{folder}: {', '.join(document.files)}"))
    return "\n".join(lines)


def _figures(document: Export) -> list[tuple[str, str, str]]:
    shown: dict[str, Callable[[PlanRow], str]] = {
        "fits": _fits,
        "step": _step,
        "peak of host memory, a node": lambda row: format_bytes(row.peak_host_bytes_per_node),
        "computed with": _with,
    }
    rows = [(name, show(document.plan), show(document.there)) for name, show in shown.items()]
    needs = ("a device needs", _needs(document.plan_memory), _needs(document.there_memory))
    return [*rows[:2], needs, *rows[2:]]


_ROWWISE = {
    "torch": "memo-exec's kernels",
    "fused": "fused kernels",
    "eager": "eager modules",
    "compiled": "compiled modules",
}
_POLICY = {
    "planned": "planned addresses",
    "caching": "PyTorch's allocator",
    "eager": "PyTorch's allocator under an eager framework",
}


def _with(row: PlanRow) -> str:
    """Return the kernels and the memory that a prediction rests on."""
    limit = f", limited to {row.allocator_limit_gib} GiB" if row.allocator_limit_gib else ""
    rowwise = _ROWWISE.get(row.rowwise, f"{row.rowwise} kernels")
    return f"{row.attention} attention, {rowwise}, {_POLICY[row.memory_policy]}{limit}"


def _fits(row: PlanRow) -> str:
    return "yes" if row.status == "ok" else f"no, short of {short_of(row.status)}"


def _step(row: PlanRow) -> str:
    return "-" if row.step_s is None else format_seconds(row.step_s)


def _needs(memory: DeviceMemory | None) -> str:
    """Return what a device of the fullest stage needs, and what adds up to it."""
    return device_text(memory) if memory else "-"
