"""A search with other processes gives what it gives alone, whatever they have found out and when it arrives."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import fields, replace
from math import inf
from typing import Any, cast
from unittest import mock

import msgspec
import pytest

import memo_sim
from memo_sim.answers.more_memory import with_one_more_gib
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.engine.fast_loop import FastLoop
from memo_sim.engine.simulate import simulate
from memo_sim.planning import ahead, examination, findings
from memo_sim.planning import plays as played
from memo_sim.planning import search as searched
from memo_sim.planning.ahead import LOWERED, OUTCOME, Ahead, Number, Offer, Searching
from memo_sim.planning.aims import Aims
from memo_sim.planning.bounded_candidates import Bounded, BoundedLayout
from memo_sim.planning.examination import Examination, Found, Needed
from memo_sim.planning.few_layers import Lowered
from memo_sim.planning.findings import Findings
from memo_sim.planning.lower_bounds import LowerBound
from memo_sim.planning.outcome import Evaluated, Key
from memo_sim.planning.processes import Kind, Message, Task, Team, working_with
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.ranking import Ranking
from memo_sim.planning.rivals import Opened, Rivals
from memo_sim.planning.search import SearchResult, play, search
from memo_sim.planning.space import Candidate, Space
from memo_sim.planning.subsequences import swap_each


class Slow:
    """A process that works in this one, a few steps each time that messages are asked for."""

    kept = None
    ready = True

    def __init__(self) -> None:
        self.tasks: deque[int] = deque()
        self.given: dict[int, Iterator[object]] = {}
        self.here: dict[str, Any] = {}
        self.asked: list[tuple[object, ...]] = []
        """The arguments of its tasks."""

    def give(self, name: int, task: Task, *arguments: object) -> bool:
        self.asked.append(arguments)
        self.tasks.append(name)
        self.given[name] = iter(task(self.here, *pickle.loads(pickle.dumps(arguments))))
        return True

    def drop(self, name: int) -> None:
        self.tasks.remove(name)
        del self.given[name]

    def step(self, *, dies: bool) -> Message:
        name = self.tasks[0]
        part = None if dies else next(self.given[name], None)
        if part is not None:
            return Message(name, Kind.PART, pickle.loads(pickle.dumps(part)))
        ended = Message(name, Kind.LOST if dies else Kind.ENDED)
        self.tasks.popleft()
        del self.given[name]
        return ended


class SlowTeam(Team):
    """Processes whose results come after chosen numbers of steps; of their tasks, some are lost."""

    def __init__(self, others: int, *, seed: int, most_steps: int = 2, lost: float = 0.0) -> None:
        super().__init__(others)
        self.slow = [Slow() for _ in range(others)]
        self.random = random.Random(seed)
        self.most_steps = most_steps
        self.lost = lost
        self.named = Counter[object]()
        """How often each kind of result has come."""

    def helpers(self, module: str, kept: dict[str, Any]) -> list[Any]:
        return self.slow

    def messages(self, *, block: bool) -> Iterator[Message]:
        for one in self.slow:
            for _ in range(max(int(block), self.random.randrange(self.most_steps + 1))):
                if one.tasks:
                    begins = isinstance(one.given[one.tasks[0]], type(iter(())))
                    message = one.step(dies=not begins and self.random.random() < self.lost)
                    if message.kind is Kind.PART and isinstance(message.part, tuple):
                        self.named[message.part[0]] += 1
                    yield message


def asked(devices: int, **more: Any) -> Question:
    cluster, hardware = load_cluster(f"a800-1x{devices}")
    return Question(load_model("gpt-tiny"), cluster, hardware, 4096, **({"system": "any"} | more))


def told(found: SearchResult) -> bytes:
    """Return everything that a search gives, as bytes."""
    ranked = [
        (e.policy, e.decisions, e.prediction, e.linear_program, e.above, e.below, e.unlimited) for e in found.ranked
    ]
    return msgspec.json.encode((ranked, found.evaluated, found.pruned, found.refused, list(found.played.values())))


@pytest.fixture(autouse=True)
def own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the searches a loop of their own: the tasks that play here change it."""
    monkeypatch.setattr(played, "run_fast", FastLoop())


