"""The plans that a search has played in the engine: each once, with its prediction; the best with its simulation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from math import inf

from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.engine.fast_loop import run_fast
from memo_sim.engine.player import Loop
from memo_sim.engine.simulate import Simulation, memory_alone, simulate
from memo_sim.planning.outcome import Evaluated, SearchResult, ranked_s
from memo_sim.planning.presets import KEEP
from memo_sim.planning.question import Question

MOST_KEPT = 400_000
"""Largest number of played instructions that a search keeps beside another plan; 100 to 300 MiB."""


class Plays:
    """The plans of one question that were played so far."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self.known: dict[Decisions, Prediction] = {}
        """Predictions that need not be made again, those of other processes included."""
        self.fastest: Simulation | None = None
        """The simulation of the best plan that was played here."""
        self.used: dict[Decisions, None] = {}
        """The plans whose predictions the candidates asked for, in this order."""
        self.before: Callable[[], None] = _nothing
        """What to do before each play."""
        self.loop: Loop = run_fast
        """What plays the plans."""
        self._begun: Simulation | None = None
        """The last plan that fits whose memory alone was asked for, if its play may follow."""

    def predict(self, decisions: Decisions) -> Prediction:
        """Return the engine's prediction; each plan is played once."""
        if decisions not in self.known:
            self.play(decisions)
        self.used[decisions] = None
        return self.known[decisions]

    def step_s(self, decisions: Decisions) -> float:
        """Return the step seconds of a plan, infinite where it does not fit; it does not count as used."""
        with self.apart():
            step_s = self.predict(decisions).step_s
        return inf if step_s is None else step_s

    def play(self, decisions: Decisions) -> Simulation:
        """Play a plan, and keep the simulation of the fastest plan for the answer.

        A long one is kept only until the next plan is played: two of them would need twice the memory.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun.decisions != decisions:
            begun = None
        self._make_room()
        self.before()
        simulation = simulate(decisions, self._question.hardware, self._question.cluster, loop=self.loop, begun=begun)
        del begun
        self.known[decisions] = simulation.prediction
        self.used[decisions] = None
        if self.fastest is None or _ranks_before(simulation, self.fastest):
            self.fastest = simulation
        return simulation

    def refused(self, decisions: Decisions) -> Prediction | None:
        """Return the prediction of a plan that runs out of memory; None for one that fits, which is not played."""
        if decisions in self.known:
            prediction = self.known[decisions]
            return prediction if prediction.step_s is None else None
        if self._begun is not None and self._begun.decisions == decisions:
            return None
        self._make_room()
        simulation = memory_alone(decisions, self._question.hardware, self._question.cluster, loop=self.loop)
        if simulation.memory.fault is None:
            self._begun = simulation
            return None
        self.known[decisions] = simulation.prediction
        return simulation.prediction

    def _make_room(self) -> None:
        """Let go of simulations of long plans, before another one is made."""
        if self.fastest is not None and self.fastest.instructions_played > MOST_KEPT:
            self.fastest = None
        if self._begun is not None and self._begun.instructions_played > MOST_KEPT:
            self._begun = None

    def known_among(self, plans: Collection[Decisions]) -> dict[Decisions, Prediction]:
        """Return the predictions of those plans that need not be played again."""
        return {plan: self.known[plan] for plan in plans if plan in self.known}

    def note(self, used: Collection[Decisions]) -> None:
        """Count plans as used that another process has played."""
        self.used.update(dict.fromkeys(used))

    def stand_aside(self) -> None:
        """Play for the search of another process: no simulation is kept, and nothing is done before plays."""
        self.fastest, self.before, self._begun = None, _nothing, None

    @contextmanager
    def apart(self) -> Iterator[dict[Decisions, None]]:
        """Give the plans that are used in this block, which are not counted with the others."""
        before, self.used = self.used, {}
        try:
            yield self.used
        finally:
            self.used = before


def _nothing() -> None:
    """Do nothing."""


def is_compiled() -> bool:
    """Return whether plans are played in the compiled loop (``fast_loop.py``)."""
    return run_fast.compiled


def play_beside(*, compiled: bool) -> None:
    """Play what follows in the compiled loop if the search does that this process helps, or where a file holds it."""
    run_fast.beside(compiled)


def _ranks_before(simulation: Simulation, other: Simulation) -> bool:
    """Return whether a plan ranks before another one; of equally fast ones the best is kept, too."""
    mine_s, other_s = simulation.prediction.step_s, other.prediction.step_s
    if mine_s is None or other_s is None:
        return mine_s is not None
    if ranked_s(mine_s) != ranked_s(other_s):
        return mine_s < other_s
    pair = (Evaluated(KEEP, each.decisions, each.prediction).rank_key for each in (simulation, other))
    return next(pair) < next(pair)


def predict(question: Question, decisions: Decisions) -> Prediction:
    """Return the prediction of one plan on the question's cluster, of which nothing else is shown."""
    return simulate(decisions, question.hardware, question.cluster, loop=run_fast).prediction


def play(question: Question, decisions: Decisions, found: SearchResult | None = None) -> Simulation:
    """Return one plan played on the question's cluster, as answers show it; a search may already have simulated it."""
    fastest = found.fastest if found else None
    if fastest is not None and fastest.decisions == decisions:
        return fastest.shown()
    return simulate(decisions, question.hardware, question.cluster)
