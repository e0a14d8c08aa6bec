"""What METP does not go with."""

from __future__ import annotations

from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged
from memo_sim.program.layout.rules.rule import Rule

_METP = Feature(
    name="METP",
    chosen=lambda d: d.layout.metp > 1,
    beside="beside METP",
    setting=lambda d: f"metp {d.layout.metp}",
    hint="dp, pp and ZeRO go with METP",
)

METP_SCHEDULE = _METP.allows(
    "layout.schedule",
    *("gpipe", "1f1b", "interleaved"),
    because="deferred weight gradients would need the ring of weights, or its sums, once more",
    when=lambda d: d.layout.metp > 1 and staged(d),
)

NORMS_KEPT_UNDER_FULL_RECOMPUTE = Rule(
    name="METP: keep_norms",
    breaks=lambda d: d.layout.metp > 1 and d.keep_norms and d.recompute == "full",
    what="full recompute keeps a layer's input alone, and no norms",
    where="decisions.keep_norms",
    got="true with recompute full",
    wanted="recompute none or tokenwise",
    hint="leave --keep-norms out, or --recompute",
)

NORMS_OF_METP = Rule(
    name="keep_norms: metp",
    breaks=lambda d: d.keep_norms and d.layout.metp == 1,
    what="a layer that is not METP's keeps its norms anyway",
    where="decisions.keep_norms",
    got="true with metp 1",
    wanted="false",
    hint="leave it out, or divide by metp",
)

METP = (
    _METP.allows("layout.tp", 1, because="METP divides the same rows and columns of a layer's weights as tp"),
    _METP.allows("layout.cp", 1, because="METP passes keys and values round a ring of its own"),
    _METP.allows(
        "layout.zero_ranks", 0, because="METP's layers and its embedding and head have different numbers of replicas"
    ),
    _METP.allows("layout.ulysses", 1, because="METP plays the heads part by part, which Ulysses would divide"),
    _METP.allows(
        "layout.subsequences",
        1,
        because="every subsequence would send METP's weights round the ring again, with the sums of their gradients",
    ),
    METP_SCHEDULE,
    _METP.allows(
        "decisions.mlp_rebuild", "block", because="METP's backward computes the MLP's tensors again, step by step"
    ),
    _METP.allows(
        "decisions.recompute",
        *("none", "full", "tokenwise"),
        because="of what selective recompute drops METP keeps only attention's output, which full recompute rebuilds",
        when=lambda d: d.layout.metp > 1 and not is_rowwise(d),  # refused in rowwise.py, with its own reason
    ),
    _METP.allows(
        "decisions.grad_sums",
        *("auto", "fp32"),
        because="METP passes the sums of its gradients round the ring in fp32",
    ),
    _METP.allows("decisions.early_stop", False, because="METP's full recompute plays whole rings"),
    _METP.allows(
        "decisions.states",
        "fp32",
        "bf16",
        "host",
        because="METP passes the sums of its gradients round the ring in fp32",
    ),
    _METP.allows(
        "decisions.memory_policy", "planned", "caching", because="memo has no model of an eager framework with METP"
    ),
    NORMS_KEPT_UNDER_FULL_RECOMPUTE,
    Rule(
        name="METP: attention",
        breaks=lambda d: d.layout.metp > 1 and d.kernels.attention == "plain",
        what="plain attention has no log-sum-exp to merge the ring's parts by",
        where="decisions.kernels.attention",
        got=lambda d: f"plain with metp {d.layout.metp}",
        wanted="a flash kernel",
        hint="another attention kernel, or cp, tp or Ulysses in place of metp",
    ),
)
