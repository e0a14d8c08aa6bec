"""What subsequences and the window of their offload do not go with."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.recompute import swaps
from memo_sim.program.layout.rules.rule import Rule


def _divided(decisions: Decisions) -> bool:
    """Return whether ranks of context parallelism divide every subsequence."""
    return decisions.layout.subsequences > 1 and decisions.layout.cp > 1


_DIVIDED = Feature(
    name="subsequences with cp",
    chosen=_divided,
    beside="with subsequences that cp ranks divide",
    setting=lambda d: f"{d.layout.subsequences} subsequences and cp {d.layout.cp}",
    hint="--ulysses in place of --cp, or leave --subsequences out",
)

SUBSEQUENCES = (
    Rule(
        name="offload window: subsequences",
        breaks=lambda d: d.offload_window > 0 and (d.layout.subsequences == 1 or not swaps(d)),
        what="an offload window is for subsequences that are swapped",
        where="decisions.offload_window",
        got=lambda d: (
            f"{d.offload_window} with {d.layout.subsequences} subsequences, {d.swapped_tokens} tokens swapped"
        ),
        wanted="0",
        hint="--subsequences 8 and an --alpha above 0, or leave --offload-window out",
    ),
    Rule(
        name="rounding buffers: offload_window",
        breaks=lambda d: d.rounding_buffers and d.offload_window > 0,
        what="in an offload window each subsequence has buffers of its own",
        where="decisions.offload_window",
        got=lambda d: f"{d.offload_window} with rounding buffers",
        wanted="0",
        hint="--no-rounding-buffers, or leave --offload-window out",
    ),
    _DIVIDED.allows(
        "layout.multiplexed", False, because="helper stages have rows whose halves in zigzag order are not equal"
    ),
    _DIVIDED.allows("decisions.memory_policy", "planned", "caching", because="no framework has subsequences with cp"),
    Rule(
        name="subsequences: attention",
        breaks=lambda d: d.layout.subsequences > 1 and d.kernels.attention == "plain",
        what="plain attention has no log-sum-exp to merge earlier keys by",
        where="decisions.kernels.attention",
        got=lambda d: f"plain with {d.layout.subsequences} subsequences",
        wanted="a flash kernel",
        hint="another attention kernel, or leave --subsequences out",
    ),
)
