"""What attention windows do not go with."""

from __future__ import annotations

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule

_WINDOWS = Feature(
    name="windows",
    chosen=lambda d: longest_window(d) > 0,
    beside="beside attention windows",
    setting=lambda d: f"a window of {longest_window(d)} tokens",
    hint="tp, cp, Ulysses, subsequences, dp, pp and ZeRO go with windows, and every recompute",
)


def windowed(decisions: Decisions) -> bool:
    """Return whether any layer's window is shorter than the sequences."""
    return longest_window(decisions) > 0


def longest_window(decisions: Decisions) -> int:
    """Return the tokens of the longest window that is shorter than the sequences; 0: there is none."""
    shapes = decisions.model.layer_shapes if decisions.model.windowed else ()
    return max((shape.window for shape in shapes if shape.window < decisions.seq_tokens), default=0)


def chunk_tokens(decisions: Decisions) -> int:
    """Return the tokens of one of a rank's two chunks in zigzag order; of subsequences, those of the shortest."""
    layout, whole = decisions.layout, decisions.seq_tokens // (2 * decisions.layout.cp)
    if layout.subsequences == 1:
        return whole
    try:
        return partition(decisions)[-1] * layout.ulysses // (2 * decisions.micro_batch)
    except Infeasible:  # too many subsequences, which is refused where they are counted
        return whole


WINDOWED = (
    Rule(
        name="windows: attention",
        breaks=lambda d: windowed(d) and not ATTENTION_KERNELS[d.kernels.attention].windows,
        what="the attention kernel has no argument for a window",
        where="decisions.kernels.attention",
        got=lambda d: f"{d.kernels.attention} with a window of {longest_window(d)} tokens",
        wanted=", ".join(name for name, kernel in ATTENTION_KERNELS.items() if kernel.windows),
        hint="--attention flash",
    ),
    Rule(
        name="windows: modules",
        breaks=lambda d: windowed(d) and d.modules == "huggingface" and d.kernels.attention.startswith("torch-"),
        what="Hugging Face's modules give torch's attention a window as a mask of all pairs, which is not priced",
        where="decisions.kernels.attention",
        got=lambda d: f"{d.kernels.attention} with a window of {longest_window(d)} tokens",
        wanted="a kernel of flash-attn",
        hint="--attention flash2 (attn_implementation flash_attention_2)",
    ),
    _WINDOWS.allows("layout.cp_exchange", "ring", "all_gather", because="it has scores of all keys"),
    _WINDOWS.allows("layout.metp", 1, because="METP's ring brings every rank's keys"),
    _WINDOWS.allows("decisions.attention_chunk_tokens", 0, because="each chunk's queries fetch all keys before them"),
    _WINDOWS.allows("layout.multiplexed", False, because="helper stages would need a window's rows of other stages"),
    Rule(
        name="windows: cp",
        breaks=lambda d: windowed(d) and d.layout.cp > 1 and longest_window(d) > chunk_tokens(d) + 1,
        what="the window is longer than a chunk of a sequence or subsequence: its keys lie on more than neighbours",
        where="layout.cp",
        got=lambda d: f"cp {d.layout.cp}, chunks of {chunk_tokens(d)} tokens, a window of {longest_window(d)}",
        wanted="at most one token more than a chunk, of 2 x cp",
        hint="a smaller --cp, fewer --subsequences, or --ulysses",
    ),
)
