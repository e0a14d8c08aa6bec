"""Computes alpha by the paper's linear program, in closed form; ``alpha_search.py`` finds the fastest alpha instead.

MEMO 4.1 maximises alpha under two conditions. A layer's offload must hide under a layer's forward, and the swapped
layers must fit into host memory:

    (S_input + S_attn + alpha * S_others) / B <= T_layer,      (n - 2) * (S_input + S_attn + alpha * S_others) <= M_CPU

Where layers differ, their mean stands for a layer. There is one variable, so the optimum is the smaller of the two
bounds. The fastest alpha in the engine can differ, because the paper's model is coarse: stalls are not all or nothing,
backward has more time to hide copies than forward, and host blocks may be rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.plan import Decisions
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import Fate
from memo_sim.program.layout.swap_format import swapped_bytes


@dataclass(frozen=True, slots=True)
class LinearProgram:
    """The paper's problem for one rank: bytes of a layer, offload bandwidth, layer time, the rank's host bytes."""

    input_bytes: int
    attention_bytes: int
    others_bytes: int
    bandwidth_bytes_per_s: float
    layer_forward_s: float
    swapped_layers: int
    host_bytes: float

    @property
    def overlap_bound(self) -> float:
        """Largest alpha whose offload hides under one layer's forward; negative when not even alpha 0 hides."""
        hidden = self.bandwidth_bytes_per_s * self.layer_forward_s
        return (hidden - self.input_bytes - self.attention_bytes) / self.others_bytes

    @property
    def host_bound(self) -> float:
        """Largest alpha that fits into host memory; negative when not even alpha 0 fits."""
        if self.swapped_layers <= 0:
            return 1.0
        return (self.host_bytes / self.swapped_layers - self.input_bytes - self.attention_bytes) / self.others_bytes

    @property
    def alpha(self) -> float:
        """The optimum, between 0 and 1."""
        return min(1.0, max(0.0, min(self.overlap_bound, self.host_bound)))

    @property
    def binds(self) -> str:
        """The limit of alpha: ``nothing``, ``overlap`` or ``host memory``."""
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
    shape, model = shape_of(decisions), decisions.model
    tensors = skeletal_of(decisions, shape, model.layer(0))
    whole = {t.name: swapped_bytes(decisions, t) for t in tensors if t.fate is Fate.WHOLE}
    others = [
        sum(swapped_bytes(decisions, t) for t in skeletal_of(decisions, shape, layer) if t.fate is Fate.BY_TOKEN)
        for layer in model.layer_shapes
    ]
    return LinearProgram(
        input_bytes=whole["x"],
        attention_bytes=sum(size for name, size in whole.items() if name.startswith(("attn", "lse", "route"))),
        others_bytes=sum(others[kind] for kind in model.layer_kinds) // model.layers,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        layer_forward_s=layer_forward_s,
        swapped_layers=decisions.model.layers - 2,
        host_bytes=host_bytes,
    )
