"""Times single operators: lowers small models, and runs each distinct operator alone with the kernels of a run.

Lowering a grid of widths and lengths yields every operator at every shape, with exactly the work that a plan prices.

The cache state matters. In a step, an operator finds its newest input in the cache, but not its weights or the tensors
that forward saved, which were last used long before. So repeats cycle through sets of operands that together exceed
the cache. Before each repeat, the input that the previous operator would have written is written again.

Small operators do not exceed a CPU's cache even so. In a step, others run between two calls of one, and their operands
and code take its place in the cache of its core. So before each repeat, other bytes fill the caches of the cores that
compute. And every repeat of a small operator has a set of its own, which nothing has touched since other bytes filled
the last level of the cache. Without that, a step of operators of some ten microseconds is predicted a third too short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log, prod

import torch
from torch import Tensor

from memo_exec.kernels import IN_TRITON, KERNELS, ROUNDING, Call, Context, StepScalars
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.probes.memory import core_cache_bytes
from memo_exec.probes.timing import WARM_UPS, Effort, Sample, time_call
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Work
from memo_sim.program.lower import lower

FRESH_ROLES = ("grad", "logits", "y", "x", "qkv", "source", "part", "grad_q")
"""Roles of the operand that the previous operator writes, the most likely first."""

NOISE_NUMBERS = 2**22
"""Random numbers that fill all operands repeatedly; drawing new ones would take longer than the operators."""

ROUTED = ("ends", "experts", "sorted", "order", "places")
"""Roles of what a router decides: numbers of rows and experts, which must lie in their ranges."""

MOST_OPERAND_SETS = 12
"""Largest number of operand sets that repeats cycle through."""

COLD_BYTES = 2**26
"""Bytes that pass through a CPU's cache between two uses of a tensor that forward saves, in a step of a small model."""

MOST_SET_BYTES = 7 * 2**26
"""Bytes of all operand sets of an operator together, on a CPU, where a calibration needs less than 1 GiB."""


@dataclass(frozen=True)
class Operator:
    """One instruction and the shape of each of its operands."""

    instruction: Instruction
    decisions: Decisions
    operands: tuple[tuple[str, tuple[int, ...], str], ...]
    """(role, shape, dtype) of each operand."""

    @property
    def key(self) -> tuple[str, Work, tuple[str, ...]]:
        """The op, the work and the roles of the operands; operators with equal keys cost the same."""
        return self.instruction.op, self.instruction.work, tuple(role for role, _, _ in self.operands)

    @property
    def rowwise(self) -> RowwiseKernel:
        """The library that runs a row-wise operator; "torch" for operators that have no fused kernel."""
        return self.decisions.kernels.rowwise if self.instruction.op in IN_TRITON else "torch"

    @cached_property
    def bytes(self) -> int:
        """Total size of all operands."""
        return sum(prod(shape) * TORCH_DTYPES[dtype].itemsize for _, shape, dtype in self.operands)


def operators_of(decisions: Iterable[Decisions]) -> list[Operator]:
    """Return every distinct operator of the programs that ``decisions`` lower to.

    Those are the instructions on the compute lane, and the rounding of rows on the copy lanes.
    """
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
            if instruction.op not in KERNELS or not (instruction.lane is Lane.COMPUTE or instruction.op in ROUNDING):
                continue
            operands = []
            for operand in instruction.operands:
                family = families[template.slots[operand.slot]]
                shape = (operand.tokens,) if family.features == 1 else (operand.tokens, family.features)
                operands.append((operand.role, shape, family.dtype))
            yield Operator(instruction, decisions, tuple(operands))


