"""Explains a what-if answer in sentences: what limits the step, what fills memory, why the runner-up is slower.

Each function returns the sentences about one topic; it returns none where there is nothing to say. What is said about
activations, device memory and parallelism has modules of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memo_sim.contract.cluster import DEFAULT_EFFICIENCY
from memo_sim.contract.hardware import BOARD, DISTURBED, POWER
from memo_sim.contract.knobs import FrameworkLibrary
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.arena import Arena
from memo_sim.planning.outcome import SearchResult
from memo_sim.planning.presets import KEEP, Policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import predict
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.operators.framework_kernels import library_of
from memo_sim.reasons import activations, device_memory, parallelism
from memo_sim.reasons.adapters import adapters
from memo_sim.reasons.attention import attention
from memo_sim.reasons.documents import documents
from memo_sim.reasons.experts import experts
from memo_sim.reasons.fp8 import fp8
from memo_sim.reasons.latent import latent_attention
from memo_sim.reasons.metp import metp
from memo_sim.reasons.policy import policy
from memo_sim.reasons.runner_up import Closeness, allocator_decides, closer_than_the_interval, label, runner_up, ties
from memo_sim.reasons.subsequences import balance, heuristic, subsequences
from memo_sim.reasons.windows import windows
from memo_sim.views.plan_table import layout_label

EXACT = 1e-6
LIBRARIES: dict[FrameworkLibrary, str] = {
    "eager": "eager torch kernels (a kernel for each operator and cast)",
    "compiled": "kernels of torch.compile",
    "fused": "fused kernels of Megatron-LM and Transformer Engine",
    "jit": "kernels of Megatron-LM before Transformer Engine (TorchScript, apex)",
    "flash-attn": "kernels of flash-attention's training code",
    "internevo": "kernels of InternEvo (apex's norms, flash-attn's rotary, torch's operators)",
}
"""What the kernels of each library are called."""
CHECKPOINTED_LOSS = " (checkpointed-fp32 before TRL 1.13)"
"""What to name where TRL is older."""
SLACK = 0.01
"""Compute is the bottleneck when it is idle for less than this fraction of the step."""


def explain(
    question: Question,
    found: SearchResult,
    simulation: Simulation | None,
    arena: Arena | None = None,
    *,
    close: Closeness | None = None,
    ways: Sequence[str] = (),
) -> list[str]:
    """Return the reasons, most important first. When no plan fits, return what is missing and what would help.

    ``close`` are the plans that cannot be told from the best, ``ways`` the ways out where nothing fits.
    """
    if simulation is None:
        return _nothing_fits(question, found, ways)
    alike = _of_one_micro_batch(found)
    lines = [*_rounded(question, simulation), _binding(simulation), *attention(question, simulation.decisions)]
    lines += _own_loss(question, simulation.decisions)
    lines += [*activations.recompute(alike, simulation), device_memory.peak(simulation)]
    lines += [*_rowwise(simulation), *adapters(simulation)]
    lines += device_memory.planned_arena(simulation, arena) if arena else []
    lines += [*device_memory.allocator(simulation), *device_memory.limited(alike)]
    lines += [
        *parallelism.pipeline(simulation),
        *subsequences(alike, simulation),
        *metp(question, alike, simulation),
        *balance(question, alike),
        *heuristic(question, alike),
        *parallelism.sharding(question, simulation),
        *parallelism.overlap(question, simulation),
        *parallelism.ulysses(simulation),
        *parallelism.tp_chunks(simulation),
        *experts(question, simulation),
        *latent_attention(simulation),
        *policy(simulation),
        *fp8(question, simulation),
        *documents(question, simulation),
        *windows(simulation),
        *activations.alpha(alike),
        *activations.partial_swap(alike),
        *activations.full_recompute(alike, simulation),
        *activations.rowwise_recompute(alike, simulation),
        *activations.rounded_swaps(simulation),
        *_fallback(question, alike),
        *runner_up(found),
        *allocator_decides(found, lambda decisions: predict(question, decisions)),
        *ties(found),
        *closer_than_the_interval(close),
    ]
    if outside := extrapolations(simulation):
        lines.append(f"Outside the calibrated range: {outside}. Treat the figures as extrapolations.")
    lines += _profile(question)
    if found.refused:
        skipped = f"{counted(len(found.refused), 'layout')} cannot be played with this model, sequence and batch"
        lines.append(f"{skipped}; the first is {found.refused[0]}.")
    return lines


def _of_one_micro_batch(found: SearchResult) -> SearchResult:
    """Return the plans with the best plan's micro-batch: others say nothing about its alpha or policy."""
    best = found.best
    if best is None:
        return found
    return replace(found, ranked=[e for e in found.ranked if e.decisions.micro_batch == best.decisions.micro_batch])


def extrapolations(simulation: Simulation) -> str:
    """Return the curves that are read beyond their sizes, with their shares of the step; empty where there are none."""
    return ", ".join(
        f"{name} ({format_percent(share, 0)} of the step)" for name, share in simulation.outside_shares.items()
    )


