"""What failures cost a job that saves checkpoints: closed forms for the long run, and the best interval.

A job trains for ``interval`` seconds, then waits ``checkpoint`` seconds for a checkpoint, and so on. Failures come at
random, at any time, with the mean time ``mtbf`` between them. After one, ``restart`` seconds pass until training goes
on from the last checkpoint; a failure during that time begins the restart anew.

    train       save train       save train   X restart  train       save
    |___________|cc| |___________|cc| |_______|__________|___________|cc|
                                       lost

With x = (interval + checkpoint) / mtbf, the mean time from one checkpoint to the next is (Daly 2006)

    mtbf * exp(restart / mtbf) * (exp(x) - 1)

The interval with the largest share of useful time is, in Daly's higher-order estimate, for a checkpoint shorter than
twice the mtbf,

    sqrt(2 checkpoint mtbf) * (1 + sqrt(checkpoint / (2 mtbf)) / 3 + checkpoint / (2 mtbf) / 9) - checkpoint

and else the mtbf. Its first factor is Young's estimate (1974).

J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17(9), 1974.
J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
Systems 22(3), 2006.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, log, sqrt

LARGE = 700.0
"""An exponent whose exponential is still a float, and so large that one less makes no difference."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a long job's time, which sum to 1: kept steps, their checkpoints, what failures undo, restarts."""

    useful: float
    checkpoints: float
    lost: float
    restarts: float


def young_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return Young's interval in seconds, which holds where a checkpoint takes far less than the mtbf."""
    return sqrt(2.0 * checkpoint_s * mtbf_s)


def daly_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return Daly's interval in seconds."""
    if checkpoint_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2.0 * mtbf_s)
    return young_interval(checkpoint_s, mtbf_s) * (1.0 + sqrt(ratio) / 3.0 + ratio / 9.0) - checkpoint_s


def shares(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> Shares:
    """Return where the time of a long job goes; all arguments in seconds, interval and mtbf above 0.

    A job is in a restart where the last failure is less than ``restart_s`` ago, which has the probability
    1 - exp(-restart / mtbf); what is neither restart, nor kept, is lost.
    """
    restarts = -expm1(-restart_s / mtbf_s)
    x = (interval_s + checkpoint_s) / mtbf_s
    grown = x if x > LARGE else log(expm1(x))
    useful = exp(log(interval_s / mtbf_s) - restart_s / mtbf_s - grown)
    checkpoints = useful * checkpoint_s / interval_s
    return Shares(useful, checkpoints, max(0.0, 1.0 - restarts - useful - checkpoints), restarts)
