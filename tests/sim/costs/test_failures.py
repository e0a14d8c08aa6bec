"""What failures cost, held against a seeded simulation of jobs that fail, and against figures of Daly's paper."""

from __future__ import annotations

import numpy as np
import pytest

from memo_sim.costs.failures import Shares, daly_interval, shares, young_interval

HOUR_S, MINUTE_S = 3600.0, 60.0
JOBS = (
    pytest.param(6 * HOUR_S, 5 * MINUTE_S, 10 * MINUTE_S, id="fails every 6 hours"),
    pytest.param(15 * MINUTE_S, 5 * MINUTE_S, 10 * MINUTE_S, id="fails every 15 minutes"),
    pytest.param(HOUR_S, 5.0, 30.0, id="saves within seconds"),
)
"""Mean time between failures, checkpoint, restart."""
SEGMENTS, RUNS = 400, 60


def played(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float, seed: int) -> Shares:
    """Play a job of ``SEGMENTS`` checkpoints failure by failure, and return where its time went."""
    draws = np.random.default_rng(seed)
    clock = lost = restarts = 0.0
    failure = draws.exponential(mtbf_s)
    done, restarting = 0, False
    while done < SEGMENTS:
        wanted = restart_s if restarting else interval_s + checkpoint_s
        if failure >= clock + wanted:
            clock += wanted
            restarts += wanted if restarting else 0.0
            done += not restarting
            restarting = False
            continue
        spent = failure - clock
        restarts += spent if restarting else 0.0
        lost += 0.0 if restarting else spent
        clock, restarting = failure, True
        failure = clock + draws.exponential(mtbf_s)
    return Shares(SEGMENTS * interval_s / clock, SEGMENTS * checkpoint_s / clock, lost / clock, restarts / clock)


@pytest.mark.parametrize(("mtbf_s", "checkpoint_s", "restart_s"), JOBS)
def test_the_closed_form_is_within_the_confidence_of_simulated_failures(mtbf_s, checkpoint_s, restart_s) -> None:
    interval_s = daly_interval(checkpoint_s, mtbf_s)
    expected = shares(interval_s, checkpoint_s, restart_s, mtbf_s)
    runs = [played(interval_s, checkpoint_s, restart_s, mtbf_s, seed) for seed in range(RUNS)]
    for name in Shares.__slots__:
        found = np.array([getattr(run, name) for run in runs])
        # Three standard errors; a job of finitely many checkpoints differs from the long run by about one of them.
        margin = 3 * found.std() / RUNS**0.5 + 1 / SEGMENTS * getattr(expected, name)
        assert getattr(expected, name) == pytest.approx(found.mean(), abs=margin), name
    assert sum(getattr(expected, name) for name in Shares.__slots__) == pytest.approx(1)


@pytest.mark.parametrize(("mtbf_s", "checkpoint_s", "restart_s"), JOBS)
def test_no_other_interval_keeps_more_of_the_time_than_dalys(mtbf_s, checkpoint_s, restart_s) -> None:
    """Played with the same failures, and in the closed form on a fine grid."""
    best = daly_interval(checkpoint_s, mtbf_s)

    def kept(interval_s: float) -> float:
        return float(np.mean([played(interval_s, checkpoint_s, restart_s, mtbf_s, s).useful for s in range(RUNS)]))

    assert kept(best) > max(kept(best / 2), kept(best * 2))
    grid = best * np.geomspace(0.2, 5, 401)
    most = max(shares(each, checkpoint_s, restart_s, mtbf_s).useful for each in grid)
    assert shares(best, checkpoint_s, restart_s, mtbf_s).useful == pytest.approx(most, rel=2e-3)


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR_S, 117), (6 * HOUR_S, 57), (15 * MINUTE_S, 9.1)])
def test_the_interval_is_that_of_the_papers_figures(mtbf_s: float, minutes: float) -> None:
    """Daly 2006, captions of figures 3 to 5: checkpoints of 5 minutes."""
    assert daly_interval(5 * MINUTE_S, mtbf_s) / MINUTE_S == pytest.approx(minutes, rel=6e-3)


def test_youngs_interval_is_the_first_order_of_dalys() -> None:
    assert young_interval(1.0, 1e8) == pytest.approx(daly_interval(1.0, 1e8), rel=1e-3)
    assert daly_interval(100.0, 40.0) == 40.0


def test_a_job_that_fails_too_often_makes_no_progress_and_raises_nothing() -> None:
    found = shares(1e6, 1e6, 1e6, 1.0)
    assert (found.useful, found.checkpoints, found.restarts) == (0.0, 0.0, 1.0)
    never = shares(1e4, 1.0, 60.0, 1e15)
    assert never.useful == pytest.approx(1e4 / (1e4 + 1))
