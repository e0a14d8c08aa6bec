"""How much to swap: the paper's linear program in closed form, and the alpha that is best in the engine.

MEMO 4.1: maximise alpha so that a layer's offload hides under a layer's forward and the swapped layers fit host memory,

    (S_input + S_attn + alpha * S_others) / B <= T_layer,      (n - 2) * (S_input + S_attn + alpha * S_others) <= M_CPU

with one variable, so the optimum is the smaller of the two bounds. The engine's best differs where the paper's model
is coarse: stalls are not all or nothing, backward has more time than forward, and host blocks may be rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.planning.space import with_alpha
from memo_sim.program.shape import shape_of, swap_granule
from memo_sim.program.tensors import Fate, skeletal_tensors


@dataclass(frozen=True, slots=True)
class LinearProgram:
    """The paper's problem for one rank: bytes of one layer, offload bandwidth, layer time, host bytes of this rank."""

    input_bytes: int
    attention_bytes: int
    others_bytes: int
    bandwidth_bytes_per_s: float
    layer_forward_s: float
    swapped_layers: int
    host_bytes: float

    @property
    def overlap_bound(self) -> float:
        """Largest alpha whose offload hides under one layer's forward; negative when even alpha 0 does not."""
        hidden = self.bandwidth_bytes_per_s * self.layer_forward_s
        return (hidden - self.input_bytes - self.attention_bytes) / self.others_bytes

    @property
    def host_bound(self) -> float:
        """Largest alpha that host memory holds; negative when even alpha 0 does not fit."""
        if self.swapped_layers <= 0:
            return 1.0
        return (self.host_bytes / self.swapped_layers - self.input_bytes - self.attention_bytes) / self.others_bytes

    @property
    def alpha(self) -> float:
        """The optimum, between 0 and 1."""
        return min(1.0, max(0.0, min(self.overlap_bound, self.host_bound)))

    @property
    def binds(self) -> str:
        """What limits alpha: ``nothing``, ``overlap`` or ``host memory``."""
        if min(self.overlap_bound, self.host_bound) >= 1:
            return "nothing"
        return "overlap" if self.overlap_bound < self.host_bound else "host memory"

    @property
    def full_overlap_bandwidth(self) -> float:
        """Offload bandwidth (bytes/s) that would hide a full swap."""
        return (self.input_bytes + self.attention_bytes + self.others_bytes) / self.layer_forward_s


def linear_program(
    decisions: Decisions, *, layer_forward_s: float, bandwidth_bytes_per_s: float, host_bytes: float
) -> LinearProgram:
    """Return the paper's problem for a plan; ``host_bytes`` is one rank's share of host memory."""
    shape = shape_of(decisions)
    tensors = skeletal_tensors(decisions.model, shape, decisions.dtype)
    whole = {t.name: t.bytes for t in tensors if t.fate is Fate.WHOLE}
    return LinearProgram(
        input_bytes=whole["x"],
        attention_bytes=whole["attn"] + whole["lse"],
        others_bytes=sum(t.bytes for t in tensors if t.fate is Fate.BY_TOKEN),
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        layer_forward_s=layer_forward_s,
        swapped_layers=decisions.model.layers - 2,
        host_bytes=host_bytes,
    )


@dataclass(frozen=True, slots=True)
class AlphaSearch:
    """Result of a search over alpha: the plan that won (nearest to fitting when none does), and how many were played.

    ``above`` is what memory said of the next alpha up where it refused that; ``below`` of the next one down.
    """

    decisions: Decisions
    prediction: Prediction
    evaluated: int
    above: Prediction | None = None
    below: Prediction | None = None


class _Scan:
    """The plans of one layout and recompute mode at multiples of 1 / ``steps``, each predicted once."""

    def __init__(self, base: Decisions, predict: Callable[[Decisions], Prediction], resolution: int) -> None:
        self.steps = max(1, min(resolution, base.local_tokens // swap_granule(base)))
        self._base = base
        self._predict = predict
        self._seen: dict[int, tuple[Decisions, Prediction]] = {}

    def at(self, step: int) -> tuple[Decisions, Prediction]:
        """Return the plan at a step, and what is predicted of it."""
        if step not in self._seen:
            decisions = with_alpha(self._base, self._base.recompute, step / self.steps)
            self._seen[step] = (decisions, self._predict(decisions))
        return self._seen[step]

    def time_of(self, step: int) -> float:
        """Return the step time; what memory refuses is slower than anything."""
        step_s = self.at(step)[1].step_s
        return step_s if step_s is not None else float("inf")

    def descend(self, starts: tuple[int, ...], lowest: int, highest: int) -> int:
        """Return the fastest step found from the best of ``starts`` by shrinking strides."""
        best = min(starts, key=self.time_of)
        stride = max(1, (highest - lowest) // 4)
        while stride:
            neighbours = [s for s in (best - stride, best + stride) if lowest <= s <= highest]
            better = [s for s in neighbours if self.time_of(s) < self.time_of(best)]
            if better:
                best = min(better, key=self.time_of)
            else:
                stride //= 2
        return best

    def result(self, step: int) -> AlphaSearch:
        """Return the search's result with the plan at ``step``, and why its neighbours were not taken."""
        decisions, prediction = self.at(step)
        above, below = (self._refusal(n) for n in (step + 1, step - 1))
        return AlphaSearch(decisions, prediction, len(self._seen), above, below)

    def _refusal(self, step: int) -> Prediction | None:
        seen = self._seen.get(step)
        return seen[1] if seen and seen[1].step_s is None else None


def best_alpha(
    base: Decisions, predict: Callable[[Decisions], Prediction], *, start: float, resolution: int = 64
) -> AlphaSearch:
    """Return the plan with ``base``'s recompute mode that is fastest in the engine at any alpha.

    Step time falls with alpha (less recompute) until copies stall compute, then rises: it is searched by shrinking
    steps from ``start`` (the linear program's answer) over multiples of 1 / ``resolution``; what memory refuses counts
    as slower than anything.
    """
    scan = _Scan(base, predict, resolution)
    starts = tuple(dict.fromkeys((0, round(start * scan.steps), scan.steps)))
    return scan.result(scan.descend(starts, 0, scan.steps))


def best_partial_swap(
    base: Decisions, predict: Callable[[Decisions], Prediction], *, resolution: int = 64
) -> AlphaSearch | None:
    """Return the fastest plan that swaps a part and keeps the rest; None when ``base`` has too few rows for a part.

    Device memory falls with alpha, host memory and copies rise: the least alpha that the device holds is found by
    bisection, and the fastest is searched from there upward.
    """
    scan = _Scan(base, predict, resolution)
    lowest, highest = 1, scan.steps - 1
    if highest < lowest:
        return None
    while lowest < highest:
        middle = (lowest + highest) // 2
        if scan.at(middle)[1].status == "gpu_oom":
            lowest = middle + 1
        else:
            highest = middle
    if scan.at(lowest)[1].status != "ok":
        return scan.result(lowest)
    return scan.result(scan.descend((lowest,), lowest, scan.steps - 1))
