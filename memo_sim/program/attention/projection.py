"""Attention's output projection and the residual sum behind it, of any rows of a rank."""

from __future__ import annotations

from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


def project(writer: OperatorWriter, ulysses: Ulysses, rows: RowBlock, at: RowBlock, room: int) -> None:
    """Write projection and residual sum of ``rows``; their product lies at ``at`` in a buffer for ``room`` rows."""
    shape = writer.shape
    product = Rows(writer.own("proj_out", room, shape.hidden), *at)
    attended = Rows(ulysses.sequence_sharded("attn"), *rows)
    writer.linear("proj", attended, product, shape.hidden, shape.q_width, bias=False)
    summed = writer.scatter("proj", product, tokens=room)
    writer.residual("resid_add", "x", summed, out="resid", rows=rows, bias="proj.bias")
