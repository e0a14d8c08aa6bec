"""Row blocks of row-wise recompute: the rows that a layer computes at once, outside of attention.

rows     |   b0   |   b1   | b2 |      norm, QKV, projection and MLP of one block after the other;
                                       attention of all rows
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions

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


def routed_at_once(decisions: Decisions) -> list[int]:
    """Return the tokens whose experts a rank chooses at once, in order: all of a micro-batch, or those of each block.

    With expert parallelism each has a capacity of its own.
    """
    if not is_rowwise(decisions):
        return [decisions.routed_tokens]
    total, tokens = decisions.routed_tokens, decisions.local_tokens
    return [rows * total // tokens for _, rows in rowwise_blocks(decisions, tokens)]
