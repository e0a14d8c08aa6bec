"""Fused row-wise kernels are a choice of the plan and change only the workspaces of its program."""

import msgspec

from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.small import decide, llama


def with_kernels(rowwise: RowwiseKernel) -> Decisions:
    kernels = Kernels(attention="flash2", rowwise=rowwise)
    return decide(llama(), dtype="bf16", seq_tokens=65_536, micro_batch=1, kernels=kernels)


def largest(program: Program, part: str) -> int:
    """Return the bytes of the largest workspace whose name contains ``part``."""
    found = [
        slot.bytes
        for template in program.templates
        for slot in template.slots
        if slot.buffer_class is BufferClass.WORKSPACE and part in slot.name
    ]
    return max(found, default=0)


def test_the_default_is_torch() -> None:
    decisions = with_kernels("torch")
    implied = msgspec.structs.replace(decisions, kernels=Kernels(attention="flash2"))
    assert program_sha256(lower(implied)) == program_sha256(lower(decisions))
    assert program_sha256(lower(with_kernels("triton"))) != program_sha256(lower(decisions))


def test_only_workspaces_differ() -> None:
    plain, fused = lower(with_kernels("torch"))[0], lower(with_kernels("triton"))[0]
    names = [[i.op for t in program.templates for i in t.instructions] for program in (plain, fused)]
    assert names[0] == names[1]


def test_fused_kernels_need_less() -> None:
    rows, features, vocab = 65_536, 4096, 32_000
    assert table.norm_workspace_bytes(rows, features, "bf16", "triton") == 0
    backward = table.norm_backward_workspace_bytes(rows, features, "bf16", "triton")
    assert backward == 4 * features * (2 * table.NORM_PROGRAMS + 1)
    assert backward < table.norm_backward_workspace_bytes(rows, features, "bf16") / 10
    assert table.norm_backward_workspace_bytes(10, 64, "bf16", "triton") == 4 * 64 * 21
    heads = 4096 * 40 * 64 * 2
    rotary = table.rotary_workspace_bytes(rows, 40, 128, "bf16")
    assert rotary - table.rotary_workspace_bytes(rows, 40, 128, "bf16", "triton") == heads
    assert table.loss_workspace_bytes(rows, vocab, "bf16", "triton") == 4 * rows + table.SCRATCH_ALIGNMENT_BYTES
