"""States of an eager framework: memory that is allocated and freed before the second step stays reserved."""

from __future__ import annotations

import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.requests import Phase, Requests
from memo_sim.contract.units import GIB
from memo_sim.memory.initial_states import Beginning, beginning_of, without_states
from memo_sim.memory.replay import replay
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.layout.parameters import embed_block, head_block, layer_block
from memo_sim.program.lower import lower

MIB = 2**20


def decisions(*, dp: int = 2, **knobs: object) -> Decisions:
    layout = Layout(tp=2, sequence_parallel=True, dp=dp, zero=1 if dp > 1 else 0)
    usual = {"model": load_model("llama-tiny"), "layout": layout, "seq_tokens": 512, "global_batch": dp}
    return Decisions(**{**usual, **knobs})


def found(asked: Decisions) -> Beginning:
    beginning = beginning_of(lower(asked)[0], asked)
    assert beginning is not None
    return beginning


def elements(asked: Decisions) -> int:
    model, tp = asked.model, asked.layout.tp
    ends = embed_block(model, tp).elements + head_block(model, tp).elements
    return ends + model.layers * layer_block(model, tp, model.layer(0)).elements


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_all_states_are_allocated_in_the_end(dp: int) -> None:
    asked = decisions(dp=dp)
    beginning, whole = found(asked), elements(asked)
    share = whole - (dp - 1) * -(-whole // dp)
    assert sum(beginning.temporary) == 2 * whole
    assert beginning.before == (2 * whole, 4 * whole)
    assert sum(beginning.behind) == 4 * share
    assert sum(beginning.later) == 8 * share


def test_a_share_is_that_of_a_group_that_zero_divides_over() -> None:
    groups = decisions(layout=Layout(tp=2, sequence_parallel=True, dp=4, zero=1, zero_ranks=2), global_batch=4)
    assert found(groups) == found(decisions())


def test_the_last_rank_holds_the_first_parameters() -> None:
    """The flat buffer runs from the last parameter to the first; this rank's share ends with the embedding."""
    asked = decisions()
    model = asked.model
    (tokens,) = (p.elements for p in embed_block(model, 2).parameters)
    assert found(asked).behind[-1] == 4 * min(tokens, elements(asked) // 2)


def test_other_precisions_and_states_on_the_host() -> None:
    assert found(decisions(dtype="fp32")).behind == ()
    assert sum(found(decisions(states="bf16")).later) == sum(found(decisions()).later) // 2
    for other in (decisions(states="host"), decisions(layout=Layout(dp=2, zero=3))):
        assert beginning_of(lower(other)[0], other) is None


def test_a_program_without_its_states_keeps_everything_else() -> None:
    asked = decisions()
    program = lower(asked)[0]
    lives = liveness(program, expand(program))
    kinds = ("params", "grads", "master", "moment1", "moment2")
    states = sum(f.bytes * f.count for f in program.families if f.name.split(".")[0] in kinds)
    assert lives.bytes.sum() - without_states(program, lives).bytes.sum() == states > 0


def test_cached_segments_of_parameters_are_cut_and_stay() -> None:
    """Parameters of 40 and 60 MiB pass; the master is cut from the larger, the moments from what is left or new.

    before   | param 40 | param 60 | flat 100 | gradients 200 |
    behind   | (40)     | master 50, (10) | flat | gradients |
    step     an activation of 38 MiB takes the 40; moments of 50 find nothing that is large enough
    """
    requests = Requests(
        name="step",
        ids=["activation"],
        lower=[0],
        upper=[1],
        size_bytes=[38 * MIB],
        classes=["skeletal"],
        phases=[Phase(name="step", kind="step", lower=0, upper=2)],
    )
    sizes = {"temporary": (40, 60), "before": (100, 200), "behind": (50,), "later": (50, 50)}
    beginning = Beginning(**{name: tuple(size * MIB for size in mine) for name, mine in sizes.items()})
    played = replay(requests, iterations=2, beginning=beginning)
    assert played.reserved_peak_bytes == (40 + 60 + 100 + 200 + 50 + 50) * MIB
    assert played.allocated_peak_bytes == (100 + 200 + 50 + 50 + 50 + 38) * MIB
    assert played.live_peak_bytes == played.allocated_peak_bytes


def test_running_out_of_memory_before_the_first_step_is_a_result() -> None:
    requests = Requests(name="step", ids=[], lower=[], upper=[], size_bytes=[], classes=[], phases=[])
    beginning = Beginning(temporary=(GIB,), before=(2 * GIB,), behind=(), later=())
    failed = replay(requests, capacity_bytes=2 * GIB, beginning=beginning).out_of_memory
    assert failed is not None
    assert (failed.iteration, failed.requested_bytes, failed.allocated_bytes) == (-1, 2 * GIB, GIB)
    assert replay(requests, capacity_bytes=3 * GIB, beginning=beginning).out_of_memory is None
    later = Beginning(temporary=(), before=(GIB,), behind=(), later=(2 * GIB,))
    failed = replay(requests, capacity_bytes=2 * GIB, beginning=later).out_of_memory
    assert failed is not None
    assert failed.iteration == 0
