"""Documents as rows for data frames and spreadsheets: one dictionary a row, every row with the same names.

    model, cluster, seq_tokens, rank, status, system, layout, tp, ... step_s, mfu, ...
    memory_skeletal_bytes, ...     the peak by buffer class
    busy_compute_s, ...            busy seconds by lane
    wait_all_gather_s, ...         seconds that compute waits, by the kind of instruction it waits for

Busy seconds and waits of compute add up to the step. None stands for what is not known, as seconds of a plan that does
not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import msgspec

from memo_sim.contract.comparison import Comparison
from memo_sim.contract.difference import Difference
from memo_sim.contract.gpus import Gpus
from memo_sim.contract.interchange import ImportedJob
from memo_sim.contract.knobs import DEGREES
from memo_sim.contract.longest import Longest
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import PlanRow
from memo_sim.contract.results import Results
from memo_sim.contract.shortage import Shortage
from memo_sim.contract.summary import Summary
from memo_sim.contract.validation import Measured, Validation
from memo_sim.contract.verdict import Verdict
from memo_sim.views.difference_table import letter
from memo_sim.views.plan_table import layout_label
from memo_sim.views.shortage_table import peak_sizes

Cell = str | int | float | bool | None
Row = dict[str, Cell]

OF_A_LAYOUT = (*DEGREES, "zero", "subsequences")
PARTS = (("memory_", "_bytes"), ("busy_", "_s"), ("wait_", "_s"))
"""Beginnings and ends of the names that only some plans have."""


def plan_rows(plans: Sequence[PlanRow], about: Mapping[str, Cell]) -> list[Row]:
    """Return one row a plan, in the order given; ``about`` is in each of them, such as the model's name."""
    return alike([{**about, "rank": rank, **plan_row(plan)} for rank, plan in enumerate(plans, start=1)])


def plan_row(plan: PlanRow | None) -> Row:
    """Return a plan's figures as one row; of None an empty one."""
    if plan is None:
        return {}
    row: Row = {
        "status": plan.status,
        "system": plan.system,
        "layout": layout_label(plan.layout),
        **{name: getattr(plan.layout, name) for name in OF_A_LAYOUT},
        "alpha": plan.alpha,
        "recompute": plan.recompute,
        "memory_policy": plan.memory_policy,
        "attention": plan.attention,
        "states": plan.states,
        "micro_batch": plan.micro_batch,
        "step_s": plan.step_s,
        "low_s": plan.interval.low_s if plan.interval else None,
        "high_s": plan.interval.high_s if plan.interval else None,
        "mfu": plan.mfu,
        "tokens_per_device_s": plan.tgs,
        "peak_device_bytes": plan.peak_device_bytes,
        "reserved_bytes": plan.reserved_bytes,
        "peak_host_bytes_per_node": plan.peak_host_bytes_per_node,
        "shortfall_bytes": plan.shortfall_bytes,
        "reason": plan.reason,
    }
    row |= {f"memory_{_name(kind)}_bytes": size for kind, size in plan.peak_by_class.items()}
    row |= {f"busy_{_name(lane)}_s": seconds for lane, seconds in plan.lanes.items()}
    for stall in plan.stalls:
        if stall.lane == "compute":
            row[f"wait_{_name(stall.waits_for)}_s"] = stall.seconds
    return row