ALONE: dict[str, Any] = {"tp": 2, "zero": 1, "memory_policy": "planned"}
QUESTIONS: dict[str, tuple[Question, dict[str, Any]]] = {
    "pruned": (asked(8), {"keep": 1, "siblings": inf}),
    "siblings": (asked(8), {"keep": 1, "siblings": 1.1}),
    "front": (asked(2, pins=Pins(**ALONE)), {"keep": 3, "front": True}),
    "all": (asked(2, pins=Pins(**ALONE)), {"prune": False}),
    "enough": (asked(2), {"enough_s": float("inf")}),
    "stages": (asked(2, system="every-layout", global_batch=4, pins=Pins(pp=2, memory_policy="planned")), {"keep": 1}),
    "kept": (
        Question(
            load_model("gpt-7b"),
            *load_cluster("a800-1x8"),
            1 << 17,
            system="any",
            pins=Pins(tp=8, memory_policy="planned"),
        ),
        {"keep": 1},
    ),
    "subsequences": (asked(2, system="sppo", pins=Pins(subsequences=2)), {"keep": 2, "siblings": inf}),
}


@pytest.mark.parametrize("name", ["pruned", "siblings", "all", "stages"])
def test_the_result_does_not_depend_on_the_processes(name: str) -> None:
    question, settings = QUESTIONS[name]
    alone, team = told(search(question, **settings)), SlowTeam(2, seed=2, most_steps=4, lost=0.1)
    with working_with(team):
        assert told(search(question, **settings)) == alone
    assert team.named[OUTCOME]
    assert team.named[LOWERED]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_result_depends_neither_on_their_number_nor_on_when_they_are_done(name: str) -> None:
    question, settings = QUESTIONS[name]
    alone = told(search(question, **settings))
    for seed, others, most_steps, lost in ((3, 1, 1, 0.0), (4, 1, 9, 0.5), (5, 4, 2, 0.0), (6, 4, 30, 0.1)):
        with working_with(SlowTeam(others, seed=seed, most_steps=most_steps, lost=lost)):
            assert told(search(question, **settings)) == alone


