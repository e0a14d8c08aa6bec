"""The page of a what-if answer: verdict, timeline, where the step goes, ranked plans, assumptions, how to run it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.goodput import Goodput
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Plan, PlanRow
from memo_sim.contract.result import Result
from memo_sim.contract.shortage import LiveTensor
from memo_sim.contract.summary import Summary
from memo_sim.contract.units import (
    GIB,
    counted,
    format_bytes,
    format_duration,
    format_percent,
    format_seconds,
    format_tokens,
)
from memo_sim.views.palette import phase_colour
from memo_sim.views.plan_table import BEYOND, interval_ends, interval_label, layout_label, short_of
from memo_sim.views.report.curves import Chart, Line
from memo_sim.views.report.page import (
    Block,
    Bullets,
    Cell,
    Charts,
    Commands,
    Details,
    Heading,
    Notice,
    Page,
    Pairs,
    Paragraph,
    Section,
    Table,
    Tiles,
    Timeline,
)
from memo_sim.views.report.shares import shares_note, shares_of
from memo_sim.views.step import Step
from memo_sim.views.summary_text import verdict_lines

PLAN_FILE = "plan.json"
"""What the plan's file is called where none was written."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """What the page shows of the best plan: its file's content and name, and the step of each pipeline stage.

    ``pace`` is the number of the stage that sets the pace.
    """

    plan: Plan
    file: str | None
    steps: Sequence[Step]
    pace: int = 0
    largest: Sequence[LiveTensor] = ()
    """The largest tensors at the peak of the stage with most live bytes."""


def what_if_page(
    result: Result,
    *,
    cluster: Cluster,
    hardware: Hardware,
    best: Best | None,
    command: str,
    created: str,
) -> Page:
    """Return the report of an answer; ``best`` is None when no plan fits."""
    summary = result.summary
    sections = [Section("", [*map(Notice, result.warnings), *([_tiles(summary)] if summary else [])])]
    if best is not None:
        sections += [_timeline(best), _shares(best), _peak(result, best)]
    if summary is not None and summary.goodput is not None:
        sections.append(_goodput(summary.goodput))
    if summary is not None and summary.ways_out:
        sections.append(Section("Ways out", [Bullets(summary.ways_out)]))
    sections += [_plans(result), Section("Why", [Bullets(result.why)] if result.why else [])]
    if summary is not None:
        sections.append(_assumptions(summary))
    if best is not None:
        sections.append(_how_to_run(best, result, cluster, command))
    sections.append(provenance(cluster, hardware, best.plan if best else None, command=command, created=created))
    title = f"{result.model}, {format_tokens(result.seq_tokens)} tokens, {result.cluster}"
    fits = result.best is not None
    lines = verdict_lines(summary) if summary else ["FITS." if fits else "No plan fits."]
    subtitle = (
        f"What-if: {counted(result.evaluated, 'plan')} evaluated, {result.pruned} pruned. All figures are predicted."
    )
    return Page(
        title=title,
        subtitle=subtitle,
        verdict=lines,
        good=fits,
        sections=[section for section in sections if section.blocks],
    )


def _tiles(summary: Summary) -> Tiles:
    """Return the key figures; a plan that does not fit has no speed."""
    device, host = summary.device_memory, summary.host_memory
    items: list[tuple[str, str, str]] = []
    if summary.fits and summary.step_s is not None:
        sure = summary.interval
        expected = interval_label(sure) if sure else ""
        items.append(("step", format_seconds(summary.step_s), expected))
    if summary.mfu is not None:
        items.append(("MFU", format_percent(summary.mfu), "causal mask counted"))
    if summary.tokens_per_device_s is not None:
        tokens = f"{format_tokens(summary.tokens_per_step)} tokens a step"
        items.append(("tokens per GPU and second", f"{summary.tokens_per_device_s:.0f}", tokens))
    if summary.device_hours_per_billion_tokens is not None:
        hours = summary.device_hours_per_billion_tokens
        items.append(("GPU-hours per billion tokens", f"{hours:,.0f}", counted(summary.devices, "GPU")))
    if summary.price_per_billion_tokens is not None:
        at = f"at {summary.price_per_device_hour:g} a GPU-hour"
        items.append(("price per billion tokens", f"{summary.price_per_billion_tokens:,.0f}", at))
    if summary.goodput is not None:
        items += _goodput_tiles(summary.goodput)
    free = f"{format_bytes(device.free_bytes)} free of {format_bytes(device.capacity_bytes)}"
    short = f"of {format_bytes(device.capacity_bytes)}"
    note = free if summary.fits else short
    items.append(("device memory with reserve", format_bytes(device.needed_bytes), note))
    items.append(("host memory of a node", format_bytes(host.needed_bytes), f"of {format_bytes(host.capacity_bytes)}"))
    return Tiles(items)


def _goodput_tiles(goodput: Goodput) -> list[tuple[str, str, str]]:
    """Return the share of time that lasts, and what follows for the rate and a long training."""
    fails = f"a failure every {format_duration(goodput.job_mtbf_s)}"
    items = [("goodput", format_percent(goodput.goodput), fails)]
    if goodput.days_per_trillion_tokens is None:
        return items
    every = f"a checkpoint every {format_duration(goodput.interval_s)}"
    items.append(("effective tokens per GPU and second", f"{goodput.tokens_per_device_s:.0f}", every))
    items.append(("days for a trillion tokens", f"{goodput.days_per_trillion_tokens:,.1f}", "failures included"))
    return items


def _goodput(goodput: Goodput) -> Section:
    """Return where the time of a long job goes."""
    rows: list[list[Cell]] = [
        ["steps that last", format_percent(goodput.goodput)],
        ["checkpoints after them", format_percent(goodput.checkpoints)],
        ["steps and checkpoints that a failure undoes", format_percent(goodput.lost)],
        ["restarts", format_percent(goodput.restarts)],
    ]
    return Section("Where the time of a long job goes", [Table(["part", "share"], rows, "lr")])


def _peak(result: Result, best: Best) -> Section:
    """Return what a device of the fullest stage holds at its peak: by class, and its largest tensors."""
    by_class = result.best.peak_by_class if result.best else {}
    classes = sorted(by_class.items(), key=lambda item: -item[1])
    rows: list[list[Cell]] = [
        [name, format_bytes(size)] for name, size in [*classes, ("total", sum(by_class.values()))]
    ]
    tensors: list[list[Cell]] = [
        [each.name, each.buffer_class, f"{each.count}", format_bytes(each.bytes)] for each in best.largest
    ]
    return Section(
        "What fills a device at its peak",
        [
            Paragraph("Live bytes of one device of the fullest stage, without the reserve.", quiet=True),
            Table(["class", "size"], rows, "lr"),
            Heading("Largest tensors"),
            Table(["tensor", "class", "number", "size together"], tensors, "llrr"),
        ],
    )


def _timeline(best: Best) -> Section:
    trace = best.steps[0].trace
    blocks: list[Block] = []
    if trace.micro_batches_played < trace.micro_batches:
        played = f"{trace.micro_batches_played} of the step's {trace.micro_batches} micro-batches were played"
        blocks.append(Paragraph(f"{played}; the others repeat them. The step's time counts them all.", quiet=True))
    return Section("Timeline and memory", [*blocks, Timeline(best.steps)])


def _shares(best: Best) -> Section:
    step = best.steps[best.pace]
    shares = shares_of(step.trace)
    of = f"{step.name}, which computes longest" if len(best.steps) > 1 else ""
    return Section("Where the step goes", [shares, Paragraph(shares_note(step.trace, shares, of), quiet=True)])


def _plans(result: Result) -> Section:
    fitting = [plan for plan in result.plans if plan.status == "ok"]
    others = [plan for plan in result.plans if plan.status != "ok"]
    blocks: list[Block] = []
    if fitting:
        blocks.append(plans_table(fitting))
    if outside := sorted({name for plan in fitting for name in plan.outside_calibration}):
        blocks.append(Paragraph(f"{BEYOND}: {', '.join(outside)}", quiet=True))
    if others:
        rows: list[list[Cell]] = [
            [
                _policy(plan),
                layout_label(plan.layout),
                short_of(plan.status),
                format_bytes(plan.shortfall_bytes) if plan.shortfall_bytes else None,
                plan.reason,
            ]
            for plan in others
        ]
        headers = ["plan", "layout", "short of", "by", "reason"]
        blocks += [Heading("Plans that do not fit")] if fitting else []
        blocks.append(Table(headers, rows, "lnlrl"))
    if result.front_is_whole:
        blocks += [
            Heading("Pareto front of step time, device memory and host memory"),
            Charts([_front(result.front, side) for side in ("device", "host") if _has(result.front, side)]),
            plans_table(result.front, mark_first=False),
        ]
    return Section("Ranked plans" if fitting else "Plans that do not fit", blocks)


def _has(front: Sequence[PlanRow], side: str) -> bool:
    return any(_memory_of(plan, side) for plan in front)


def _memory_of(plan: PlanRow, side: str) -> int:
    if side == "host":
        return plan.peak_host_bytes_per_node
    return plan.peak_device_bytes if plan.reserved_bytes is None else plan.reserved_bytes


def _front(front: Sequence[PlanRow], side: str) -> Chart:
    """Return the front's plans by memory of a device or of a node's host, and step time."""
    points = [
        (_memory_of(plan, side) / GIB, plan.step_s, f"{_policy(plan)}, {layout_label(plan.layout)}")
        for plan in front
        if plan.step_s is not None
    ]
    label = "device memory, GiB" if side == "device" else "host memory of a node, GiB"
    line = Line("front", phase_colour("fwd"), points, joined=False)
    return Chart(f"Step time by {side} memory", label, "step, s", [line])


def plans_table(plans: Sequence[PlanRow], *, mark_first: bool = True) -> Table:
    """Return plans that fit, one per row; ``*`` marks one that read a curve outside its measurements."""
    rows: list[list[Cell]] = []
    for rank, plan in enumerate(plans, start=1):
        stall = max((s for s in plan.stalls if s.lane == "compute"), key=lambda s: s.seconds, default=None)
        rows.append(
            [
                f"{rank}{'*' if plan.outside_calibration else ''}",
                _policy(plan),
                layout_label(plan.layout),
                f"{plan.alpha:.3f}",
                None if plan.step_s is None else format_seconds(plan.step_s),
                None if plan.interval is None else interval_ends(plan.interval),
                None if plan.mfu is None else format_percent(plan.mfu),
                None if plan.tgs is None else f"{plan.tgs:.1f}",
                format_bytes(_memory_of(plan, "device")),
                format_bytes(plan.peak_host_bytes_per_node),
                None if stall is None else f"{stall.waits_for} {format_seconds(stall.seconds)}",
            ]
        )
    headers = [
        "#",
        "plan",
        "layout",
        "alpha",
        "step",
        "80 % interval",
        "MFU",
        "TGS",
        "device, without the reserve",
        "host, all ranks of a node",
        "longest wait",
    ]
    return Table(headers, rows, "llnrrrrrrrn", mark_first=mark_first)


def _policy(plan: PlanRow) -> str:
    """Return the plan's name, or its recompute mode where it is a file, with its chunks and its layers."""
    blocks = "blocks" if plan.recompute == "rowwise" else "MLP"
    chunks = {blocks: plan.mlp_chunk_tokens, "attention": plan.attention_chunk_tokens}
    named = [f"{name} {format_tokens(tokens)}" for name, tokens in chunks.items() if tokens]
    layers = [] if plan.recompute_layers == "all" else [plan.recompute_layers]
    mode = "keep" if plan.recompute == "none" else plan.recompute
    name = mode if plan.system in ("", "plan") else plan.system
    return f"{name} ({', '.join([*layers, *named])})" if layers or named else name


