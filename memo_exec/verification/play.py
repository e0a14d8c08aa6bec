"""Plays one rank's program for a few steps with random weights and tokens, and returns losses and gradients.

Weights and tokens depend on the seed alone, not on the layout: every rank takes its part of the same tensors. So the
results of two layouts, or of plain autograd, can be compared. Every parameter has noise, so that no gradient is
negligible, and a fifth of the labels does not count.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from memo_exec.distributed.groups import Groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Kernel, StepScalars
from memo_exec.kernels.call import Call, Ends
from memo_exec.machine.rank_placement import first_fit_placement
from memo_exec.training import weights
from memo_exec.training.loop import tokens_of
from memo_sim.contract.documents import fill
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.arena.library_workspaces import without_library
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.program import Program
from memo_sim.program.layers.loss import ROLLOUT_NUMBERS
from memo_sim.program.layout.rank_order import coordinate
from memo_sim.program.layout.token_order import rows_of_a_cut, token_runs

NOISE_STD = 0.08
"""Of the noise on every parameter. With GPT-2's initial values alone most gradients would be tiny."""

IGNORED = 0.2
"""Fraction of the labels that the loss does not count."""
LOG_PROBABILITY_STD = 0.3
"""Standard deviation of a rollout's log-probabilities around those of tokens that are all equally likely."""

LEARNING_RATE = 1e-2
EPSILON = 1e-4
"""AdamW's, larger than usual: an update of lr x g / (|g| + 1e-8) would turn the rounding of a gradient near zero into a
step of the whole learning rate."""

ROUTE = "experts.route"
"""The instruction that chooses experts."""

Change = Callable[[Program], Program]


def unchanged(program: Program) -> Program:
    """Return the program as it is."""
    return program


@dataclass(frozen=True)
class Shard:
    """A rectangle of a gradient: the tensor's name, the place and the tensor's whole shape."""

    name: str
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Route:
    """The experts (rows, per_token) that one layer chose for the rows of a micro-batch.

    ``rows``: of each, the token's number in the global batch of the step, sequence after sequence.
    """

    step: int
    layer: int
    rows: Tensor
    experts: Tensor


class _Recorder:
    """Chooses experts with a kernel, and keeps what it chose in forward."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.chosen: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        """By layer and micro-batch: the first row of each call, and its experts."""

    def __call__(self, call: Call) -> None:
        self.kernel(call)
        if call.instruction.phase is Phase.FORWARD:
            experts = call.matrix("experts").detach().to("cpu", torch.int64, copy=True)
            self.chosen.setdefault((call.layer, call.micro_batch), []).append((call.first("experts"), experts))

    def routes(self, step: int, rows: Sequence[Tensor]) -> Iterator[Route]:
        """Yield what was chosen since the last call; ``rows`` are those of every micro-batch."""
        for (layer, micro_batch), parts in sorted(self.chosen.items()):
            experts = torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])])
            yield Route(step, layer, rows[micro_batch], experts)
        self.chosen.clear()


@dataclass(frozen=True)
class Played:
    """What one rank returns: loss and gradient norm of every step, and its shards of the first step's gradients."""

    losses: list[float]
    norms: list[float]
    gradients: list[Shard]
    routes: list[Route] = field(default_factory=list)
    """The experts that its tokens went to, where rounding may send them elsewhere (dtypes of two bytes)."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """What to play on every rank. ``kernels`` and ``change`` are for planted faults."""

    decisions: Decisions
    seed: int = 0
    steps: int = 1
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    """Kernels by operator that replace memo-exec's own."""
    change: Change = unchanged
    """Changes the rank's lowered program before it is played."""

    def on(self, rank: int, groups: Groups, device: torch.device | str, *, sharing: int = 1) -> Played:
        """Play on one rank, whose process groups are ``groups``; ``sharing`` processes share the host's cores."""
        decisions = self.decisions
        program = self.change(rank_program(decisions, MeshCoordinates(decisions.layout, rank)))
        placement = None
        if decisions.memory_policy == "planned":
            columns = expand(program)
            lives = without_library(program, liveness(program, columns))
            placement = first_fit_placement(requests_of(program, columns, lives=lives))
        kernels, recorder = {**KERNELS, **self.kernels}, None
        if rounds_routes(decisions):
            kernels[ROUTE] = recorder = _Recorder(kernels[ROUTE])
        with Interpreter(
            decisions,
            program,
            device=device,
            placement=placement,
            rank=rank,
            groups=groups,
            sharing=sharing,
            kernels=kernels,
        ) as interpreter:
            return self._played(interpreter, rank, recorder)

    def _played(self, interpreter: Interpreter, rank: int, recorder: _Recorder | None) -> Played:
        for name, found in weights.by_name(interpreter).items():
            whole = parameter(name, found[0].whole, self.decisions.model, self.seed)
            for held in found:
                held.view.copy_(held.of(whole))
        losses, norms, gradients, routes = [], [], [], list[Route]()
        for step in range(1, self.steps + 1):
            inputs = global_batch(self.decisions, self.seed, step)
            documents = _own_documents(self.decisions, rank, global_documents(self.decisions, self.seed, step))
            own = _own_batch(self.decisions, rank, inputs, documents)
            record = interpreter.run_step(own, scalars_of(step, inputs[1]), documents)
            losses.append(record.loss)
            norms.append(record.grad_norm)
            if recorder is not None:
                routes += recorder.routes(step, _own_rows(self.decisions, rank, documents))
            if step == 1:
                gradients = [
                    Shard(held.name, held.offsets, held.whole, held.view.detach().to("cpu", torch.float32, copy=True))
                    for held in weights.held_by(interpreter, "grads")
                ]
        return Played(losses, norms, gradients, routes)


