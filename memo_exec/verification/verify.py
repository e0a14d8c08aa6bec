"""Compares a plan's gradients, losses and gradient norms with keep-everything and with plain autograd.

    reduce the plan -> play it -> play keep-everything on the same ranks -> autograd in one process -> compare

The references share less and less with the plan: keep-everything has the same kernels and ranks, but keeps, copies and
cuts nothing; autograd has none of memo's kernels or programs, and computes in fp64.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from memo_exec.distributed.shards import whole_parameters
from memo_exec.kernels import KERNELS, Kernel, StepScalars
from memo_exec.verification.autograd_model import AutogradModel
from memo_exec.verification.local_ranks import play_on_ranks
from memo_exec.verification.play import (
    EPSILON,
    LEARNING_RATE,
    Change,
    Play,
    Played,
    global_batch,
    global_documents,
    parameter,
    rounds_routes,
    scalars_of,
    unchanged,
    whole_gradients,
    whole_routes,
)
from memo_exec.verification.reduction import keep_everything, reduced, reductions
from memo_sim.contract.plan import Decisions
from memo_sim.contract.verdict import Against, CheckResult, Compared, Verdict
from memo_sim.program.layout.parameters import SELECTION_BIAS, moment_dtype
from memo_sim.program.lower import lower, program_sha256

KEEP_EVERYTHING, AUTOGRAD = "keep-everything", "autograd"

FP32 = {
    KEEP_EVERYTHING: (1e-5, "fp32 sums in another order differed by up to 3e-6 in verified plans"),
    AUTOGRAD: (3e-5, "fp32 differed from fp64 by up to 7e-6 there, most for norms of keys, where sums cancel"),
}
BF16 = {
    KEEP_EVERYTHING: (2.0**-5, "bf16 rounds to 2^-9, and the plan may sum its row blocks in another order"),
    AUTOGRAD: (2.0**-4, "twice what bf16 differs from fp64 on a CPU with 16 layers (0.027)"),
}
"""Tolerances, and why. In bf16 small faults hide in rounding: fp32 on a CPU is the stricter proof."""

MOST_SCORES = 2**25
"""Largest number of scores of one head that autograd holds: 0.25 GiB in fp64 for each of few copies."""

CPU_ATTENTION = "torch-flash-cpu"


@dataclass(frozen=True)
class Values:
    """What is compared: whole gradients of the first step by name, loss and gradient norm of every step."""

    gradients: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    apart: dict[str, float]
    """How much ranks with the same entries of a gradient differ, by name."""
    moved: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Of a reference that goes to the plan's experts, by layer: how many are not those with the best scores there, and
    how far off the furthest one is, relative to the largest score."""


def verify(
    decisions: Decisions,
    *,
    kernels: Mapping[str, Kernel] = KERNELS,
    change: Change = unchanged,
    seed: int = 0,
    steps: int = 1,
    layers: int = 0,
) -> Verdict:
    """Reduce a plan, play it in fp32 on this machine's CPU, and compare it with both references.

    Args:
        decisions: the plan's decisions at full size.
        kernels: what plays the plan; the references have memo-exec's own. For tests that plant faults.
        change: changes the plan's program before it is played, for the same tests. With several ranks, it and kernels
            that are not memo-exec's own are pickled.
        seed: of weights and tokens.
        steps: number of steps; from the second on, losses and norms show the optimizer's update.
        layers: of the reduced model; 0: as many as the policy needs.

    Raises:
        CannotRun: when the plan cannot be reduced, or cannot be played here.
        MemoError: when a rank fails.
    """
    began = time.perf_counter()
    here = reduced(decisions, layers=layers, attention=CPU_ATTENTION)
    plays = plays_of(here, seed=seed, steps=steps, kernels=kernels, change=change)
    verdict = judge(decisions, plays, play_here(plays))
    return msgspec.structs.replace(verdict, seconds=time.perf_counter() - began)


def plays_of(
    here: Decisions,
    *,
    seed: int,
    steps: int,
    kernels: Mapping[str, Kernel] = KERNELS,
    change: Change = unchanged,
) -> tuple[Play, Play]:
    """Return what to play: a reduced plan, and keep-everything; ``kernels`` and ``change`` are those of the plan."""
    replaced = {op: kernel for op, kernel in kernels.items() if KERNELS.get(op) is not kernel}
    return (
        Play(decisions=here, seed=seed, steps=steps, kernels=replaced, change=change),
        Play(decisions=keep_everything(here), seed=seed, steps=steps),
    )


def play_here(plays: Sequence[Play]) -> list[list[Played]]:
    """Return the results of every play, in order of ranks: of this process, or of ranks that it starts, on the CPU."""
    if plays[0].decisions.layout.devices > 1:
        return play_on_ranks(plays)
    return [[play.on(0, {}, "cpu")] for play in plays]


