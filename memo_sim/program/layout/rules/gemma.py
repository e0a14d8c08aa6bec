"""What Gemma's layers do not go with: norms behind attention and MLP, gates by gelu, scaled embeddings."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged

_POST_NORMS = Feature(
    name="norms behind attention and MLP",
    chosen=lambda d: d.model.post_norms,
    beside="with norms behind attention and MLP",
    setting="a model with such norms",
    hint="tp, cp, Ulysses, subsequences, dp, pp and ZeRO go with them, under recompute none, tokenwise and full",
)

_GEMMAS = Feature(
    name="Gemma's operators",
    chosen=lambda d: d.model.scaled_embeddings or bool(d.model.query_scalar) or d.model.activation != _usual(d),
    beside="with FFNs gated by gelu, scaled embeddings or a query scalar",
    setting="a model with them",
    hint="tp, cp (ring, all-gather), Ulysses, subsequences, dp, pp and ZeRO go with them",
)


def _usual(decisions: Decisions) -> str:
    """Return the activation of the MLP in the model's family; of GPT models, any."""
    return "silu" if decisions.model.gated else decisions.model.activation


GEMMA = (
    _POST_NORMS.allows("layout.metp", 1),
    _POST_NORMS.allows("decisions.mlp_chunk_tokens", 0, because="the norm behind the MLP needs its whole output kept"),
    _POST_NORMS.allows("decisions.attention_chunk_tokens", 0),
    _POST_NORMS.allows("decisions.recompute", "none", "tokenwise", "full"),
    _POST_NORMS.allows(
        "decisions.modules", "auto", "operators", because="what Hugging Face's modules save of them is not known"
    ),
    _POST_NORMS.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients would need the gradients before these norms",
        when=lambda d: d.model.post_norms and staged(d),
    ),
    _POST_NORMS.allows("layout.multiplexed", False),
    _GEMMAS.allows("layout.cp_exchange", "ring", "all_gather"),
    _GEMMAS.allows(
        "decisions.modules", "auto", "operators", because="what Hugging Face's modules save of them is not known"
    ),
)
