"""Shows plans as text: the ranked answer to a what-if question, the classes at the peak, the stalls of one plan.

A plan that does not fit is shown with the reason and its shortfall, never with a speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memo_sim.contract.knobs import PINNED, Listed, Mark
from memo_sim.contract.plan import Layout, PlanRow, Prediction, Stall, StepInterval
from memo_sim.contract.result import Result
from memo_sim.contract.units import GIB, MIB, counted, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.views.accuracy import class_label
from memo_sim.views.palette import ordered_classes
from memo_sim.views.text_table import number, percent, text_table

GIVEN = "plan"
"""In place of a system: the plan was given, and nothing was searched."""
LEAST_DIGITS, MOST_DIGITS = 3, 6
"""Significant digits of the step times in one table."""


SHORT_OF = {"gpu_oom": "device memory", "host_oom": "host memory"}
MEMORY_COLUMNS = (
    "device {unit}: buffers of the plan on its fullest stage, without the reserve; host {unit}: all ranks of a node."
)

BEYOND = "* curves of the profile read beyond the sizes that were measured"


def layout_label(layout: Layout) -> str:
    """Return a short name of a layout, such as ``tp4+sp cp2 dp1``: tp, cp and dp always, other degrees above 1.

    Each knob's label is declared with it (``contract/knobs.py``).

    ``+ag``: context-parallel ranks all-gather keys and values; ``+rsa``: they write all scores. ``pp4(7,8,8,7)``: the
    layers of each stage, where they are given. ``+length``: all subsequences have the same length. ``+mx``: idle stages
    compute rows of other stages in the pipeline's fill and drain.
    """
    parts = dict[str, str]()
    for knob in PINNED:
        value: object = getattr(layout, knob.name, None)
        for label in knob.labels:
            if isinstance(label, Mark):
                if value == label.value and label.of in parts and getattr(layout, label.of) >= label.least:
                    parts[label.of] += label.text
            elif isinstance(label, Listed):
                if isinstance(value, tuple) and value:
                    parts[label.of] += f"({','.join(map(str, value))})"
            elif isinstance(value, int) and value > label.above:
                parts[knob.name] = f"{label.text}{value}"
    return " ".join(parts.values())


def plans_table(result: Result, *, top: int | None = None) -> str:
    """Return how many plans were evaluated, the ranked plans, and those that do not fit.

    ``top`` limits the rows of each table.
    """
    fitting = [p for p in result.plans if p.status == "ok"]
    others = [p for p in result.plans if p.status != "ok"]
    blocks = [f"{counted(result.evaluated, 'plan')} evaluated, {result.pruned} pruned"]
    if fitting:
        blocks[0] += ":\n" + ranked_table(fitting, top=top)
    if others:
        blocks.append("does not fit:\n" + infeasible_table(others, top=top))
    return "\n\n".join(blocks)


def step_line(step_s: float, interval: StepInterval) -> str:
    """Return a step, its interval and where that comes from: ``Step 667 s (80 % interval 664 to 697 s, from ...)``."""
    name = class_label(interval.generation, interval.framework, retries=interval.allocation_retries)
    rows = f"the errors of {counted(interval.rows, 'published row')} of {name}"
    text = f"Step {format_seconds(step_s)} ({interval_label(interval)}, from {rows})"
    if interval.beyond:
        text += f"; wider than where rows were measured: {', '.join(interval.beyond)}"
    return f"{text}."


def interval_label(interval: StepInterval, digits: int = LEAST_DIGITS) -> str:
    """Return an interval with the share of steps that it holds: ``80 % interval 654 to 690 s``."""
    return f"{format_percent(interval.level, 0)} interval {interval_ends(interval, digits)}"


def interval_ends(interval: StepInterval, digits: int = LEAST_DIGITS) -> str:
    """Return the two ends of an interval in one unit: ``654 to 690 s``."""
    low, high = format_seconds(interval.low_s, digits), format_seconds(interval.high_s, digits)
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


def ranked_table(plans: Sequence[PlanRow], *, top: int | None = None) -> str:
    """Return the plans that fit, in the given order, one per row."""
    rows: list[list[str | None]] = []
    outside: set[str] = set()
    digits = _digits([p.step_s for p in plans[:top] if p.step_s is not None])
    # One unit for the whole table: GiB, or MiB for small models.
    unit, scale = ("GiB", GIB) if any(p.peak_device_bytes >= GIB for p in plans[:top]) else ("MiB", MIB)
    sure = any(p.interval for p in plans[:top])
    several = len({p.micro_batch for p in plans[:top]}) > 1
    cached = any(p.memory_policy != "planned" for p in plans[:top])
    for rank, plan in enumerate(plans[:top], start=1):
        outside.update(plan.outside_calibration)
        # Only waits of compute cost time; a copy lane may wait.
        stall = max((s for s in plan.stalls if s.lane == "compute"), key=lambda s: s.seconds, default=None)
        rows.append(
            [
                f"{rank}{'*' if plan.outside_calibration else ' '}",
                policy_of(plan),
                layout_label(plan.layout),
                *([str(plan.micro_batch)] if several else []),
                _alpha(plan),
                _recompute(plan),
                None if plan.step_s is None else format_seconds(plan.step_s, digits),
                *([interval_ends(plan.interval) if plan.interval else None] if sure else []),
                None if plan.mfu is None else f"{100 * plan.mfu:.2f}",
                number(plan.tgs),
                f"{plan.peak_device_bytes / scale:.1f}",
                *(_allocator(plan, scale) if cached else []),
                f"{plan.peak_host_bytes_per_node / scale:.1f}",
                None if stall is None else f"{stall.waits_for} {format_seconds(stall.seconds)}",
            ]
        )
    headers = [
        "",
        "policy",
        "layout",
        *(["micro-batch"] if several else []),
        "alpha",
        "recompute",
        "step",
        *(["80 % interval"] if sure else []),
        "MFU %",
        "TGS",
        f"device {unit}",
        *(["memory", f"reserved {unit}", "retries"] if cached else []),
        f"host {unit}/node",
    ]
    kinds = "rll" + "r" * several + "rlr" + "r" * sure + "rrr" + "lrr" * cached + "rl"
    table = text_table([*headers, "compute waits for"], rows, kinds)
    table += f"\n{MEMORY_COLUMNS.format(unit=unit)}"
    if outside:
        table += f"\n{BEYOND}: {', '.join(sorted(outside))}"
    if top is not None and len(plans) > top:
        table += f"\n... and {len(plans) - top} more"
    return table


def short_of(status: str) -> str:
    """Return what a plan is short of that does not fit, in words; of any other plan its status."""
    return SHORT_OF.get(status, status)


def short_by(refused: Prediction) -> str:
    """Return how much more memory a plan needs that does not fit, in words."""
    return f"short by {format_bytes(refused.shortfall_bytes)} of {short_of(refused.status)}"


def policy_of(plan: PlanRow) -> str | None:
    """Return what happens to activations, as the search calls it, without the system; None for a plan of a file."""
    return plan.system.rpartition(": ")[2] if plan.system not in ("", GIVEN) else None


def _digits(steps_s: Sequence[float]) -> int:
    """Return how many digits distinguish the step times: three to six."""
    apart = {f"{step_s:.{MOST_DIGITS}g}" for step_s in steps_s}
    for digits in range(LEAST_DIGITS, MOST_DIGITS):
        if len({f"{step_s:.{digits}g}" for step_s in steps_s}) == len(apart):
            return digits
    return MOST_DIGITS


def _alpha(plan: PlanRow) -> str:
    """Return a plan's alpha, with its offload window where it has one."""
    return f"{plan.alpha:.3f}{f' w{plan.offload_window}' if plan.offload_window else ''}"


