"""Draw the figures of the concept pages again: ``python docs/figures.py``, about a minute."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import memo_sim as memo
from memo_sim.contract.accuracy import GroupAccuracy
from memo_sim.contract.trace import Trace
from memo_sim.validation.accepted import load_accepted
from memo_sim.validation.cases import load_cases
from memo_sim.validation.validate import validate
from memo_sim.views.palette import PHASES

CONCEPTS = Path(__file__).parent / "concepts"
GIB = 2**30
SHORT = 0.01
"""Waits below this part of a step are not drawn; they are waits for collectives inside a pass."""


def alpha() -> Figure:
    """Return MFU by alpha, 7B at 192K tokens on eight A800: predicted, and measured in MEMO's Table 5."""
    rows = [case for case in load_cases("memo-table5") if case.question.seq_tokens == 192 * 1024]
    cases = validate(rows).cases
    places = [case.predicted.alpha or 0.0 for case in cases]
    figure = Figure(figsize=(7.5, 3.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(places, [100 * (c.predicted.mfu or 0) for c in cases], "o-", color="#3b76b5", label="predicted by memo")
    axes.plot(places, [100 * (c.expected.mfu or 0) for c in cases], "s-", color="#d98a1c", label="MEMO, Table 5")
    axes.set(xlabel="alpha (fraction of the tokens that are swapped)", ylabel="MFU (%)", xticks=places)
    axes.set_title("7B, 192K tokens, eight A800 (tp 4, cp 2)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower left")
    return figure


def subsequences() -> Figure:
    """Return the compute lanes of a pipeline that plays one sequence whole, in 4 and in 16 subsequences."""
    counts = (1, 4, 16)
    figure = Figure(figsize=(7.5, 5.6), dpi=150, layout="constrained")
    answers = {n: _pipeline(n) for n in counts}
    longest_s = max(_step_s(answer) for answer in answers.values())
    for axes, (count, answer) in zip(figure.subplots(len(counts), sharex=True), answers.items(), strict=True):
        for stage, trace in enumerate(answer.traces):
            _draw_compute(axes, trace, stage)
        step_s = _step_s(answer)
        whole = "one sequence, whole" if count == 1 else f"{count} subsequences"
        axes.set_title(f"{whole}: {step_s:.1f} s, {step_s / longest_s:.0%} of the longest", loc="left", fontsize=9)
        axes.set(yticks=range(4), yticklabels=[f"stage {n}" for n in range(1, 5)], ylim=(3.5, -0.5))
        axes.tick_params(labelsize=8)
    axes.set_xlabel("seconds (white: the stage computes nothing)")
    names = ("fwd", "bwd", "embed", "opt")
    legend = [Patch(color=PHASES[name][1], label=PHASES[name][0]) for name in names]
    figure.legend(handles=legend, ncols=len(names), loc="outside lower center", frameon=False, fontsize=8)
    figure.suptitle("gpt-7b, one sequence of 256K tokens, 32 A100 (tp 8, pp 4), predicted", fontsize=10)
    return figure


def _pipeline(subsequences: int) -> memo.WhatIfResult:
    return memo.what_if(
        "gpt-7b",
        cluster="a100-4x8-hdr4",
        seq_len="256k",
        tp=8,
        pp=4,
        subsequences=subsequences,
        system="sppo" if subsequences > 1 else "memo",
        recompute="tokenwise" if subsequences == 1 else None,
        global_batch=1,
    )


def _step_s(answer: memo.WhatIfResult) -> float:
    return answer.traces[0].step_s


def _draw_compute(axes: Axes, trace: Trace, stage: int) -> None:
    """Draw the compute lane of a stage; spans of one colour with short waits between them are one bar."""
    bars: list[tuple[float, float, str]] = []
    spans = trace.spans
    for name, lane, start_s, end_s in zip(spans.ids, spans.lanes, spans.start_s, spans.end_s, strict=True):
        if lane != "compute" or end_s == start_s:
            continue
        parts = name.split("/")
        phase = next((part for part in parts if part in ("embed", "head")), parts[-2])
        colour = PHASES.get(phase, PHASES["opt"])[1]
        if bars and bars[-1][2] == colour and start_s - bars[-1][1] < SHORT * trace.step_s:
            bars[-1] = (bars[-1][0], end_s, colour)
        else:
            bars.append((start_s, end_s, colour))
    pieces = [(start_s, end_s - start_s) for start_s, end_s, _ in bars]
    axes.broken_barh(pieces, (stage - 0.4, 0.8), facecolors=[colour for _, _, colour in bars], linewidth=0)


def metp() -> Figure:
    """Return speed and device memory by length under full recompute, of METP and of the best of tp, cp and Ulysses."""
    lengths = (128, 256, 512, 1024, 2048)
    systems = {"metp": ("METP", "o-", "#3b76b5"), "memo": ("best of tp, cp and Ulysses", "s-", "#d98a1c")}
    figure = Figure(figsize=(7.5, 3.6), dpi=150, layout="constrained")
    tokens_axes, memory_axes = figure.subplots(1, 2)
    for system, (label, marks, colour) in systems.items():
        answers = [_on_one_node(system, length) for length in lengths]
        fitting = [(n, a.summary) for n, a in zip(lengths, answers, strict=True) if a.best and a.summary]
        at = [length for length, _ in fitting]
        tokens_axes.plot(at, [s.tokens_per_device_s for _, s in fitting], marks, color=colour, label=label)
        used = [s.device_memory.needed_bytes / GIB for _, s in fitting if s.device_memory]
        memory_axes.plot(at, used, marks, color=colour, label=label)
    capacity = {s.device_memory.capacity_bytes / GIB for _, s in fitting if s.device_memory}
    memory_axes.axhline(capacity.pop(), color="#555555", linestyle="--")
    for axes, name in ((tokens_axes, "tokens per GPU and second"), (memory_axes, "device memory with reserve (GiB)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n}K" if n < 1024 else f"{n // 1024}M" for n in lengths])
        axes.set(xlabel="tokens of the sequence", ylabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
    tokens_axes.legend(frameon=False)
    figure.suptitle("gpt-7b, one sequence, eight A100 of one node, full recompute, predicted", fontsize=10)
    return figure


def _on_one_node(system: str, length: int) -> memo.WhatIfResult:
    return memo.what_if(
        "gpt-7b", cluster="a100-1x8", seq_len=f"{length}k", system=system, recompute="full", global_batch=1
    )


def validated() -> Figure:
    """Return the error in speed of every published row, by source, as accepted in ``memo_sim/data/accuracy.json``."""
    groups = {name: _speed_errors(group) for name, group in load_accepted().groups.items() if group.errors}
    figure = Figure(figsize=(7.5, 0.5 + 0.24 * len(groups)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, errors in enumerate(groups.values()):
        axes.plot([100 * error for error in errors], [row] * len(errors), "o", color="#3b76b5", alpha=0.4, ms=4)
    axes.axvline(0, color="#555555", linewidth=0.8)
    axes.set_yticks(range(len(groups)), [name.replace("/", ": ") for name in groups], fontsize=8)
    axes.set(xlabel="predicted speed over measured speed - 1 (%); right: predicted too fast", ylim=(len(groups), -1))
    axes.grid(axis="x", alpha=0.3)
    return figure


def _speed_errors(group: GroupAccuracy) -> list[float]:
    """Return predicted over measured speed - 1 of each row; of a step, whose error is of its time, the inverse."""
    of_time = group.quantity == "step_ms"
    return [1 / (1 + error) - 1 if of_time else error for error in group.errors.values()]


if __name__ == "__main__":
    for draw in (alpha, subsequences, metp, validated):
        draw().savefig(CONCEPTS / f"{draw.__name__}.png")
