"""MEMO's linear program for alpha: the closed form agrees with a solver, and the search with a full scan."""

from __future__ import annotations

import itertools
import random

import mip
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.knobs import Pins, States
from memo_sim.contract.plan import Decisions, Layout, Prediction
from memo_sim.planning.alpha_linear_program import LinearProgram, linear_program
from memo_sim.planning.alpha_search import Grid, best_alpha, best_partial_swap
from memo_sim.planning.question import Question
from memo_sim.planning.search import search
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import skeletal_tensors


def solved(program: LinearProgram) -> float | None:
    """Return alpha as CBC finds it in the paper's formulation, or None when the problem is infeasible."""
    model = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    alpha = model.add_var(lb=0.0, ub=1.0)
    model.objective = alpha
    scale = 1e-9
    size = (program.input_bytes + program.attention_bytes) * scale + program.others_bytes * scale * alpha
    model += size <= program.bandwidth_bytes_per_s * program.layer_forward_s * scale
    model += program.swapped_layers * size <= program.host_bytes * scale
    status = model.optimize()
    return alpha.x if status == mip.OptimizationStatus.OPTIMAL else None


def test_the_closed_form_is_the_solvers_optimum() -> None:
    rng = random.Random(7)
    feasible = 0
    for _ in range(40):
        program = LinearProgram(
            input_bytes=rng.randrange(10**8, 10**9),
            attention_bytes=rng.randrange(10**8, 10**9),
            others_bytes=rng.randrange(10**9, 10**10),
            bandwidth_bytes_per_s=rng.uniform(5e9, 5e10),
            layer_forward_s=rng.uniform(0.02, 1.0),
            swapped_layers=rng.randrange(1, 80),
            host_bytes=rng.uniform(1e10, 4e11),
        )
        expected = solved(program)
        if expected is None:
            assert min(program.overlap_bound, program.host_bound) < 0
            assert program.alpha == 0.0
        else:
            feasible += 1
            assert program.alpha == pytest.approx(expected, abs=1e-6)
    assert feasible > 10


def test_sizes_come_from_the_layers_tensors() -> None:
    decisions = Decisions(
        model=load_model("gpt-7b"), layout=Layout(tp=4, sequence_parallel=True, cp=2), seq_tokens=1 << 18
    )
    program = linear_program(decisions, layer_forward_s=1.0, bandwidth_bytes_per_s=1e10, host_bytes=2e11)
    whole = sum(t.bytes for t in skeletal_tensors(decisions.model, shape_of(decisions), "bf16"))
    assert program.input_bytes + program.attention_bytes + program.others_bytes == whole
    assert program.input_bytes == (1 << 18) * 4096 * 2 // 8
    assert program.swapped_layers == 30


@pytest.mark.parametrize("valley", [0.0, 0.3, 0.55, 1.0])
@pytest.mark.parametrize("ceiling", [1.0, 0.4])
def test_the_search_finds_what_a_full_scan_finds(valley: float, ceiling: float) -> None:
    base = Decisions(model=load_model("gpt-7b"), seq_tokens=1 << 16)

    def predict(decisions: Decisions) -> Prediction:
        if decisions.alpha > ceiling:
            return Prediction(status="host_oom", shortfall_bytes=1)
        return Prediction(status="ok", step_s=10 + abs(decisions.alpha - valley))

    scanned = min((step / 64 for step in range(65) if step / 64 <= ceiling), key=lambda alpha: abs(alpha - valley))
    for start in (0.0, 0.5, 1.0):
        found = best_alpha(base, predict, start=start)
        assert found.decisions.alpha == pytest.approx(scanned)
        assert found.evaluated < 30
        refused = ceiling < found.decisions.alpha + 1 / 64 <= 1
        grid = Grid.of(base)
        above = grid.refusal(grid.step_of(found.decisions) + 1, predict)
        assert (above.status if above else None) == ("host_oom" if refused else None)


@pytest.mark.parametrize("valley", [0.0, 0.5, 0.7])
@pytest.mark.parametrize("ceiling", [1.0, 0.6, 0.3])
@pytest.mark.parametrize("bound", [0.01, 0.28, 0.4375])
def test_partial_swap_finds_what_a_full_scan_finds(bound: float, ceiling: float, valley: float) -> None:
    base = Decisions(model=load_model("gpt-7b"), seq_tokens=1 << 16)
    asked = []

    def predict(decisions: Decisions) -> Prediction:
        assert decisions.recompute == "none"
        asked.append(decisions.alpha)
        if decisions.alpha < bound:
            return Prediction(status="gpu_oom", shortfall_bytes=1)
        if decisions.alpha > ceiling:
            return Prediction(status="host_oom", shortfall_bytes=1)
        return Prediction(status="ok", step_s=10 + max(0.0, decisions.alpha - valley))

    found = best_partial_swap(base, predict)
    assert found is not None
    least = next(step / 64 for step in range(1, 64) if step / 64 >= bound)
    assert found.decisions.alpha == least
    assert found.prediction.status == ("ok" if least <= ceiling else "host_oom")
    assert len(asked) == len(set(asked)) < 20
    assert 0 < min(asked) <= max(asked) < 1
    grid = Grid.of(base)
    below = grid.refusal(grid.step_of(found.decisions) - 1, predict) if least > 1 / 64 else None
    assert (below.status if below else None) == ("gpu_oom" if least > 1 / 64 else None)


def test_too_few_rows_have_no_partial_swap() -> None:
    base = Decisions(model=load_model("gpt-tiny"), seq_tokens=128)
    assert best_partial_swap(base, lambda _: pytest.fail("nothing to predict")) is None


def test_nothing_fits_is_reported_with_the_smallest_plan() -> None:
    base = Decisions(model=load_model("gpt-tiny"), seq_tokens=4096)

    def predict(decisions: Decisions) -> Prediction:
        return Prediction(status="gpu_oom", shortfall_bytes=decisions.swapped_tokens + 1)

    found = best_alpha(base, predict, start=0.5)
    assert found.decisions.alpha == 0
    assert found.prediction.step_s is None
    assert found.prediction.shortfall_bytes == 1


def test_binds_names_the_limit() -> None:
    sizes = {"input_bytes": 1, "attention_bytes": 1, "others_bytes": 14, "swapped_layers": 1}
    for (bandwidth, host), expected in zip(
        itertools.product((16.0, 9.0), (16.0, 8.0)), ("nothing", "host memory", "overlap", "host memory"), strict=True
    ):
        program = LinearProgram(**sizes, bandwidth_bytes_per_s=bandwidth, layer_forward_s=1.0, host_bytes=host)
        assert program.binds == expected
        assert program.full_overlap_bandwidth == 16.0


@pytest.mark.parametrize("states", ["fp32", "host"])
def test_the_program_knows_that_states_take_host_memory(states: States) -> None:
    cluster, hardware = load_cluster("a800-1x8")
    asked = Question(
        model=load_model("gpt-7b"),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=1 << 20,
        system="any",
        pins=Pins(tp=8, cp=1, recompute="tokenwise"),
        states=states,
    )
    best = search(asked).best
    assert best is not None
    assert best.linear_program is not None
    assert best.linear_program.binds == "host memory"
    assert 0 <= best.linear_program.alpha - best.decisions.alpha < 1 / 64