@pytest.mark.parametrize("siblings", [0.0, 1.1, 2.0])
def test_a_search_does_not_depend_on_how_far_bounds_pass_its_limit(
    siblings: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have computed them against a longer time."""
    question, settings = QUESTIONS["stages"][0], {"keep": 1, "siblings": siblings}
    wanted, tightened, passed = told(search(question, **settings)), Findings.tightened, Counter[bool]()

    def farther(self: Findings, number: Number, one: Bounded | BoundedLayout) -> Bounded | BoundedLayout:
        found, most = tightened(self, number, one), self.limit_key()
        passes = isinstance(found, Bounded) and found.least_key > most and not most[0]
        passed[passes] += 1
        if not (passes and isinstance(found, Bounded) and found.bound):
            return found
        return msgspec.structs.replace(found, bound=msgspec.structs.replace(found.bound, step_s=2 * found.bound.step_s))

    monkeypatch.setattr(Findings, "tightened", farther)
    assert told(search(question, **settings)) == wanted
    assert passed[True]


def test_no_plan_is_played_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    plays = Counter[Decisions]()

    def counted(decisions: Decisions, *arguments: Any, **more: Any) -> Any:
        plays[decisions] += 1
        return simulate(decisions, *arguments, **more)

    monkeypatch.setattr(played, "simulate", counted)
    question = asked(2)
    found = search(question, siblings=inf)
    assert play(question, found.ranked[0].decisions, found).prediction == found.ranked[0].prediction
    assert set(plays.values()) == {1}
    plays.clear()
    with working_with(SlowTeam(2, seed=7, most_steps=9)):
        search(question, siblings=inf)
    assert set(plays.values()) == {1}


def squares(here: dict[str, Any], numbers: list[int]) -> Iterator[list[int]]:
    yield squared(numbers)


def squared(numbers: list[int]) -> list[int]:
    return [number * number for number in numbers]


@pytest.mark.parametrize("lost", [0.0, 0.3, 1.0])
def test_divided_work_gives_the_result_of_each_part_whoever_does_it(lost: float) -> None:
    parts = [[number, number + 1] for number in range(20)]
    for others, most_steps in ((1, 0), (1, 3), (3, 1), (3, 9)):
        team = SlowTeam(others, seed=8, most_steps=most_steps, lost=lost)
        ahead = Ahead(team, mock.Mock(), begin=(squares, ([],)), kept={}, task=squares)
        assert ahead.divided(squares, squared, parts) == [squared(part) for part in parts]
        assert all(len(one.tasks) <= 1 for one in team.slow)  # of one that has not begun, its first task


def test_bounds_of_one_stage_have_a_name_for_each_time_that_it_is_played() -> None:
    candidate = mock.Mock()
    low, high = (Bounded(candidate, LowerBound(step_s, 0, 0), next_bound="alone") for step_s in (1.0, 2.0))
    assert low.next_name(9.0) != high.next_name(9.0)
    assert low.next_name(9.0) != low.next_name(8.0)


def test_bounds_of_many_layouts_do_not_depend_on_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searched, "MOST_LAYOUTS_AT_ONCE", 4)
    monkeypatch.setattr(findings, "AT_ONCE", 3)
    question, settings = QUESTIONS["pruned"]
    alone, team = told(search(question, **settings)), SlowTeam(2, seed=9, most_steps=4, lost=0.1)
    with working_with(team):
        assert told(search(question, **settings)) == alone
    assert team.named["waits"]


@pytest.mark.slow
def test_answers_are_equal_for_every_number_of_processes() -> None:
    text = [memo_sim.what_if("gpt-tiny", cluster="a800-1x8", seq_len="8k", jobs=jobs).to_json() for jobs in (1, 2, 3)]
    assert text[0] == text[1] == text[2]
    kinds: Any = {"cluster": "a800", "seq_len": "8k", "most_gpus": 8}
    assert memo_sim.gpus("gpt-tiny", **kinds).to_json() == memo_sim.gpus("gpt-tiny", **kinds, jobs=3).to_json()
    there: Any = {"cluster": "a800-1x2", "tp": 2, "step": "256k"}
    assert memo_sim.longest("gpt-7b", **there).to_json() == memo_sim.longest("gpt-7b", **there, jobs=2).to_json()


class Waits:
    """A candidate that waits, with its key; plans may be played next for it."""

    def __init__(self, seconds: float, name: str) -> None:
        self.least_key = (False, False, seconds)
        self.name = name


class Waiting:
    """A search that looks for plans faster than ten seconds."""

    at = ()

    def __init__(self, *named: str, first: tuple[str, ...] = ()) -> None:
        every = [Waits(float(place), name) for place, name in enumerate((*first, *named), 1)]
        entries = [(one.least_key, (place, 0), one) for place, one in enumerate(every)]
        self.first, self.waiting = entries[: len(first)], entries[len(first) :]
        self.results: list[tuple[Task, object]] = []
        self.expected: Key = (True, True, inf)
        self.done: list[str] = []
        """What it has done itself while it waited."""
        self.heard: list[str] = []

    def unsent(self, _: object) -> tuple[Task, object] | None:
        return self.results.pop() if self.results else None

    def next_name(self, one: Waits, most: Key) -> str:
        return "against ten seconds"

    def takes_long(self, one: Waits) -> bool:
        return False

    def limit_key(self) -> Key:
        return (False, False, 10.0)

    def expected_key(self) -> Key:
        return min(self.limit_key(), self.expected)

    def beside_itself(self, name: str) -> Iterator[tuple[str, Waits]]:
        self.done.append(name)
        yield OUTCOME, Waits(0.0, name)

    def hear(self, found: Waits, helper: object) -> None:
        self.heard.append(found.name)

    def plays_next(self, one: Waits) -> bool:
        return one.name.startswith("play")

    def offered(self, one: Waits, _: Key, soon: Key, most: Key) -> Offer | None:
        return None if self.plays_next(one) and one.least_key > soon else Offer((one.name,), ())


def begin(here: dict[str, Any]) -> Iterator[str]:
    return iter(())


def examined(here: dict[str, Any], name: str) -> Iterator[str]:
    yield here.setdefault(name, name)


def test_a_process_begins_with_plays_and_goes_on_with_what_the_search_needs_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ranks after the next two candidates is played when there is nothing else to do."""
    monkeypatch.setattr(ahead, "NEXT", 1)
    team = SlowTeam(1, seed=0)
    search = cast("Searching", Waiting("first", "play soon", "second", "third", "play late"))
    others = Ahead(team, search, begin=(begin, ()), kept={}, task=examined)
    others.give(4)
    first = [(), ("play soon",), ("third",), ("second",)]
    assert team.slow[0].asked == first
    others.give(9)
    assert team.slow[0].asked == [*first, ("first",), ("play late",)]


def evaluated(here: dict[str, Any], name: str) -> Iterator[tuple[str, Waits]]:
    yield OUTCOME, Waits(0.0, name)


def test_a_search_that_waits_for_a_process_plays_what_else_may_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "NEXT", 1)
    search, team = Waiting("play soon", "second", "third", "play late"), SlowTeam(1, seed=0, most_steps=0)
    others = Ahead(team, cast("Searching", search), begin=(begin, ()), kept={}, task=evaluated)
    others.give(2)
    team.slow[0].step(dies=False)  # the task that begins
    assert team.slow[0].asked == [(), ("play soon",)]
    assert others.outcome(search.waiting[0][1]).name == "play soon"
    assert search.done == ["second", "third", "play late"]
    assert search.heard == [*search.done, "play soon"]


