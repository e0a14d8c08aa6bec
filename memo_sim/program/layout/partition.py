"""Partition of a sequence into subsequences: the tokens of each one, and how many of these are swapped.

The forward work of a token in a layer grows with its position: c for the products, and a for every earlier key. The
first x tokens cost W(x) = c x + a x^2 / 2. N subsequences of equal work on a sequence of S tokens therefore end where
W(x_i) = i W(S) / N (SPPO 4, TeraPipe 3.3):

    x_i = sqrt(k^2 + (2 k S + S^2) i / N) - k,    k = c / a

Example: with S = 8 granules, k = 4 and N = 2 the first subsequence has 5.2 granules and the second 2.8, which round to
5 and 3. Only layers count: equal work in one layer is equal work in a stage's layers. The head is on the last stage
alone. With a window, every token has as many keys, and subsequences are equally long. Of experts, c has those of one
token. Where layers differ, parts of equal work in one layer are not so in another, and few layers that stand for all
would have other parts: there subsequences have equal lengths (``rules/unlike_layers.py``).
"""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from memo_sim.contract.errors import BadInput, Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions

PRICE_AGAIN = "the plan was edited: memo-sim what-if with MODEL and --seq-len makes another"
"""Hint for a plan file that contains numbers no search writes."""


def partition(decisions: Decisions) -> tuple[int, ...]:
    """Return the tokens of each subsequence of one rank's micro-batch, in order.

    Each is a multiple of the swap granule, except the last when the sequence itself is no multiple. No subsequence is
    longer than the one before it. Of a micro-batch of several sequences, each has equal parts of all of them.

    Raises:
        Infeasible: when there are fewer granules than subsequences.
    """
    layout, granule, sequences = decisions.layout, decisions.swap_granule, decisions.micro_batch
    parts, tokens = layout.subsequences, decisions.local_tokens // sequences
    if parts == 1:
        return (decisions.local_tokens,)
    granules = -(-tokens // granule)
    if granules < parts:
        raise Infeasible(
            f"a subsequence has to have {granule} tokens at least",
            where="layout.subsequences",
            got=f"{parts} of {tokens} tokens",
            wanted=f"at most {granules}",
            hint="fewer --subsequences, or a longer sequence",
        )
    if layout.partition == "length" or 0 < decisions.model.layer(0).window < decisions.seq_tokens:
        ideal = [granules / parts] * parts
    else:
        ideal = balanced(granules, parts, earlier_tokens(decisions.model) / (granule * layout.ulysses * layout.cp))
    sizes = [size * granule for size in _whole(ideal, granules)]
    sizes[-1] -= granules * granule - tokens
    return tuple(sequences * size for size in sizes)


def swapped_parts(decisions: Decisions) -> tuple[int, ...]:
    """Return the swapped tokens of each subsequence.

    Raises:
        Infeasible: as ``partition``.
        BadInput: when swapped tokens end inside a granule. No search writes such a plan; only an edited file has it.
    """
    parts, each, swapped = partition(decisions), decisions.subsequence_swapped_tokens, decisions.swapped_tokens
    if not each:
        return parts if swapped == decisions.local_tokens else (swapped,) * len(parts)
    for i, (tokens, some) in enumerate(zip(parts, each, strict=True)):
        if some > tokens or (some % decisions.swap_granule and some != tokens):
            raise BadInput(
                "swapped tokens of a subsequence do not fall on a row block",
                where=f"$.decisions.subsequence_swapped_tokens[{i}]",
                got=some,
                wanted=f"a multiple of {decisions.swap_granule} up to {tokens}, or {tokens}",
                hint=PRICE_AGAIN,
            )
    return each


def earlier_tokens(model: Model) -> float:
    """Return k: the number of earlier keys at which attention costs a token the same forward FLOPs as the products.

    Of experts, the products are those of one token.
    """
    return 2.0 * (model.layers_active_params / model.layers) / (4.0 * model.score_width)


def balanced(length: float, parts: int, k: float) -> list[float]:
    """Return lengths of equal work, when a unit costs c plus a for each unit before it, and k = c / a."""
    ends = [sqrt(k * k + (2 * k * length + length * length) * i / parts) - k for i in range(parts + 1)]
    return [after - before for before, after in pairwise(ends)]


def _whole(ideal: list[float], total: int) -> list[int]:
    """Round ``ideal`` sizes, which never grow, to whole numbers of at least 1 that sum to ``total``.

    Units lost by rounding down go to the largest remainders. Units gained by rounding up to 1 come from the longest.
    """
    sizes = [max(1, int(size)) for size in ideal]
    left = total - sum(sizes)
    for i in sorted(range(len(ideal)), key=lambda i: sizes[i] - ideal[i])[: max(0, left)]:
        sizes[i] += 1
    for _ in range(-left):
        sizes[sizes.index(max(sizes))] -= 1
    return sorted(sizes, reverse=True)
