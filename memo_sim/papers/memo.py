"""Computes MEMO's figures and tables again with the engine, on the paper's models and clusters.

    1a    allocated and reserved memory over one step of Megatron-LM: gpt-7b, 512K tokens, 8 A800
    1b    a layer's forward, its FlashAttention and the full offload of its activations by length; gpt-7b, tp 8, 8 A800
    6     FlashAttention and the rest of a layer's forward, for the same lengths
    11a   the longest sequence of three systems on 8 to 64 GPUs, gpt-7b;  11b: their MFU at that length
    11c   their MFU on 64 GPUs from 1024K to 8192K tokens

    table3, table4, table5    MEMO's tables, each prediction at its printed place

Layouts are searched, for figures as for tables. A length is the longest when it fits and the next step does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError, did_you_mean
from memo_sim.contract.figure import Figure, Line, Point, XKind, YKind
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import GIB, KIB, format_tokens
from memo_sim.contract.validation import CaseReport, Validation
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import Simulation
from memo_sim.memory.replay import Iteration
from memo_sim.papers.longest import last_that_fits
from memo_sim.planning.bandwidth import offload_bandwidth
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import Evaluated, play, search
from memo_sim.planning.space import candidates
from memo_sim.program.ir.work import Attention, Copy
from memo_sim.program.lower import lower
from memo_sim.validation.cases import Case, CaseQuestion, load_cases
from memo_sim.validation.validate import validate
from memo_sim.views.plan_table import layout_label
from memo_sim.views.published_table import Cell

MODEL = "gpt-7b"
SYSTEMS = ("deepspeed-ulysses", "megatron-lm", "memo")
"""In the order of the paper."""
GLOBAL_BATCH = 16
"""Sequences per step: tokens per step in the paper's tables, divided by the sequence length."""
NODES = (1, 2, 4, 8)
GPUS = 8
"""GPUs per node."""
STEP_TOKENS = 128 * KIB
MOST_STEPS = 128
MOSTLY = 0.9
MEMOS_MOSTLY = 576 * KIB
"""Beyond this length, attention takes more than ``MOSTLY`` of a layer's forward in the paper's Figure 6."""
SNAPSHOT_SYSTEM, SNAPSHOT_TOKENS = "megatron-lm", 512 * KIB
"""System and length of Figure 1a. The paper prints the model and the length; the system and 8 GPUs are assumed: of its
two baselines, only Megatron-LM runs gpt-7b at this length on 8 GPUs (Table 3)."""
WINDOWS = 32
"""Equal parts of a step in Figure 1a; each is shown at the instant where most is allocated."""
LAYER_TOKENS = tuple(64 * KIB * n for n in range(1, 13))
LONG_TOKENS = tuple(1024 * KIB * n for n in range(1, 9))


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds on one GPU: a layer's forward, its attention, and the offload of all its skeletal tensors."""

    forward_s: float
    attention_s: float
    offload_s: float


def layer_times(seq_tokens: int, *, model: str = MODEL, gpus: int = GPUS) -> LayerTimes:
    """Return the times of a middle layer with full swap and tensor parallelism over ``gpus``."""
    question = _question("full-swap", seq_tokens, gpus=gpus, model=model, sequences=1, pins=Pins(tp=gpus))
    decisions = candidates(question)[0][0].base
    (program,) = lower(decisions)
    works = {t.name: [i.work for i in t.instructions] for t in program.templates}
    pricer = Pricer(question.hardware, question.cluster, decisions.layout)
    copied = sum(work.bytes for work in works["layer.offload"] if isinstance(work, Copy))
    return LayerTimes(
        forward_s=play(question, decisions).layer_forward_s,
        attention_s=sum(pricer.seconds(work) for work in works["layer.fwd"] if isinstance(work, Attention)),
        offload_s=copied / offload_bandwidth(question, decisions, copied),
    )


def longest(question: Callable[[int], Question], step_tokens: int, most_steps: int) -> tuple[int, Evaluated | None]:
    """Return the largest multiple of ``step_tokens`` whose ``question`` has a plan, and its best plan.

    Assumes that a length fits if a longer one fits. Returns 0 and None where not even one step fits.
    """
    return last_that_fits(lambda tokens: _best(question(tokens)), step_tokens, most_steps)


def _best(question: Question) -> Evaluated | None:
    try:
        return search(question).best
    except Infeasible:  # no layout divides this length
        return None