def _reason(plan: PlanRow) -> str:
    """Return a reason without the list of what is alive there; the document holds all of it."""
    if plan.status == "invalid":
        return plan.reason
    stage, colon, rest = plan.reason.partition(": ") if plan.reason.startswith("stage") else ("", "", plan.reason)
    return f"{stage}{colon}{rest.partition(': ')[0]}"


def _recompute(plan: PlanRow) -> str:
    """Return the recompute mode, which layers it is about, and the sizes of row blocks and of attention's chunks."""
    blocks = "blocks" if plan.recompute == "rowwise" else "mlp"
    cut = {blocks: plan.mlp_chunk_tokens, "attention": plan.attention_chunk_tokens}
    layers = [] if plan.recompute_layers == "all" else [plan.recompute_layers]
    return ", ".join([plan.recompute, *layers, *(f"{name} {format_tokens(n)}" for name, n in cut.items() if n)])


def _allocator(plan: PlanRow, scale: int) -> list[str | None]:
    """Return a plan's memory policy and limit, its reserved memory, and its allocation retries per step."""
    limit = f" in {plan.allocator_limit_gib} GiB" if plan.allocator_limit_gib else ""
    policy = f"{plan.memory_policy}{limit}"
    if plan.reserved_bytes is None:
        return [policy, None, None]
    return [policy, f"{plan.reserved_bytes / scale:.1f}", str(plan.allocation_retries)]


def infeasible_table(plans: Sequence[PlanRow], *, top: int | None = None) -> str:
    """Return the plans that do not fit, one per row: status, shortfall, reason."""
    rows = [
        [
            policy_of(plan),
            layout_label(plan.layout),
            _alpha(plan),
            _recompute(plan),
            short_of(plan.status),
            format_bytes(plan.shortfall_bytes) if plan.shortfall_bytes else None,
            _reason(plan) or None,
        ]
        for plan in plans[:top]
    ]
    table = text_table(["policy", "layout", "alpha", "recompute", "short of", "by", "reason"], rows, "llrllrl")
    return table + (f"\n... and {len(plans) - top} more" if top is not None and len(plans) > top else "")


def stall_table(stalls: Sequence[Stall], step_s: float) -> str:
    """Return the stalls, longest first, with their share of the step."""
    rows = [
        [s.lane, s.waits_for, format_seconds(s.seconds), percent(s.seconds / step_s if step_s else None), str(s.count)]
        for s in sorted(stalls, key=lambda s: -s.seconds)
    ]
    return text_table(["lane", "waits for", "time", "of step", "times"], rows, "llrrr")


def peak_table(peak_by_class: Mapping[str, int], *, capacity_bytes: int | None = None) -> str:
    """Return the live bytes at the fullest instant by class, largest first, with the total and the free bytes."""
    total = sum(peak_by_class.values())
    names = sorted(ordered_classes(set(peak_by_class)), key=lambda name: -peak_by_class[name])
    sizes = [(name, peak_by_class[name]) for name in names if peak_by_class[name]] + [("total", total)]
    if capacity_bytes is not None:
        sizes += [("capacity", capacity_bytes), ("free" if total <= capacity_bytes else "short by", 0)]
        sizes[-1] = (sizes[-1][0], abs(capacity_bytes - total))
    rows = [[name, format_bytes(size), percent(size / total if total else None)] for name, size in sizes]
    return text_table(["class", "at the peak", "share"], rows, "lrr")
