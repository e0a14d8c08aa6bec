"""Options that are compatible with ring self-attention, which writes scores to memory and never moves them."""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions


def check_rsa(decisions: Decisions) -> None:
    """Reject options that are incompatible with ring self-attention.

    Raises:
        Infeasible: names the first incompatible option.
    """
    layout = decisions.layout
    if layout.cp_exchange != "rsa":
        return
    for name, got, allowed in (
        ("layout.metp", layout.metp, (1,)),
        ("layout.ulysses", layout.ulysses, (1,)),
        ("layout.subsequences", layout.subsequences, (1,)),
        ("decisions.recompute", decisions.recompute, ("none", "selective", "full")),
        ("decisions.swapped_tokens", decisions.swapped_tokens, (0,)),
    ):
        if got not in allowed:
            raise Infeasible(
                f"{name.rpartition('.')[2]} {got} has no lowering beside ring self-attention",
                where=name,
                got=f"{got} with cp_exchange rsa",
                wanted=" or ".join(str(each) for each in allowed),
                hint="tp, pp, dp and ZeRO go with it, and what it keeps is rebuilt, not swapped",
            )
    if decisions.kernels.attention == "plain":
        raise Infeasible(
            "plain attention keeps the scores of whole sequences, ring self-attention its own",
            where="decisions.kernels.attention",
            got="plain with cp_exchange rsa",
            wanted="the kernel that the machine has; ring self-attention plays none",
        )
