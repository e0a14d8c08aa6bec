"""No kernel allocates memory that the program does not declare."""

import pytest

from memo_exec.kernels import KERNELS, LIBRARY_SCRATCH, Call, Scratch
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.workspaces import attention_workspace_bytes
from tests.exec_cpu.kernels.hand_call import allocations
from tests.exec_cpu.small import MODELS, decide, one_step

NUMBER_BYTES = 16
"""Allocations up to this size are ignored, because torch turns Python numbers into tensors of one element."""
THREAD_BYTES = 2**20
"""Upper limit of one thread's tile in torch's CPU attention; the tile's size depends on the machine."""


@pytest.mark.parametrize("name", ["gpt2", "llama-biased", "qwen3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_hidden_allocations(name: str, dtype: str) -> None:
    decisions = decide(MODELS[name], recompute="full", dtype=dtype, states=dtype)
    hidden: dict[str, int] = {}
    declared: dict[str, int] = {}

    def counting(op: str, call: Call) -> None:
        sizes = allocations(lambda: KERNELS[op](call))
        work = call.instruction.work
        if isinstance(work, Attention):
            declared[op] = attention_workspace_bytes(work, decisions.kernels.head_groups)
        hidden[op] = max(hidden.get(op, 0), sum(size for size in sizes if size > NUMBER_BYTES))

    def kernel(op: str) -> object:
        return lambda call: counting(op, call)

    one_step(decisions, kernels={op: kernel(op) for op in KERNELS})

    assert len(hidden) > 15
    library = {op: hidden.pop(op) for op in LIBRARY_SCRATCH}
    assert {op: size for op, size in hidden.items() if size} == {}
    for op, size in library.items():
        assert declared[op] <= size <= declared[op] + THREAD_BYTES


def test_a_kernel_cannot_take_more_than_is_declared() -> None:
    with pytest.raises(ValueError, match="more workspace bytes, but 0 of the declared 0 are taken"):
        Scratch(None).take(1)
