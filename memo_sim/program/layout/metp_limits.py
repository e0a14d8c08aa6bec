"""Options that are compatible with METP.

METP divides tokens like context parallelism and weights like tensor parallelism, so it excludes both of them.
"""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Schedule

METP_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved")
"""Pipeline schedules that do not defer weight gradients: METP computes them beside the data gradients."""


def check_metp(decisions: Decisions) -> None:
    """Reject options that are incompatible with METP.

    Raises:
        Infeasible: names the first incompatible option.
    """
    layout = decisions.layout
    if layout.metp == 1:
        if decisions.keep_norms:
            raise Infeasible(
                "a layer that is not METP's keeps its norms anyway",
                where="decisions.keep_norms",
                got="true with metp 1",
                wanted="false",
                hint="leave it out, or divide by metp",
            )
        return
    for name, got, allowed, why in (
        ("layout.tp", layout.tp, (1,), "METP divides the same rows and columns of a layer's weights as tp"),
        ("layout.cp", layout.cp, (1,), "METP passes keys and values round a ring of its own"),
        ("layout.ulysses", layout.ulysses, (1,), "METP plays the heads part by part, which Ulysses would divide"),
        (
            "layout.subsequences",
            layout.subsequences,
            (1,),
            "its weights pass round once a pass: every subsequence would send them again, with sums of gradients",
        ),
        (
            "layout.schedule",
            layout.schedule if layout.pp > 1 else "1f1b",
            METP_SCHEDULES,
            "weight gradients apart would need the weights' ring, or its sums, once more",
        ),
        (
            "decisions.recompute",
            decisions.recompute,
            ("none", "full", "tokenwise"),
            "METP keeps nothing that selective recompute would drop but attention's output, which full rebuilds",
        ),
        ("decisions.mlp_chunk_tokens", decisions.mlp_chunk_tokens, (0,), "METP cuts the MLP by features, not by rows"),
        (
            "decisions.memory_policy",
            decisions.memory_policy,
            ("planned", "caching"),
            "no eager framework that memo has a model of plays METP",
        ),
    ):
        if got not in allowed:
            raise Infeasible(
                f"{name.rpartition('.')[2]} {got} has no lowering beside METP",
                where=name,
                got=f"{got} with metp {layout.metp}",
                wanted=" or ".join(str(each) for each in allowed),
                hint=f"{why}; dp, pp and ZeRO go with METP",
            )
    if decisions.keep_norms and decisions.recompute == "full":
        raise Infeasible(
            "full recompute keeps a layer's input alone, and no norms",
            where="decisions.keep_norms",
            got="true with recompute full",
            wanted="recompute none or tokenwise",
            hint="leave --keep-norms out, or --recompute",
        )
    if decisions.kernels.attention == "plain":
        raise Infeasible(
            "plain attention has no log-sum-exp to merge the ring's parts by",
            where="decisions.kernels.attention",
            got=f"plain with metp {layout.metp}",
            wanted="a flash kernel",
        )