def _rounded(question: Question, simulation: Simulation) -> list[str]:
    """Say that a pinned alpha was rounded to whole blocks of tokens."""
    asked, alpha = question.pins.alpha, simulation.decisions.alpha
    if asked is None or abs(alpha - asked) < EXACT:
        return []
    granule = simulation.decisions.swap_granule
    each = ", the same number in every subsequence" if simulation.decisions.layout.subsequences > 1 else ""
    return [f"Alpha {asked:.3g} is rounded to {alpha:.3g}: tokens are swapped in blocks of {granule}{each}."]


def _rowwise(simulation: Simulation) -> list[str]:
    """Say that row-wise operators run as a framework's kernels, and what they take."""
    library = library_of(simulation.decisions.kernels.rowwise)
    if library is None:
        return []
    stage = simulation.pace
    rowwise = stage.per_instruction(lambda i: isinstance(i.work, Rowwise) and i.lane is Lane.COMPUTE) * stage.weights
    share = float((rowwise * stage.seconds).sum()) / stage.compute_s
    text = f"Row-wise operators run as {LIBRARIES[library]} and take {format_percent(share)} of compute time"
    return [f"{text}; memo-exec cannot play such a plan (--rowwise torch or triton)."]


def _profile(question: Question) -> list[str]:
    """Say which board and power limit the profile was changed to, and whether other work ran during measurement."""
    hardware = question.hardware
    lines = [
        "The cluster names no efficiency of its network by size (size_efficiency), so that of clusters given by name is"
        f" used. {source.text}."
        for source in [question.cluster.sources.get(DEFAULT_EFFICIENCY)]
        if source and question.cluster.nodes > 1
    ]
    lines += [f"The board is {text}." for text in [hardware.provenance.get(BOARD)] if text]
    lines += [f"The power limit is {text}." for text in [hardware.provenance.get(POWER)] if text]
    if disturbed := hardware.provenance.get(DISTURBED):
        lines.append(f"The profile {hardware.name} was measured on a busy machine ({disturbed}). Calibrate again.")
    return lines


def _nothing_fits(question: Question, found: SearchResult, ways: Sequence[str]) -> list[str]:
    nearest = found.ranked[0]
    if nearest.prediction.status == "invalid":
        return [f"No plan can be evaluated. The first is {label(nearest)}: {nearest.prediction.reason}."]
    need = format_bytes(nearest.prediction.shortfall_bytes)
    return [
        f"No plan fits. The nearest is {label(nearest)}, short by {need}: {nearest.prediction.reason}.",
        *attention(question, nearest.decisions),
        f"What would help: {'; '.join(ways)}.",
    ]


def _binding(simulation: Simulation) -> str:
    prediction = simulation.prediction
    step_s = prediction.step_s or 0.0
    compute_s = prediction.lanes.get("compute", 0.0)
    idle_s = step_s - compute_s
    head = (
        f"Compute is busy {format_percent(compute_s / step_s)} of the step" if step_s else "No instruction was played"
    )
    if idle_s < SLACK * step_s:
        return f"{head} and is the bottleneck; it hides copies and communication."
    waits = [(s.seconds, s.waits_for) for s in prediction.stalls if s.lane == "compute"]
    listed = ", ".join(f"{name} {format_seconds(seconds)}" for seconds, name in sorted(waits, reverse=True)[:3])
    return f"{head}; it waits {format_seconds(idle_s)} in total, mostly for {listed}."


def _own_loss(question: Question, decisions: Decisions) -> list[str]:
    """Say which form of the loss a system assumes, where the question leaves it open."""
    if question.loss != "auto" or decisions.loss == "auto":
        return []
    tokens = decisions.loss_chunk_tokens
    chunks = f", in chunks of {format_tokens(tokens)} tokens" if tokens else ""
    what = CHECKPOINTED_LOSS if decisions.loss == "checkpointed" else ""
    return [f"The loss is {decisions.loss}{chunks}: {question.system}'s own; --loss names another{what}."]


def _fallback(question: Question, found: SearchResult) -> list[str]:
    """Say that the system used its fallback for short sequences."""
    best = found.best
    system = question.preset
    if best and best.policy == KEEP and KEEP in system.short_sequences:
        return [f"{system.name} falls back to keeping all activations: they fit, and no plan is faster."]
    return []


def plan_title(decisions: Decisions, prediction_step_s: float | None, cluster: str = "") -> str:
    """Return the one-line heading of a picture, with the cluster that the plan is for."""
    names = {"none": "keep", "full": "full recompute", "tokenwise": "token-wise"}
    policy = names.get(decisions.recompute) or Policy.of(decisions).label
    if decisions.recompute in ("full", "rowwise"):
        policy = Policy.of(decisions).label
    elif decisions.swapped_tokens:
        swap = "full swap" if decisions.swapped_tokens == decisions.local_tokens else "partial swap"
        policy = f"{swap if decisions.recompute == 'none' else policy} alpha {decisions.alpha:.3g}"
    step = f", step {format_seconds(prediction_step_s)}" if prediction_step_s is not None else ""
    tokens = f"{format_tokens(decisions.seq_tokens)} tokens{f' on {cluster}' if cluster else ''}"
    return f"{decisions.model.name}, {tokens}, {layout_label(decisions.layout)}, {policy}{step}"