def test_nothing_is_given_that_a_plan_beats_which_is_played_but_not_ranked() -> None:
    search, team = Waiting("first", "second", "third", "fourth"), SlowTeam(1, seed=0)
    others = Ahead(team, cast("Searching", search), begin=(begin, ()), kept={}, task=examined)
    others.give(4)
    assert team.slow[0].asked == [(), ("fourth",), ("third",), ("second",)]
    search.expected = (False, False, 2.0)
    others.give(9)  # what waits after the second is taken back
    assert team.slow[0].asked[4:] == [("first",)]
    assert len(team.slow[0].tasks) == 3


def test_the_limit_is_expected_from_plays_of_this_search() -> None:
    question, ranking = QUESTIONS["stages"][0], Ranking(1)
    best = search(question).best
    assert best is not None

    def lasting(step_s: float, global_batch: int) -> tuple[Decisions, Prediction]:
        decisions = msgspec.structs.replace(best.decisions, global_batch=global_batch)
        return decisions, msgspec.structs.replace(best.prediction, step_s=step_s)

    examined_here, opened = Examination(question, Aims()), Opened()
    examined_here.plays.known |= dict([lasting(1.0, 2)])  # by an earlier search
    for batch in (2, 4, 8, 16):
        base = swap_each(lasting(1.0, batch)[0], 0)
        opened.add(base.layout, [Candidate(base, best.policy)])
    found = Findings(examined_here, ranking, opened, Aims())
    found.share(SlowTeam(1, seed=0), Space(question), goes_on=True)
    found.hear(Found(None, dict([lasting(3.0, 32), lasting(4.0, 4)])), None)  # 32 is of no candidate
    assert found.expected_key() == (True, True, inf)  # nothing is ranked
    ranking.add(Evaluated(best.policy, *lasting(8.0, 8)))
    assert found.expected_key() == (False, False, 4.0) < found.limit_key()
    found.hear(Found(None, dict([lasting(16.0, 16)])), None)
    assert found.expected_key() == (False, False, 4.0)


def lowered_by(parts: Iterator[Any]) -> dict[str, int]:
    """Return how many results of each kind a task sends."""
    found = [part for name, part in parts if name == LOWERED]
    return {each.name: sum(len(getattr(one, each.name)) for one in found) for each in fields(Lowered)}


