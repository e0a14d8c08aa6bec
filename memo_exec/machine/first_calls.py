"""Plays every distinct compute kernel once before ranks communicate.

CUDA loads a kernel's code at its first launch and may wait for the whole device to do so. Inside the first step the
device may be playing a receive, which waits for another rank that is itself loading a kernel: a deadlock. So each rank
first plays all its kernels alone, in the shapes of the step, because libraries choose kernels by shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memo_exec.distributed.groups import communicates
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import own_program
from memo_exec.kernels import KERNELS, Context, Kernel
from memo_exec.machine.distinct_instructions import call_on_zeros, distinct_instructions
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.stage_layers import layers_by_kind

ELEMENTS = 4096
"""Numbers in the tensors on which the operators inside collectives are played."""


def play_first_calls(
    decisions: Decisions,
    program: Program,
    mesh: MeshCoordinates,
    device: torch.device,
    *,
    kernels: Mapping[str, Kernel] = KERNELS,
) -> int:
    """Play each distinct instruction of the compute lane once, on zeros; return how many there are.

    Call this before the run's buffers exist: the operands of one instruction take at most the bytes that they take in
    a step, and are freed before the next one.
    """
    context = Context(decisions, device, rank=mesh.rank)
    own = own_program(program, decisions, mesh)
    found, layers = distinct_instructions(own, _computes), _layers(own, decisions, mesh)
    with torch.inference_mode():
        for instruction, families in found.items():
            kernels[instruction.op](call_on_zeros(instruction, families, context, layer=layers[instruction]))
            _end(device)
        _play_inside_collectives(device)
    del context
    _end(device)
    return len(found)


def _layers(program: Program, decisions: Decisions, mesh: MeshCoordinates) -> dict[Instruction, int]:
    """Return for each instruction the first of the stage's layers, or of those of its layer kind."""
    stage = stages_of(decisions)[mesh.at("pp")]
    first = {kind.number: stage.layers[kind.layers[0]] for kind in layers_by_kind(decisions.model, stage)}
    return {
        instruction: first.get(template.layer_kind, stage.layers[0])
        for template in reversed(program.templates)
        for instruction in template.instructions
    }


def _computes(instruction: Instruction) -> bool:
    return instruction.lane is Lane.COMPUTE and not communicates(instruction.work)


def _play_inside_collectives(device: torch.device) -> None:
    """Play the element-wise operators of kernels that communicate: copies, sums and exponentials."""
    wide, narrow = (torch.zeros(ELEMENTS, dtype=kind, device=device) for kind in (torch.float32, torch.bfloat16))
    for tensor in (wide, narrow):
        tensor.copy_(tensor.clone())
        tensor.add_(tensor.clone())
    wide.copy_(narrow)
    narrow.copy_(wide)
    wide.add_(narrow)
    wide.sub_(wide.clone()).exp_()


def _end(device: torch.device) -> None:
    """Wait until the device is idle, and return cached memory, which the next call or the arena needs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