def alike(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the names of all of them, plain figures first; what a plan has not is 0, or None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.sort(key=_part)
    return [{name: row.get(name, _missing(name, row)) for name in names} for row in rows]


def _part(name: str) -> int:
    """Return which of ``PARTS`` a name belongs to, counted from 1; 0 for a name that every plan has."""
    found = (n for n, (begin, end) in enumerate(PARTS, start=1) if name.startswith(begin) and name.endswith(end))
    return next(found, 0)


def _missing(name: str, row: Row) -> Cell:
    """Return 0 for a class, lane or wait that other plans have, where this plan's are known."""
    if _part(name) == 1:
        return 0 if any(_part(each) == 1 for each in row) else None
    return 0.0 if _part(name) and row.get("step_s") is not None else None


def _name(text: str) -> str:
    """Return ``pipeline bubble (stage 1)`` as ``pipeline_bubble_stage_1``."""
    return re.sub(r"[^0-9a-zA-Z]+", "_", text).strip("_")


def length_rows(document: Longest) -> list[Row]:
    """Return one row a length that was tried."""
    about: Row = {"model": document.model, "cluster": document.cluster}
    return [
        {**about, "seq_tokens": t.seq_tokens, "fits": t.fits, "step_s": t.step_s, "bound": t.bound, "reason": t.reason}
        for t in document.tried
    ]


def kind_rows(seconds: Mapping[str, Mapping[str, float]], step_s: float) -> list[Row]:
    """Return one row a lane and kind of instruction: its busy seconds, and their share of the step."""
    return [
        {"lane": lane, "kind": kind, "seconds": busy_s, "share": busy_s / step_s if step_s else None}
        for lane, kinds in seconds.items()
        for kind, busy_s in sorted(kinds.items(), key=lambda item: -item[1])
    ]


def struct_rows(structs: Iterable[msgspec.Struct]) -> list[Row]:
    """Return one row a struct, with its fields as columns; the texts of a list are joined, parts are left out."""
    rows = []
    for struct in structs:
        values = {name: getattr(struct, name) for name in struct.__struct_fields__}
        texts = {n: ", ".join(map(str, v)) if isinstance(v, list) else v for n, v in values.items()}
        rows.append({n: v for n, v in texts.items() if v is None or isinstance(v, str | int | float)})
    return rows


def case_rows(document: Validation) -> list[Row]:
    """Return one row a published case: what was predicted, what was measured, and the errors."""
    rows: list[Row] = []
    for case in document.cases:
        about: Row = {"case": case.case, "source": case.source, "system": case.system, "model": case.model}
        about |= {"seq_tokens": case.seq_tokens, "fitted": case.fitted, "status": case.predicted.status}
        about |= {"measured_status": case.expected.status, "reason": case.predicted.reason}
        for quantity in get_args(Measured):
            about |= {
                quantity: getattr(case.predicted, quantity),
                f"measured_{quantity}": getattr(case.expected, quantity),
                f"error_{quantity}": getattr(case.error, quantity),
            }
        rows.append(about)
    return rows


def size_rows(document: Gpus) -> list[Row]:
    """Return one row a number of GPUs worth knowing: why it is, its price, and its best plan's figures."""
    rows: list[Row] = []
    for size in document.sizes:
        row: Row = {"model": document.model, "seq_tokens": document.seq_tokens, "kind": size.kind}
        row |= {"cluster": size.cluster, "devices": size.summary.devices, "nodes": size.nodes}
        row |= {"roles": ", ".join(size.roles), "chosen": size == document.chosen}
        rows.append({**row, **_prices(size.summary), **plan_row(size.best)})
    return alike(rows)


def cluster_rows(document: Results) -> list[Row]:
    """Return one row a cluster, the best first: its price, and its best plan's figures; None where nothing fits."""
    rows: list[Row] = []
    for rank, result in enumerate(document.results, start=1):
        row: Row = {"model": result.model, "seq_tokens": result.seq_tokens, "rank": rank, "cluster": result.cluster}
        row |= {"devices": result.summary.devices, **_prices(result.summary)} if result.summary else {}
        rows.append({**row, **plan_row(result.best or next(iter(result.plans), None))})
    return alike(rows)


def _prices(summary: Summary) -> Row:
    return {
        "device_hours_per_billion_tokens": summary.device_hours_per_billion_tokens,
        "price_per_step": summary.price_per_step,
        "price_per_billion_tokens": summary.price_per_billion_tokens,
        **goodput_row(summary),
    }


def goodput_row(summary: Summary) -> Row:
    """Return what failures leave of the speed, where the question speaks of them."""
    if (goodput := summary.goodput) is None:
        return {}
    return {
        "goodput": goodput.goodput,
        "effective_tokens_per_device_s": goodput.tokens_per_device_s,
        "days_per_trillion_tokens": goodput.days_per_trillion_tokens,
    }


def class_rows(found: Shortage) -> list[Row]:
    """Return one row a class of bytes at the peak of a run's memory."""
    return [{"class": name, "bytes": size} for name, size in peak_sizes(found).items()]


def job_rows(document: ImportedJob) -> list[Row]:
    """Return the job as one row, and one row a plan that was searched for it, in its own framework and in memo."""
    about: Row = {"model": document.model.name, "seq_tokens": document.seq_tokens}
    own = [{**about, "plan": "job", **plan_row(document.job)}] if document.job is not None else []
    named = ("the same framework", "memo")
    better = [
        {**about, "plan": f"best of {name}", **plan_row(plan)}
        for name, result in zip(named, document.better, strict=False)
        for plan in result.plans
    ]
    return alike([*own, *better])


def option_rows(document: ImportedJob) -> list[Row]:
    """Return one row an option of the job's files: whether it was read, and what it says or why it was not used."""
    read: list[Row] = [{"key": o.key, "value": o.value, "read": True, "says": o.says} for o in document.read]
    return read + [{"key": o.key, "value": o.value, "read": False, "says": o.why} for o in document.ignored]


def difference_rows(document: Difference) -> list[Row]:
    """Return one row a part of the step: its seconds on each side (``A_s``), and what the others have more than A."""
    rows = []
    for share in document.shares:
        row: Row = {"group": share.group, "name": share.name}
        row |= {f"{letter(at)}_s": seconds for at, seconds in enumerate(share.seconds)}
        row |= {f"{letter(at)}_minus_A_s": more for at, more in enumerate(share.difference_s) if at}
        rows.append(row)
    return rows


def buffer_rows(placement: Placement) -> list[Row]:
    """Return one row a buffer: its name, class, life and address."""
    classes = placement.classes or [""] * len(placement.ids)
    columns = (placement.ids, classes, placement.lower, placement.upper, placement.size_bytes, placement.offset_bytes)
    names = ("id", "class", "lower", "upper", "size_bytes", "offset_bytes")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def verdict_rows(document: Verdict) -> list[Row]:
    """Return one row a kind of value and reference: its largest difference, where it is, and whether that is fine."""
    return [
        {"reference": against.reference, "tolerance": against.tolerance, **row}
        for against in document.against
        for row in struct_rows(against.compared)
    ]


def comparison_rows(document: Comparison) -> list[Row]:
    """Return one row a figure of the step, then a lane, then a kind of instruction: predicted, measured, ratio."""
    before, after, ratio = document.predicted, document.measured, document.ratio

    def row(name: str, predicted: float | None, measured: float | None, share: float | None) -> Row:
        return {"figure": name, "predicted": predicted, "measured": measured, "ratio": share}

    rows = [
        row(name, getattr(before, name, None), getattr(after, name), getattr(ratio, name, None))
        for name in ("step_s", "peak_device_bytes")
    ]
    for of, unit in (("lanes", "busy_{}_s"), ("ops", "kind_{}_s")):
        parts: list[dict[str, float]] = [getattr(each, of, {}) for each in (before, after, ratio)]
        names = dict.fromkeys([*parts[0], *parts[1]])
        rows += [row(unit.format(_name(name)), *(part.get(name) for part in parts)) for name in names]
    return rows