def _assumptions(summary: Summary) -> Section:
    rows = [[each.name, each.value, each.option or "decided by the hardware profile"] for each in summary.assumptions]
    blocks: list[Block] = [Table(["assumed", "value", "changed by"], rows, "nll")] if rows else []
    blocks += [Paragraph(f"Not tried: {each.what} ({each.option}).") for each in summary.left_out]
    return Section("Assumptions", blocks)


NOT_RUN = {
    True: "memo-exec cannot run this attention kernel; the plan is only priced.",
    False: "memo-exec cannot run these products in FP8; the plan is only priced.",
}
"""By whether products are in the plan's dtype: what memo-exec lacks."""


def _how_to_run(best: Best, result: Result, cluster: Cluster, command: str) -> Section:
    blocks: list[Block] = []
    if result.best is not None and not result.best.executable:
        blocks.append(Notice(NOT_RUN[result.best.fp8 == "none"]))
    if best.file is None:
        write = f'{command}.save("{PLAN_FILE}")' if command.startswith("memo_sim.") else f"{command} -o {PLAN_FILE}"
        blocks += [Paragraph("Write the plan first:"), Commands([write])]
    file = shlex.quote(best.file or PLAN_FILE)
    in_fp8 = best.plan.decisions.fp8 != "none"  # which plain autograd has not, so verify refuses it
    checks = "Check the plan:" if in_fp8 else "Check the plan, then its gradients at a reduced size on a CPU:"
    blocks += [
        Paragraph(checks),
        Commands([f"memo-exec doctor {file}", *([] if in_fp8 else [f"memo-exec verify {file}"])]),
        Paragraph("Train, and compare the measured step with this prediction:"),
        Commands(run_commands(best.plan, file, cluster)),
    ]
    return Section("How to run it", blocks)


