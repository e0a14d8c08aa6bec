"""Computes the SPPO paper's figures again.

    sppo-1     the longest sequences: 1M, 2M and 4M tokens of gpt-7b
    sppo-6     which passes access a layer's tensors of the first subsequence: keys and values, skeletal, transient
    sppo-7     a layer's forward over N subsequences and the bubble that N leaves; hidden 4096, 128K tokens, one A100
    sppo-10    Table 4: tokens per GPU and second of three systems
    sppo-11    the gain of each of SPPO's techniques
    sppo-12    the longest sequence of gpt-7b on 32, 64 and 128 GPUs, for the three systems
    sppo-table2    memory of states and of kept activations at 4M tokens, and the fewest A100 that hold both

The systems of Table 4:

    sppo              SP x PP and N of the table; alpha_i by SPPO 5.2
    megatron-lm       the table's tuned SP x PP; activations are recomputed, as section 7 says of the baselines
    deepspeed-fpdt    Ulysses over the table's SP; for 65B over as many devices as it has heads, two sequences per step;
                      none for 13B, whose 40 heads do not divide by 64 devices

Otherwise a step has one sequence. SP is tensor parallelism with sequence parallelism; for 65B, SP 16 spans two nodes.
The paper does not print the batch size. With one sequence, Megatron-LM's stages wait for each other most, and the
printed speed-ups for 65B need that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf

from msgspec.structs import replace as replace_struct

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.figure import Figure, Line, Point
from memo_sim.contract.knobs import MemoryPolicy
from memo_sim.contract.plan import Decisions, Layout, Prediction
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import GIB, KIB, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.engine.simulate import memory_alone
from memo_sim.papers.longest import last_that_fits
from memo_sim.planning.presets import FULL_SWAP, KEEP, SEQUENCE_AWARE, Policy
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import predict, search
from memo_sim.planning.space import candidates
from memo_sim.planning.subsequences import PartPrices, swap_fraction
from memo_sim.program.analysis.access import access_types, accesses
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from memo_sim.views.plan_table import layout_label, short_of

SPPO, MEGATRON, DEEPSPEED = "sppo", "megatron-lm", "deepspeed-fpdt"
UNPLANNED = "sppo, memory not planned"


@dataclass(frozen=True, slots=True)
class Job:
    """A model's rows of Table 4. ``parts``: SPPO's N by thousands of tokens. Then each system's degrees."""

    model: str
    nodes: int
    parts: dict[int, int]
    sppo: tuple[int, int]
    megatron: tuple[int, int]
    ulysses: int | None
    printed: str
    """SPPO's printed speed-up over Megatron-LM, and which systems run out of memory in the paper."""

    def question(self, system: str, thousands: int) -> Question:
        """Return the question of one cell of the table."""
        cluster, hardware = load_cluster(f"a100-{self.nodes}x8-hdr4")
        sp, pp = self.sppo if system == SPPO else self.megatron
        pins = Pins(tp=sp, cp=1, pp=pp, recompute="full")
        if system == SPPO:
            pins = Pins(tp=sp, pp=pp, subsequences=self.parts[thousands])
        sequences = 1
        if system == DEEPSPEED:
            pins, sequences = Pins(ulysses=self.ulysses), cluster.devices // (self.ulysses or cluster.devices)
        pins, model = replace(pins, allocator_limit_gib=0), load_model(self.model)
        return Question(model, cluster, hardware, thousands * KIB, system=system, pins=pins, global_batch=sequences)


