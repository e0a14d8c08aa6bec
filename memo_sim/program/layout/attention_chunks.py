"""Boundaries of chunked attention (FPDT, Yao et al. 2024), and options that are incompatible with it.

A chunk is a run of ``attention_chunk_tokens`` tokens, divided over the ranks of Ulysses: each rank holds its share of
every chunk. The last chunk may be shorter.

      tokens     |      c0      |      c1      |   c2   |
      rank 0     | c0 | c1 | c2 |       rows [first, first + rows) of its own
"""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions

MOST_CHUNKS = 64
"""Upper limit. Every chunk of queries attends to every earlier chunk of keys, so the number of calls grows with its
square: more chunks make programs of millions of instructions."""


def attention_chunks(decisions: Decisions) -> list[tuple[int, int]]:
    """Return (first row, rows) of each chunk, in rows of a rank; one chunk of all rows when attention is whole."""
    total = decisions.local_tokens
    rows = min(decisions.attention_chunk_tokens // decisions.layout.ulysses or total, total)
    return [(first, min(rows, total - first)) for first in range(0, total, rows)]


def in_chunks(decisions: Decisions) -> bool:
    """Return whether attention runs in several chunks."""
    return 0 < decisions.attention_chunk_tokens < decisions.seq_tokens


def check_attention_chunks(decisions: Decisions) -> None:
    """Reject options that are incompatible with chunked attention, and chunks that do not end at row blocks.

    Raises:
        Infeasible: names the decision to change. Chunk sizes are checked first, then decisions that no layout changes.
    """
    if not in_chunks(decisions):
        return
    chunk, layout, tokens = decisions.attention_chunk_tokens, decisions.layout, decisions.seq_tokens
    granule = decisions.swap_granule * layout.ulysses
    if chunk % granule or chunk * MOST_CHUNKS < tokens:
        raise Infeasible(
            f"chunks of attention have to be multiples of {granule} tokens, {MOST_CHUNKS} of them at most",
            where="decisions.attention_chunk_tokens",
            got=f"{chunk} of {tokens} tokens",
            wanted=f"a multiple of {granule}, at least {-(-tokens // MOST_CHUNKS)}",
            hint="another --attention-chunk, or leave it out",
        )
    zero_bubble = layout.pp > 1 and layout.schedule == "zero-bubble"
    for where, got, wanted, refused in (
        ("model.bidirectional", "true", "a model with causal attention", decisions.model.bidirectional),
        ("decisions.kernels.attention", "plain", "a flash kernel", decisions.kernels.attention == "plain"),
        ("decisions.recompute", decisions.recompute, "full", decisions.recompute != "full"),
        ("decisions.micro_batch", decisions.micro_batch, 1, decisions.micro_batch > 1),
        ("layout.subsequences", layout.subsequences, 1, layout.subsequences > 1),
        ("layout.schedule", layout.schedule, "1f1b, gpipe or interleaved", zero_bubble),
        ("layout.cp_exchange", layout.cp_exchange, "ring or all_gather", layout.cp_exchange == "rsa"),
        ("layout.cp", layout.cp, 1, layout.cp > 1),
        ("layout.metp", layout.metp, 1, layout.metp > 1),
    ):
        if refused:
            raise Infeasible(
                f"{where.rpartition('.')[2]} {got} has no lowering with attention in chunks",
                where=where,
                got=f"{got} with chunks of {chunk} tokens",
                wanted=wanted,
                hint="leave --attention-chunk out; tp, ulysses, dp, pp and ZeRO go with it, under full recompute",
            )