def run_commands(plan: Plan, file: str, cluster: Cluster) -> list[str]:
    """Return the command that runs a plan, on every node of the cluster that it uses; ``file`` is quoted."""
    devices = plan.decisions.layout.devices
    if devices == 1:
        return [f"memo-exec run {file} --steps 10 --report run.html"]
    per_node = min(devices, cluster.devices_per_node)
    nodes = -(-devices // per_node)
    several = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500 " if nodes > 1 else ""
    line = f"torchrun {several}--nproc_per_node {per_node} -m memo_exec run {file} --steps 10 --report run.html"
    return [f"# on each of the {nodes} nodes", line] if nodes > 1 else [line]


def provenance(cluster: Cluster, hardware: Hardware, plan: Plan | None, *, command: str, created: str) -> Section:
    """Return who made the page from what: versions, the command, hashes, and the sources of the profile's numbers."""
    items = [
        ("command", command),
        ("created", created),
        (
            "cluster",
            f"{cluster.name}: {counted(cluster.nodes, 'node')} of {counted(cluster.devices_per_node, 'device')}",
        ),
        ("hardware profile", hardware.name),
    ]
    if plan is not None:
        items += [
            ("memo", plan.provenance.memo_version),
            ("profile's hash", plan.provenance.hardware_sha256),
            ("program's hash", plan.program_sha256),
        ]
    sources = {**hardware.sources, **cluster.sources}
    rows = [[each.kind, each.text] for _, each in sorted(sources.items(), key=lambda item: (item[1].kind, item[0]))]
    listed = Details(
        f"{counted(len(rows), 'source')} of the profile's numbers", [Table(["kind", "source"], rows, "ll")]
    )
    return Section("Provenance", [Pairs([(name, value) for name, value in items if value]), listed])
