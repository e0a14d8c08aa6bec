"""What products in FP8 cost and save: their time, that of quantisation, and the copies of weights."""

from __future__ import annotations

import numpy as np

from memo_sim.contract.units import format_bytes, format_seconds
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.question import Question
from memo_sim.program.ir.instruction import BufferClass, Instruction
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.work import Fp8Gemm, Fp8GroupedGemm, Gemm, GroupedGemm
from memo_sim.program.layout.fp8 import weight_copies

MAKES_COPIES = frozenset({"fp8.quantize", "fp8.transpose", "params.largest", "params.quantize", "params.transpose"})
"""Instructions that make the FP8 copies of operands."""


def fp8(question: Question, simulation: Simulation) -> list[str]:
    """Say how long products in FP8 and their quantisation take, beside the same products in bf16."""
    decisions = simulation.decisions
    if decisions.fp8 == "none":
        return []
    pricer = Pricer(question.hardware, question.cluster, decisions.layout, rowwise=decisions.kernels.rowwise)

    def in_bf16(instruction: Instruction) -> float:
        work = instruction.work
        if isinstance(work, Fp8GroupedGemm):
            return pricer.seconds(GroupedGemm(work.sizes, work.n, work.k, work.gemm_pass, work.dtype))
        if not isinstance(work, Fp8Gemm):
            return 0.0
        return pricer.seconds(Gemm(work.m, work.n, work.k, work.gemm_pass, work.dtype))

    taken: tuple[float, ...] = (0.0, 0.0, 0.0)
    for stage in simulation.stages:
        products = stage.per_instruction(lambda i: float(isinstance(i.work, Fp8Gemm | Fp8GroupedGemm)))
        copies = stage.per_instruction(lambda i: float(i.op in MAKES_COPIES))
        each = (stage.seconds * products, stage.seconds * copies, stage.per_instruction(in_bf16))
        taken = max(taken, tuple(float(np.sum(one * stage.weights)) for one in each))
    products_s, copies_s, bf16_s = taken
    text = f"FP8 ({decisions.fp8}): layers' products take {format_seconds(products_s)} of a rank's step, making FP8"
    text += f" copies of their operands {format_seconds(copies_s)}; the same products in bf16 take"
    text += f" {format_seconds(bf16_s)}."
    held = sum(
        family.bytes * family.count
        for family in simulation.fullest.program.families
        if family.kind in (FamilyKind.PARAMS_FP8, FamilyKind.PARAMS_FP8_COLUMNS)
        and family.buffer_class is BufferClass.STATE
    )
    if decisions.fp8_params:
        text += f" A rank holds {format_bytes(held)} of their weights, in FP8 alone."
    elif held:
        number = weight_copies(decisions)
        several = "one FP8 copy" if number == 1 else f"{number} FP8 copies"
        text += f" Beside bf16 weights a rank holds {several} of them, {format_bytes(held)}, made once a step."
    else:
        text += " FP8 copies of gathered weights are made before every use."
    return [text]
