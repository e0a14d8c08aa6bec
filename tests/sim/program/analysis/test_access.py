"""Access types follow from the program: the KV cache stays, one subsequence's tensors may be offloaded."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.papers.figures import figure
from memo_sim.program.analysis.access import AccessType, access_types, accesses
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.schedule import Kind
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, LLAMA, decide

MODELS = {"gpt": msgspec.structs.replace(GPT, layers=2), "llama": msgspec.structs.replace(LLAMA, layers=2)}


def cut(model: str, count: int, **more) -> Decisions:
    return decide(MODELS[model], Layout(subsequences=count), seq_tokens=1024, global_batch=1, **more)


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_swaps_exactly_what_one_subsequence_keeps(model: str) -> None:
    """Every tensor that a layer swaps has type 1; only keys, values and their gradients have type 0.

    The gradients of the last subsequence's keys have type 2, because no other subsequence adds to them.
    """
    kept = access_types(lower(cut(model, 4))[0])
    kv_cache_tokens = {name for name, kind in kept.items() if kind is AccessType.PREFIX}
    assert kv_cache_tokens == {"prefix.kv", *(f"prefix.d_kv.{n}" for n in range(3))}
    assert kept["prefix.d_kv.3"] is AccessType.TRANSIENT
    swapping = lower(cut(model, 4, policy=("none", 1.0)))[0]
    travelling = {f.name.removeprefix("host.") for f in swapping.families if f.name.startswith("host.")}
    layers = {name.removeprefix("skeletal."): kind for name, kind in kept.items() if name.startswith("skeletal.")}
    assert travelling == {name for name, kind in layers.items() if kind is AccessType.KEPT}
    assert travelling == set(layers)
    own = {kind for name, kind in kept.items() if name.startswith(("layer.fwd.s", "layer.bwd.s"))}
    assert own == {AccessType.TRANSIENT}


def test_a_whole_sequence_has_no_kv_cache() -> None:
    kinds = access_types(lower(cut("gpt", 1))[0])
    assert AccessType.PREFIX not in kinds.values()
    assert kinds["skeletal.qkv"] is AccessType.KEPT


def test_first_keys_are_touched_by_every_pass_and_first_queries_by_two() -> None:
    decisions = cut("llama", 4)
    program = lower(decisions)[0]
    found = accesses(program, rows=partition(decisions)[0])
    passes = [each for each, _ in program.passes]
    assert set(found["prefix.kv", 1]) == set(range(8))
    queries = found["skeletal.q.s0", 1]
    assert [(passes[n].kind, passes[n].subsequence) for n in queries] == [(Kind.FORWARD, 0), (Kind.BACKWARD, 0)]


def test_figure_6_has_a_tensor_of_each_type() -> None:
    made = figure("sppo-6")
    touched = [sum(point.y > 0 for point in line.points) for line in made.lines]
    assert [line.label.partition(":")[0] for line in made.lines] == ["type 0", "type 1", "type 2"]
    assert touched == [8, 2, 1]
