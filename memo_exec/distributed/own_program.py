"""Turns a lowered program into the program of one rank, with the operands of that rank's shards.

A lowered program has the operand ranges of rank 0. Only operands change here. Instructions, their order, their names
and the buffers stay the same, and so do ids, lives and placements. Under ZeRO and tensor parallelism these change:

    grads.reduce_scatter, params.all_gather   one operand per run (decayed, other parameters), not the whole block
    update, add                               this rank's share, at its own offset in buffers of the whole block
    shards.all_reduce                         this rank's share of each run
    norm                                      only the gradients that no other rank counts, and no loads of experts

A run is a contiguous range of a block that the optimizer updates alike (``fp8.runs``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.shards import Part, Stretch, narrow_ahead, optimizer_of, own_runs, trained_ranges
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Family, Instruction, Operand, Template
from memo_sim.program.ir.kinds import FamilyKind, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.fp8 import ACTIVATIONS, NARROW, runs
from memo_sim.program.layout.parameters import FROZEN
from memo_sim.program.lower import lower

_ON_SHARDS = (
    TemplateKind.GATHER,
    TemplateKind.GATHER_UPDATED,
    TemplateKind.REGATHER,
    TemplateKind.SCATTER,
    TemplateKind.ADD,
    TemplateKind.REDUCE,
    TemplateKind.NORM,
    TemplateKind.UPDATE,
)
"""Templates whose operands may be a rank's shard of a block."""


def rank_program(decisions: Decisions, mesh: MeshCoordinates) -> Program:
    """Return the lowered program of a rank: of its pipeline stage, and of its part of the sequence.

    Raises:
        CannotRun: when attention of ranks with uneven heads would run in several head groups.
        Infeasible: as ``lower``.
    """
    layout = decisions.layout
    if layout.uneven_heads and decisions.kernels.head_groups > 1:
        raise CannotRun(
            "ranks with uneven heads cannot all divide their heads into the same head groups",
            where="$.decisions.kernels.head_groups",
            got=decisions.kernels.head_groups,
            wanted=1,
            hint="plan with a --ulysses that divides the key/value heads, or with a shorter sequence",
        )
    ring_rank = mesh.at(layout.ring_group) if layout.ring > 1 else None
    ranks = {"ulysses_rank": mesh.at("ulysses"), "tp_rank": mesh.at("tp")}
    return lower(decisions, cp_rank=ring_rank, **ranks)[mesh.at("pp")]


def own_program(program: Program, decisions: Decisions, mesh: MeshCoordinates) -> Program:
    """Return ``program`` with the operands of one rank, whose mesh coordinates are ``mesh``."""
    mixture = decisions.model.mixture
    if decisions.layout.devices == 1 and not (mixture and mixture.selection_bias):
        return program
    families = {family.name: family for family in program.families}
    return replace(program, templates=tuple(_own_template(t, families, decisions, mesh) for t in program.templates))


def _own_template(
    template: Template, families: Mapping[str, Family], decisions: Decisions, mesh: MeshCoordinates
) -> Template:
    if template.kind not in _ON_SHARDS or template.block is None:
        return template
    block = _Block(Part(template.block, template.layer_kind or 0), template, families, decisions, mesh)
    return replace(template, instructions=tuple(block.own(i) for i in template.instructions))


