"""Chunked attention beside row-wise recompute: its output and log-sum-exp are kept, so it runs forward once.

As in ``chunked.py`` queries, keys and values exist for single chunks, and wait on the host between their uses. Unlike
there, attention's output and the log-sum-exp of all rows outlive forward: on the device, or swapped as alpha says.

    forward    chunk by chunk: norm, product, attention over the own keys and over those of all earlier chunks
    backward   gradient of attention's output, chunk by chunk; each chunk's waits on the host
               norm and product of each chunk again, whose queries, keys and values go to the host
               pairs of chunks as in ``chunked.py``, and for a complete chunk product and norm backward

Attention's backward reads a chunk's rows of the two kept tensors in place. A chunk consists of row blocks, of one
where ranks exchange or gather rows: under Ulysses a chunk's rows are then next to each other in head-sharded tensors.
"""

from __future__ import annotations

from memo_sim.program.attention.chunked import ChunkedAttention
from memo_sim.program.ir.builder import Rows
from memo_sim.program.operators.operators import RowBlock


class KeptChunks(ChunkedAttention):
    """Writes attention from the first norm on, and its backward; row-wise recompute writes the rest of a layer."""

    def forward(self, blocks: list[RowBlock]) -> None:
        """Write norm, product and attention of every chunk; keys and values of all but the last go to the host."""
        for c in range(len(self.chunks)):
            self.writer.suffix = f".c{c}"
            if c:
                self._fetch_earlier(c, 0)
            self._project(c)
            self._attend(c)
            if c + 1 < len(self.chunks):
                self._store("kv", c)
        self.writer.suffix = ""

    def rebuild(self) -> None:
        """Write norm and product of every chunk again, and store what attention's backward reads on the host."""
        for c in range(len(self.chunks)):
            self.writer.suffix = f".c{c}"
            self._project(c)
            for name in ("kv", "q", *self._raw):
                self._store(name, c)
        self.writer.suffix = ""

    def output_gradient(self, rows: RowBlock) -> Rows:
        """Return where the gradient of attention's output of a row block is written, head-sharded."""
        c, first = self._chunk_of(rows)
        slot = self._chunk("d_attn", c, self._gradient_slot(c)).slot
        return Rows(slot, self.shape.ulysses * first, self.shape.ulysses * rows[1])

    def store_output_gradient(self, rows: RowBlock) -> None:
        """Write the copy of that gradient to the host, behind the last row block of a chunk."""
        c, first = self._chunk_of(rows)
        if first + rows[1] == self.chunks[c][1]:
            self._store("d_attn", c, self._gradient_slot(c))

    def _chunk_of(self, rows: RowBlock) -> tuple[int, int]:
        """Return a row block's chunk, and the block's first row in it."""
        return divmod(rows[0], self.room)

    def backward(self, grad_in: str) -> None:
        """Write the backward of all pairs of chunks, product and norm, to the layer's input gradient ``grad_in``."""
        n, k, c = 0, *self._order()[0]
        self._fetch_keys(k)
        self._fetch_queries(n, k, c, ("q", "d_attn"))
        self._pairs_backward(grad_in)

    @property
    def _outputs(self) -> tuple[str, ...]:
        """The results of attention that are stored on the host: none, the layer keeps them."""
        return ()

    def _out(self, c: int) -> Rows:
        return self._kept("attn", c)

    def _lse(self, c: int) -> Rows:
        return self._kept("lse", c)

    def _out_of_pair(self, n: int, c: int) -> Rows:
        return self._out(c)

    def _lse_of_pair(self, n: int, c: int) -> Rows:
        return self._lse(c)

    def _kept(self, name: str, c: int) -> Rows:
        """Return a chunk's rows of a tensor that the layer keeps."""
        first, tokens = self.chunks[c]
        return Rows(name, self.shape.ulysses * first, self.shape.ulysses * tokens)
