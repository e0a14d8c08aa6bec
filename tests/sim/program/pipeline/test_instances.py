"""Instances that come again for each micro-batch are kept once, and are the same as listed ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import msgspec
import numpy as np
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instances import Instances, Repeated
from memo_sim.program.ir.instruction import Instance
from memo_sim.program.lower import lower

LAYOUTS = [
    Layout(),
    Layout(pp=4),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, schedule="zero-bubble"),
    Layout(pp=2, dp=2, zero=3),
    Layout(pp=2, subsequences=4),
]


def plan(layout: Layout, recompute: str = "full") -> Decisions:
    """Return a plan of 8 layers."""
    model = msgspec.structs.replace(load_model("gpt-tiny"), layers=8)
    base = Decisions(model=model, layout=layout, seq_tokens=2048, global_batch=12 * layout.dp)
    return msgspec.structs.replace(base, recompute=recompute)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_are_those_of_listed_instances(layout: Layout) -> None:
    for program in lower(plan(layout)):
        listed = tuple(program.instances)
        assert len(program.instances) == len(listed)
        assert program.template_of.tolist() == [each.template for each in listed]
        assert program.bound_indices.tolist() == list(chain.from_iterable(each.indices for each in listed))
        other = replace(program, instances=listed)
        assert program.instances == listed
        assert (other.template_of == program.template_of).all()
        for one, another in zip(vars(expand(program)).values(), vars(expand(other)).values(), strict=True):
            np.testing.assert_array_equal(one, another)


def test_instances_of_other_micro_batches_follow_from_two() -> None:
    one = [Instance(3, "m1/s0/l2", (5, 7, 7), 1, layer=2), Instance(4, "m1/s0/head", (), 1)]
    two = [Instance(3, "m2/s0/l2", (8, 7, 7), 2, layer=2), Instance(4, "m2/s0/head", (), 2)]
    found = Instances([(Repeated(one, two), micro_batch) for micro_batch in (1, 2, 10)])
    ten = [Instance(3, "m10/s0/l2", (32, 7, 7), 10, layer=2), Instance(4, "m10/s0/head", (), 10)]
    assert list(found) == [*one, *two, *ten]
    assert found[4:] == tuple(ten)
    assert found.templates.tolist() == [3, 4] * 3
    assert found.indices.tolist() == [5, 7, 7, 8, 7, 7, 32, 7, 7]
    assert found == (*one, *two, *ten)
    assert found != (*one, *two)
    assert hash(found) == hash((*one, *two, *ten))