def judge(
    decisions: Decisions,
    plays: tuple[Play, Play],
    played: Sequence[list[Played]],
    *,
    checks: Sequence[CheckResult] = (),
    machine: str = "",
) -> Verdict:
    """Compare what was played of the plan ``decisions`` with keep-everything and, where it fits, with autograd.

    ``checks`` are what the checkers of programs said about the plan; the verdict includes them.
    """
    play = plays[0]
    here = play.decisions
    plan, kept = map(_values, played)
    limits = FP32 if here.dtype == "fp32" else BF16
    limit, why = limits[KEEP_EVERYTHING]
    against = [Against(reference=KEEP_EVERYTHING, tolerance=limit, why=why, compared=_compared(plan, kept, limit))]
    limit, why = limits[AUTOGRAD]
    skipped, agree, compared = _too_large(here), None, []
    if not skipped:
        shapes = {name: tuple(gradient.shape) for name, gradient in kept.gradients.items()}
        routes = whole_routes(played[0], here) if rounds_routes(here) else {}
        true = autograd_values(here, shapes, play.seed, play.steps, routes)
        why += _other_experts(true, here)
        compared = _compared(plan, true, limit)
        agree = all(each.fine for each in _compared(kept, true, limit))
    against.append(Against(reference=AUTOGRAD, tolerance=limit, why=why, skipped=skipped, compared=compared))
    same = all(each.fine for reference in against for each in reference.compared)
    return Verdict(
        verified=same and all(check.fine for check in checks),
        model=decisions.model.name,
        layout=decisions.layout,
        recompute=decisions.recompute,
        alpha=decisions.alpha,
        program_sha256=program_sha256(lower(decisions)),
        machine=machine,
        dtype=here.dtype,
        ranks=here.layout.devices,
        steps=play.steps,
        seed=play.seed,
        reductions=reductions(decisions, here),
        checks=list(checks),
        against=against,
        references_agree=agree,
        losses=[loss if math.isfinite(loss) else None for loss in plan.losses],
    )


def _values(ranks: list[Played]) -> Values:
    gradients, apart = whole_gradients(ranks)
    return Values(gradients, _agreed([r.losses for r in ranks]), _agreed([r.norms for r in ranks]), apart)


def _agreed(by_rank: list[list[float]]) -> list[float]:
    """Return the ranks' common numbers: for each step the one that is furthest from the first rank's."""
    first = by_rank[0]
    return [max((rank[i] for rank in by_rank), key=lambda v, i=i: _gap(v, first[i])) for i in range(len(first))]  # type: ignore[misc]


def _gap(value: float, other: float) -> float:
    return abs(value - other) if math.isfinite(value) else math.inf


def _too_large(here: Decisions) -> str:
    """Return why one process cannot hold the attention of autograd; empty when it can."""
    scores = here.seq_tokens**2
    if scores <= MOST_SCORES:
        return ""
    return f"one process cannot hold the {scores} attention scores of a head (at most {MOST_SCORES})"


def _other_experts(true: Values, here: Decisions) -> str:
    """Return how many tokens autograd sends to other experts than it would choose; empty where it chooses them."""
    experts = here.model.mixture
    if not true.moved or experts is None:
        return ""
    count = sum(moved for moved, _ in true.moved.values())
    every = len(true.moved) * here.global_batch * here.seq_tokens * experts.per_token
    return f"; it takes the experts that the plan chose, of which rounding moved {count} of {every}"


def autograd_values(
    here: Decisions,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    steps: int,
    routes: Mapping[tuple[int, int], Tensor] | None = None,
) -> Values:
    """Train ``steps`` steps with plain autograd and AdamW in fp64, on the weights and tokens of the plan.

    ``shapes``: the shape of every trained parameter. Parameters start as the plan's dtype rounds them. ``routes``: by
    step and layer the experts (global batch, tokens, per_token) that tokens go to; without them those with the best
    scores. A score that is rounded otherwise sends a token elsewhere, which no tolerance of a gradient covers.
    """
    frozen = {name: each.shape for name, each in whole_parameters(here.model, here.lora).items() if each.frozen}
    shapes = {**shapes, **frozen}
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(here.dtype, torch.float32)
    initial = {name: parameter(name, shape, here.model, seed).to(dtype) for name, shape in shapes.items()}
    model = AutogradModel(here.model, initial, adapters=here.lora)
    counts = {name for name in model.trained if name.endswith(SELECTION_BIAS)}
    trained = {name: p for name, p in model.trained.items() if name not in counts}
    optimizer = _AdamW(trained, narrow=moment_dtype(here) == "bf16")
    losses, norms, gradients = [], [], {}
    for step in range(1, steps + 1):
        inputs = global_batch(here, seed, step)
        scalars, total = scalars_of(step, inputs[1]), 0.0
        for p in model.trained.values():
            p.grad = None
        documents = global_documents(here, seed, step) or [(here.seq_tokens,)] * len(inputs[0])
        for number, (ends, (ids, labels, *rollout)) in enumerate(
            zip(documents, zip(*inputs, strict=True), strict=True)
        ):
            for first, end in pairwise((0, *ends)):
                model.routes = {
                    f"layer.{layer}/": chosen[number, first:end]
                    for (at, layer), chosen in (routes or {}).items()
                    if at == step
                }
                numbers = rollout[0][None, first:end] if rollout else None
                loss = model.loss(ids[None, first:end], labels[None, first:end], scalars.loss_scale, numbers, scalars)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.trained.items()}
        losses.append(total)
        # In the place of a selection bias's gradient are the rows of each expert: no gradient, so not in the norm.
        norms.append(math.sqrt(sum(float(found[name].square().sum()) for name in trained)))
        if step == 1:
            gradients = {name: gradient.clone() for name, gradient in found.items()}
        if step < steps:
            optimizer.step(found)
            _balance(here, {name: model.trained[name] for name in counts}, found)
    return Values(gradients, losses, norms, {}, model.moved)


