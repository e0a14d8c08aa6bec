"""No kernel allocates memory that neither the program declares nor the reserve counts, on any instruction set."""

from itertools import accumulate

import pytest

from memo_exec.kernels import KERNELS, LIBRARY_SCRATCH, Call, Scratch
from memo_exec.machine.library_scratch import MEASURED, library_scratch
from memo_exec.machine.machine import this_machine
from memo_exec.machine.memory_budget import needs_of
from memo_sim.program.ir.work import Attention
from memo_sim.program.lower import lower
from memo_sim.program.operators.workspaces import attention_workspace_bytes, sort_workspace_bytes
from tests.exec_cpu.kernels.hand_call import memory_changes
from tests.exec_cpu.small import EXPERT_MODELS, MODELS, decide, one_step

NUMBER_BYTES = 16
"""Allocations up to this size are ignored, because torch turns Python numbers into tensors of one element."""


@pytest.mark.parametrize("name", ["gpt2", "llama-biased", "qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_hidden_allocations(name: str, dtype: str) -> None:
    decisions = decide((MODELS | EXPERT_MODELS)[name], recompute="full", dtype=dtype, states=dtype)
    hidden: dict[str, int] = {}

    def counting(op: str, call: Call) -> None:
        work = call.instruction.work
        least = 0 if isinstance(work, MEASURED) else NUMBER_BYTES
        changes = [size for size in memory_changes(lambda: KERNELS[op](call)) if abs(size) > least]
        declared = attention_workspace_bytes(work, decisions.kernels.head_groups) if isinstance(work, Attention) else 0
        if op == "experts.sort":
            declared = sort_workspace_bytes(len(call["order"]), decisions.kernels.attention)
        most = max(accumulate(changes, initial=0))
        assert op not in LIBRARY_SCRATCH or most >= declared
        hidden[op] = max(hidden.get(op, 0), most - declared)

    def kernel(op: str) -> object:
        return lambda call: counting(op, call)

    one_step(decisions, kernels={op: kernel(op) for op in KERNELS})

    assert len(hidden) > 15
    (program,) = lower(decisions)
    machine = this_machine()
    works = {i.op: i.work for template in program.templates for i in template.instructions}
    scratch = library_scratch(decisions, program, machine.compute_threads)
    products = {op: size for op, size in hidden.items() if isinstance(works[op], MEASURED)}
    assert {op: size for op, size in hidden.items() if size and op not in products} == {}
    grouped = {op for op in products if op.startswith("experts.")}
    assert {op: size for op, size in products.items() if op not in grouped} == {
        op: size for op, size in scratch.items() if op not in grouped
    }
    assert all(products[op] <= scratch[op] for op in grouped)  # measured with all rows at one expert
    if dtype == "fp32":
        assert {op for op, size in products.items() if size} <= LIBRARY_SCRATCH
    needs = needs_of(program, machine, library_scratch=scratch if dtype == "bf16" else None)
    assert max(scratch.values()) <= needs.reserve_bytes


def test_a_kernel_cannot_take_more_than_is_declared() -> None:
    with pytest.raises(ValueError, match="more workspace bytes, but 0 of the declared 0 are taken"):
        Scratch(None).take(1)
