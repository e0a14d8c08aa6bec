"""What attention in chunks does not go with."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.attention_chunks import in_chunks, rows_of_a_chunk
from memo_sim.program.layout.rowwise_blocks import ROWWISE, is_rowwise
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged
from memo_sim.program.layout.rules.rule import Rule

_CHUNKS = Feature(
    name="attention in chunks",
    chosen=in_chunks,
    beside="with attention in chunks",
    setting=lambda d: f"chunks of {d.attention_chunk_tokens} tokens",
    hint="leave --attention-chunk out; tp, ulysses, cp, dp, pp and ZeRO go with it, under full and row-wise recompute, "
    "and METP under full recompute",
)


def _other_blocks(decisions: Decisions) -> bool:
    """Return whether the row blocks of row-wise recompute do not divide the chunks of attention as they have to.

    Rows that ranks gather or exchange are in order only where all of a chunk are gathered or exchanged at once.
    """
    if not (in_chunks(decisions) and is_rowwise(decisions)):
        return False
    layout, chunk = decisions.layout, rows_of_a_chunk(decisions)
    whole = layout.ulysses > 1 or (layout.tp > 1 and layout.sequence_parallel)
    block = decisions.mlp_chunk_tokens or decisions.local_tokens
    return block != chunk if whole else chunk % block > 0


def _in_a_ring(decisions: Decisions) -> bool:
    """Return whether ranks of context parallelism divide every chunk."""
    return in_chunks(decisions) and decisions.layout.cp > 1


CHUNKS_UNDER_RECOMPUTE = Rule(
    name="attention in chunks: recompute",
    breaks=lambda d: in_chunks(d) and d.recompute not in ("full", ROWWISE),
    what="attention in chunks needs full or row-wise recompute",
    where="decisions.recompute",
    got=lambda d: f"recompute {d.recompute} with chunks of {d.attention_chunk_tokens} tokens",
    wanted="full or rowwise",
    hint="--recompute full or rowwise, or leave --attention-chunk out",
)

ROW_BLOCKS_OF_CHUNKS = Rule(
    name="attention in chunks: row blocks of row-wise recompute",
    breaks=_other_blocks,
    what="with row-wise recompute, attention's chunks consist of whole row blocks, and of one with Ulysses or "
    "sequence parallelism",
    where="decisions.mlp_chunk_tokens",
    got=lambda d: f"{d.mlp_chunk_tokens} with chunks of {rows_of_a_chunk(d)} rows on a rank",
    wanted="the rows of a chunk, or a divisor of them where one is allowed",
    hint="leave --mlp-chunk out, or leave --attention-chunk out",
)

ATTENTION_CHUNKS = (
    _CHUNKS.allows("model.bidirectional", False, wanted="a model with causal attention"),
    _CHUNKS.allows(
        "decisions.kernels.attention",
        wanted="a flash kernel",
        when=lambda d: in_chunks(d) and d.kernels.attention == "plain",
    ),
    CHUNKS_UNDER_RECOMPUTE,
    ROW_BLOCKS_OF_CHUNKS,
    _CHUNKS.allows("layout.subsequences", 1),
    _CHUNKS.allows("layout.schedule", "1f1b", "gpipe", "interleaved", when=lambda d: in_chunks(d) and staged(d)),
    _CHUNKS.allows(
        "layout.cp_exchange",
        "ring",
        because="--cp-exchange ring passes the keys of a chunk from rank to rank",
        when=lambda d: _in_a_ring(d) or (in_chunks(d) and d.layout.cp_exchange == "rsa"),
    ),
    _CHUNKS.allows(
        "decisions.memory_policy",
        *("planned", "caching"),
        because="no framework has chunks beside a ring",
        when=lambda d: _in_a_ring(d) and d.memory_policy == "eager",
    ),
)
