"""Row blocks of row-wise recompute: the rows that a layer computes at once, outside of attention.

rows     |   b0   |   b1   | b2 |      norm, QKV, projection and MLP of one block after the other;
                                       attention of all rows
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.partition import partition

ROWWISE = "rowwise"
"""Name of this recompute mode in a plan."""


def is_rowwise(decisions: Decisions) -> bool:
    """Return whether backward rebuilds all of a layer but attention, in row blocks."""
    return decisions.recompute == ROWWISE


def rows_of_a_block(decisions: Decisions, tokens: int) -> int:
    """Return the most rows of a block of ``tokens`` rows; without ``mlp_chunk_tokens`` one block has all of them."""
    return min(decisions.mlp_chunk_tokens or tokens, tokens)


def rowwise_blocks(decisions: Decisions, tokens: int) -> list[tuple[int, int]]:
    """Return (first row, rows) of the blocks in order; the last one may be shorter."""
    most = rows_of_a_block(decisions, tokens)
    return [(first, min(most, tokens - first)) for first in range(0, tokens, most)]


def routed_unit(decisions: Decisions) -> str:
    """Return what a rank routes at once, as a word for people: a layer's tokens, a subsequence's, or a row block's."""
    parts = len(routed_at_once(decisions))
    if parts == 1:
        return "layer"
    return "row block" if parts > decisions.layout.subsequences else "subsequence"


def routed_part(decisions: Decisions, tokens: int) -> str:
    """Return the same for ``tokens`` that are routed at once, with their number where these are not all of a layer."""
    unit = routed_unit(decisions)
    return "a layer" if unit == "layer" else f"a layer's {unit} of {tokens:,} tokens"


def routed_at_once(decisions: Decisions) -> list[int]:
    """Return the tokens whose experts a rank chooses at once, in order: those of a subsequence, or of each row block.

    Without subsequences these are all of a micro-batch. With expert parallelism each has a capacity of its own.
    """
    parts = partition(decisions)
    if is_rowwise(decisions):
        parts = tuple(rows for part in parts for _, rows in rowwise_blocks(decisions, part))
    total, tokens = decisions.routed_tokens, decisions.local_tokens
    return [rows * total // tokens for rows in parts]
