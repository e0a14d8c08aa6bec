"""The operators that steps are made of, each by itself: lowered from small models, played by the kernels of a run.

Lowering a grid of widths and lengths gives every operator at every shape with exactly the work a plan prices. Each
distinct one is timed alone. In a step an operator finds its newest input in the cache and everything else outside
(weights and what forward saved were touched long ago), so repeats take turns over operands that together exceed the
cache, and the input that the operator before would just have written is written anew before each repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log, prod

import torch
from torch import Tensor

from memo_exec.kernels import FUSED, KERNELS, Call, Context, StepScalars
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.probes.timing import Effort, Sample, time_call
from memo_sim.contract.plan import Decisions, RowwiseKernel
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Work
from memo_sim.program.lower import lower

FRESH_ROLES = ("grad", "logits", "y", "x", "qkv", "source", "part", "grad_q")
"""Operands by which an operator follows the one before, most likely first."""

NOISE_NUMBERS = 2**22
"""Random numbers that operands are filled from, over and over: drawing new ones takes longer than the operators."""

MOST_ROTATIONS = 12
"""Sets of operands that repeats take turns over."""


@dataclass(frozen=True)
class Operator:
    """One instruction and the shape of each of its operands."""

    instruction: Instruction
    decisions: Decisions
    operands: tuple[tuple[str, tuple[int, ...], str], ...]
    """Role, shape, dtype."""

    @property
    def key(self) -> tuple[str, Work, tuple[str, ...]]:
        """What tells operators apart that cost differently: the kind, the work, and which operands there are."""
        return self.instruction.op, self.instruction.work, tuple(role for role, _, _ in self.operands)

    @property
    def rowwise(self) -> RowwiseKernel:
        """What plays it, of row-wise operators; torch of all that no fused kernel plays."""
        return self.decisions.kernels.rowwise if self.instruction.op in FUSED else "torch"

    @cached_property
    def bytes(self) -> int:
        """Size of all operands together."""
        return sum(prod(shape) * TORCH_DTYPES[dtype].itemsize for _, shape, dtype in self.operands)


def operators_of(decisions: Iterable[Decisions]) -> list[Operator]:
    """Return every distinct operator of the compute lane in the steps that ``decisions`` stand for."""
    found: dict[tuple[str, Work, tuple[str, ...]], Operator] = {}
    for each in decisions:
        for operator in _operators(each):
            found.setdefault(operator.key, operator)
    return list(found.values())


def _operators(decisions: Decisions) -> Iterator[Operator]:
    (program,) = lower(decisions)
    shared = {family.name: family for family in program.families}
    for template in program.templates:
        families = shared | {family.name: family for family in template.own}
        for instruction in template.instructions:
            if instruction.lane is not Lane.COMPUTE or instruction.op not in KERNELS:
                continue
            operands = []
            for operand in instruction.operands:
                family = families[template.slots[operand.slot]]
                shape = (operand.tokens,) if family.features == 1 else (operand.tokens, family.features)
                operands.append((operand.role, shape, family.dtype))
            yield Operator(instruction, decisions, tuple(operands))


class Bench:
    """Times operators on one device; ``cache_bytes`` is what repeats have to outgrow."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.noise = torch.empty(NOISE_NUMBERS, device=device).normal_(0.0, 0.05, generator=self.generator)
        self._settle()

    def seconds(self, operator: Operator, effort: Effort) -> Sample:
        """Return how long the operator takes."""
        with torch.inference_mode():
            rotations = min(MOST_ROTATIONS, 2 + self.cache_bytes // max(1, operator.bytes))
            context = Context(operator.decisions, self.device, StepScalars(lr=1e-4, clip=1.0))
            calls = [Call(operator.instruction, context, self._tensors(operator)) for _ in range(rotations)]
            kernel = KERNELS[operator.instruction.op]
            roles = [role for role in FRESH_ROLES if role in calls[0].tensors]
            fresh = [call.tensors[roles[0]] for call in calls] if roles else []
            content = fresh[0].clone() if fresh else None

            def prepare(i: int) -> None:
                if content is not None:
                    fresh[i % rotations].copy_(content)

            return time_call(lambda i: kernel(calls[i % rotations]), self.device, effort, prepare)

    def chain(self, operators: Sequence[Operator]) -> Callable[[int], None]:
        """Return a call that plays the operators one after the other, each on operands of its own."""
        context = [Context(o.decisions, self.device, StepScalars(lr=1e-4, clip=1.0)) for o in operators]
        calls = [Call(o.instruction, c, self._tensors(o)) for o, c in zip(operators, context, strict=True)]
        self._settle()

        def play(i: int) -> None:
            del i
            for call in calls:
                KERNELS[call.instruction.op](call)

        return play

    def _settle(self) -> None:
        """Return once what this stream has written is there: other lanes' streams do not wait for it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _tensors(self, operator: Operator) -> dict[str, Tensor]:
        return {role: self._tensor(role, shape, dtype, operator) for role, shape, dtype in operator.operands}

    def _tensor(self, role: str, shape: tuple[int, ...], dtype: str, operator: Operator) -> Tensor:
        """Return numbers that a step could hold there: no denormals, no infinities, ids inside the vocabulary."""
        kind = TORCH_DTYPES[dtype]
        if not kind.is_floating_point:
            vocab = operator.decisions.model.vocab
            return torch.randint(0, vocab, shape, device=self.device, dtype=kind, generator=self.generator)
        made = torch.empty(shape, device=self.device, dtype=kind)
        if role == "lse":
            return made.fill_(log(operator.decisions.seq_tokens))
        if role in ("stats", "norm", "moment2"):
            return made.fill_(1.0)
        for piece in torch.split(made.view(-1), NOISE_NUMBERS):
            piece.copy_(self.noise[: len(piece)])
        return made
