"""Measures the scratch that each kernel allocates on a GPU inside one call, and compares it with what programs declare.

Attention's libraries allocate their own workspace, which ``attention_workspace_bytes`` computes from their sources. It
depends on the number of head groups and on grouped queries, so each kernel is played with both. All other kernels get
their workspace as an operand and should allocate nothing. On a CPU, ``machine/library_scratch.py`` measures instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from memo_exec.probes.grid import Grid, attention_operator
from memo_exec.probes.operators import Bench, Operator
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.workspaces import attention_workspace_bytes

HEADS, KV_HEADS, GROUPS = 8, (8, 2), (1, 2)
"""Query heads, key/value heads and head groups of the measured calls."""

MOST_TOKENS = 65_536
"""Longest sequence of the measured calls; scratch grows in proportion beyond it."""

ROUNDING_BYTES = 2**14
"""Bytes that do not count as undeclared: torch's allocator rounds each block up to 512 bytes."""


@dataclass(frozen=True)
class Workspace:
    """The scratch of one kernel's call, in bytes."""

    name: str
    declared: int
    measured: int

    @property
    def exceeds(self) -> bool:
        """Whether the kernel takes more than programs declare."""
        return self.measured > self.declared + ROUNDING_BYTES

    def text(self) -> str:
        """Return both sizes as text."""
        return f"{self.measured} bytes, {self.declared} declared"


def measure(bench: Bench, grid: Grid, kernels: Sequence[str], operators: Sequence[Operator]) -> list[Workspace]:
    """Return the scratch of every attention kernel, and of the largest of ``operators`` of each other kind.

    Call this in the compute lane. The list is empty on a CPU.
    """
    if bench.device.type != "cuda":
        return []
    found = []
    for name, operator, declared in [*_attention(grid, kernels), *_others(operators)]:
        found.append(Workspace(name, declared, _peak_bytes(bench.playing(operator), bench.device)))
    return found


def _attention(grid: Grid, kernels: Sequence[str]) -> Iterator[tuple[str, Operator, int]]:
    tokens = max(length for length in grid.attention_lengths if length <= MOST_TOKENS)
    for kernel, head_dim, kv_heads, groups in product(kernels, grid.head_dims, KV_HEADS, GROUPS):
        for backward in (False, True):
            shape = (tokens, HEADS, head_dim)
            operator = attention_operator(
                grid.dtype, kernel, shape, "causal", backward=backward, kv_heads=kv_heads, groups=groups
            )
            work = operator.instruction.work
            assert isinstance(work, Attention)
            name = (
                f"{kernel} {'backward' if backward else 'forward'}, {tokens} tokens, {HEADS} heads of {head_dim}, "
                f"{kv_heads} of keys, {groups} head groups"
            )
            yield name, operator, attention_workspace_bytes(work, groups)


def _others(operators: Sequence[Operator]) -> Iterator[tuple[str, Operator, int]]:
    largest: dict[str, Operator] = {}
    for operator in operators:
        key = f"{operator.instruction.op} ({operator.rowwise})"
        if isinstance(operator.instruction.work, Attention):
            continue
        if key not in largest or operator.bytes > largest[key].bytes:
            largest[key] = operator
    for key, operator in largest.items():
        yield key, operator, 0


def _peak_bytes(call: Callable[[], None], device: torch.device) -> int:
    """Return how many bytes torch's allocator hands out at most during a call, after a first call that warms up."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
