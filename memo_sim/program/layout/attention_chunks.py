"""Boundaries of chunked attention (FPDT, Yao et al. 2024).

A chunk is a run of ``attention_chunk_tokens`` tokens, divided over the ranks of Ulysses and of a ring: each rank has
its share of every chunk. The last chunk may be shorter.

      tokens     |      c0      |      c1      |   c2   |
      rank 0     | c0 | c1 | c2 |       rows [first, first + rows) of its own

Of a micro-batch of several sequences, a chunk has these tokens of every sequence, one sequence after the other
(``token_order.py``). The ranks of a ring divide every chunk in zigzag order, as they divide a whole sequence.
"""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Layout

MOST_CHUNKS = 64
"""Upper limit. Every chunk of queries attends to every earlier chunk of keys, so the number of calls grows with its
square: more chunks make programs of millions of instructions."""


def most_chunks(layout: Layout) -> int:
    """Return the most chunks that a layout allows: no more calls than ``MOST_CHUNKS`` have on one rank.

    Every pair of chunks has a call for each rank of a ring, and under METP for each of its parts of the heads.
    """
    calls, each = MOST_CHUNKS * (MOST_CHUNKS + 1), layout.ring * layout.metp
    return max((n for n in range(1, MOST_CHUNKS + 1) if n * (n + 1) * each <= calls), default=1)


def attention_chunks(decisions: Decisions) -> list[tuple[int, int]]:
    """Return (first row, rows) of each chunk, in rows of a rank; one chunk of all rows when attention is whole."""
    total, rows = decisions.local_tokens, rows_of_a_chunk(decisions)
    return [(first, min(rows, total - first)) for first in range(0, total, rows)]


def rows_of_a_chunk(decisions: Decisions) -> int:
    """Return a rank's rows of the longest chunk, of all sequences of a micro-batch; all when attention is whole."""
    chunk = decisions.micro_batch * decisions.attention_chunk_tokens // ranks_of_a_chunk(decisions)
    return min(chunk or decisions.local_tokens, decisions.local_tokens)


def ranks_of_a_chunk(decisions: Decisions) -> int:
    """Return the number of ranks that divide every chunk."""
    return decisions.layout.ulysses * decisions.layout.ring


def in_chunks(decisions: Decisions) -> bool:
    """Return whether attention runs in several chunks."""
    return 0 < decisions.attention_chunk_tokens < decisions.seq_tokens


def check_attention_chunks(decisions: Decisions) -> None:
    """Reject chunks that do not end at row blocks, and too many of them.

    Raises:
        Infeasible: with the chunks that are allowed.
    """
    if not in_chunks(decisions):
        return
    most = most_chunks(decisions.layout)
    chunk, tokens = decisions.attention_chunk_tokens, decisions.seq_tokens
    granule = decisions.swap_granule * ranks_of_a_chunk(decisions)
    if chunk % granule or chunk * most < tokens:
        layout = decisions.layout
        beside = f" beside a ring of {layout.ring} ranks" if layout.ring > 1 else ""
        if layout.metp > 1:
            beside = f" under METP on {layout.metp} ranks"
        raise Infeasible(
            f"chunks of attention have to be multiples of {granule} tokens, {most} of them at most{beside}",
            where="decisions.attention_chunk_tokens",
            got=f"{chunk} of {tokens} tokens",
            wanted=f"a multiple of {granule}, at least {-(-tokens // most)}",
            hint="another --attention-chunk, or leave it out",
        )
