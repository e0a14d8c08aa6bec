"""Merges partial attention results: the same queries against several sets of keys, combined by their log-sum-exp.

    lse' = log(exp(lse) + exp(part_lse))        out' = out + (part - out) * exp(part_lse - lse')

A partial result may cover only the late half of each sequence's queries (``memo_sim/program/attention/ring.py``). Sums
are in fp32. Their scratch is allocated once per context (``Context.merging``); the reserve counts it, the program does
not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memo_exec.kernels.call import Call, Scratch
from memo_sim.program.operators.workspaces import MERGE_ROWS


def merge(call: Call) -> None:
    """Merge ``part, part_lse`` into ``out, lse``, in place."""
    part, part_lse = call.matrix("part"), call.matrix("part_lse")
    heads = part_lse.shape[1]
    scratch = Scratch(call.context.merging)
    rows = min(len(part), MERGE_ROWS)
    weights = scratch.take(rows, heads, 1)
    wide = [scratch.take(rows, heads, part.shape[1] // heads) for _ in range(2)] if part.dtype != torch.float32 else []
    for ours, into in _blocks(call, rows):
        n = ours.stop - ours.start
        out, lse = (call.matrix(role)[into].view(n, heads, -1) for role in ("out", "lse"))
        added, added_lse = (tensor[ours].view(n, heads, -1) for tensor in (part, part_lse))
        torch.logaddexp(lse, added_lse, out=lse)
        weight = torch.sub(added_lse, lse, out=weights[:n]).exp_()
        if wide:
            into_wide, added_wide = wide[0][:n].copy_(out), wide[1][:n].copy_(added)
            out.copy_(torch.lerp(into_wide, added_wide, weight, out=into_wide))
        else:
            torch.lerp(out, added, weight, out=out)


def sequences_of_a_part(call: Call) -> int:
    """Return of how many sequences a part has the end; 1 where it has all rows of ``out``."""
    return call.context.decisions.micro_batch if len(call["part"]) < len(call["out"]) else 1


def _blocks(call: Call, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows of the part, rows of ``out``), at most ``most`` at a time; a part is all, or each sequence's end."""
    batch = sequences_of_a_part(call)
    part, whole = len(call["part"]) // batch, len(call["out"]) // batch
    for sequence in range(batch):
        for first in range(0, part, most):
            n = min(most, part - first)
            ours, into = sequence * part + first, (sequence + 1) * whole - part + first
            yield slice(ours, ours + n), slice(into, into + n)