def test_a_process_sends_each_result_of_its_lowerings_once_and_none_that_it_received() -> None:
    question, here = QUESTIONS["stages"][0], dict[str, Any]()
    space = Space(question)
    list(examination.begin(here, question, Aims(), space.policies, goes_on=False))
    passes = here["examination"].passes
    none = Rivals(None, None)
    needed = Needed((True, True, inf), (True, True, inf), inf, none, known={}, compiled=False)
    candidates = [Bounded(one, next_bound="layers") for layout in space.layouts[:2] for one in space.of(layout)]
    firsts = [msgspec.structs.replace(one, bound=LowerBound(0.0, 0, 0)) for one in candidates]

    def sent_now(one: Bounded) -> dict[str, int]:
        before = passes.counts
        sent = lowered_by(examination.examine(here, one, needed))
        assert list(sent.values()) == [after - was for after, was in zip(passes.counts, before, strict=True)]
        return sent

    assert any(sent_now(firsts[0]).values())
    assert not any(sent_now(firsts[0]).values())
    elsewhere = Examination(question, Aims())
    elsewhere.space = space
    list(elsewhere.parts(firsts[-1], needed))
    nothing = Examination(question, Aims()).passes.counts
    examination.learn(here, elsewhere.passes.lowered_since(nothing))
    assert not any(sent_now(firsts[-1]).values())
    # Unsent results are sent with the next part, even if the process has received others in between.
    before = passes.counts
    here["examination"].tightened(firsts[1], inf)
    assert passes.counts != before
    examination.learn(here, elsewhere.passes.lowered_since(nothing))
    assert any(lowered_by(examination.examine(here, firsts[-1], needed)).values())
    list(examination.begin(here, question, Aims(), space.policies, goes_on=False))  # another search
    passes = here["examination"].passes
    assert any(sent_now(firsts[0]).values())


def test_results_of_a_process_are_known_to_the_search_and_not_sent_back() -> None:
    question, team = QUESTIONS["stages"][0], SlowTeam(2, seed=0)
    there = Examination(question, Aims())
    nothing = there.passes.counts
    keep = Space(question).of(Space(question).layouts[0])[0].base
    there.bounds.of_plans.of(keep)
    here = Examination(question, Aims())
    found = Findings(here, Ranking(1), Opened(), Aims())
    found.share(team, Space(question), goes_on=False)
    author, other = team.helpers("", {})
    found.hear(there.passes.lowered_since(nothing), author)
    assert here.passes.counts == there.passes.counts != nothing
    assert found.unsent(author) is None
    assert found.unsent(other) is not None


@pytest.mark.parametrize(
    ("cluster", "devices", "same"),
    [("a800-1x2", "a800-1x2", True), ("a800-2x1", "a800-2x1", False), ("a800-1x2", "a100-1x2", False)],
)
def test_a_process_keeps_passes_for_a_question_on_the_same_devices(cluster: str, devices: str, same: bool) -> None:
    """One GiB more changes no pass: the search for what it buys goes on with them."""
    first, here = QUESTIONS["stages"][0], dict[str, Any]()
    space = Space(first)
    list(examination.begin(here, first, Aims(), space.policies, goes_on=False))
    here["examination"].bounds.of_plans.of(space.of(space.layouts[0])[0].base)
    counts = here["examination"].passes.counts
    second = replace(first, cluster=load_cluster(cluster)[0], hardware=load_cluster(devices)[1])
    second = with_one_more_gib(second, "device")
    list(examination.begin(here, second, Aims(), space.policies, goes_on=True))
    assert (here["examination"].passes.counts == counts) == same


def test_what_a_task_finds_that_is_taken_back_too_late_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "NEXT", 1)
    search, team = Waiting("first", "second"), SlowTeam(1, seed=0, most_steps=0)

    def lowering(here: dict[str, Any], name: str) -> Iterator[tuple[str, Waits]]:
        yield LOWERED, Waits(0.0, name)

    others = Ahead(team, cast("Searching", search), begin=(begin, ()), kept={}, task=lowering)
    others.give(3)
    late = team.slow[0].tasks[-1]
    others.end()
    monkeypatch.setattr(team, "messages", lambda block: iter([Message(late, Kind.PART, (LOWERED, Waits(0.0, "late")))]))
    search.waiting.clear()
    others.give()
    assert search.heard == ["late"]


