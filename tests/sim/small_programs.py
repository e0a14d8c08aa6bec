"""Two small models, every policy, and decisions for them, used by the tests of the lowering."""

from __future__ import annotations

import msgspec

from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_deadlock, check_stages
from memo_sim.program.verify.values import check_values

GPT = Model(
    name="gpt",
    family="gpt",
    layers=5,
    hidden=256,
    heads=4,
    kv_heads=4,
    head_dim=64,
    ffn_hidden=1024,
    vocab=100,
    tied_embeddings=True,
    qkv_bias=True,
    linear_bias=True,
)
LLAMA = Model(
    name="llama",
    family="llama",
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    ffn_hidden=640,
    vocab=100,
    tied_embeddings=False,
    qk_norm=True,
    activation="silu",
)
LATENT = msgspec.structs.replace(
    LLAMA,
    name="latent",
    qk_norm=False,
    heads=4,
    kv_heads=4,
    head_dim=48,
    latent=LatentAttention(q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
)
NO_Q_LATENT = msgspec.structs.replace(
    LATENT, name="no-q-latent", latent=msgspec.structs.replace(LATENT.latent, q_rank=0, score_scale=1.5)
)
EXPERTS = msgspec.structs.replace(LLAMA, name="experts", experts=Experts(count=8, per_token=2, hidden=192))
POLICIES = [
    *[("none", 0.0), ("none", 0.5), ("none", 1.0)],
    *[("full", 0.0), ("full", 0.5), ("full", 1.0)],
    *[("tokenwise", 0.0), ("tokenwise", 0.5)],
]


def decide(
    model: Model = GPT, layout: Layout | None = None, policy: tuple[str, float] = ("none", 0.0), **more
) -> Decisions:
    """Return decisions with a few thousand tokens; ``policy`` is a recompute mode and an alpha."""
    layout = layout or Layout()
    seq = more.pop("seq_tokens", 2048)
    swapped = int(policy[1] * seq // (layout.cp * layout.ulysses))
    fields = {"global_batch": 2 * layout.dp, "loss_chunk_tokens": 512, **more}
    return Decisions(model=model, layout=layout, seq_tokens=seq, recompute=policy[0], swapped_tokens=swapped, **fields)


def faults_of(decisions: Decisions, *, values: bool = True) -> list[str]:
    """Return the faults that the independent checkers find in each stage's program, and in all of them together.

    ``values``: also check values, which holds for the layers that the checker knows.
    """
    programs = lower(decisions)
    columns = [expand(p) for p in programs]
    edges = [derive_edges(c) for c in columns]
    found = check_stages(programs) + check_deadlock(programs, columns, edges)
    for program, mine, orders in zip(programs, columns, edges, strict=True):
        found += check_program(program, mine) + check_edges(mine, orders)
        found += check_values(program, mine, decisions) if values else []
    return found
