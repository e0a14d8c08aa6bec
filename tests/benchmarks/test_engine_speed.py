"""Measures how long the engine takes (best of five); run with ``pytest -m benchmark -s tests/benchmarks``."""

from __future__ import annotations

import gc
import time

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.question import with_memory

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]  # slow, because parallel tests would disturb the times


def evaluate(layers: int) -> Simulation:
    """Evaluate gpt-65b with ``layers`` layers at 1M tokens on 64 ranks."""
    model = load_model("gpt-65b")
    shape = {f: getattr(model, f) for f in model.__struct_fields__} | {"layers": layers}
    decisions = Decisions(
        model=type(model)(**shape),
        layout=Layout(tp=8, sequence_parallel=True, cp=8, zero=1),
        seq_tokens=1 << 20,
        recompute="tokenwise",
        swapped_tokens=65536,
        loss_chunk_tokens=16384,
    )
    # The memory must suffice for any number of layers, because a plan that does not fit is not simulated.
    cluster, hardware = with_memory(*load_cluster("a800-8x8"), device_bytes=2**50, host_bytes=2**50)
    return simulate(decisions, hardware, cluster)


def best_s(layers: int) -> float:
    gc.collect()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        evaluate(layers)
        times.append(time.perf_counter() - begin)
    return min(times)


def test_gpt_65b_at_1m_on_64_ranks() -> None:
    simulation = evaluate(80)
    assert simulation.prediction.status == "ok"
    instructions, edges = len(simulation.columns.lane), len(simulation.playback.edges.producer)
    seconds = best_s(80)
    print(f"\ngpt-65b, 1M, 64 ranks: {instructions} instructions, {edges} edges in {seconds * 1e3:.0f} ms")
    assert seconds < 0.1


def test_time_is_linear_in_layers() -> None:
    few, many = best_s(40), best_s(160)
    print(f"\n40 layers {few * 1e3:.0f} ms, 160 layers {many * 1e3:.0f} ms")
    assert many < 1.25 * 4 * few


def test_pricing_a_candidate() -> None:
    """The cost models of the profile are made in advance, as in a search."""
    simulation = evaluate(80)
    works = [i.work for template in simulation.program.templates for i in template.instructions]
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        price = Pricer(simulation.hardware, simulation.cluster, simulation.decisions.layout)
        for work in works:
            price.seconds(work)
        times.append(time.perf_counter() - begin)
    print(f"\n{len(works)} works priced in {min(times[1:]) * 1e3:.1f} ms")