JOBS = (
    Job(
        "gpt-7b",
        4,
        {512: 32, 640: 64, 768: 80, 896: 128, 1024: 160},
        (8, 4),
        (32, 1),
        32,
        "1.13 to 1.29; megatron-lm beyond 896K: oom",
    ),
    Job(
        "gpt-13b",
        8,
        {512: 32, 640: 48, 768: 64, 1024: 80, 1280: 160},
        (8, 8),
        (8, 8),
        None,
        "no number; megatron-lm beyond 768K: oom, sppo up to 1280K",
    ),
    Job(
        "gpt-65b",
        16,
        {512: 32, 600: 64, 640: 80, 768: 96, 1024: 128},
        (16, 8),
        (64, 2),
        64,
        "3.38 at 600K, 3.12 at 640K; megatron-lm beyond 768K: oom, deepspeed beyond 512K: oom",
    ),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One system at one length: the prediction, and the layout and policy behind it."""

    prediction: Prediction
    how: str

    @property
    def tgs(self) -> float | None:
        """Tokens per GPU and second; None where it does not fit."""
        return self.prediction.tgs

    @property
    def note(self) -> str:
        """Step time or shortfall, then layout and policy."""
        found = self.prediction
        if found.step_s is None:
            return f"{format_bytes(found.shortfall_bytes)} of {short_of(found.status)} short; {self.how}"
        return f"{format_seconds(found.step_s)}; {self.how}"


def cell(
    job: Job,
    system: str,
    thousands: int,
    policy: Policy = SEQUENCE_AWARE,
    *,
    multiplexed: bool = False,
    windows: Sequence[int] = (1,),
    memory_policy: MemoryPolicy | None = None,
) -> Cell:
    """Return one system's cell of the table.

    ``policy`` is SPPO's activation policy. Sequence-aware offload (5.2) uses the faster of its roundings, any other
    offload the fastest of ``windows``. ``memory_policy`` replaces the system's own.
    """
    question = job.question(system, thousands)
    pins = replace(question.pins, multiplexed=multiplexed, memory_policy=memory_policy)
    question = replace(question, pins=pins)
    if system != SPPO:
        best = search(question).ranked[0]
        how = f"{layout_label(best.decisions.layout)}, {best.policy.label}"
        return Cell(best.prediction, how)
    offered = [c.base for c in candidates(question)[0] if c.policy.hides]
    if policy.alpha is not None:
        base = swap_fraction(offered[0], policy.alpha)
        offered = [replace_struct(base, offload_window=n) for n in windows] if base.swapped_tokens else [base]
    base, prediction = min(((each, predict(question, each)) for each in offered), key=_slower)
    how = f"{layout_label(base.layout)}, {policy.label}, alpha {base.alpha:.2f}"
    lags = f", copies span at most {base.offload_window} passes" if base.offload_window > 1 else ""
    return Cell(prediction, f"{how}{lags}")


def _slower(played: tuple[Decisions, Prediction]) -> float:
    step_s = played[1].step_s
    return inf if step_s is None else step_s


def throughput(progress: Progress) -> Figure:
    """Return SPPO's Figure 10: tokens per GPU and second of every system at every length of Table 4."""
    wanted = [
        (job, system, thousands)
        for job in JOBS
        for system in (SPPO, MEGATRON, DEEPSPEED)
        for thousands in job.parts
        if system != DEEPSPEED or job.ulysses
    ]
    total = len(wanted) + len(JOBS)
    found: dict[tuple[str, str], dict[int, Cell]] = {}
    for done, (job, system, thousands) in enumerate(wanted, start=1):
        found.setdefault((job.model, system), {})[thousands] = cell(job, system, thousands)
        progress(done, total)
    for done, job in enumerate(JOBS, start=len(wanted) + 1):
        found[job.model, UNPLANNED] = _unplanned(job)
        progress(done, total)
    return _figure(
        name="sppo-10",
        title="SPPO's Table 4: tokens per GPU and second, one sequence per step; A100, four 200 Gb/s cards per node",
        lines=[
            Line(
                panel=model,
                label=system,
                points=[Point(x=n * KIB, y=one.tgs, note=one.note) for n, one in cells.items()],
            )
            for (model, system), cells in found.items()
        ],
        findings=[line for job in JOBS for line in _speed_ups(job, found)],
    )


def _unplanned(job: Job) -> dict[int, Cell]:
    """Return SPPO's cells with an eager framework's memory, as its rivals have: from the longest length down to the
    first that fits."""
    cells: dict[int, Cell] = {}
    for thousands in sorted(job.parts, reverse=True):
        cells[thousands] = cell(job, SPPO, thousands, memory_policy="eager")
        if cells[thousands].tgs is not None:
            break
    return cells


def _figure(name: str, title: str, lines: list[Line], findings: list[str] | None = None) -> Figure:
    """Return a figure of tokens per GPU and second over sequence lengths."""
    return Figure(
        name=name,
        title=title,
        x_label="sequence length (tokens)",
        y_label="tokens per GPU and second",
        x_kind="tokens",
        y_kind="number",
        lines=lines,
        findings=findings or [],
    )


def _speed_ups(job: Job, found: dict[tuple[str, str], dict[int, Cell]]) -> list[str]:
    """Return SPPO's speed-up over each other system by length, with the printed one."""
    ours, lines = found[job.model, SPPO], []
    for system in (MEGATRON, DEEPSPEED):
        if (job.model, system) not in found:
            continue
        ratios = [_ratio(n, ours[n], other) for n, other in found[job.model, system].items()]
        printed = f" (SPPO reports {job.printed})" if system == MEGATRON else ""
        lines.append(f"{job.model}, sppo over {system}: {', '.join(ratios)}{printed}.")
    return lines


def _ratio(thousands: int, ours: Cell, other: Cell) -> str:
    length = format_tokens(thousands * KIB)
    if ours.tgs is None or other.tgs is None:
        missing = " and ".join(name for name, one in (("sppo", ours), ("the other", other)) if one.tgs is None)
        return f"{length} {missing} does not fit"
    return f"{length} {ours.tgs / other.tgs:.2f}"


BREAKDOWN = ((JOBS[1], 512), (JOBS[2], 640), (replace(JOBS[1], parts={64: 32}), 64))
"""Jobs of SPPO's Figure 11 and their thousands of tokens, and one so short that compute does not hide all copies."""
LAGS = (2, 4, 8)
"""How many passes copies of everything may take, as in the top of SPPO's Figure 8."""
VARIANTS = (
    (KEEP, False, (1,)),
    (FULL_SWAP, False, (1,)),
    (FULL_SWAP, False, LAGS),
    (SEQUENCE_AWARE, False, (1,)),
    (SEQUENCE_AWARE, True, (1,)),
)
"""Activation policy, whether idle stages are multiplexed, and how many passes copies may take."""


def breakdown(progress: Progress) -> Figure:
    """Return SPPO's Figure 11: no offload, full offload, sequence-aware offload, and multiplexing on top."""
    cells: dict[str, list[tuple[Job, int, Cell]]] = {}
    total = len(VARIANTS) * len(BREAKDOWN)
    for i, (policy, multiplexed, windows) in enumerate(VARIANTS):
        label = policy.label + (", multiplexed" if multiplexed else "")
        label += ", copies span passes" if windows == LAGS else ""
        for j, (job, thousands) in enumerate(BREAKDOWN):
            one = cell(job, SPPO, thousands, policy, multiplexed=multiplexed, windows=windows)
            cells.setdefault(label, []).append((job, thousands, one))
            progress(i * len(BREAKDOWN) + j + 1, total)
    return _figure(
        name="sppo-11",
        title="The gain of each SPPO technique: gpt-13b at 512k and 64k, gpt-65b at 640k",
        lines=[
            Line(
                panel=model,
                label=label,
                points=[Point(x=n * KIB, y=one.tgs, note=_peak(one)) for job, n, one in found if job.model == model],
            )
            for model in dict.fromkeys(job.model for job, _ in BREAKDOWN)
            for label, found in cells.items()
        ],
    )


def _peak(one: Cell) -> str:
    return f"{one.note}, device {format_bytes(one.prediction.peak_device_bytes)}"


LONG = (
    Job("gpt-7b", 4, {1024: 64}, (8, 4), (32, 1), None, ""),
    Job("gpt-7b", 8, {2048: 128}, (8, 8), (32, 2), None, ""),
    Job("gpt-7b", 16, {4096: 256}, (8, 16), (32, 4), None, ""),
)
"""The sequences that SPPO trains on 32, 64 and 128 GPUs, in subsequences of 16K tokens; it prints no configuration."""


def longest(progress: Progress) -> Figure:
    """Return SPPO's own points of its Figure 1: 1M, 2M and 4M tokens of gpt-7b."""
    points = []
    for done, job in enumerate(LONG, start=1):
        ((thousands, _),) = job.parts.items()
        one = cell(job, SPPO, thousands)
        mfu = "" if one.prediction.mfu is None else f", MFU {format_percent(one.prediction.mfu)}"
        points.append(Point(x=thousands * KIB, y=one.tgs, note=f"{8 * job.nodes} GPUs, {_peak(one)}{mfu}"))
        progress(done, len(LONG))
    return _figure(
        name="sppo-1",
        title="SPPO on sequences of 1m, 2m and 4m tokens of gpt-7b, one per step: 32, 64 and 128 A100",
        lines=[Line(label="gpt-7b sppo", points=points)],
    )


STEP_TOKENS, MOST_STEPS = 512 * KIB, 16
"""Lengths of Figure 12 are multiples of 512K tokens up to 8M; longer ones are not tried."""
PART_TOKENS = 16 * KIB
"""Tokens per subsequence in Figure 12, the longest of SPPO's range (6.1), as in ``LONG``."""
TUNED = "megatron-lm, any layout"
PRINTED_ON_32 = 896
"""Thousands of tokens: beyond this length, Megatron-LM's gpt-7b runs out of memory on 32 GPUs (section 7.1)."""


def lengths(progress: Progress) -> Figure:
    """Return SPPO's Figure 12: the longest sequence of gpt-7b by number of GPUs.

    Each system has the layout of Table 4, continued to more GPUs as in ``LONG``. Megatron-LM is shown with its best
    layout as well. SPPO offloads everything, which needs least device memory.
    """
    fitting: dict[str, Callable[[Job, int], str | None]] = {
        SPPO: _sppo_layout,
        MEGATRON: _megatron_layout,
        TUNED: _searched_layout,
        DEEPSPEED: _fpdt_layout,
    }
    points: dict[str, list[Point]] = {label: [] for label in fitting}
    for i, job in enumerate(LONG):
        for j, (label, layout) in enumerate(fitting.items()):
            ((thousands, _),) = job.parts.items()
            first = thousands * KIB // STEP_TOKENS
            tokens, how = last_that_fits(lambda n, f=layout, k=job: f(k, n), STEP_TOKENS, MOST_STEPS, first_steps=first)  # type: ignore[misc]
            note = f"{how}; longer ones not tried" if tokens == STEP_TOKENS * MOST_STEPS else how or "no length fits"
            points[label].append(Point(x=8 * job.nodes, y=tokens or None, note=note))
            progress(i * len(fitting) + j + 1, len(LONG) * len(fitting))
    per_gpu = [round((point.y or 0) / point.x / KIB) for point in points[SPPO]]
    return Figure(
        name="sppo-12",
        title="The longest sequence of gpt-7b by number of A100, one sequence per step",
        x_label="GPUs",
        y_label="sequence length (tokens)",
        x_kind="number",
        y_kind="tokens",
        lines=[Line(label=label, points=its) for label, its in points.items()],
        findings=[
            f"sppo fits {', '.join(map(str, per_gpu))}K tokens per GPU (SPPO trains 1m, 2m and 4m: 32K per GPU).",
            f"On 32 GPUs, Table 4's megatron-lm fits {_tokens(points[MEGATRON][0])} (SPPO: {PRINTED_ON_32}k).",
        ],
        step_tokens=STEP_TOKENS,
    )


def _tokens(point: Point) -> str:
    return "no length" if point.y is None else format_tokens(round(point.y))


def _sppo_layout(job: Job, tokens: int) -> str | None:
    question = replace(job, parts={tokens // KIB: tokens // PART_TOKENS}).question(SPPO, tokens // KIB)
    offered = [swap_fraction(c.base, 1.0) for c in candidates(question)[0] if c.policy.hides]
    return _first_that_fits(question, [replace_struct(each, offload_window=1) for each in offered])


def _megatron_layout(job: Job, tokens: int) -> str | None:
    question = job.question(MEGATRON, tokens // KIB)
    return _first_that_fits(question, [c.base for c in candidates(question)[0]])


def _searched_layout(job: Job, tokens: int) -> str | None:
    question = job.question(MEGATRON, tokens // KIB)
    best = search(replace(question, pins=Pins(recompute="full")), enough_s=inf).best
    return None if best is None else layout_label(best.decisions.layout)


def _fpdt_layout(job: Job, tokens: int) -> str | None:
    question = replace(job, ulysses=load_model(job.model).heads).question(DEEPSPEED, tokens // KIB)
    return _first_that_fits(question, [c.base for c in candidates(question)[0]])


def _first_that_fits(question: Question, offered: Sequence[Decisions]) -> str | None:
    """Return the layout of the first plan whose memory suffices, or None; nothing is played."""
    for each in offered:
        if memory_alone(each, question.hardware, question.cluster).memory.fault is None:
            return layout_label(each.layout)
    return None


@dataclass(frozen=True, slots=True)
class Footprint:
    """A row of SPPO's Table 2: bytes of a model's states, bytes of kept activations, and numbers of GPUs.

    ``by_bytes``: GPUs if memory were divided exactly. ``by_plan``: the fewest that have a plan that keeps everything.
    """

    state_bytes: int
    activation_bytes: int
    by_bytes: int
    by_plan: int
    how: str


PRINTED = {"gpt-7b": (120, 16384, 512), "gpt-13b": (234, 52600, 660), "gpt-65b": (1200, 81920, 1024)}
"""SPPO's Table 2: GB of the model, GB of activations, number of A100."""
TABLE_TOKENS = 4096 * KIB
STATE_TOKENS = 4 * KIB
"""Any length: states do not depend on it, and one device lowers a short sequence faster."""
GPU_BYTES = 80 * GIB
NODE = 8
"""GPUs per node, and the tensor-parallel degree of the plans of Table 2."""


def footprint(model_name: str, seq_tokens: int = TABLE_TOKENS) -> Footprint:
    """Return what a model's states and kept activations need at ``seq_tokens``, and how many A100 hold both."""
    model = load_model(model_name)
    (program,) = lower(Decisions(model=model, seq_tokens=STATE_TOKENS))
    states = sum(f.bytes * f.count for f in program.all_families if f.buffer_class is BufferClass.STATE)
    whole = Decisions(model=model, seq_tokens=seq_tokens)
    activations = model.layers * sum(tensor.bytes for tensor in skeletal_of(whole, shape_of(whole), model.layer(0)))
    by_bytes = ceil((states + activations) / GPU_BYTES)
    by_plan, how = next(
        found for nodes in count(ceil(by_bytes / NODE)) if (found := _kept(model_name, seq_tokens, nodes))
    )
    return Footprint(states, activations, by_bytes, by_plan, how)


def _kept(model_name: str, seq_tokens: int, nodes: int) -> tuple[int, str] | None:
    """Return the GPUs of ``nodes`` and the first plan on them that keeps all activations, or None."""
    cluster, hardware = load_cluster(f"a100-{nodes}x{NODE}-hdr4")
    pins = Pins(tp=NODE, recompute="none", alpha=0.0)
    asked = Question(load_model(model_name), cluster, hardware, seq_tokens, system="every-layout", pins=pins)
    try:
        best = search(asked, enough_s=inf).best
    except Infeasible:  # no layout divides this length
        return None
    return None if best is None else (cluster.devices, layout_label(best.decisions.layout))


def _footprints(progress: Progress) -> Figure:
    """Return SPPO's Table 2 beside what the programs need; one panel for each of its columns."""
    found: dict[str, Footprint] = {}
    for done, name in enumerate(PRINTED, start=1):
        found[name] = footprint(name)
        progress(done, len(PRINTED))
    billions = {name: round(load_model(name).total_params / 1e9, 1) for name in PRINTED}
    panels: dict[str, dict[str, dict[str, tuple[float, str]]]] = {
        "states of the model (GB, 1e9 bytes)": {
            "computed": {name: (row.state_bytes / 1e9, "") for name, row in found.items()},
            "printed": {name: (PRINTED[name][0], "") for name in found},
        },
        "kept activations (GiB)": {
            "computed": {name: (row.activation_bytes / GIB, "") for name, row in found.items()},
            "printed": {name: (PRINTED[name][1], "") for name in found},
        },
        "A100 with 80 GB": {
            "by bytes": {name: (row.by_bytes, "") for name, row in found.items()},
            "by a plan": {name: (row.by_plan, row.how) for name, row in found.items()},
            "printed": {name: (PRINTED[name][2], "") for name in found},
        },
    }
    return Figure(
        name="sppo-table2",
        title=f"Memory that training needs at {format_tokens(TABLE_TOKENS)} tokens, everything kept",
        x_label="parameters (billions)",
        y_label="GB, GiB, GPUs",
        x_kind="number",
        y_kind="number",
        lines=[
            Line(panel=panel, label=label, points=[Point(x=billions[n], y=y, note=how) for n, (y, how) in rows.items()])
            for panel, lines in panels.items()
            for label, rows in lines.items()
        ],
        findings=[_beside_printed(name, row) for name, row in found.items()],
    )


def _beside_printed(name: str, row: Footprint) -> str:
    states, activations, gpus = PRINTED[name]
    return (
        f"{name}: states {format_percent(row.state_bytes / 1e9 / states - 1, signed=True)}, activations "
        f"{format_percent(row.activation_bytes / GIB / activations - 1, signed=True)} against print; "
        f"{row.by_bytes} GPUs by bytes, {row.by_plan} by a plan (SPPO: {gpus} and more)."
    )


LAYER_TOKENS = 128 * KIB
"""Tokens in Figure 7, which times one layer with gpt-7b's hidden size."""
NUMBERS = tuple(2**i for i in range(10))
STAGES = 4
"""The paper's example of a bubble (3.3); Figure 7b does not state its number of stages."""
ACCESSED_NUMBER = 4
MIDDLE_LAYER = 16
ACCESSED = {
    "keys and values": "prefix.kv",
    "queries": "skeletal.q.s0",
    "attention's projection": "layer.fwd.s0/proj_out",
}
"""One tensor of each access type, and the buffer family that holds it."""
SLOWER = 0.03
"""A forward counts as slower when it is longer than the shortest by this fraction."""


def _kernel_efficiency(progress: Progress) -> Figure:
    cluster, hardware = load_cluster("a100-1x1")
    prices = PartPrices(hardware, cluster)
    forward_s: dict[int, float] = {}
    for done, parts in enumerate(NUMBERS, start=1):
        layout = Layout(subsequences=parts, partition="length")
        decisions = Decisions(model=load_model("gpt-7b"), seq_tokens=LAYER_TOKENS, layout=layout)
        forward_s[parts] = prices.forward_s(decisions)
        progress(done, len(NUMBERS))
    bubble_s = {parts: (STAGES - 1) * seconds / parts for parts, seconds in forward_s.items()}
    total_s = {parts: forward_s[parts] + bubble_s[parts] for parts in NUMBERS}
    best, least_s = min(total_s, key=lambda parts: total_s[parts]), min(forward_s.values())
    slower = [parts for parts in NUMBERS if forward_s[parts] > (1 + SLOWER) * least_s and parts > best]
    lines = {"forward": forward_s, f"bubble of {STAGES} stages": bubble_s, "both": total_s}
    findings = [
        f"The sum of forward and bubble is least at N {best}, {format_tokens(LAYER_TOKENS // best)} tokens each."
    ]
    if slower:
        short = format_tokens(LAYER_TOKENS // slower[0])
        findings.append(
            f"With {short} tokens per subsequence or fewer, kernels are more than {format_percent(SLOWER, 0)} slower."
        )
    return Figure(
        name="sppo-7",
        title=f"A layer's forward over {format_tokens(LAYER_TOKENS)} tokens in equal subsequences: h 4096, one A100",
        x_label="tokens per subsequence",
        y_label="milliseconds",
        x_kind="tokens",
        y_kind="number",
        lines=[_line(label, values) for label, values in lines.items()],
        findings=[*findings, "SPPO 6.1 chooses 2K to 16K tokens per subsequence from this figure."],
    )


def _line(label: str, values_s: dict[int, float]) -> Line:
    return Line(label=label, points=[Point(x=LAYER_TOKENS // n, y=1e3 * s) for n, s in values_s.items()])


def _access(progress: Progress) -> Figure:
    layout = Layout(subsequences=ACCESSED_NUMBER)
    decisions = Decisions(model=load_model("gpt-7b"), seq_tokens=LAYER_TOKENS, layout=layout)
    (program,) = lower(decisions)
    found, types = accesses(program, rows=partition(decisions)[0]), access_types(program)
    passes = range(len(program.passes))
    lines, findings = [], []
    for label, family in ACCESSED.items():
        touched = found[family, MIDDLE_LAYER]
        points = [Point(x=number + 1, y=touched[number]) for number in passes]
        lines.append(Line(label=f"type {types[family]}: {label}", points=points))
        findings.append(f"Type {types[family]}, {label}: accessed in {len(touched)} of {len(passes)} passes.")
    progress(1, 1)
    return Figure(
        name="sppo-6",
        title=f"Accesses to one layer's tensors of the first of {ACCESSED_NUMBER} subsequences: gpt-7b, one sequence",
        x_label="pass: forward passes in order, then backward passes from the last",
        y_label="operands",
        x_kind="number",
        y_kind="number",
        lines=lines,
        findings=[*findings, "Type 0 stays on the device; type 1 may be offloaded between its two passes (SPPO 5.1)."],
    )


FIGURES: dict[str, Callable[[Progress], Figure]] = {
    "sppo-1": longest,
    "sppo-6": _access,
    "sppo-7": _kernel_efficiency,
    "sppo-10": throughput,
    "sppo-11": breakdown,
    "sppo-12": lengths,
    "sppo-table2": _footprints,
}
