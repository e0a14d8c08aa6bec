"""What a policy's plans play at least, from the pass of the plan of their layout that keeps everything.

Other plans play at least the kernels of that plan, in the same order. Where compute waits between kernels A and B for
what another lane makes of A's result, it waits as long with more work in between:

    keeps everything   compute [A]             [B]        full recompute    compute [A][more  ]    [B]
                       tp         [collective ]                             tp         [collective ]

So the formula of ``lower_bounds.py`` holds with W, B and I of that plan. It also holds with I = 0, and with W of the
kernels that are certainly played once more. Exceptions:

- Token-wise recompute cuts a forward into two row blocks. Each waits for its own collectives, but Ulysses' exchanges
  can run beside the other block (``Pass.uncut_idle_s``). Two collectives may be faster than one.
- Recompute of experts includes exchanges that the plan which keeps everything has in backward. Where exchanges overlap
  with products, recompute stands between an exchange and what waits for it.
- Other row blocks and chunks may hide every wait, but those for experts' rows: of each block, the kernel that needs
  them follows the one that copies those that are sent (``Pass.exchanged_s``). A block's capacity is not smaller, for
  its rows, than that of all rows. Attention in chunks may be faster than whole attention.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from memo_sim.contract.plan import Decisions
from memo_sim.planning.few_layers import Pass
from memo_sim.planning.presets import Policy
from memo_sim.program.layout.expert_load import fullest_share
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.rowwise_blocks import ROWWISE


class Change(Struct, frozen=True):
    """Makes a pass of the plan that keeps everything one that has at most the work and waits of other plans."""

    repeats: bool = False
    """Whether other plans certainly play the kernels of ``Pass.repeated_s`` once more."""
    attends: bool = False
    """Whether they certainly play attention's forward once more."""
    waits: Literal["none", "exchanges", "uncut", "all"] = "none"
    """Which collectives and waits they have; ``uncut``: those that remain in two row blocks; ``exchanges``: those for
    experts' rows, which remain in any row blocks."""
    gain: float = 1.0
    """By how much collectives of row blocks may be faster."""

    def of(self, one: Pass) -> Pass:
        """Return a changed pass."""
        if self.waits == "all":
            return one
        if self.waits == "uncut":
            lanes = {"idle_s": one.uncut_idle_s, "collective_s": one.collective_s, "p2p_s": one.p2p_s}
            return replace(one, **{name: seconds / self.gain for name, seconds in lanes.items()})
        repeated_s = one.repeated_s if self.repeats else 0.0
        attention_s = one.attention_s if self.attends else 0.0
        idle_s = one.exchanged_s / self.gain if self.waits == "exchanges" else 0.0
        return replace(_compute_alone(one), compute_s=one.compute_s + repeated_s + attention_s, idle_s=idle_s)

    def adds_to(self, other: Change) -> bool:
        """Return whether changed passes have at least all that ``other`` leaves in them."""
        if other.waits != "none":
            return self == other
        return self.repeats >= other.repeats and self.attends >= other.attends


def has_waits(one: Pass) -> bool:
    """Return whether a pass has more than kernels; without, there are no waits or they are not known."""
    return one != _compute_alone(one)


def passes_beside(keep: Decisions, policy: Policy, *, waits: bool, gain_of_pieces: float) -> list[Change]:
    """Return changes of passes of ``keep`` after each of which the formula gives a lower bound for ``policy``.

    - ``keep``: the plan of the layout that keeps everything.
    - ``waits``: whether its waits are known.
    - ``gain_of_pieces``: by how much collectives are faster at most than one with the rows of all.
    """
    kernels = _repeated(keep, policy)
    in_blocks = policy.mlp_blocks or policy.attention_chunks or policy.recompute == ROWWISE
    beside_exchanges = keep.expert_overlap and policy.recompute != "none"
    if waits and policy.recompute == ROWWISE and not beside_exchanges and _exchanges_as_much_in_blocks(keep):
        return [kernels, replace(kernels, waits="exchanges", gain=gain_of_pieces)]
    if not waits or in_blocks or beside_exchanges or keep.modules != "auto":
        return [kernels]
    if policy.recompute == "none" or (keep.layout.ep == 1 and policy.recompute != "tokenwise"):
        with_waits = Change(waits="all")
    else:
        with_waits = Change(waits="uncut", gain=gain_of_pieces if policy.recompute == "tokenwise" else 1.0)
    return [kernels, with_waits] if kernels != Change() else [with_waits]


def _exchanges_as_much_in_blocks(keep: Decisions) -> bool:
    """Return whether row blocks certainly exchange as many rows of experts as a layer that is routed at once.

    A capacity that follows from the load is that of the fullest rank, whose rows are rounded in each block. It is not
    smaller in any block where all ranks have equally many rows of the whole layer.
    """
    of, ep = keep.model.mixture, keep.layout.ep
    if of is None or ep == 1:
        return False
    rows = keep.routed_tokens * of.per_token
    return keep.expert_capacity > 0 or fullest_share(of, rows, keep.expert_load, ep) == 1.0


def _compute_alone(one: Pass) -> Pass:
    """Return a pass without waits and without the other lanes."""
    return replace(one, idle_s=0.0, out_s=0.0, in_s=0.0, collective_s=0.0, p2p_s=0.0)


def _repeated(keep: Decisions, policy: Policy) -> Change:
    """Return the change of a pass of ``keep`` by the kernels that a policy certainly plays once more.

    METP and other modules repeat other kernels; under full recompute, attention is among them.
    """
    full = policy.recompute == "full" and policy.layers == ALL
    own = keep.layout.metp == 1 and keep.modules == "auto"
    return Change(repeats=own and (full or policy.recompute == ROWWISE), attends=full)