def operand_sets(device: torch.device, wanted: int, set_bytes: int, most_bytes: int) -> int:
    """Return how many of the ``wanted`` sets of operands repeats cycle through: on a CPU, what fits in ``most_bytes``.

    There are two in any case.
    """
    return wanted if device.type != "cpu" else min(wanted, max(2, most_bytes // max(1, set_bytes)))


class Bench:
    """Times operators on one device; the operand sets of the repeats must exceed ``cache_bytes``."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.noise = torch.empty(NOISE_NUMBERS, device=device).normal_(0.0, 0.05, generator=self.generator)
        self._other: Tensor | None = None
        self._passing = torch.zeros(COLD_BYTES, dtype=torch.uint8) if device.type == "cpu" else None
        self._settle()

    def seconds(self, operator: Operator, effort: Effort) -> Sample:
        """Return the time of one call of the operator."""
        with torch.inference_mode():
            sets = min(MOST_OPERAND_SETS, 2 + self.cache_bytes // max(1, operator.bytes))
            if self._passing is not None:
                sets = max(sets, min(WARM_UPS + effort.most, COLD_BYTES // max(1, operator.bytes)))
            sets = operand_sets(self.device, sets, operator.bytes, MOST_SET_BYTES)
            sets = min(sets, WARM_UPS + effort.most)  # one for each call
            context = Context(operator.decisions, self.device, StepScalars(lr=1e-4, clip=1.0))
            calls = [Call(operator.instruction, context, self._tensors(operator)) for _ in range(sets)]
            kernel = KERNELS[operator.instruction.op]
            roles = [role for role in FRESH_ROLES if role in calls[0].tensors]
            fresh = [call.tensors[roles[0]] for call in calls] if roles else []
            content = fresh[0].clone() if fresh else None

            other = self._beside()
            if self._passing is not None:
                self._passing.view(torch.float32).sum()

            def prepare(i: int) -> None:
                if other is not None:
                    other.sum()
                if content is not None:
                    fresh[i % sets].copy_(content)

            return time_call(lambda i: kernel(calls[i % sets]), self.device, effort, prepare)

    def _beside(self) -> Tensor | None:
        """Return the bytes that fill the caches of the calling thread's cores; None on a GPU, whose cores share one."""
        if self.device.type != "cpu":
            return None
        size = torch.get_num_threads() * core_cache_bytes()
        if self._other is None or self._other.nbytes != size:
            self._other = torch.zeros(size, dtype=torch.uint8).view(torch.float32)
        return self._other

    def playing(self, operator: Operator) -> Callable[[], None]:
        """Return a function that plays the operator once, on operands that exist already."""
        context = Context(operator.decisions, self.device, StepScalars(lr=1e-4, clip=1.0))
        with torch.inference_mode():
            call = Call(operator.instruction, context, self._tensors(operator))
        self._settle()

        def play() -> None:
            with torch.inference_mode():
                KERNELS[operator.instruction.op](call)

        return play

    def chain(self, operators: Sequence[Operator]) -> Callable[[int], None]:
        """Return a function that runs the operators one after the other, each on its own operands."""
        context = [Context(o.decisions, self.device, StepScalars(lr=1e-4, clip=1.0)) for o in operators]
        calls = [Call(o.instruction, c, self._tensors(o)) for o, c in zip(operators, context, strict=True)]
        self._settle()

        def play(i: int) -> None:
            del i
            for call in calls:
                KERNELS[call.instruction.op](call)

        return play

    def _settle(self) -> None:
        """Wait until this stream's writes have finished, because other lanes' streams do not wait for them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _tensors(self, operator: Operator) -> dict[str, Tensor]:
        return {role: self._tensor(role, shape, dtype, operator) for role, shape, dtype in operator.operands}

    def _routed(self, role: str, shape: tuple[int, ...], operator: Operator) -> Tensor:
        """Return what a router decides when every expert gets equally many rows."""
        mixture = operator.decisions.model.mixture
        assert mixture is not None
        rows, size = operator.decisions.local_tokens * mixture.per_token, prod(shape)
        numbers = torch.arange(size, device=self.device)
        if role == "ends":
            return (numbers + 1) * rows // mixture.count
        if role == "experts":
            return (numbers % mixture.count).view(shape)
        if role == "sorted":
            return numbers * mixture.count // size
        if size % mixture.count == 0:
            numbers = numbers.view(-1, mixture.count).t().flatten()
        return numbers.view(shape)

    def _tensor(self, role: str, shape: tuple[int, ...], dtype: str, operator: Operator) -> Tensor:
        """Return a tensor with realistic values: no denormals, no infinities, token ids inside the vocabulary."""
        kind = TORCH_DTYPES[dtype]
        if role in ROUTED and operator.decisions.model.mixture is not None:
            return self._routed(role, shape, operator).to(kind)
        if not kind.is_floating_point:
            vocab = min(operator.decisions.model.vocab, torch.iinfo(kind).max)
            return torch.randint(0, vocab, shape, device=self.device, dtype=kind, generator=self.generator)
        made = torch.empty(shape, device=self.device, dtype=kind)
        if role == "lse":
            return made.fill_(log(operator.decisions.seq_tokens))
        if role in ("stats", "norm", "moment2"):
            return made.fill_(1.0)
        for piece in torch.split(made.view(-1), NOISE_NUMBERS):
            piece.copy_(self.noise[: len(piece)])
        return made
