"""Passes over operators end before their deadline, by a clock that only timed operators advance."""

import time

import pytest

from memo_exec.probes import grid as grids
from memo_exec.probes import passes
from memo_exec.probes.budget import ENDING, OPERATORS_END, Budget
from memo_exec.probes.operators import Operator
from memo_exec.probes.order import kind_of, left_out, size_of, table_of, tables_of
from memo_exec.probes.passes import Samples, time_all
from memo_exec.probes.timing import Sample
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Gemm, Rowwise

OVERHEAD_S, RATE = 0.1, 1e6
"""What every operator takes, and FLOPs or bytes of a second."""


def made(work: Gemm | Rowwise) -> Operator:
    decisions = next(grids.decisions(grids.CPU, "torch-flash-cpu"))
    return Operator(Instruction("gelu", "gelu", Lane.COMPUTE, work, ()), decisions, ())


def curve(kind: str, sizes: list[int]) -> list[Operator]:
    return [made(Rowwise(kind, 1, size // 2, size // 2)) for size in sizes]


class Machine:
    """Takes ``OVERHEAD_S`` and the time of its size for each operator, ``slower`` times as long under load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slower: float = 1.0) -> None:
        self.now, self.slower = 0.0, slower
        self.order: list[Operator] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self, operator: Operator, *, climbing: bool) -> Sample:
        self.order.append(operator)
        self.now += self.slower * (OVERHEAD_S + size_of(operator) / RATE)
        return Sample(1.0, 0.0)

    def samples(self, operators: list[Operator], until: float) -> Samples:
        return time_all(self, operators, until, lambda done: None)


SIZES = [10**4, 10**5, 10**6, 10**7]
"""Bytes of a curve; the largest takes 10 s."""


@pytest.fixture
def operators() -> list[Operator]:
    return [each for name in ("gelu", "copy", "zero") for each in curve(name, SIZES)]


@pytest.mark.parametrize("slower", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("until", [2.0, 5.0, 10.0, 20.0, 45.0, 200.0])
def test_the_deadline_holds_beyond_the_smallest_points(
    monkeypatch: pytest.MonkeyPatch, operators: list[Operator], until: float, slower: float
) -> None:
    machine = Machine(monkeypatch, slower)
    samples = machine.samples(operators, until)
    in_any_case = 3 * slower * (OVERHEAD_S + SIZES[0] / RATE)
    assert machine.now <= max(until, in_any_case) + 1e-9
    smallest = {points[0] for points in tables_of(operators).values()}
    assert smallest <= set(samples)


def test_without_time_only_the_smallest_points_are_timed(
    monkeypatch: pytest.MonkeyPatch, operators: list[Operator]
) -> None:
    samples = Machine(monkeypatch).samples(operators, 0.0)
    assert [size_of(operators[i]) for i in samples] == [SIZES[0]] * 3
    marked = left_out(operators, samples)
    assert marked.startswith("9 of 12 points, for want of time")
    assert "without their largest point: row-wise gelu torch, row-wise copy torch, row-wise zero torch" in marked


def test_a_table_climbs_as_far_as_its_share_of_the_time_allows(
    monkeypatch: pytest.MonkeyPatch, operators: list[Operator]
) -> None:
    """Each largest point takes 10 s, so 8 s are enough for the middles alone, and 18 s for one largest point."""
    short = Machine(monkeypatch).samples(operators, 8.0)
    assert {size_of(operators[i]) for i in short} == set(SIZES[:3])
    assert "without their largest point" in left_out(operators, short)
    longer = Machine(monkeypatch).samples(operators, 18.0)
    assert sum(size_of(operators[i]) == SIZES[3] for i in longer) == 1


def test_with_time_every_table_has_its_ends_before_the_other_points(
    monkeypatch: pytest.MonkeyPatch, operators: list[Operator]
) -> None:
    machine = Machine(monkeypatch)
    samples = machine.samples(operators, 1000.0)
    assert {len(found) for found in samples.values()} == {passes.PASSES}
    assert len(samples) == len(operators)
    first = machine.order[: len(operators)]
    assert [size_of(each) for each in first[:3]] == [SIZES[0]] * 3
    assert [size_of(each) for each in first[3:6]] == [SIZES[3]] * 3
    assert left_out(operators, samples) == ""


def test_a_pass_that_would_not_end_in_time_does_not_start(
    monkeypatch: pytest.MonkeyPatch, operators: list[Operator]
) -> None:
    one_pass_s = 3 * sum(OVERHEAD_S + size / RATE for size in SIZES)
    for until, times in ((1.9 * one_pass_s, 1), (2.1 * one_pass_s, 2)):
        machine = Machine(monkeypatch)
        assert {len(found) for found in machine.samples(operators, until).values()} == {times}
        assert machine.now <= until


def test_a_later_pass_ends_where_the_machine_becomes_slower(
    monkeypatch: pytest.MonkeyPatch, operators: list[Operator]
) -> None:
    machine = Machine(monkeypatch)

    def loaded(operator: Operator, *, climbing: bool) -> Sample:
        machine.slower = 3.0 if len(machine.order) >= len(operators) else 1.0
        return machine(operator, climbing=climbing)

    samples = time_all(loaded, operators, 75.0, lambda done: None)
    assert {len(found) for found in samples.values()} == {1, 2}
    assert machine.now <= 75.0 + 2 * SIZES[3] / RATE  # it was expected to be as fast as before


def test_operators_of_a_kind_expect_each_others_times(monkeypatch: pytest.MonkeyPatch) -> None:
    gelu, copy = curve("gelu", SIZES[:2]), curve("copy", SIZES)
    product = made(Gemm(8, 8, 8, "fprop", "fp32"))
    expected = passes.Expected()
    expected.learn(gelu[0], 0.5)
    expected.learn(gelu[1], 1.0)
    assert kind_of(copy[2]) == kind_of(gelu[0]) != kind_of(product)
    assert expected.seconds(copy[0]) == 0.5
    assert expected.seconds(copy[2]) == pytest.approx(10.0)  # ten times the largest smaller one
    assert expected.seconds(product) == 0.0
    other = made(Gemm(8, 8, 8, "dgrad", "fp32"))
    assert table_of(other) != table_of(product)
    assert kind_of(other) == kind_of(product)


def test_the_end_of_processes_that_start_slowly_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    quick, slow = Budget(60.0, spent_s=4.0), Budget(60.0, spent_s=30.0)
    assert quick.operators_until() == pytest.approx(96.0 + 60 * OPERATORS_END)
    assert slow.operators_until() == pytest.approx(130.0 - 30 * ENDING)
