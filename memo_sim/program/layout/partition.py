"""How a sequence is cut into subsequences: how many tokens each has, and how many of them are swapped.

A token's forward work in a layer grows with its position: c for the products, a for every earlier key. Tokens before x
cost W(x) = c x + a x^2 / 2, so N parts of equal work end where W(x_i) = i W(S) / N (SPPO 4, TeraPipe 3.3):

    x_i = sqrt(k^2 + (2 k S + S^2) i / N) - k,    k = c / a

With S = 8 granules, k = 4 and N = 2 the first part has 5.2 of them, the second 2.8; in whole granules 5 and 3. Layers
alone are counted: every stage has as many, the head is the last stage's.
"""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from memo_sim.contract.errors import BadInput, Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions

PRICE_AGAIN = "the plan was edited: memo-sim what-if with MODEL and --seq-len makes another"
"""What to do with a plan file whose numbers no search would have written."""


def partition(decisions: Decisions) -> tuple[int, ...]:
    """Return the tokens of each subsequence of one rank's micro-batch, in order.

    Multiples of the swap granule, but for the last one where the micro-batch is none; no part is longer than the one
    before it.

    Raises:
        Infeasible: when there are fewer granules than subsequences.
    """
    layout, tokens, granule = decisions.layout, decisions.local_tokens, decisions.swap_granule
    parts = layout.subsequences
    if parts == 1:
        return (tokens,)
    granules = -(-tokens // granule)
    if granules < parts:
        raise Infeasible(
            f"a subsequence has to have {granule} tokens at least",
            where="layout.subsequences",
            got=f"{parts} of {tokens} tokens",
            wanted=f"at most {granules}",
            hint="fewer --subsequences, or a longer sequence",
        )
    if layout.partition == "length":
        ideal = [granules / parts] * parts
    else:
        ideal = balanced(granules, parts, earlier_tokens(decisions.model) / granule)
    sizes = [size * granule for size in _whole(ideal, granules)]
    sizes[-1] -= granules * granule - tokens
    return tuple(sizes)


def swapped_parts(decisions: Decisions) -> tuple[int, ...]:
    """Return the swapped tokens of each subsequence.

    Raises:
        Infeasible: as ``partition``.
        BadInput: when swapped tokens end inside a granule: no search asks for that, only a file can.
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
    """Return k: how many earlier keys cost a token as much as its products do, in FLOPs of a layer's forward."""
    return 2.0 * model.layer_matrix_params / (4.0 * model.q_width)


def balanced(length: float, parts: int, k: float) -> list[float]:
    """Return lengths of equal work: c for each unit and a for each unit before it, k = c / a."""
    ends = [sqrt(k * k + (2 * k * length + length * length) * i / parts) - k for i in range(parts + 1)]
    return [after - before for before, after in pairwise(ends)]


def _whole(ideal: list[float], total: int) -> list[int]:
    """Return whole numbers of one at least that sum to ``total``, next to ``ideal`` ones that never grow.

    What rounding down leaves goes to the largest remainders; what rounding up to one took comes from the longest.
    """
    sizes = [max(1, int(size)) for size in ideal]
    left = total - sum(sizes)
    for i in sorted(range(len(ideal)), key=lambda i: sizes[i] - ideal[i])[: max(0, left)]:
        sizes[i] += 1
    for _ in range(-left):
        sizes[sizes.index(max(sizes))] -= 1
    return sorted(sizes, reverse=True)
