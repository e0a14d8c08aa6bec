"""What latent attention does not go with."""

from __future__ import annotations

from memo_sim.contract.attention_kernels import takes_values
from memo_sim.program.layout.rowwise_blocks import ROWWISE
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged
from memo_sim.program.layout.rules.rule import Rule

_LATENT = Feature(
    name="latent attention",
    chosen=lambda d: d.model.latent is not None,
    beside="beside latent attention",
    setting="a model with latent attention",
    hint="tp, cp, Ulysses, dp, pp, ZeRO and subsequences go with latents, and every recompute but operators",
)

LATENT = (
    _LATENT.allows("decisions.adapters", "none", because="adapters would be of products that latents do not have"),
    _LATENT.allows(
        "layout.metp", 1, because="METP passes the weights of Q, K and V round its ring, not those of latents"
    ),
    _LATENT.allows(
        "layout.tp_overlap", "none", because="the latents are gathered, and no chunks of them are multiplied"
    ),
    _LATENT.allows(
        "layout.cp_exchange", "ring", "all_gather", because="scores of whole rows need equal widths of K and V"
    ),
    _LATENT.allows("layout.uneven_heads", False, because="ranks exchange equal numbers of heads"),
    _LATENT.allows("decisions.attention_chunk_tokens", 0, because="chunks of tokens would be expanded one by one"),
    _LATENT.allows("model.bidirectional", False, because="no such model has a latent"),
    _LATENT.allows(
        "decisions.recompute",
        *("none", "selective", "norms", "mlp", "full", "tokenwise", "rowwise"),
        because="every second product would have to be chosen among those of latents",
    ),
    _LATENT.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients would need the gradients of every product of latents",
        when=lambda d: d.model.latent is not None and staged(d),
    ),
    _LATENT.allows(
        "decisions.memory_policy",
        *("planned", "caching"),
        because="no framework's kernels of latents are known: --system memo, any or every-layout",
    ),
    _LATENT.allows(
        "decisions.kernels.rowwise", "torch", "triton", because="no framework's kernels of latents are known"
    ),
    Rule(
        name="latent attention: attention",
        breaks=lambda d: not takes_values(d.kernels.attention, d.model.head_dim, d.model.value_dim),
        what="the kernel has no form for these widths of keys and values",
        where="decisions.kernels.attention",
        got=lambda d: f"{d.kernels.attention} with heads of {d.model.head_dim} and values of {d.model.value_dim}",
        wanted="a kernel that takes them, or pads the values",
        hint="--attention flash2 pads values with zeros; --attention cudnn takes both widths",
    ),
    Rule(
        name="rebuild_qkv: model",
        breaks=lambda d: d.rebuild_qkv and d.model.latent is None,
        what="without latents there is nothing narrower to compute Q, K and V from",
        where="decisions.rebuild_qkv",
        got="true with a model without latent attention",
        wanted="false",
        hint="leave --rebuild-qkv out, or --recompute tokenwise",
    ),
    Rule(
        name="rebuild_qkv: subsequences",
        breaks=lambda d: d.rebuild_qkv and d.layout.subsequences > 1,
        what="the KV cache of a prefix holds expanded keys and values in any case",
        where="decisions.rebuild_qkv",
        got=lambda d: f"true with {d.layout.subsequences} subsequences",
        wanted="false",
        hint="leave --rebuild-qkv out, or --recompute tokenwise",
    ),
    Rule(
        name="rebuild_qkv: recompute",
        breaks=lambda d: d.rebuild_qkv and d.recompute in ("full", ROWWISE),
        what="full and row-wise recompute compute Q, K and V again anyway",
        where="decisions.rebuild_qkv",
        got=lambda d: f"true with recompute {d.recompute}",
        wanted="false, or another recompute",
        hint="leave --rebuild-qkv out, or --recompute tokenwise",
    ),
)
