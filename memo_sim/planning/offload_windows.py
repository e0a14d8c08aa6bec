"""Widens the offload window of the best plan, by doubling and bisection.

In a wider window copies may lag behind more passes, so compute waits less for them, and more bytes of activations stay
on the device. The search tries few windows for every plan (``System.offload_windows``). Between the last window that
makes the best plan faster and the first that does not fit, there may be better ones:

    window      1      2      3      4                  tried 1 and 4; then 2 (faster), and 3 (short)
    step     57.9   57.4   short  short
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from memo_sim.contract.knobs import MOST_WINDOW
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.planning.outcome import Evaluated, ranked_s


def with_best_window(one: Evaluated, predict: Callable[[Decisions], Prediction]) -> Evaluated:
    """Return a plan that fits in the wider window that makes it the fastest; the plan itself where none does.

    Doubling ends at a window that does not fit or gains nothing. Windows before one that does not fit are bisected;
    before one that gains nothing, none gains more. ``predict`` plays a plan.
    """
    best, low = one, one.decisions.offload_window
    widest = min(one.decisions.layout.subsequences - 1, MOST_WINDOW)
    high = widest + 1
    while (wider := min(2 * low, widest)) > low:
        found = _in_window(best, wider, predict)
        if not _faster(found, best):
            high = low + 1 if found.prediction.status == "ok" else wider
            break
        best, low = found, wider
    while high - low > 1:
        middle = (low + high) // 2
        found = _in_window(best, middle, predict)
        if found.prediction.status == "ok":
            best, low = (found if _faster(found, best) else best), middle
        else:
            high = middle
    return best


def _in_window(one: Evaluated, window: int, predict: Callable[[Decisions], Prediction]) -> Evaluated:
    decisions = msgspec.structs.replace(one.decisions, offload_window=window)
    return replace(one, decisions=decisions, prediction=predict(decisions))


def _faster(one: Evaluated, other: Evaluated) -> bool:
    mine_s, other_s = one.prediction.step_s, other.prediction.step_s
    return mine_s is not None and other_s is not None and ranked_s(mine_s) < ranked_s(other_s)
