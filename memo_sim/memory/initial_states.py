"""Lists the allocations for states that an eager framework makes before its second step, in Megatron-LM's order.

The first step differs from later ones (core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py):

    parameters   one tensor each as modules are created; then one flat buffer for all of them and one for the
                 gradients; then the single tensors are freed, and their segments stay cached
    master       one tensor for every parameter in this rank's contiguous share of the flat buffer, which holds the
                 parameters from the last to the first
    moments      two tensors for each of those, at the end of the first step

So master parameters and the first step's activations are cut from the cached segments of the parameters, and moments
go where those activations have been. The reserved memory ends up larger than states and one step need. The model uses
the share of the last rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.fp8 import narrow_elements
from memo_sim.program.layout.parameters import (
    embed_block,
    experts_block,
    gradient_dtype,
    head_block,
    layer_block,
    moment_dtype,
    without_masters,
)
from memo_sim.program.layout.stage import stages_of

FP32_BYTES = 4
REPLACED = (FamilyKind.PARAMS, FamilyKind.GRADS, FamilyKind.MASTER, FamilyKind.MOMENT1, FamilyKind.MOMENT2)
"""States of a program that a framework allocates in another order and in other sizes."""


@dataclass(frozen=True)
class Beginning:
    """Sizes in bytes, in order of allocation.

    ``temporary`` is freed after ``before`` was allocated; ``behind`` follows; ``later`` comes after the first step.
    """

    temporary: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    later: tuple[int, ...]


def beginning_of(program: Program, decisions: Decisions) -> Beginning | None:
    """Return how a stage's states are allocated; None where they are not whole flat buffers on the device."""
    if decisions.layout.zero > 1 or decisions.states == "host":
        return None
    parameters, size = _parameters(program, decisions), DTYPE_BYTES[decisions.dtype]
    elements = [count for count, _ in parameters]
    shares = _last_share(elements, decisions.layout.shards)
    pure, moment = without_masters(decisions), DTYPE_BYTES[moment_dtype(decisions)]
    in_fp32 = decisions.memory_policy == "eager" and not pure
    summed = FP32_BYTES if in_fp32 else DTYPE_BYTES[gradient_dtype(decisions)]
    master = [FP32_BYTES * share for share in shares] if decisions.dtype != "fp32" and not pure else []
    return Beginning(
        temporary=tuple(count * (1 if narrow else size) for count, narrow in parameters),
        before=(size * sum(count for count, narrow in parameters if not narrow), summed * sum(elements)),
        behind=tuple(master),
        later=tuple(moment * share for share in shares for _ in range(2)),
    )


def without_states(program: Program, lives: Liveness) -> Liveness:
    """Return the buffers, with size 0 for the states that a ``Beginning`` replaces."""
    replaced = np.array(
        [f.kind in REPLACED for f in program.all_families],
        dtype=np.bool_,
    )
    sizes = lives.bytes.copy()
    of_program = np.arange(len(sizes)) < sum(f.count for f in program.all_families)
    sizes[replaced[lives.family] & of_program & lives.on_device] = 0
    return replace(lives, bytes=sizes)


def _parameters(program: Program, decisions: Decisions) -> list[tuple[int, bool]]:
    """Return the number of elements of every parameter of the stage, and whether it is in FP8 alone.

    They are in the order in which modules are created. The flat buffers of what is in FP8 alone are the program's.
    """
    model, tp, ep, split = decisions.model, decisions.layout.tp, decisions.layout.ep, decisions.layout.expert_divided
    (stage,) = (each for each in stages_of(decisions) if each.name == program.stage)
    held = {f.name for f in program.families}
    blocks = [
        *[embed_block(model, tp)] * ("params.embed" in held),
        *(layer_block(model, tp, model.layer(number), ep=ep) for number in stage.layers),
        *(block for number in stage.layers if (block := experts_block(model, split, ep, model.layer(number).experts))),
        *[head_block(model, tp)] * ("params.head" in held),
    ]
    return [(p.elements, p.first < narrow_elements(decisions, block)) for block in blocks for p in block.parameters]


def _last_share(elements: list[int], ranks: int) -> list[int]:
    """Return how many elements of each parameter are in the last rank's share of the flat buffer."""
    share = -(-sum(elements) // ranks)
    found, first = [], 0
    for count in reversed(elements):
        inside = first + count - max(first, (ranks - 1) * share)
        if inside > 0:
            found.append(inside)
        first += count
    return found