def parameter(name: str, shape: tuple[int, ...], model: Model, seed: int) -> Tensor:
    """Return the initial value of a parameter in fp32: as GPT-2 draws it, plus noise."""
    noise = torch.normal(0.0, NOISE_STD, shape, generator=_generator(f"noise {seed}:{name}"))
    return weights.initial(name, shape, layers=model.layers, seed=seed) + noise


def scalars_of(step: int, labels: Tensor) -> StepScalars:
    """Return the numbers of a step; those of a policy's objective are not the defaults, and clip some ratios."""
    return StepScalars(
        lr=LEARNING_RATE,
        eps=EPSILON,
        step=step,
        loss_scale=1 / counted_targets(labels),
        clip_ratio=0.1,
        clip_ratio_high=0.3,
        kl_weight=0.05,
    )


def global_batch(decisions: Decisions, seed: int, step: int) -> tuple[Tensor, ...]:
    """Return ids and labels of a step, each (sequences, tokens); the label -100 does not count.

    With a policy's objective, the numbers of its rollout besides, (sequences, tokens, 3).
    """
    generator = _generator(f"tokens {seed}:{step}")
    shape = (decisions.global_batch, decisions.seq_tokens)
    ids = torch.randint(0, decisions.model.vocab, shape, generator=generator)
    labels = torch.randint(0, decisions.model.vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < IGNORED] = -100
    if decisions.objective == "next-token":
        return ids, labels
    rollout = torch.randn(*shape, ROLLOUT_NUMBERS, generator=generator)
    rollout[..., 1:].mul_(LOG_PROBABILITY_STD).sub_(math.log(decisions.model.vocab))
    return ids, labels, rollout


def _generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]))


def counted_targets(labels: Tensor) -> int:
    """Return the number of labels that the loss counts."""
    return int((labels != -100).sum())


def _own_batch(
    decisions: Decisions, rank: int, inputs: tuple[Tensor, ...], documents: Sequence[Ends]
) -> list[tuple[Tensor, ...]]:
    """Return the micro-batches of a rank: its sequences, and of these its tokens in the order of its rows."""
    every = documents or [()] * decisions.micro_batches
    chosen = [tokens_of(token_runs(decisions, rank, ends)) for ends in every]
    share = coordinate("dp", decisions.layout, rank)
    split = []
    for whole in inputs:
        own = torch.chunk(whole, decisions.layout.dp)[share]
        parts = torch.split(own, decisions.micro_batch)
        split.append([part.flatten(0, 1)[mine] for part, mine in zip(parts, chosen, strict=True)])
    return list(zip(*split, strict=True))


def _own_rows(decisions: Decisions, rank: int, documents: Sequence[Ends]) -> list[Tensor]:
    """Return for each micro-batch of a rank the numbers of its tokens in the global batch."""
    tokens = torch.arange(decisions.global_batch * decisions.seq_tokens).view(decisions.global_batch, -1)
    return [each for (each,) in _own_batch(decisions, rank, (tokens,), documents)]


def rounds_routes(decisions: Decisions) -> bool:
    """Return whether rounding may send a token to other experts than exact scores would."""
    return decisions.model.mixture is not None and decisions.dtype != "fp32"


def whole_routes(ranks: Iterable[Played], decisions: Decisions) -> dict[tuple[int, int], Tensor]:
    """Return by step and layer the experts (global batch, tokens, per_token) that the ranks chose."""
    experts = decisions.model.mixture
    found: dict[tuple[int, int], Tensor] = {}
    shape = (decisions.global_batch * decisions.seq_tokens, experts.per_token if experts else 0)
    for rank in ranks:
        for route in rank.routes:
            whole = found.setdefault((route.step, route.layer), torch.full(shape, -1, dtype=torch.int64))
            whole[route.rows] = route.experts
    return {key: whole.view(decisions.global_batch, decisions.seq_tokens, -1) for key, whole in found.items()}


def global_documents(decisions: Decisions, seed: int, step: int) -> Ends:
    """Return where the documents of every sequence of a step end; empty where a sequence is one document."""
    if decisions.documents is None:
        return ()
    lengths = decisions.documents.draw(Random(f"documents {seed}:{step}"))
    sequences = fill(lengths, decisions.seq_tokens, rows_of_a_cut(decisions))
    return tuple(tuple(accumulate(next(sequences))) for _ in range(decisions.global_batch))


def _own_documents(decisions: Decisions, rank: int, ends: Ends) -> list[Ends]:
    """Return the documents of a rank's micro-batches; all ranks that share a sequence have the same."""
    share, count, size = coordinate("dp", decisions.layout, rank), decisions.micro_batches, decisions.micro_batch
    own = ends[share * count * size : (share + 1) * count * size]
    return [own[first : first + size] for first in range(0, len(own), size)]


def whole_gradients(ranks: Iterable[Played]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the whole gradients from the shards of all ranks, and how much ranks that hold the same entry differ.

    The difference is relative to the tensor's largest entry, for tensors whose entries lie on several ranks. Entries
    that no rank holds are NaN.
    """
    found: dict[str, Tensor] = {}
    apart: dict[str, float] = {}
    held: dict[str, Tensor] = {}
    for rank in ranks:
        for shard in rank.gradients:
            target = found.setdefault(shard.name, torch.full(shard.whole, torch.nan))
            known = held.setdefault(shard.name, torch.zeros(shard.whole, dtype=torch.bool))
            place = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.values.shape, strict=True))
            before, again = target[place], known[place]
            if again.any():
                gap = (before[again] - shard.values[again]).abs().max()
                scale = shard.values.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
                apart[shard.name] = max(apart.get(shard.name, 0.0), float((gap / scale).nan_to_num(torch.inf)))
            target[place] = shard.values
            known[place] = True
    return found, apart
