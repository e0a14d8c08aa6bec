"""What an eager framework asks of the allocator before its second step: Megatron-LM's order of making states.

The first step is not like the others (core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py):

    parameters   one by one as modules are made; then one flat buffer of all of them and one of fp32 gradients; then
                 what was made one by one is given back, and its segments stay cached
    master       a tensor for every parameter that lies in this rank's contiguous share of the flat buffer, which holds
                 them from the last to the first
    moments      two for each of those, at the end of the first step

So masters and the first step's activations are cut from the segments that parameters left, and moments go where those
have been: what is reserved in the end is more than the states and a step would take by themselves. The share taken is
the last rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.parameters import embed_block, head_block, layer_block

FP32_BYTES = 4
REPLACED = (FamilyKind.PARAMS, FamilyKind.GRADS, FamilyKind.MASTER, FamilyKind.MOMENT1, FamilyKind.MOMENT2)
"""A program's states that are made in another order and in other pieces."""


@dataclass(frozen=True)
class Beginning:
    """Sizes in bytes, in order: what passes, what is handed out before that is given back, behind it, after a step."""

    passing: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    later: tuple[int, ...]


def beginning_of(program: Program, decisions: Decisions) -> Beginning | None:
    """Return how the states of a role come to be; None where they are not whole flat buffers on the device."""
    if decisions.layout.zero > 1 or decisions.states == "host":
        return None
    elements = _parameters(program, decisions)
    size = DTYPE_BYTES[decisions.dtype]
    shares = _last_share(elements, decisions.layout.replicas if decisions.layout.zero else 1)
    moment = 2 if decisions.states == "bf16" else FP32_BYTES
    master = [FP32_BYTES * share for share in shares] if decisions.dtype != "fp32" else []
    return Beginning(
        passing=tuple(size * n for n in elements),
        before=(size * sum(elements), FP32_BYTES * sum(elements)),
        behind=tuple(master),
        later=tuple(moment * share for share in shares for _ in range(2)),
    )


def without_states(program: Program, lives: Liveness) -> Liveness:
    """Return the buffers without the states that a beginning stands for: of no bytes."""
    replaced = np.array(
        [f.kind in REPLACED for f in program.all_families],
        dtype=np.bool_,
    )
    sizes = lives.bytes.copy()
    of_program = np.arange(len(sizes)) < sum(f.count for f in program.all_families)
    sizes[replaced[lives.family] & of_program & lives.on_device] = 0
    return replace(lives, bytes=sizes)


def _parameters(program: Program, decisions: Decisions) -> list[int]:
    """Return the elements of every parameter of the role, in the order in which its modules are made."""
    model, tp = decisions.model, decisions.layout.tp
    blocks = {"embed": embed_block(model, tp), "layer": layer_block(model, tp), "head": head_block(model, tp)}
    counts = {f.name: f.count for f in program.families}
    return [
        parameter.elements
        for kind, block in blocks.items()
        for _ in range(counts.get(f"params.{kind}", 0))
        for parameter in block.parameters
    ]


def _last_share(elements: list[int], ranks: int) -> list[int]:
    """Return how many elements of each parameter lie in the last rank's share of the flat buffer."""
    share = -(-sum(elements) // ranks)
    found, first = [], 0
    for count in reversed(elements):
        inside = first + count - max(first, (ranks - 1) * share)
        if inside > 0:
            found.append(inside)
        first += count
    return found
