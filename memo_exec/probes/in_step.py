"""Measures the time that a step on a CPU adds to a kernel that runs alone.

A kernel that is repeated alone lacks two costs. The interpreter needs time between two instructions. And the kernel
itself is slower in a step: since its last call, other kernels have run, and their code, Python objects and pages have
taken the place of its own in the caches. Both are per call and not per byte, so they count in steps of small operators
only. They are measured in a step of the smallest model of the grid, with more layers:

    compute lane   | norm |..| linear |..| rotary |..|        between: the mean of the dots
                   | norm |  | linear |  | rotary |           longer: the mean of (kernel in the step - kernel alone)

The first call of an operator in a step is slower still. It is not counted, as a model has many layers: of each
operator's calls the middle one counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

import msgspec
import numpy as np
import torch

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Kernel, StepScalars
from memo_exec.probes.operators import Operator, operators_of
from memo_exec.probes.timing import Sample, sample_of
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Work
from memo_sim.program.lower import lower

LAYERS = 8
"""Layers of the model."""

WARM_UPS, STEPS = 2, 16

QUIET = 0.25
"""Of an instruction's times over the steps, the fraction below the one that counts. Other load of the machine lengthens
a step more than the short calls of a kernel alone."""

STD = 0.02
"""Standard deviation of the parameters, as GPT-2's."""

Alike = tuple[str, Work, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class InStep:
    """Seconds of an instruction: between two of them, and by how much a kernel is longer than alone."""

    between: Sample
    longer_s: float

    @property
    def seconds(self) -> float:
        """All that comes on top of a kernel alone."""
        return self.between.seconds + self.longer_s


def measure(
    decisions: Decisions,
    alone: Callable[[Operator], Sample],
    kernels: Mapping[str, Kernel] = KERNELS,
    *,
    sharing: int = 1,
) -> InStep:
    """Return the time that a step adds to ``alone(operator)``, the mean over the compute lane.

    There are ``LAYERS`` layers that are kept, so that an instruction's operands are not those of the last, and compute
    waits for no copy. ``sharing``: as for ``Lanes``.
    """
    model = msgspec.structs.replace(decisions.model, layers=LAYERS)
    kept = msgspec.structs.replace(decisions, model=model, swapped_tokens=0, subsequence_swapped_tokens=())
    (program,) = lower(kept)
    found = [(i, _alike(each)) for i, (_, each) in enumerate(program.walk()) if each.lane is Lane.COMPUTE]
    numbers = [i for i, _ in found]
    tokens = torch.zeros(kept.micro_batch, kept.seq_tokens, dtype=torch.int64)
    batch = [(tokens, tokens)] * program.micro_batches
    between, played = [], []
    with Interpreter(kept, program, sharing=sharing, kernels=kernels) as interpreter:
        _draw(interpreter)
        for step in range(WARM_UPS + STEPS):
            record = interpreter.run_step(batch, StepScalars())
            if step >= WARM_UPS:
                start_s, end_s = record.start_s[numbers], record.end_s[numbers]
                between.append(start_s[1:] - end_s[:-1])
                played.append(end_s - start_s)
    gaps = [sample_of(each) for each in np.array(between).T.tolist()]
    calls: dict[Alike, list[float]] = defaultdict(list)
    for (_, alike), seconds in zip(found, np.quantile(np.array(played), QUIET, axis=0).tolist(), strict=True):
        calls[alike].append(seconds)
    alone_s = {operator.key: alone(operator).seconds for operator in operators_of([kept])}
    longer = [len(each) * (float(np.median(each)) - alone_s[alike]) for alike, each in calls.items()]
    return InStep(
        between=Sample(fmean(each.seconds for each in gaps), fmean(each.spread for each in gaps)),
        longer_s=max(0.0, sum(longer) / len(found)),
    )


def _draw(interpreter: Interpreter) -> None:
    """Write numbers of a usual size into the parameters; products of tiny ones are denormal, which are slow."""
    generator = torch.Generator().manual_seed(0)
    for family in interpreter.program.families:
        if family.name.startswith("params."):
            for index in range(family.count):
                interpreter.buffer(family.name, index).normal_(0.0, STD, generator=generator)
    interpreter.weights_changed()


def _alike(instruction: Instruction) -> Alike:
    """Return what instructions of equal cost have in common, as ``Operator.key`` does."""
    return instruction.op, instruction.work, tuple(operand.role for operand in instruction.operands)
