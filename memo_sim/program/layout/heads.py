"""How attention's heads are divided: over tensor-parallel ranks, then over the ranks of Ulysses.

A rank has whole query heads, and whole key/value heads that these queries read. Where there are more ranks than
key/value heads, ranks have copies of one:

- Ulysses: a rank sends its rows of a key/value head to every rank that reads them. In backward these send their
  gradients back, and the sender adds them up (DeepSpeed's ``runtime/sequence_parallel/ulysses_sp.py``).
- Tensor parallelism: a rank multiplies by its part of the weights, which is less than a head. Ranks gather the packed
  Q, K, V and take their own heads; in backward they reduce-scatter the gradients (``attention/shared_heads.py``).

      8 query heads, 2 key/value heads, Ulysses 4      ranks   q0 q1 k0   q2 q3 k0   q4 q5 k1   q6 q7 k1

Uneven heads: Ulysses' degree need not divide the key/value heads. The first ranks have one of them more, with its
query heads (DeepSpeed's ``module_inject/tp_shard.py``). So rank 0 has the most, and its program stands for all ranks.

      7 heads, Ulysses 4      2 2 2 1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Layout


@dataclass(frozen=True, slots=True)
class Share:
    """The heads of one rank: the number of the first one and how many there are, of queries and of keys and values."""

    first: int
    heads: int
    first_kv: int
    kv_heads: int


def divided_heads(model: Model, layout: Layout) -> tuple[int, int]:
    """Return the query heads and the key/value heads of one tensor-parallel (or METP) rank."""
    return model.heads // layout.divided, max(1, model.kv_heads // layout.divided)


def sharing_ranks(model: Model, layout: Layout) -> int:
    """Return the number of tensor-parallel ranks that have copies of one key/value head; 1 when none has a copy."""
    return max(1, layout.tp // model.kv_heads)


@cache
def shares(heads: int, kv_heads: int, degree: int) -> tuple[Share, ...]:
    """Return how the heads of a tensor-parallel rank are divided over ``degree`` ranks of Ulysses, by rank.

    The numbers have to go together (``are_even``, or uneven heads).
    """
    if degree > kv_heads:
        mine, copies = heads // degree, degree // kv_heads
        return tuple(Share(rank * mine, mine, rank // copies, 1) for rank in range(degree))
    least, extra = divmod(kv_heads, degree)
    counts = [least + (rank < extra) for rank in range(degree)]
    queries = heads // kv_heads
    starts = (0, *accumulate(counts))
    return tuple(
        Share(first * queries, count * queries, first, count) for first, count in zip(starts, counts, strict=False)
    )


def are_even(heads: int, kv_heads: int, degree: int) -> bool:
    """Return whether every one of ``degree`` ranks has equally many query heads and key/value heads, or copies."""
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def have_unequal_shares(model: Model, layout: Layout) -> bool:
    """Return whether some ranks of Ulysses have more heads than others."""
    return not are_even(*divided_heads(model, layout), layout.ulysses)
