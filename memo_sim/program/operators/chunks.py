"""Products in chunks beside the exchanges of tensor parallelism (``tp_overlap``).

Products overlap with the all-gathers before them and the reduce-scatters behind them, in one chunk for the rows of each
tensor-parallel rank. In exchange i a rank sends to the rank i places ahead and receives from the rank i places behind,
as torch's fused operators do (``torch/distributed/_symmetric_memory``). Example of rank 0 of 4; ``own`` copies its
shard into the gathered rows, and ``sum`` adds up the partial sums of its rows:

    all-gather        p2p          [from 3][from 2][from 1]
    and product       compute  own [rows 0][rows 3][rows 2][rows 1]

    product and       p2p                  [to 1 ][to 2 ][to 3 ]
    reduce-scatter    compute      [rows 1][rows 2][rows 3][rows 0] sum

A rank sends as many bytes as in the collective. Products that run so:

    behind a gather    QKV and the first MLP product; gradients of the inputs of projection and second MLP product
    before a sum       projection and second MLP product; with deferred weight gradients, gradients of the inputs of QKV
                       and first MLP product

In backward QKV and the first MLP product also gather their input again and sum its gradient. Both collectives stay
whole, because they run beside the gradients of input and weight anyway (Transformer Engine's bulk overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from memo_sim.program.ir.builder import Rows, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Exchange, Rowwise
from memo_sim.program.layout.token_order import clipped_runs, row_blocks

if TYPE_CHECKING:
    from memo_sim.program.operators.operators import OperatorWriter, RowBlock


def gather_chunks(  # noqa: PLR0917 - the arguments of ``gather_and_multiply``
    writer: OperatorWriter,
    name: str,
    source: Rows,
    full: str,
    at: RowBlock,
    product: Callable[[Rows, RowBlock], None],
    tokens: int,
) -> None:
    """Write ``gather_and_multiply`` of one row block in chunks."""
    builder, suffix, tp, chunk = writer.builder, writer.suffix, writer.shape.tp, source.tokens
    full = writer.own(
        f"{builder.phase}.{full}", tokens or writer.shape.tokens, writer.shape.hidden, BufferClass.EXCHANGE
    )
    ranks = [(writer.shape.tp_rank - step) % tp for step in range(tp)]
    parts = [Rows(full, at[0] + rank * chunk, chunk) for rank in ranks]
    size = chunk * writer.shape.hidden * writer.size
    builder.further = True
    operands = {"source": reads(source), "target": writes(parts[0])}
    builder.emit(f"{name}.own{suffix}", "copy", Lane.COMPUTE, Rowwise("copy", chunk, size, size), **operands)
    for step, part in enumerate(parts):
        if step + 1 < tp:
            _send_chunk(writer, f"{name}.gather", step + 1, parts[0], parts[step + 1])
        writer.suffix, builder.further = f"{suffix}.c{step}", step > 0
        product(part, (part.first, chunk))
        writer.suffix, builder.further = suffix, True
    builder.further = False


def scatter_chunks(  # noqa: PLR0917 - the arguments of ``multiply_and_scatter``
    writer: OperatorWriter, name: str, x: Rows, first: int, product: Callable[[Rows, Rows], None], tokens: int
) -> None:
    """Write ``multiply_and_scatter`` of one row block in chunks."""
    builder, suffix, tp, hidden = writer.builder, writer.suffix, writer.shape.tp, writer.shape.hidden
    chunk, room = writer.shape.shard(x.tokens), writer.shape.shard(tokens or writer.shape.tokens)
    sent = [writer.own(f"{name}.sent{i}", room, hidden, BufferClass.EXCHANGE) for i in range(min(2, tp - 1))]
    parts = writer.own(f"{name}.parts", tp * room, hidden, BufferClass.EXCHANGE)
    for step in range(1, tp + 1):
        to = (writer.shape.tp_rank + step) % tp
        result = Rows(sent[step % len(sent)], 0, chunk) if step < tp else Rows(parts, 0, chunk)
        writer.suffix = f"{suffix}.c{step - 1}"
        product(Rows(x.slot, x.first + to * chunk, chunk), result)
        writer.suffix, builder.further = suffix, True
        if step < tp:
            _send_chunk(writer, f"{name}.scatter", step, result, Rows(parts, step * chunk, chunk))
    summed = Rows(writer.own(f"{name}_shard", room, hidden, BufferClass.EXCHANGE), writer.shape.shard(first), chunk)
    size = chunk * hidden * writer.size
    added, given = Rowwise("parts.sum", chunk, tp * size, size), reads(Rows(parts, 0, tp * chunk))
    builder.emit(f"{name}.sum{suffix}", "parts.sum", Lane.COMPUTE, added, parts=given, out=writes(summed))
    builder.further = False


def own_row_blocks(writer: OperatorWriter, at: RowBlock) -> Iterator[RowBlock]:
    """Yield the row blocks inside ``at``, in each of which ranks have a chunk of their own; ``suffix`` names them.

    Row blocks of the MLP (``mlp_chunk_tokens``) count rows from their own beginning, and are not divided.
    """
    blocks, suffix = [at], writer.suffix
    if writer.decisions.recompute == "tokenwise":
        blocks = list(clipped_runs(row_blocks(writer.decisions), *at))
    for number, rows in enumerate(blocks):
        writer.suffix = f"{suffix}.r{number}" if len(blocks) > 1 else suffix
        yield rows
    writer.suffix = suffix


def _send_chunk(writer: OperatorWriter, name: str, distance: int, send: Rows, recv: Rows) -> None:
    """Emit the exchange of a chunk: sent ``distance`` ranks ahead, received from as far behind."""
    work = Exchange(send.tokens * writer.shape.hidden * writer.size, writer.shape.tp, "tp", distance)
    operands = {"send": reads(send), "recv": writes(recv)}
    writer.builder.emit(f"{name}{distance}{writer.suffix}", "send_recv", Lane.P2P, work, **operands)
