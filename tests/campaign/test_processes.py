"""Runs that are killed, share a folder, meet limits or lose a rank end with the weights of an undisturbed run."""

from __future__ import annotations

import pytest

from tests.campaign.processes import play_all

KILLS = 12


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_happens_to_a_run_it_resumes_to_the_same_weights() -> None:
    trials = play_all(2, KILLS, tell=lambda trial: print(trial.line()))
    assert len(trials) > KILLS + 20
    assert not [trial.line() for trial in trials if trial.complaints]
