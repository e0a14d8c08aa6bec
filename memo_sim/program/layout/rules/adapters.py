"""What low-rank adapters do not go with."""

from __future__ import annotations

from memo_sim.contract.knobs import LINEAR_LOSSES
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged
from memo_sim.program.layout.rules.rule import Rule

_ADAPTERS = Feature(
    name="adapters",
    chosen=lambda d: d.lora is not None,
    beside="beside low-rank adapters",
    setting=lambda d: f"adapters {d.adapters}",
    hint="tp, cp, Ulysses, pp, dp, ZeRO, subsequences and every recompute but operators go with --lora",
)

ADAPTERS = (
    Rule(
        name="adapters: model",
        breaks=lambda d: (
            d.lora is not None
            and not any(d.lora.targets_of(product, d.model) for product in ("qkv", "proj", "ffn_up", "ffn_down"))
        ),
        what="the model has none of the products that adapters are given for",
        where="decisions.adapters",
        got=lambda d: f"{d.adapters} with a model without a gate",
        wanted="a target among q, k, v, proj, up and down",
        hint="--lora r=16,targets=up",
    ),
    Rule(
        name="adapters: experts",
        breaks=lambda d: bool(d.lora and d.model.mixture and {"gate", "up", "down"}.intersection(d.lora.targets)),
        what="adapters of experts have no lowering: each would need grouped products of its own",
        where="decisions.adapters",
        got=lambda d: f"{d.adapters} with a model with experts",
        wanted="targets among q, k, v and proj",
        hint="--lora r=16,targets=qkv+proj",
    ),
    _ADAPTERS.allows("layout.metp", 1, because="METP's rings would carry the adapters with the weights"),
    _ADAPTERS.allows(
        "layout.tp_overlap", "none", because="the chunks of a product would each need their part of the adapter"
    ),
    _ADAPTERS.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="frozen products leave hardly any weight gradients to defer",
        when=lambda d: d.lora is not None and staged(d),
    ),
    _ADAPTERS.allows("layout.multiplexed", False, because="helper stages would need the gradients of the adapters"),
    _ADAPTERS.allows(
        "decisions.recompute",
        *("none", "selective", "norms", "mlp", "full", "tokenwise", "rowwise"),
        because="every second product would be rebuilt without its adapter",
    ),
    _ADAPTERS.allows(
        "decisions.memory_policy",
        *("planned", "caching"),
        because="no framework's tensors and kernels of adapters are known: --system memo, any or every-layout",
    ),
    _ADAPTERS.allows(
        "decisions.kernels.rowwise", "torch", "triton", because="no framework's kernels of adapters are known"
    ),
    _ADAPTERS.allows(
        "decisions.kernels.attention",
        wanted="a flash kernel",
        because="memo has not derived what plain attention keeps beside frozen products",
        when=lambda d: d.lora is not None and d.kernels.attention == "plain",
    ),
    _ADAPTERS.allows(
        "layout.cp_exchange",
        *("ring", "all_gather"),
        because="memo has not derived what ring self-attention keeps beside frozen products",
    ),
    _ADAPTERS.allows(
        "decisions.loss",
        *("auto", "blocks", "fused", "eager-fp32", "vocab-parallel", *LINEAR_LOSSES),
        because="checkpointed losses make the gradient of a classifier, which is frozen",
    ),
)