def _question(
    system: str,
    seq_tokens: int,
    *,
    gpus: int,
    model: str = MODEL,
    sequences: int = GLOBAL_BATCH,
    pins: Pins | None = None,
) -> Question:
    nodes = max(1, gpus // GPUS)
    cluster, hardware = load_cluster(f"a800-{nodes}x{gpus // nodes}")
    return Question(
        model=load_model(model),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=seq_tokens,
        system=system,
        global_batch=sequences,
        pins=replace(pins or Pins(), allocator_limit_gib=0),
    )


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that the allocator's cache could not serve, at an allocation retry.

    ``requested_bytes``: the new segment's size. ``unused_bytes``: reserved and not allocated before the retry released
    memory. ``seconds``: of the retry's cudaFree and cudaMalloc calls.
    """

    requested_bytes: int
    unused_bytes: int
    seconds: float


def failed_requests(step: Iteration) -> list[FailedRequest]:
    """Return the requests of a replayed step that made the allocator retry, in order."""
    at = {instant: number for number, instant in enumerate(step.instants.tolist())}
    found = []
    for stop in step.stops:
        if stop.retried_allocation:
            number, requested = at[stop.instant], stop.calls[-1].bytes
            unused = int(step.reserved_bytes[number] - step.allocated_bytes[number]) + requested
            found.append(FailedRequest(requested, unused, stop.seconds))
    return found


def _allocated_and_reserved(progress: Progress) -> Figure:
    question = _question(SNAPSHOT_SYSTEM, SNAPSHOT_TOKENS, gpus=GPUS, sequences=1)
    best = _best(question)
    if best is None:
        raise Infeasible(f"{SNAPSHOT_SYSTEM} has no plan for {MODEL} at {format_tokens(SNAPSHOT_TOKENS)} tokens")
    simulation = play(question, best.decisions)
    caching = simulation.memory.caching
    assert caching is not None, "the system's memory policy is not planned"
    step = caching.replay.steady
    points = _fullest_of_windows(simulation, step)
    progress(1, 1)
    return Figure(
        name="1a",
        title=f"Memory of PyTorch's allocator over one step: {MODEL}, {format_tokens(SNAPSHOT_TOKENS)}, {_how(best)}",
        x_label="seconds",
        y_label="GiB",
        x_kind="number",
        y_kind="number",
        lines=[
            Line(label="reserved", points=[Point(x=second, y=reserved / GIB) for second, _, reserved in points]),
            Line(label="allocated", points=[Point(x=second, y=allocated / GIB) for second, allocated, _ in points]),
        ],
        findings=_fragmentation(step, simulation.fullest.playback.span_s),
    )


def _fullest_of_windows(simulation: Simulation, step: Iteration) -> list[tuple[float, int, int]]:
    """Return (seconds, allocated bytes, reserved bytes) at the fullest instant of each window of the step."""
    times_s = simulation.fullest.playback.start_s[step.instants]
    window_s = simulation.fullest.playback.span_s / WINDOWS
    allocated, reserved = step.allocated_bytes.tolist(), step.reserved_bytes.tolist()
    fullest: dict[int, int] = {}
    for number, second in enumerate(times_s.tolist()):
        window = min(WINDOWS - 1, int(second / window_s))
        if window not in fullest or allocated[number] > allocated[fullest[window]]:
            fullest[window] = number
    return [(round(float(times_s[n]), 1), allocated[n], reserved[n]) for n in sorted(fullest.values())]


def _fragmentation(step: Iteration, step_s: float) -> list[str]:
    """Return the paper's statements on Figure 1a, checked on a replayed step of ``step_s`` seconds."""
    fullest = int(step.allocated_bytes.argmax())
    allocated = int(step.allocated_bytes[fullest])
    unused = int(step.reserved_bytes[fullest]) - allocated
    peak = (
        f"At the highest peak, {allocated / GIB:.1f} GiB are allocated and {unused / GIB:.1f} GiB more are reserved "
        "(MEMO: more than 4 GB)."
    )
    failed = failed_requests(step)
    if not failed:
        return [peak, "No allocation retry happens."]
    sizes = " or ".join(f"{size:g}" for size in sorted({round(each.requested_bytes / GIB, 2) for each in failed}))
    least, most = (f(each.unused_bytes for each in failed) / GIB for f in (min, max))
    requests = (
        f"{len(failed)} requests of {sizes} GiB fail in a step, while {least:.1f} to {most:.1f} GiB are reserved and "
        "not allocated (MEMO: a request of 4 GB fails)."
    )
    calls = (
        f"The allocator's calls to the device take {step.seconds:.0f} of the step's {step_s:.0f} seconds, "
        f"{sum(each.seconds for each in failed):.0f} of them in allocation retries."
    )
    return [peak, requests, calls]


def _layers(progress: Progress) -> dict[int, LayerTimes]:
    found = {}
    for done, tokens in enumerate(LAYER_TOKENS, start=1):
        found[tokens] = layer_times(tokens)
        progress(done, len(LAYER_TOKENS))
    return found


def _offload_and_forward(progress: Progress) -> Figure:
    found = _layers(progress)
    hidden = [tokens for tokens, times in found.items() if times.offload_s <= times.forward_s]
    return _layer_figure(
        "1b",
        "A layer's forward and the offload of its activations: gpt-7b, 8 A800, tp 8",
        {
            "one layer's full offload": {tokens: times.offload_s for tokens, times in found.items()},
            "one layer's forward": {tokens: times.forward_s for tokens, times in found.items()},
            "FlashAttention forward": {tokens: times.attention_s for tokens, times in found.items()},
        },
        [
            f"Forward hides the offload from {format_tokens(hidden[0])} tokens on (MEMO: beyond 192K)."
            if hidden
            else "Forward hides the offload at none of these lengths."
        ],
    )


def _attention_share(progress: Progress) -> Figure:
    found = _layers(progress)
    share = {tokens: times.attention_s / times.forward_s for tokens, times in found.items()}
    first, last = (f"{100 * share[n]:.1f} % at {format_tokens(n)}" for n in (LAYER_TOKENS[0], LAYER_TOKENS[-1]))
    above = [tokens for tokens, part in share.items() if part > MOSTLY]
    passes = f"first passes 90 % at {format_tokens(above[0])} tokens" if above else "stays under 90 % at these lengths"
    memos = format_tokens(MEMOS_MOSTLY)
    there = f" ({100 * share[MEMOS_MOSTLY]:.1f} % at {memos})" if MEMOS_MOSTLY in share else ""
    return _layer_figure(
        "6",
        "Time of a layer's forward, FlashAttention and the rest: gpt-7b, 8 A800, tp 8",
        {
            "FlashAttention": {tokens: times.attention_s for tokens, times in found.items()},
            "the rest": {tokens: times.forward_s - times.attention_s for tokens, times in found.items()},
        },
        [
            f"FlashAttention's share of the forward grows from {first} tokens to {last}.",
            f"Here it {passes}{there}; in MEMO's paper it passes 90 % beyond {memos}.",
        ],
    )


def _layer_figure(name: str, title: str, seconds: dict[str, dict[int, float]], findings: list[str]) -> Figure:
    """Return a figure of a layer's times by length; ``seconds`` holds each line's values by tokens."""
    return Figure(
        name=name,
        title=title,
        x_label="sequence length (tokens)",
        y_label="milliseconds",
        x_kind="tokens",
        y_kind="number",
        lines=[
            Line(label=label, points=[Point(x=tokens, y=1e3 * value) for tokens, value in values.items()])
            for label, values in seconds.items()
        ],
        findings=findings,
    )


def _on_more_gpus(progress: Progress) -> dict[str, list[tuple[int, int, Evaluated | None]]]:
    """Return (GPUs, longest sequence, its best plan) for every system."""
    found: dict[str, list[tuple[int, int, Evaluated | None]]] = {system: [] for system in SYSTEMS}
    for i, system in enumerate(SYSTEMS):
        for j, nodes in enumerate(NODES):
            gpus = nodes * GPUS
            tokens, best = longest(lambda t, s=system, g=gpus: _question(s, t, gpus=g), STEP_TOKENS, MOST_STEPS)  # type: ignore[misc]
            found[system].append((gpus, tokens, best))
            progress(i * len(NODES) + j + 1, len(SYSTEMS) * len(NODES))
    return found


def _longest(progress: Progress) -> Figure:
    found = _on_more_gpus(progress)
    per_gpu = [tokens // gpus // KIB for gpus, tokens, _ in found["memo"]]
    return _system_figure(
        ("11a", "The longest sequence of gpt-7b by number of A800"),
        ("GPUs", "number"),
        ("sequence length (tokens)", "tokens"),
        {
            system: [Point(x=gpus, y=tokens or None, note=_how(best)) for gpus, tokens, best in rows]
            for system, rows in found.items()
        },
        finding=f"memo fits {', '.join(map(str, per_gpu))}K tokens per GPU (MEMO: linear, 128K per GPU on 8).",
        step_tokens=STEP_TOKENS,
    )


def _at_the_longest(progress: Progress) -> Figure:
    found = _on_more_gpus(progress)
    return _system_figure(
        ("11b", "MFU of gpt-7b at each system's longest sequence"),
        ("GPUs", "number"),
        ("MFU", "fraction"),
        {
            system: [Point(x=gpus, y=_mfu(best), note=f"{format_tokens(n)}, {_how(best)}") for gpus, n, best in rows]
            for system, rows in found.items()
        },
        finding=_least_mfu([best for _, _, best in found["memo"]]),
        step_tokens=STEP_TOKENS,
    )


def _on_64_gpus(progress: Progress) -> Figure:
    plans: dict[str, list[Evaluated | None]] = {system: [] for system in SYSTEMS}
    for i, system in enumerate(SYSTEMS):
        for j, tokens in enumerate(LONG_TOKENS):
            plans[system].append(_best(_question(system, tokens, gpus=NODES[-1] * GPUS)))
            progress(i * len(LONG_TOKENS) + j + 1, len(SYSTEMS) * len(LONG_TOKENS))
    return _system_figure(
        ("11c", "MFU of gpt-7b on 64 A800"),
        ("sequence length (tokens)", "tokens"),
        ("MFU", "fraction"),
        {
            system: [Point(x=n, y=_mfu(best), note=_how(best)) for n, best in zip(LONG_TOKENS, its, strict=True)]
            for system, its in plans.items()
        },
        finding=_least_mfu(plans["memo"]),
    )


def _system_figure(
    name: tuple[str, str],
    x: tuple[str, XKind],
    y: tuple[str, YKind],
    points: dict[str, list[Point]],
    *,
    finding: str,
    step_tokens: int = 0,
) -> Figure:
    """Return a figure with one line per system; ``name`` is (name, title), ``x`` and ``y`` are (label, kind)."""
    return Figure(
        name=name[0],
        title=name[1],
        x_label=x[0],
        y_label=y[0],
        x_kind=x[1],
        y_kind=y[1],
        lines=[Line(label=system, points=its) for system, its in points.items()],
        findings=[finding],
        step_tokens=step_tokens,
    )


def _mfu(best: Evaluated | None) -> float | None:
    return None if best is None else best.prediction.mfu


def _how(best: Evaluated | None) -> str:
    return "no plan fits" if best is None else f"{layout_label(best.decisions.layout)}, {best.policy.label}"


def _least_mfu(plans: Sequence[Evaluated | None]) -> str:
    values = [value for plan in plans if (value := _mfu(plan)) is not None]
    if not values:
        return "memo: no plan fits."
    return f"memo: at least {100 * min(values):.1f} % in the {len(values)} of {len(plans)} that fit (MEMO: over 50 %)."


TABLES = {"table3": "memo-table3", "table4": "memo-table4", "table5": "memo-table5"}
"""MEMO's tables and the case files with their rows."""

VARIANTS = {"full": "full recompute", "tokenwise": "token-wise", "none": "keep", "selective": "selective recompute"}


def published(name: str, *, progress: Progress | None = None) -> tuple[Validation, list[Cell]]:
    """Return the validation of the table called ``name``, and the place of each case in the printed table.

    Raises:
        UsageError: when there is no such table.
    """
    if name not in TABLES:
        raise UsageError("no such table", got=repr(name), wanted=", ".join(TABLES), hint=did_you_mean(name, TABLES))
    cases = load_cases(TABLES[name])
    report = validate(cases, progress=progress)
    return report, cells(cases, report.cases)


def cells(cases: list[Case], reports: list[CaseReport]) -> list[Cell]:
    """Return each case's place: lengths are columns; in a table over alpha, alphas are columns and lengths are rows."""
    return [_cell(case.question, report) for case, report in zip(cases, reports, strict=True)]


def _cell(asked: CaseQuestion, report: CaseReport) -> Cell:
    length, block = format_tokens(asked.seq_tokens), f"{asked.model} on {asked.cluster}"
    if asked.alpha is not None:
        return Cell(block, length, f"{asked.alpha:g}", report)
    return Cell(block, _row(asked), length, report)


def _row(asked: CaseQuestion) -> str:
    """Return the label of a row: the system, or recompute mode and memory policy where the table compares those."""
    if "recompute" not in asked.words:
        return asked.system
    plan = {"yes": ", planned memory", "no": ", caching allocator"}.get(asked.words.get("memory_plan", ""), "")
    return VARIANTS[asked.words["recompute"]] + plan


FIGURES: dict[str, Callable[[Progress], Figure]] = {
    "1a": _allocated_and_reserved,
    "1b": _offload_and_forward,
    "6": _attention_share,
    "11a": _longest,
    "11b": _at_the_longest,
    "11c": _on_64_gpus,
}
