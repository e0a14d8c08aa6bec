"""Figures of SPPO computed again.

sppo-6    which passes touch a layer's tensors of the first subsequence: its keys and values, what it keeps, the rest
sppo-7    a layer's forward over N subsequences and the bubble that N leaves; h 4096, 128K tokens, one A100
"""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.figure import Figure, Line, Point
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import KIB, format_tokens
from memo_sim.planning.subsequences import PartPrices
from memo_sim.program.analysis.access import access_types, accesses
from memo_sim.program.layout.partition import partition
from memo_sim.program.lower import lower

LAYER_TOKENS = 128 * KIB
"""Of the one layer of Figure 7, whose hidden size is that of gpt-7b."""
PARTS = tuple(2**i for i in range(10))
STAGES = 4
"""The paper's example of a bubble (3.3); Figure 7b does not say for how many stages it is."""
ACCESSED_PARTS = 4
MIDDLE_LAYER = 16
ACCESSED = {
    "keys and values": "prefix.kv",
    "queries": "skeletal.q.s0",
    "attention's projection": "layer.fwd.s0/proj_out",
}
"""A tensor of each type, by the family that holds it."""
SLOWER = 0.03
"""A forward that is so much longer than the shortest counts as slower."""


def _kernel_efficiency(progress: Progress) -> Figure:
    cluster, hardware = load_cluster("a100-1x1")
    prices = PartPrices(hardware, cluster)
    forward_s: dict[int, float] = {}
    for done, parts in enumerate(PARTS, start=1):
        layout = Layout(subsequences=parts, partition="length")
        decisions = Decisions(model=load_model("gpt-7b"), seq_tokens=LAYER_TOKENS, layout=layout)
        forward_s[parts] = sum(part.forward_s for part in prices.parts(decisions))
        progress(done, len(PARTS))
    bubble_s = {parts: (STAGES - 1) * seconds / parts for parts, seconds in forward_s.items()}
    total_s = {parts: forward_s[parts] + bubble_s[parts] for parts in PARTS}
    best, least_s = min(total_s, key=lambda parts: total_s[parts]), min(forward_s.values())
    slower = [parts for parts in PARTS if forward_s[parts] > (1 + SLOWER) * least_s and parts > best]
    lines = {"forward": forward_s, f"bubble of {STAGES} stages": bubble_s, "both": total_s}
    findings = [
        f"Forward and bubble together are least at N {best}, {format_tokens(LAYER_TOKENS // best)} tokens each."
    ]
    if slower:
        short = format_tokens(LAYER_TOKENS // slower[0])
        findings.append(f"From {short} tokens a subsequence down, kernels are more than {SLOWER:.0%} slower.")
    return Figure(
        name="sppo-7",
        title=f"A layer's forward over {format_tokens(LAYER_TOKENS)} tokens in equal subsequences: h 4096, one A100",
        x_label="tokens of a subsequence",
        y_label="milliseconds",
        x_kind="tokens",
        y_kind="number",
        lines=[_line(label, values) for label, values in lines.items()],
        findings=[*findings, "SPPO 6.1 takes 2K to 16K tokens a subsequence from this figure."],
    )


def _line(label: str, values_s: dict[int, float]) -> Line:
    return Line(label=label, points=[Point(x=LAYER_TOKENS // n, y=1e3 * s) for n, s in values_s.items()])


def _access(progress: Progress) -> Figure:
    layout = Layout(subsequences=ACCESSED_PARTS)
    decisions = Decisions(model=load_model("gpt-7b"), seq_tokens=LAYER_TOKENS, layout=layout)
    (program,) = lower(decisions)
    found, types = accesses(program, rows=partition(decisions)[0]), access_types(program)
    passes = range(len(program.passes))
    lines, findings = [], []
    for label, family in ACCESSED.items():
        touched = found[family, MIDDLE_LAYER]
        points = [Point(x=number + 1, y=touched[number]) for number in passes]
        lines.append(Line(label=f"type {types[family]}: {label}", points=points))
        findings.append(f"Type {types[family]}, {label}: touched in {len(touched)} of {len(passes)} passes.")
    progress(1, 1)
    return Figure(
        name="sppo-6",
        title=f"Accesses to one layer's tensors of the first of {ACCESSED_PARTS} subsequences: gpt-7b, one sequence",
        x_label="pass: forwards in order, then backwards from the last",
        y_label="operands",
        x_kind="number",
        y_kind="number",
        lines=lines,
        findings=[*findings, "Type 0 stays on the device, type 1 may travel between its two passes (SPPO 5.1)."],
    )


FIGURES: dict[str, Callable[[Progress], Figure]] = {"sppo-6": _access, "sppo-7": _kernel_efficiency}
