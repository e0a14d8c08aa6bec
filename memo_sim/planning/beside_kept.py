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
- Other row blocks and chunks may hide every wait. Attention in chunks may be faster than whole attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memo_sim.contract.plan import Decisions
from memo_sim.planning.few_layers import Pass
from memo_sim.planning.presets import Policy
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.rowwise_blocks import ROWWISE

Change = Callable[[Pass], Pass]
"""Makes a pass of the plan that keeps everything one that has at most the work and waits of other plans."""


def has_waits(one: Pass) -> bool:
    """Return whether a pass has more than kernels; without, there are no waits or they are not known."""
    return one != _compute_alone(one)


def passes_beside(keep: Decisions, policy: Policy, *, waits: bool, gain_of_pieces: float) -> list[Change]:
    """Return changes of passes of ``keep`` after each of which the formula gives a lower bound for ``policy``.

    - ``keep``: the plan of the layout that keeps everything.
    - ``waits``: whether its waits are known.
    - ``gain_of_pieces``: by how much two collectives are faster at most than one with the rows of both.
    """

    def repeated(one: Pass) -> Pass:
        return _repeated(_compute_alone(one), keep, policy)

    in_blocks = policy.mlp_blocks or policy.attention_chunks or policy.recompute == ROWWISE
    beside_exchanges = keep.expert_overlap and policy.recompute != "none"
    if not waits or in_blocks or beside_exchanges or keep.modules != "auto":
        return [repeated]
    if policy.recompute == "none" or (keep.layout.ep == 1 and policy.recompute != "tokenwise"):
        return [repeated, lambda one: one]
    gain = gain_of_pieces if policy.recompute == "tokenwise" else 1.0
    return [repeated, lambda one: _uncut(one, gain)]


def _compute_alone(one: Pass) -> Pass:
    """Return a pass without waits and without the other lanes."""
    return replace(one, idle_s=0.0, out_s=0.0, in_s=0.0, collective_s=0.0, p2p_s=0.0)


def _repeated(one: Pass, keep: Decisions, policy: Policy) -> Pass:
    """Return a pass of ``keep`` with the kernels that a policy certainly plays once more.

    METP and other modules repeat other kernels; under full recompute, attention is among them.
    """
    full = policy.recompute == "full" and policy.layers == ALL
    own = keep.layout.metp == 1 and keep.modules == "auto"
    repeated_s = one.repeated_s if own and (full or policy.recompute == ROWWISE) else 0.0
    return replace(one, compute_s=one.compute_s + repeated_s + (one.attention_s if full else 0.0))


def _uncut(one: Pass, gain: float) -> Pass:
    """Return a pass with the waits that remain in two row blocks, whose collectives may be ``gain`` times as fast."""
    lanes = {"idle_s": one.uncut_idle_s, "collective_s": one.collective_s, "p2p_s": one.p2p_s}
    return replace(one, **{name: seconds / gain for name, seconds in lanes.items()})
