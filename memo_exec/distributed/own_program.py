"""The program as one rank plays it: a lowered program names the ranges of rank 0 where ranks hold shares.

Only operands change, never instructions, their order, their names or the buffers, so ids, lives and placements are the
plan's. What changes under ZeRO and tensor parallelism:

    grads.reduce_scatter, params.all_gather   one operand a run (decayed parameters, others), not the whole block
    update, add                               this rank's share, which lies in its own place of whole buffers
    norm                                      what no other rank counts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.shards import KINDS, Stretch, divided_elements, dividing, optimizer_of, own_runs
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.ir.instruction import Instruction, Operand, Template
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower

RUNS = ("decay", "no_decay")


def rank_program(decisions: Decisions, mesh: MeshCoordinates) -> Program:
    """Return the program that the rank at ``mesh`` plays: of its stage, and of its part of the sequence.

    Raises:
        CannotRun: for gathered keys of several sequences, whose chunks do not lie behind each other.
        Infeasible: as ``lower``.
    """
    layout = decisions.layout
    if layout.cp > 1 and layout.cp_exchange == "all_gather" and decisions.micro_batch > 1:
        raise CannotRun(
            "gathered keys and values are those of one sequence",
            where="$.decisions.micro_batch",
            got=decisions.micro_batch,
            wanted=1,
            hint="micro-batches of one sequence, or cp_exchange ring",
        )
    ring = "metp" if layout.metp > 1 else "cp"
    return lower(decisions, cp_rank=mesh.at(ring) if layout.ring > 1 else None)[mesh.at("pp")]


def own_program(program: Program, decisions: Decisions, mesh: MeshCoordinates) -> Program:
    """Return ``program`` with the operands of the rank at ``mesh``."""
    if decisions.layout.devices == 1:
        return program
    return replace(program, templates=tuple(_own_template(t, decisions, mesh) for t in program.templates))


def _own_template(template: Template, decisions: Decisions, mesh: MeshCoordinates) -> Template:
    kind, _, what = template.name.partition(".")
    if kind not in KINDS or kind == template.name:
        return template
    block = _Block(optimizer_of(decisions, kind, mesh), template, decisions, mesh)
    return replace(template, instructions=tuple(block.own(i, what) for i in template.instructions))


class _Block:
    """Rewrites the instructions that reduce, gather and update one block."""

    def __init__(self, optimizer: Optimizer, template: Template, decisions: Decisions, mesh: MeshCoordinates) -> None:
        self.optimizer, self.template, self.mesh = optimizer, template, mesh
        self.divided = divided_elements(decisions, optimizer.kind, mesh)
        found = dict(zip([name for name, _, _ in optimizer.runs()], own_runs(optimizer, mesh), strict=True))
        self.runs: dict[str, Stretch] = found

    def own(self, instruction: Instruction, what: str) -> Instruction:
        """Return the instruction with this rank's operands."""
        if instruction.op == "grads.reduce_scatter":
            return replace(instruction, operands=tuple(self._by_run(instruction.operands, "tensor", "full")))
        if instruction.op == "params.all_gather":
            return replace(instruction, operands=tuple(self._by_run(instruction.operands, "tensor", "full")))
        if instruction.op == "grad_norm":
            return replace(instruction, operands=tuple(self._counted(instruction.operands)))
        run = instruction.name.rpartition(".")[2]
        if what in ("update", "add") and run in self.runs and self.optimizer.shards > 1:
            return replace(instruction, operands=tuple(self._share(o, self.runs[run]) for o in instruction.operands))
        return instruction

    def _is_whole(self, operand: Operand) -> bool:
        """Whether the operand's buffer holds the whole block, not shares."""
        state = self.template.slots[operand.slot].partition(".")[0]
        if state in ("params", "grads"):
            return not self.optimizer.shared("params" if state == "params" else "grads")
        return state in ("gathered", "whole_grads")

    def _by_run(self, operands: tuple[Operand, ...], old: str, new: str) -> Iterator[Operand]:
        """Yield an operand a run: all of it where the buffer is whole, this rank's share where it holds shares."""
        ends = {"decay": self.optimizer.block.decayed_elements, "no_decay": self.optimizer.block.elements}
        for operand in operands:
            role = new if operand.role == old else operand.role
            for name, first, _ in self.optimizer.runs():
                own = self.runs[name]
                if self._is_whole(operand):
                    yield replace(operand, role=f"{role}.{name}", first=first, tokens=ends[name] - first)
                else:
                    yield replace(operand, role=f"{role}.{name}", first=own.held, tokens=own.count)

    def _share(self, operand: Operand, own: Stretch) -> Operand:
        if operand.role in ("norm", "workspace"):
            return operand
        return replace(operand, first=own.first if self._is_whole(operand) else own.held, tokens=own.count)

    def _counted(self, operands: tuple[Operand, ...]) -> Iterator[Operand]:
        """Yield the gradients that this rank counts: a vector that all of tp (or METP) have is counted by their first.

        Where they divide the states of what all of them have, each counts its share.
        """
        shares = self.optimizer.group == "ends" and self.optimizer.shards > 1
        leads = self.mesh.at(dividing(self.mesh.layout)) == 0
        limit = self.optimizer.block.elements if leads or shares else self.divided
        own = list(self.runs.values()) if self.optimizer.shards > 1 else [Stretch(0, self.optimizer.block.elements, 0)]
        for operand in operands:
            if operand.role != "grads":
                yield operand
                continue
            for i, run in enumerate(own):
                count = max(0, min(run.first + run.count, limit) - run.first)
                first = run.first if self._is_whole(operand) else run.held
                yield replace(operand, role=f"grads.{i}", first=first, tokens=count)
