"""Attention's output projection, the norm behind it in models with one, and the residual sum; of any rows of a rank."""

from __future__ import annotations

from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows
from memo_sim.program.operators import norms
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


def project(writer: OperatorWriter, ulysses: Ulysses, rows: RowBlock, at: RowBlock, room: int) -> None:
    """Write projection and residual sum of ``rows``; their product lies at ``at`` in a buffer for ``room`` rows."""
    shape = writer.shape
    output = Rows(ulysses.sequence_sharded("attn"), *rows)
    attended = Rows(writer.attended(output.slot, kept=True), *rows)
    writer.quantise(output, attended)
    attended = Rows(writer.attended(output.slot), *rows)

    def product(x: Rows, out: Rows) -> None:
        writer.linear("proj", x, out, shape.hidden, shape.attention_width, bias=False)

    summed = writer.multiply_and_scatter("proj", attended, "proj_out", at[0], product, tokens=room)
    summed = norms.post_norm(writer, "post_attn", summed, rows)
    writer.residual("resid_add", "x", summed, out="resid", rows=rows, bias="proj.bias")