class _Block:
    """Rewrites the operands of the instructions that reduce, gather and update one parameter block."""

    def __init__(
        self,
        part: Part,
        template: Template,
        families: Mapping[str, Family],
        decisions: Decisions,
        mesh: MeshCoordinates,
    ) -> None:
        self.optimizer = optimizer = optimizer_of(decisions, part, mesh)
        self.template, self.families, self.mesh = template, families, mesh
        self.trained = trained_ranges(decisions, part, mesh)
        self.divided = trained_ranges(decisions, part, mesh, divided=True)
        self.runs = own_runs(optimizer, mesh)

    def own(self, instruction: Instruction) -> Instruction:
        """Return the instruction with this rank's operands."""
        if instruction.op == "grads.reduce_scatter":
            return msgspec.structs.replace(
                instruction, operands=tuple(self._by_run(instruction.operands, "tensor", "full"))
            )
        if instruction.op == "params.all_gather":
            return msgspec.structs.replace(
                instruction, operands=tuple(self._by_run(instruction.operands, "tensor", "full"))
            )
        if instruction.op == "shards.all_reduce":
            runs = [self.runs[operand.role.partition(".")[2]] for operand in instruction.operands]
            shares = [self._share(o, run) for o, run in zip(instruction.operands, runs, strict=True)]
            return msgspec.structs.replace(instruction, operands=tuple(shares))
        if instruction.op == "grad_norm":
            return msgspec.structs.replace(instruction, operands=tuple(self._counted(instruction.operands)))
        if instruction.run and self.optimizer.shards > 1:
            run = self.runs[instruction.run]
            return msgspec.structs.replace(
                instruction, operands=tuple(self._share(o, run) for o in instruction.operands)
            )
        return instruction

    def _is_whole(self, operand: Operand) -> bool:
        """Return whether the operand's buffer holds the whole block, not only this rank's share."""
        family = self.families[self.template.slots[operand.slot]]
        if family.kind in (FamilyKind.PARAMS, FamilyKind.PARAMS_FP8):
            return not self.optimizer.shared("params")
        if family.kind is FamilyKind.GRADS:
            return not self.optimizer.shared("grads")
        return family.kind in (FamilyKind.GATHERED, FamilyKind.WHOLE_GRADS)

    def _is_beside(self, operand: Operand) -> bool:
        """Return whether an operand is no shard of a block: every rank has all of it."""
        if operand.role in ("norm", "workspace"):
            return True
        return self.families[self.template.slots[operand.slot]].kind is FamilyKind.LARGEST

    def _runs_in(self, operand: Operand) -> tuple[list[str], int]:
        """Return the runs that a buffer contains, and how many elements of the block lie before its first one.

        Weights in FP8 alone have buffers of their own; parameters are without them, gradients and states are not.
        """
        family, narrow = self.families[self.template.slots[operand.slot]], self.optimizer.narrow > 0
        parameters = family.kind in (FamilyKind.PARAMS, FamilyKind.PARAMS_FP8, FamilyKind.GATHERED)
        if not (narrow and parameters):
            return list(self.runs), 0
        if family.dtype == ACTIVATIONS:
            return [NARROW], 0
        return [name for name in self.runs if name != NARROW], narrow_ahead(
            self.optimizer, whole=self._is_whole(operand)
        )

    def _by_run(self, operands: tuple[Operand, ...], old: str, new: str) -> Iterator[Operand]:
        """Yield one operand per run: all of the run if the buffer holds the whole block, else this rank's share.

        What is frozen is gathered for a use, but not after an update, and has no gradients.
        """
        trained = any(operand.role == old for operand in operands)
        for operand in operands:
            if self._is_beside(operand):
                yield operand
                continue
            role = new if operand.role == old else operand.role
            contained, ahead = self._runs_in(operand)
            for name, first, length in runs(self.optimizer.decisions, self.optimizer.block):
                if name not in contained or (name == FROZEN and trained):
                    continue
                own = self.runs[name]
                if self._is_whole(operand):
                    yield msgspec.structs.replace(operand, role=f"{role}.{name}", first=first - ahead, tokens=length)
                else:
                    yield msgspec.structs.replace(
                        operand, role=f"{role}.{name}", first=own.held - ahead, tokens=own.count
                    )

    def _share(self, operand: Operand, own: Stretch) -> Operand:
        if self._is_beside(operand):
            return operand
        _, ahead = self._runs_in(operand)
        first = own.first if self._is_whole(operand) else own.held
        return msgspec.structs.replace(operand, first=first - ahead, tokens=own.count)

    def _counted(self, operands: tuple[Operand, ...]) -> Iterator[Operand]:
        """Yield the gradients that this rank counts in the gradient norm.

        Gradients that all tensor-parallel (or METP) ranks hold are counted once, by the first of these ranks. If these
        ranks share the block's states by ZeRO, each rank counts its own share. Where ranks divide experts, the norm is
        summed over all ranks with the same parameters of the rest: the first of those with the same block counts it.
        With ``zero_ranks`` it is summed inside a group, which has every shard of every block once.
        """
        shares = self.optimizer.group == "ends" and self.optimizer.shards > 1
        leads = self.mesh.at(self.mesh.layout.weights_group) == 0
        counted = self.trained if leads or shares else self.divided
        layout = self.mesh.layout
        every = layout.ep > 1 and not layout.sharded_in_groups
        if every and self.optimizer.shards == 1 and self.mesh.at(self.optimizer.group):
            counted = []
        runs = [run for name, run in self.runs.items() if name != FROZEN]
        own = runs if self.optimizer.shards > 1 else [Stretch(0, self.optimizer.block.trained_elements, 0)]
        for operand in operands:
            if operand.role != "grads":
                yield operand
                continue
            found = []
            for run in own:
                begin = run.first if self._is_whole(operand) else run.held
                for first, end in counted:
                    low, high = max(run.first, first), min(run.first + run.count, end)
                    if low < high:
                        found.append((begin + low - run.first, high - low))
            for i, (first, tokens) in enumerate(found or [(0, 0)]):
                yield msgspec.structs.replace(operand, role=f"grads.{i}", first=first, tokens=tokens)