def given(monkeypatch: pytest.MonkeyPatch, search: Waiting, queue: int, **numbers: int) -> list[object]:
    """Return what one process is given, with some numbers of ``ahead``."""
    for name, number in numbers.items():
        monkeypatch.setattr(ahead, name, number)
    team = SlowTeam(1, seed=0)
    Ahead(team, cast("Searching", search), begin=(begin, ()), kept={}, task=examined).give(queue)
    return [arguments[0] for arguments in team.slow[0].asked[1:]]


def test_a_process_with_few_tasks_is_given_more_than_the_next_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = [f"candidate {number}" for number in range(1, 10)]
    two, four = candidates[1::-1], candidates[3:1:-1]
    next_ones = {"NEXT": 1, "MOST_NEXT": 1, "FARTHEST": 4}
    assert given(monkeypatch, Waiting(*candidates), 20, FEW=1, **next_ones) == two
    assert given(monkeypatch, Waiting(*candidates), 20, FEW=9, **next_ones) == [*two, *four]


def test_a_process_that_still_imports_gets_no_results() -> None:
    """It would read what is sent only later, and the search would wait until it does."""
    search, team = Waiting("first", "second"), SlowTeam(1, seed=0)
    search.results = [(examined, "results")]
    team.slow[0].ready = False
    others = Ahead(team, cast("Searching", search), begin=(begin, ()), kept={}, task=examined)
    others.give()
    assert ("results",) not in team.slow[0].asked
    assert search.results


def test_what_is_looked_at_first_is_given_before_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Waiting("third", "fourth", first=("first", "second"))
    assert given(monkeypatch, search, 9, FEW=1, NEXT=1, MOST_NEXT=1) == ["second", "first"]
    assert given(monkeypatch, search, 9, FEW=9, NEXT=1, MOST_NEXT=1) == ["second", "first", "fourth", "third"]


def test_a_process_gets_new_results_before_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Waiting("first", "second")
    search.results = [(examined, "results")]
    assert given(monkeypatch, search, 9) == ["results", "second", "first"]


def bounds(here: dict[str, Any], name: str) -> Iterator[tuple[str, Waits]]:
    yield "against twelve seconds", Waits(11.0 if name == "slow" else 9.0, name)


def lacking(here: dict[str, Any], name: str) -> Iterator[tuple[str, Waits]]:
    short = Waits(0.0, name)
    short.least_key = (True, False, 11.0)
    yield "against twelve seconds", short


@pytest.mark.parametrize(("name", "found"), [("slow", (False, False, 11.0)), ("fast", None)])
def test_bounds_that_pass_the_limit_count_against_whatever_time_they_were_computed(
    name: str, found: Key | None
) -> None:
    search, team = Waiting(name), SlowTeam(1, seed=0)
    others = Ahead(team, cast("Searching", search), begin=(begin, ()), kept={}, task=bounds)
    others.give()
    team.slow[0].step(dies=False)  # the task that begins
    ((_, number, one),) = search.waiting
    known = others.bounded(number, one)
    assert (known and known.least_key) == found


def test_no_bounds_pass_the_limit_while_no_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search then looks first at plans without stages, and a candidate must not skip the bounds before that."""
    search, team = Waiting("slow"), SlowTeam(1, seed=0)
    monkeypatch.setattr(search, "limit_key", lambda: (True, False, 10.0))
    monkeypatch.setattr(search.waiting[0][2], "least_key", (True, False, 1.0))
    others = Ahead(team, cast("Searching", search), begin=(begin, ()), kept={}, task=lacking)
    others.give()
    team.slow[0].step(dies=False)  # the task that begins
    ((_, number, one),) = search.waiting
    assert others.bounded(number, one) is None
