"""What an MLP in row blocks does not go with."""

from __future__ import annotations

from memo_sim.program.layout.rowwise_blocks import ROWWISE
from memo_sim.program.layout.rules.pipeline_stages import staged
from memo_sim.program.layout.rules.rule import Rule

MLP_BLOCKS_UNDER_FULL_RECOMPUTE = Rule(
    name="MLP in row blocks: recompute",
    breaks=lambda d: d.mlp_chunk_tokens > 0 and d.recompute not in ("full", ROWWISE),
    what="the MLP in row blocks needs full or row-wise recompute",
    where="decisions.mlp_chunk_tokens",
    got=lambda d: f"{d.mlp_chunk_tokens} with recompute {d.recompute}",
    wanted="0, or recompute full or rowwise",
    hint="--recompute full or rowwise, or leave --mlp-chunk out",
)

MLP_BLOCKS_UNDER_ZERO_BUBBLE = Rule(
    name="MLP in row blocks: schedule",
    breaks=lambda d: d.layout.schedule == "zero-bubble" and staged(d) and d.mlp_chunk_tokens > 0,
    what="deferred weight gradients need the inputs of the whole MLP",
    where="decisions.mlp_chunk_tokens",
    got=lambda d: f"{d.mlp_chunk_tokens} with the schedule zero-bubble",
    wanted="0",
    hint="leave --mlp-chunk out, or another --schedule",
)

MLP_REBUILT_BY_FRAMEWORKS = (
    Rule(
        name="MLP rebuilt by frameworks: row blocks",
        breaks=lambda d: d.mlp_rebuild != "block" and not d.mlp_chunk_tokens,
        what="an MLP without row blocks is rebuilt with its layer",
        where="decisions.mlp_rebuild",
        got=lambda d: f"{d.mlp_rebuild} without row blocks",
        wanted="block",
        hint="--mlp-chunk 16384, or leave --mlp-rebuild out",
    ),
    Rule(
        name="MLP rebuilt by frameworks: tp",
        breaks=lambda d: d.mlp_rebuild != "block" and d.layout.tp > 1,
        what="the frameworks that rebuild row blocks like this do not divide the MLP by tensor parallelism",
        where="decisions.mlp_rebuild",
        got=lambda d: f"{d.mlp_rebuild} with tp {d.layout.tp}",
        wanted="block",
        hint="leave --mlp-rebuild out, or --tp 1",
    ),
)
