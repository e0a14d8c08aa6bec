"""What goes beside METP and what does not: it divides tokens as context parallelism does, weights as tp does."""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Schedule

MOST_ZERO = 1
"""Above, the blocks that a layer needs would be gathered whole, which METP exists to avoid."""

METP_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved")
"""Orders of a pipeline's passes that leave weight gradients where METP computes them: beside their data gradients."""


def check_metp(decisions: Decisions) -> None:
    """Refuse what has no lowering beside METP.

    Raises:
        Infeasible: naming the first of them.
    """
    layout = decisions.layout
    if layout.metp == 1:
        return
    for name, got, allowed in (
        ("layout.tp", layout.tp, (1,)),
        ("layout.cp", layout.cp, (1,)),
        ("layout.ulysses", layout.ulysses, (1,)),
        ("layout.subsequences", layout.subsequences, (1,)),
        ("layout.zero", layout.zero, tuple(range(MOST_ZERO + 1))),
        ("layout.schedule", layout.schedule if layout.pp > 1 else "1f1b", METP_SCHEDULES),
        ("decisions.recompute", decisions.recompute, ("none", "full", "tokenwise")),
        ("decisions.mlp_chunk_tokens", decisions.mlp_chunk_tokens, (0,)),
        ("decisions.overlap", decisions.overlap, ("none",)),
        ("decisions.memory_policy", decisions.memory_policy, ("planned", "caching")),
    ):
        if got not in allowed:
            raise Infeasible(
                f"{name.rpartition('.')[2]} {got} has no lowering beside METP",
                where=name,
                got=f"{got} with metp {layout.metp}",
                wanted=" or ".join(str(each) for each in allowed),
                hint="dp, pp and ZeRO 1 go with METP",
            )
    if decisions.kernels.attention == "plain":
        raise Infeasible(
            "plain attention has no log-sum-exp to merge the ring's parts by",
            where="decisions.kernels.attention",
            got=f"plain with metp {layout.metp}",
            wanted="a flash kernel",
        )