@torch.no_grad()
def _balance(here: Decisions, biases: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    """Move selection biases by fixed steps towards the mean number of rows (DeepSeek-V3, section 2.1.2)."""
    experts = here.model.mixture
    if experts is None:
        return
    for name, bias in biases.items():
        mean = here.global_batch * here.seq_tokens * experts.per_token / experts.count
        bias.sub_(experts.selection_rate * torch.sign(rows[name] - mean))


class _AdamW:
    """AdamW as Loshchilov and Hutter write it (2019, algorithm 2), one tensor at a time; only matrices decay.

    ``narrow``: moments are rounded to bf16 between steps.
    """

    def __init__(self, parameters: dict[str, Tensor], *, narrow: bool) -> None:
        self.narrow = narrow
        self.parameters, self.scalars, self.steps = parameters, StepScalars(lr=LEARNING_RATE, eps=EPSILON), 0
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update every parameter."""
        self.steps += 1
        s = self.scalars
        for name, p in self.parameters.items():
            (first, second), g = self.moments[name], gradients[name]
            first.mul_(s.beta1).add_((1 - s.beta1) * g)
            second.mul_(s.beta2).add_((1 - s.beta2) * g * g)
            mean, scale = first / (1 - s.beta1**self.steps), second / (1 - s.beta2**self.steps)
            decay = s.weight_decay if p.dim() > 1 else 0.0
            p.sub_(s.lr * (mean / (scale.sqrt() + s.eps) + decay * p))
            if self.narrow:
                for moment in (first, second):
                    moment.copy_(moment.to(torch.bfloat16))


def _compared(plan: Values, reference: Values, tolerance: float) -> list[Compared]:
    """Return the differences: the loss, the gradient norm, then every kind of parameter's gradient."""
    found = []
    for what, ours, theirs in (
        ("loss", plan.losses, reference.losses),
        ("gradient norm", plan.norms, reference.norms),
    ):
        by_step = {f"step {i + 1}": _relative(a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))}
        found.append(_entry(what, by_step, tolerance))
    if reference.moved:
        found.append(_entry("experts", {name: furthest for name, (_, furthest) in reference.moved.items()}, tolerance))
    kinds: dict[str, dict[str, float]] = {}
    for name in sorted({*plan.gradients, *reference.gradients}):
        kind = re.sub(r"^layer\.\d+/", "layer/", name)
        gap = _tensor_difference(plan.gradients.get(name), reference.gradients.get(name))
        kinds.setdefault(kind, {})[name] = max(gap, plan.apart.get(name, 0.0))
    return found + [_entry(f"gradient of {kind}", by_name, tolerance) for kind, by_name in kinds.items()]


def _entry(what: str, differences: Mapping[str, float], tolerance: float) -> Compared:
    where = max(differences, key=differences.__getitem__)
    worst = differences[where]
    return Compared(what=what, difference=worst if math.isfinite(worst) else None, where=where, fine=worst <= tolerance)


def _relative(value: float, reference: float) -> float:
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    return abs(value - reference) / abs(reference) if reference else float(value != reference)


def _tensor_difference(values: Tensor | None, reference: Tensor | None) -> float:
    """Return the largest difference relative to the reference's largest entry; infinity for NaN and missing tensors."""
    if values is None or reference is None or values.shape != reference.shape:
        return math.inf
    gap, scale = (values.double() - reference.double()).abs().max(), reference.double().abs().max()
    found = float(gap / scale) if scale > 0 else (0.0 if gap == 0 else math.inf)
    return found if math.isfinite(found) else math.inf
