"""Why a decision of a plan becomes another one in a framework.

A framework's table of sayings has one sentence for a decision. What the decision is instead may have another cause:
ranks of a degree that the framework lacks go to another one, and of several ways that come near the best is taken.
Those causes are the same in all frameworks, so they stand here.
"""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.contract.knobs import KNOBS
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.interchange.framework import Saying

_DEGREES = ("tp", "cp", "ulysses", "metp", "pp", "dp")
_OPTIONS = {
    "decisions.swapped_tokens": "--alpha",
    "decisions.seq_tokens": "--seq-len",
}
"""Options that say a decision by another name than its knob's."""
_BEST = "of what it has, this comes out best"


def option_of(path: str) -> str:
    """Return the option of the command line that sets a decision: ``--tp``; "" where there is none."""
    named = next((knob for knob in KNOBS.values() if knob.path == path and knob.on_command_line), None)
    return _OPTIONS.get(path) or (named.option if named else "")


def reason(saying: Saying, path: str, plan: Decisions, there: Decisions) -> str:
    """Return why the decision at ``path`` of a plan is another one ``there``."""
    rule = _RULES.get(path)
    return (rule(saying, plan, there) if rule else "") or saying.lost


def _degree(name: str) -> Callable[[Saying, Decisions, Decisions], str]:
    def rule(_: Saying, plan: Decisions, there: Decisions) -> str:
        shrunk = [f"--{other}" for other in _DEGREES if _change(plan.layout, there.layout, other) < 0]
        grows = _change(plan.layout, there.layout, name) > 0
        return f"it takes the ranks of {' and '.join(shrunk)}" if grows and shrunk else ""

    return rule


def _change(plan: Layout, there: Layout, name: str) -> int:
    return int(getattr(there, name) - getattr(plan, name))


def _dp(saying: Saying, plan: Decisions, there: Decisions) -> str:
    grown = [f"--{name}" for name in _DEGREES if _change(plan.layout, there.layout, name) > 0 and name != "dp"]
    if there.layout.dp < plan.layout.dp and grown:
        return f"its ranks go to {' and '.join(grown)}"
    return _degree("dp")(saying, plan, there)


def _sequence_parallel(_: Saying, plan: Decisions, there: Decisions) -> str:
    if there.layout.sequence_parallel and plan.layout.metp > 1:
        return "METP divides tokens as well as weights"
    if there.layout.sequence_parallel:
        return "its tensor parallelism divides tokens between layers"
    return ""


def _zero(saying: Saying, plan: Decisions, there: Decisions) -> str:
    more = "more" if there.layout.zero > plan.layout.zero else "less"
    return saying.lost or f"it divides {more} of the states than ZeRO {plan.layout.zero}: {_BEST}"


def _recompute(saying: Saying, plan: Decisions, there: Decisions) -> str:
    if plan.recompute == "tokenwise":
        return f"it recomputes and swaps no part of the tokens: {_BEST}"
    if plan.recompute == "none" and plan.swapped_tokens:
        return f"what the plan swaps has to be kept or recomputed: {_BEST}"
    return f"{saying.lost}: {_BEST}"


def _recompute_layers(saying: Saying, plan: Decisions, there: Decisions) -> str:
    if there.recompute_layers.startswith("groups-") and not plan.recompute_layers.startswith("groups-"):
        return f"one input for a group of layers needs less memory: {_BEST}"
    if plan.recompute != there.recompute:
        return "it goes with the other recompute"
    return saying.lost


def _swapped(_: Saying, plan: Decisions, there: Decisions) -> str:
    return "it recomputes layers whose inputs wait on the host" if there.swapped_tokens > plan.swapped_tokens else ""


def _loss_chunk(saying: Saying, plan: Decisions, there: Decisions) -> str:
    if not there.loss_chunk_tokens:
        return saying.lost
    if not plan.loss_chunk_tokens:
        return "fp32 logits of all tokens at once would be larger"
    return "its loss needs other tiles, or comes out best with them"


def _mlp_chunk(saying: Saying, plan: Decisions, there: Decisions) -> str:
    return f"tiles of the MLP need less memory: {_BEST}" if there.mlp_chunk_tokens else saying.lost


def _states(saying: Saying, plan: Decisions, there: Decisions) -> str:
    if plan.states == "host" and not there.layout.zero:
        return "states on the host need ZeRO there"
    return saying.lost


def _adamw(saying: Saying, plan: Decisions, there: Decisions) -> str:
    eager = ("eager", "compiled")
    if plan.kernels.rowwise not in eager and there.kernels.rowwise in eager:
        return "its default; the plan's kernels have an optimizer of their own"
    return saying.lost


_RULES: dict[str, Callable[[Saying, Decisions, Decisions], str]] = {
    **{f"layout.{name}": _degree(name) for name in _DEGREES},
    "layout.dp": _dp,
    "layout.sequence_parallel": _sequence_parallel,
    "layout.zero": _zero,
    "decisions.recompute": _recompute,
    "decisions.recompute_layers": _recompute_layers,
    "decisions.swapped_tokens": _swapped,
    "decisions.loss_chunk_tokens": _loss_chunk,
    "decisions.mlp_chunk_tokens": _mlp_chunk,
    "decisions.states": _states,
    "decisions.kernels.adamw": _adamw,
}
