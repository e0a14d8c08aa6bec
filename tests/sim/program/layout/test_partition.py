"""Partition of a sequence into subsequences: equal lengths or equal work, whole granules, the longest first."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput, Infeasible
from memo_sim.contract.knobs import Partition
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.layout.partition import balanced, earlier_tokens, partition, swapped_parts
from tests.refusals import refused
from tests.sim.small_programs import GPT

GPT_7B = load_model("gpt-7b")


def cut(tokens: int, parts: int, how: Partition = "flops", **layout: int | bool) -> Decisions:
    return Decisions(
        model=GPT_7B,
        seq_tokens=tokens,
        layout=Layout(subsequences=parts, partition=how, **layout),  # type: ignore[arg-type]
    )


def work(decisions: Decisions) -> list[float]:
    """Return the forward FLOPs of a layer over each subsequence, summed token by token."""
    model, found, first = decisions.model, [], 0
    for tokens in partition(decisions):
        keys = sum(range(first, first + tokens))
        found.append(2.0 * model.matrix_params_of(model.layer(0)) * tokens + 4.0 * model.q_width * keys)
        first += tokens
    return found


def test_one_subsequence_is_the_whole_sequence() -> None:
    assert partition(cut(1000, 1)) == (1000,)


def test_the_closed_form() -> None:
    # The example of partition.py: 4 x + x^2 / 2 is 64 for x = 8, and 32 for x = sqrt(80) - 4.
    assert balanced(8, 2, 4) == pytest.approx([80**0.5 - 4, 12 - 80**0.5])


def test_without_products_ends_grow_with_the_root() -> None:
    assert balanced(16, 4, 0) == pytest.approx([8, 8 * (2**0.5 - 1), 8 * (3**0.5 - 2**0.5), 16 - 8 * 3**0.5])


def test_in_a_gpt_layer_six_hidden_earlier_keys_cost_as_much_as_the_products() -> None:
    # The products cost 2 FLOPs for each of 12 h^2 weights; an earlier key costs 4 h FLOPs.
    assert earlier_tokens(GPT_7B) == 6 * GPT_7B.hidden


def test_equal_lengths_give_the_remainder_to_the_first_subsequences() -> None:
    assert partition(cut(10 * 128, 4, "length")) == (384, 384, 256, 256)


def test_equal_work_is_equal_up_to_a_granule() -> None:
    decisions = cut(128 * 1024, 16)
    parts = work(decisions)
    last = 2.0 * GPT_7B.matrix_params_of(GPT_7B.layer(0)) + 4.0 * GPT_7B.q_width * decisions.seq_tokens
    assert max(parts) - min(parts) < 2 * 128 * last
    assert max(parts) / min(parts) < 1.03
    assert max(work(cut(128 * 1024, 16, "length"))) / min(work(cut(128 * 1024, 16, "length"))) > 5


def test_sequence_parallelism_multiplies_the_granule_by_tp() -> None:
    parts = partition(cut(128 * 1024, 8, tp=8, sequence_parallel=True))
    assert all(tokens % 1024 == 0 for tokens in parts)
    assert sum(parts) == 128 * 1024


@pytest.mark.parametrize("how", ["length", "flops"])
def test_subsequences_of_random_sequences(how: Partition) -> None:
    random = Random(how)
    for _ in range(200):
        tokens, parts = random.randrange(128, 2**20), random.randrange(2, 200)
        if -(-tokens // 128) < parts:
            with refused(Infeasible, where="layout.subsequences", got=f"{parts} of {tokens} tokens"):
                partition(cut(tokens, parts, how))
            continue
        sizes = partition(cut(tokens, parts, how))
        assert len(sizes) == parts
        assert sum(sizes) == tokens
        assert min(sizes) > 0
        assert all(before >= after for before, after in pairwise(sizes))
        assert all(size % 128 == 0 for size in sizes[:-1])


def test_swapped_tokens_of_every_subsequence() -> None:
    base = cut(1024, 2, "length")
    some = msgspec.structs.replace(base, swapped_tokens=384, subsequence_swapped_tokens=(128, 256))
    assert swapped_parts(base) == (0, 0)
    assert swapped_parts(msgspec.structs.replace(base, swapped_tokens=1024)) == (512, 512)
    assert swapped_parts(some) == (128, 256)
    assert swapped_parts(Decisions(model=GPT, seq_tokens=1024, swapped_tokens=256)) == (256,)


def test_only_the_last_subsequence_may_swap_a_number_that_is_no_multiple_of_a_granule() -> None:
    base = cut(1000, 2, "length")
    whole = msgspec.structs.replace(base, swapped_tokens=488, subsequence_swapped_tokens=(0, 488))
    assert swapped_parts(whole) == (0, 488)
    with refused(BadInput, where="$.decisions.subsequence_swapped_tokens[0]", got="12", wanted=("128", "512")):
        swapped_parts(msgspec.structs.replace(base, swapped_tokens=500, subsequence_swapped_tokens=(12, 488)))


@pytest.mark.parametrize(
    ("layout", "swapped", "each", "named"),
    [
        (Layout(subsequences=2), 256, (), "2"),
        (Layout(subsequences=2), 256, (128, 128, 0), "2"),
        (Layout(subsequences=2), 256, (128, 256), "384"),
        (Layout(subsequences=2), 1024, (512, 512), ""),
        (Layout(subsequences=2), 0, (0, 0), ""),
        (Layout(), 256, (256,), ""),
    ],
)
def test_what_subsequences_cannot_swap(layout: Layout, swapped: int, each: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=rf"subsequence_swapped_tokens.*{named}"):
        Decisions(model=GPT, seq_tokens=1024, layout=layout, swapped_tokens=swapped, subsequence_swapped_tokens=each)
