"""What products in FP8 do not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged
from memo_sim.program.layout.rules.rule import Rule

_FP8 = Feature(
    name="FP8",
    chosen=lambda d: d.fp8 != "none",
    beside="beside products in FP8",
    setting=lambda d: f"fp8 {d.fp8}",
    hint="tp, cp, Ulysses, pp, dp, ZeRO, swapping and subsequences go with FP8; or leave --fp8 out",
)

_ALONE = Feature(
    name="parameters in FP8",
    chosen=lambda d: d.fp8_params,
    beside="beside parameters in FP8 alone",
    setting="fp8_params",
    hint="leave --fp8-params out, which keeps bf16 parameters beside their FP8 copies",
)

FP8_PARAMS_OF_FP8 = Rule(
    name="parameters in FP8: products",
    breaks=lambda d: d.fp8_params and d.fp8 == "none",
    what="parameters are kept in FP8 alone only where products read them so",
    where="decisions.fp8",
    got="none with fp8_params",
    wanted="delayed, tensor or block",
    hint="add --fp8 delayed, tensor or block, or leave --fp8-params out",
)

FP8_EXPERTS_OF_FP8 = Rule(
    name="experts in FP8: products",
    breaks=lambda d: d.fp8_experts and d.fp8 == "none",
    what="experts are in FP8 only where a recipe says how",
    where="decisions.fp8",
    got="none with fp8_experts",
    wanted="delayed, tensor, block or mx",
    hint="add --fp8 block, or leave --fp8-experts out",
)
FP8_EXPERTS_OF_EXPERTS = Rule(
    name="experts in FP8: model",
    breaks=lambda d: d.fp8_experts and d.fp8 != "none" and d.model.mixture is None,
    what="the model has no experts",
    where="decisions.fp8_experts",
    got="true",
    wanted="false",
    hint="leave --fp8-experts out",
)

IN_FP8 = (
    FP8_EXPERTS_OF_FP8,
    FP8_EXPERTS_OF_EXPERTS,
    _FP8.allows("decisions.dtype", "bf16", because="quantisation reads bf16"),
    _FP8.allows("layout.metp", 1, because="METP would pass FP8 copies of its weights round the ring"),
    _FP8.allows(
        "decisions.rebuild_qkv", False, because="backward would need the latents by rows, and keeps those by columns"
    ),
    _FP8.allows("layout.tp_overlap", "none", because="chunks would each be quantised by themselves"),
    _FP8.allows("layout.multiplexed", False, because="helper stages would need the FP8 copies of the owner's weights"),
    _FP8.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients would have to keep gradients in FP8",
        when=lambda d: d.fp8 != "none" and staged(d),
    ),
    _FP8.allows("decisions.mlp_rebuild", "block", because="frameworks that rebuild an MLP like this have no FP8"),
    _FP8.allows(
        "decisions.recompute",
        *("none", "full", "selective", "tokenwise", "rowwise"),
        because="what other modes rebuild is kept in FP8 alone",
    ),
    _FP8.allows(
        "decisions.modules", "auto", "operators", because="memo has no list of what FP8 modules of transformers save"
    ),
    _FP8.allows("decisions.adapters", "none", because="frozen products need no copies for the gradients of weights"),
    _FP8.allows(
        "decisions.grad_sums", "auto", "fp32", "params", because="autocast casts fp32 weights to bf16, not to FP8"
    ),
    FP8_PARAMS_OF_FP8,
    _ALONE.allows(
        "decisions.fp8",
        *("delayed", "tensor", "block"),
        because="MXFP8's two copies have different scales, so both are made of gathered bf16 weights",
        when=lambda d: d.fp8_params and d.fp8 != "none",
    ),
    _ALONE.allows(
        "decisions.states", "fp32", "bf16", because="they are made of fp32 master weights on the device in every step"
    ),
    _ALONE.allows("decisions.zero_params", "auto", "stored", because="a cast of every gather makes bf16 parameters"),
    _ALONE.allows("decisions.sharding", "memo", because="torch's FSDP keeps shards of its own dtype"),
)
