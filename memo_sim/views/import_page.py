"""What ``memo-sim import`` shows of a job: what was read, what was ignored, what it costs, what would be better."""

from __future__ import annotations

from collections.abc import Iterable

from memo_sim.contract.interchange import ImportedJob, ReadOption
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.plan import PlanRow
from memo_sim.contract.summary import DeviceMemory
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.views.plan_table import layout_label, short_of
from memo_sim.views.summary_text import device_text

MOST_KEYS = 12
"""Names of one reason that are listed without ``--all``."""


def import_summary(document: ImportedJob, *, everything: bool = False) -> str:
    """Return the lines; with ``everything`` each option on its own line."""
    lines = [
        *import_head(document),
        "",
        "Read:",
        *_read(document.read, everything=everything),
    ]
    if document.ignored:
        lines += ["", "Ignored:", *_ignored(document, everything=everything)]
    if document.assumed:
        lines += ["", "Assumed:", *(f"  {text}" for text in document.assumed)]
    if document.job is None:
        lines += ["", "Name a cluster to see what it costs, and what would be better: --cluster h100-1x8"]
    else:
        lines += ["", *_costs(document, document.job)]
    return "\n".join(map(one_line, lines))


def import_head(document: ImportedJob) -> list[str]:
    """Return whose files they are, the model, and the batch; a line each."""
    model = document.model
    batch = f"batch {document.global_batch} ({document.micro_batch} at a time)"
    started = f", starts {counted(document.devices, 'device')}" if document.devices else ""
    shape = f"{model.layers} layers of {model.hidden}, {model.total_params / 1e9:.2f}B parameters"
    return [
        f"{document.framework}: {', '.join(document.files)}",
        f"Model {model.name}: {shape}, vocabulary {model.vocab}.",
        f"Sequence {format_tokens(document.seq_tokens)}, {batch}{started}.",
    ]


def _read(options: Iterable[ReadOption], *, everything: bool) -> list[str]:
    by_meaning = dict[str, list[ReadOption]]()
    for option in options:
        by_meaning.setdefault(option.says, []).append(option)
    width = max(map(len, by_meaning), default=0)
    made = list[str]()
    for says, same in by_meaning.items():
        words = [f"{option.key} {option.value}".strip() for option in same]
        shown = words if everything else _some(words)
        made.append(f"  {says:{min(width, 40)}}  {', '.join(shown)}")
    return made


def _ignored(document: ImportedJob, *, everything: bool) -> list[str]:
    by_reason = dict[str, list[str]]()
    for option in document.ignored:
        by_reason.setdefault(option.why, []).append(
            f"{option.key} {option.value}".strip() if everything else option.key
        )
    return [f"  {why}: {', '.join(keys)}" for why, keys in by_reason.items()]


def _some(words: list[str]) -> list[str]:
    return words if len(words) <= MOST_KEYS else [*words[:MOST_KEYS], f"and {len(words) - MOST_KEYS} more"]


def _costs(document: ImportedJob, job: PlanRow) -> list[str]:
    lines = [f"The job, as memo predicts it: {_figures(job, document.memory)}"]
    if job.status != "ok" and job.reason:
        lines.append(f"  {job.reason}")
    for title, answer in zip(
        (f"the same in {document.framework}", "any plan that memo knows"), document.better, strict=False
    ):
        best, memory = answer.best, answer.summary.device_memory if answer.summary else None
        if best is None:
            reason = f": {answer.why[0]}" if answer.why and not answer.plans else ""
            lines.append(f"Best of {title}: nothing fits{reason}.")
            continue
        if job.status == "ok" and job.step_s and best.step_s and best.step_s >= job.step_s:
            lines.append(f"Best of {title}: nothing is faster than the job. {_figures(best, memory)}")
            continue
        change = f"{job.step_s / best.step_s:.2f} times as fast, " if job.step_s and best.step_s else ""
        lines.append(f"Best of {title}: {change}{_figures(best, memory)}")
    return lines


def _figures(row: PlanRow, memory: DeviceMemory | None) -> str:
    """Return time, memory and layout of a plan; the memory says what it includes."""
    where = f"{layout_label(row.layout)}, recompute {row.recompute}"
    where += "" if row.recompute_layers == "all" else f" of {row.recompute_layers}"
    where += f", alpha {row.alpha:.3f}" if row.alpha else ""
    peak = f"on a device {device_text(memory)}" if memory else ""
    if row.status != "ok" or row.step_s is None:
        short = f"{format_bytes(row.shortfall_bytes)} of " if row.shortfall_bytes else ""
        return f"does not fit (short of {short}{short_of(row.status)}): {peak}; {where}"
    mfu = f", MFU {format_percent(row.mfu)}" if row.mfu else ""
    tgs = f", {row.tgs:.0f} tokens per GPU and second" if row.tgs else ""
    return f"{format_seconds(row.step_s)} a step{mfu}{tgs}; {peak}; {where}"
