"""The splits of layers over pipeline stages that a search tries.

- Nearly equal numbers of layers, which is what a layout without ``pp_layers`` has.
- Megatron-LM's account of the ends: the embedding and the loss count as a layer each (its
  ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``), where layers + 2 divide.
- Balanced: the slowest stage has the least work, in forward FLOPs of its layers and of the head.

The search plays each, so these are only proposals. Where layers are alike and the head is lighter than a layer, the
balanced split is the nearly equal one, and nothing else is tried.

      4 stages, 32 layers, a head of 2.4 layers     8, 8, 8, 8  has 10.4 at most;  8, 9, 9, 6  has 9
      4 stages, 4 wide and 12 narrow layers         4, 4, 4, 4  leaves the first stage all the wide ones
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.model import Model
from memo_sim.program.layout.stage import nearly_equal

GAIN = 1.01
"""How much more work the slowest stage of the nearly equal split has to have, for others to be tried."""

Floats = npt.NDArray[np.float64]
Split = tuple[int, ...]


def splits(model: Model, runs: int, seq_tokens: int) -> tuple[Split, ...]:
    """Return the splits into ``runs`` runs of layers to try; the first is empty, and stands for nearly equal ones."""
    return ((), *_others(model, runs, seq_tokens)) if 1 < runs <= model.layers else ((),)


@lru_cache(maxsize=256)
def _others(model: Model, runs: int, seq_tokens: int) -> tuple[Split, ...]:
    """Return the splits to try beside the nearly equal one."""
    equal = nearly_equal(model.layers, runs)
    work, head = _forward_flops(model, seq_tokens)
    most = _most(equal, work, head)
    balanced = _balanced(work, head, runs)
    if most <= GAIN * _most(balanced, work, head):
        return ()
    each, rest = divmod(model.layers + 2, runs)
    accounted = (each - 1, *[each] * (runs - 2), each - 1) if not rest and each > 1 else equal
    return tuple(dict.fromkeys(split for split in (balanced, accounted) if split != equal))


def _forward_flops(model: Model, seq_tokens: int) -> tuple[list[float], float]:
    """Return the forward FLOPs of a token in every layer, and in the head; attention is causal where the model is."""
    keys = seq_tokens if model.bidirectional else seq_tokens / 2

    def seen(window: int) -> float:
        return pairs_in_window(seq_tokens, seq_tokens, window) / seq_tokens if 0 < window < seq_tokens else keys

    shapes = [model.layer(number) for number in range(model.layers)]
    work = [2.0 * model.matrix_params_of(shape) + 4.0 * seen(shape.window) * model.score_width for shape in shapes]
    return work, 2.0 * model.vocab * model.hidden


def _most(split: Sequence[int], work: list[float], head: float) -> float:
    """Return the work of the run that has the most; the last one has the head."""
    sums = [0.0, *accumulate(work)]
    ends = [0, *accumulate(split)]
    runs = [sums[after] - sums[before] for before, after in pairwise(ends)]
    return max(*runs[:-1], runs[-1] + head)


def _balanced(work: list[float], head: float, runs: int) -> Split:
    """Return the split whose largest run is smallest; of several such splits, the one whose runs differ least."""
    sums = np.array([0.0, *accumulate(work)])
    least = _best(sums, head, runs, lambda run: run, np.maximum)
    limit = _most(least, work, head) * (1 + 1e-9)
    return _best(sums, head, runs, lambda run: np.where(run <= limit, run * run, np.inf), np.add)


def _best(
    sums: Floats,
    head: float,
    runs: int,
    cost: Callable[[Floats], Floats],
    joined: Callable[[Floats, Floats], Floats],
) -> Split:
    """Return the split with the least cost; ``joined`` adds the cost of a run to that of the runs before it.

    ``sums``: the work of the first 0, 1, 2 ... layers. A run has at least one layer.
    """
    layers = len(sums) - 1
    least = np.full(layers + 1, np.inf)
    least[0] = 0.0
    chosen = []
    own = sums[None, :] - sums[:, None]  # of the layers from row to column
    inner, last = (np.where(np.tri(layers + 1, dtype=np.bool_), np.inf, cost(own + more)) for more in (0.0, head))
    for run in range(runs):
        costs = joined(least[:, None], last if run == runs - 1 else inner)
        chosen.append(costs.argmin(axis=0))
        least = costs.min(axis=0)
    ends = [layers]
    for before in reversed(chosen):
        ends.append(int(before[ends[-1]]))
    ends.reverse()
    return tuple(after - before for before, after in pairwise(ends))
