"""What each subsequence costs a stage, and how much of it is offloaded (SPPO 5.2).

A subsequence's activations A_i leave while the next one is computed. Parts of equal work take T each, so what fits
under a part is the same for all of them, and alpha grows as parts shrink:

    alpha_i A_i = BW T,  at most A_i        the device then holds  M_i = M_{i-1} + A_i - alpha_{i-1} A_{i-1}

Every token has as many bytes, so a constant alpha_i A_i is a constant number of tokens that each part swaps.

      parts  8 5 4 3 tokens, four leave under one      swapped 4 4 4 3      held 8 9 9 8
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.bandwidth import offload_bandwidth
from memo_sim.planning.question import Question
from memo_sim.program.ir.instruction import Instruction, Lane, Mode, Template
from memo_sim.program.ir.work import Attention, Work
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.subsequence import subsequences_of
from memo_sim.program.lower import lower

MOST_PART_TOKENS = 16 * 1024
ROUNDING = 1e-6
"""Tokens that a fraction of them may be off by."""
LEFT_OUT = 0.05
"""Part of what hides that may be lost by rounding down."""
OCTAVES = 3
"""From 16K to 2K tokens a subsequence."""
AN_OCTAVE = 4
"""Counts tried in each: T has one flat valley."""


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of one layer's forward and backward of a subsequence on one rank, and of its head."""

    tokens: int
    forward_s: float
    backward_s: float
    forward_compute_s: float
    backward_compute_s: float
    """Of those, what the compute lane alone takes."""
    idle_s: float
    """Of both, what it stands still at least for collectives between two kernels, where no rows are cut in blocks."""
    head_compute_s: float
    """What the compute lane takes for the head and the loss, forward and backward."""


@dataclass(frozen=True, slots=True)
class _Works:
    """What a layer of a part plays on each lane in forward and backward, and of the head, in order."""

    compute: tuple[tuple[Work, ...], tuple[Work, ...]]
    collective: tuple[tuple[Work, ...], tuple[Work, ...]]
    waited_for: tuple[tuple[Work, ...], ...]
    head: tuple[Work, ...]

    @classmethod
    def of(cls, alone: Decisions) -> _Works:
        """Return the works of a plan of one subsequence."""
        (program,) = lower(alone)
        named = {template.name: template for template in program.templates}
        forward, backward, head = named["layer.fwd"], named["layer.bwd"], named["head"]
        return cls(
            (_on_lane(forward, Lane.COMPUTE), _on_lane(backward, Lane.COMPUTE)),
            (_on_lane(forward, Lane.COLLECTIVE), _on_lane(backward, Lane.COLLECTIVE)),
            (*waited_for(forward), *waited_for(backward)),
            _on_lane(head, Lane.COMPUTE),
        )


class PartPrices:
    """Prices layers of subsequences: that of a sequence of as many tokens, and attention to the earlier keys.

    Plans that differ in nothing but what they keep, swap or rebuild, or in the order of their stages, are priced once.
    """

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self.hardware = hardware
        self.cluster = cluster
        self._alone: dict[Decisions, _Works] = {}
        self._known: dict[Decisions, list[PartTimes]] = {}

    def parts(self, decisions: Decisions) -> list[PartTimes]:
        """Return the times of every subsequence.

        Raises:
            Infeasible: when the layout does not divide the model or the sequence, there are fewer granules than
            subsequences, or the profile has not measured such work.
        """
        alike = msgspec.structs.replace(
            decisions,
            layout=msgspec.structs.replace(decisions.layout, schedule="1f1b", virtual_stages=1, multiplexed=False),
            recompute="none",
            swapped_tokens=0,
            subsequence_swapped_tokens=(),
            mlp_chunk_tokens=0,
            offload_window=0,
            memory_policy="planned",
        )
        if alike not in self._known:
            sizes = partition(decisions)
            pricer = Pricer(self.hardware, self.cluster, decisions.layout, rowwise=decisions.kernels.rowwise)
            starts = [0, *accumulate(sizes)]
            self._known[alike] = [
                self._part(alike, pricer, start, tokens) for start, tokens in zip(starts, sizes, strict=False)
            ]
        return self._known[alike]

    def _part(self, decisions: Decisions, pricer: Pricer, start: int, tokens: int) -> PartTimes:
        layout = decisions.layout
        alone = msgspec.structs.replace(
            decisions,
            model=msgspec.structs.replace(decisions.model, layers=2),
            layout=Layout(tp=layout.tp, sequence_parallel=layout.sequence_parallel),
            seq_tokens=tokens,
            global_batch=1,
        )
        if alone not in self._alone:
            self._alone[alone] = _Works.of(alone)
        works = self._alone[alone]
        compute_s = [_seconds(each, pricer, start) for each in works.compute]
        beside_s = [_seconds(each, pricer, start) for each in works.collective]
        forward_s, backward_s = (busy + waits for busy, waits in zip(compute_s, beside_s, strict=True))
        idle_s = sum(max(pricer.seconds(work) for work in each) for each in works.waited_for)
        head_s = _seconds(works.head, pricer, 0)
        return PartTimes(tokens, forward_s, backward_s, compute_s[0], compute_s[1], idle_s, head_s)


_PREPARED = 4
"""Profiles on clusters whose prices are kept: layouts, candidates, floors and explanations ask for the same parts."""
_prepared: list[PartPrices] = []


def part_prices(hardware: Hardware, cluster: Cluster) -> PartPrices:
    """Return the prices of a profile on a cluster, made once for those objects."""
    for found in _prepared:
        if found.hardware is hardware and found.cluster is cluster:
            return found
    _prepared.append(PartPrices(hardware, cluster))
    del _prepared[:-_PREPARED]
    return _prepared[-1]


def _on_lane(template: Template, lane: Lane) -> tuple[Work, ...]:
    return tuple(instruction.work for instruction in template.instructions if instruction.lane is lane)


def _seconds(works: Sequence[Work], pricer: Pricer, earlier_tokens: int) -> float:
    """Return what one lane takes, with the earlier keys that attention has."""
    total = 0.0
    for work in works:
        total += pricer.seconds(work)
        if earlier_tokens and isinstance(work, Attention):
            total += pricer.seconds(replace(work, k_tokens=earlier_tokens, mask="none"))
    return total


def waited_for(template: Template) -> list[tuple[Work, ...]]:
    """Return of every kernel that has to wait the collectives of which it waits for the longest at least.

    The kernel before it makes what they read, and it reads what they make:

        compute      [A]      [B]
        collective      [C ]           B waits for all of C, and nothing hides that
    """
    found, behind = list[tuple[Work, ...]](), list[Instruction]()
    last: Instruction | None = None
    for one in template.instructions:
        if one.lane is Lane.COLLECTIVE:
            if last is not None and _follows(one, last):
                behind.append(one)
        elif one.lane is Lane.COMPUTE:
            if works := tuple(each.work for each in behind if _follows(one, each)):
                found.append(works)
            last, behind = one, []
    return found


def _follows(second: Instruction, first: Instruction) -> bool:
    """Return whether an instruction reads rows that another writes."""
    return any(
        read.mode & Mode.READ
        and written.mode & Mode.WRITE
        and read.slot == written.slot
        and max(read.first, written.first) < min(read.first + read.tokens, written.first + written.tokens)
        for read in second.operands
        for written in first.operands
    )


def counts(seq_tokens: int, an_octave: int = AN_OCTAVE) -> list[int]:
    """Return numbers of subsequences of 16K tokens down to 2K, ``an_octave`` of them for each halving; at least 1."""
    lengths = [MOST_PART_TOKENS / 2 ** (i / an_octave) for i in range(OCTAVES * an_octave + 1)]
    return sorted({max(1, round(seq_tokens / length)) for length in lengths})


def held_bytes(sizes: Sequence[float], alphas: Sequence[float]) -> list[float]:
    """Return M_i: the activations on the device while subsequence i is computed, those before it having left.

    The most is held at the last part k that does not leave whole: the sum of (1 - alpha_j) A_j before it, and A_k. (The
    paper prints M_max = (1 - alpha_{k-1}) A_{k-1}, which leaves out what the parts before it keep.)
    """
    left = [size * (1 - alpha) for size, alpha in zip(sizes, alphas, strict=True)]
    return [kept + size for kept, size in zip(accumulate([0.0, *left]), sizes, strict=False)]


def most_held_bytes(decisions: Decisions) -> float:
    """Return the most activations that a stage's forwards of one sequence hold, keys and values left out (SPPO 5.2)."""
    token_bytes = offloaded_bytes(decisions) * decisions.model.layers / decisions.layout.pp
    parts, swapped = partition(decisions), swapped_parts(decisions)
    alphas = [some / part for some, part in zip(swapped, parts, strict=True)]
    return max(held_bytes([token_bytes * part for part in parts], alphas))


def hide(question: Question, decisions: Decisions, prices: PartPrices) -> tuple[Decisions, ...]:
    """Return ``decisions`` with of each subsequence as much swapped as hides under the next one's forward (SPPO 5.2).

    First rounded down to whole row blocks. Where much is lost by that, it is rounded up as well: that hides not quite,
    and may cut fewer parts in two; which is faster only playing tells. All of every part is a full swap, and not what
    this is rounded up to.

    Raises:
        Infeasible: as ``PartPrices.parts``.
    """
    granule, exact = decisions.swap_granule, hidden_tokens(question, decisions, prices)
    tried = [swap_each(decisions, tokens) for tokens in rounded(exact, granule)]
    return (tried[0], *(up for up in tried[1:] if up.alpha < 1))


def rounded(tokens: float, granule: int) -> tuple[int, ...]:
    """Return whole granules next to ``tokens``: those below, and those above where that leaves much of them out.

    Of 1729 tokens in granules of 1024 these are 1024 and 2048; of 40,033 they are 39,936 alone.
    """
    down = int(tokens / granule) * granule
    return (down, down + granule) if tokens - down > LEFT_OUT * tokens else (down,)


def hidden_tokens(question: Question, decisions: Decisions, prices: PartPrices) -> float:
    """Return the tokens of a part whose offload takes as long as a part's forward, before they are rounded.

    Raises:
        Infeasible: as ``PartPrices.parts``.
    """
    parts = prices.parts(decisions)
    token_bytes = offloaded_bytes(decisions)
    bandwidth = offload_bandwidth(question, decisions, int(token_bytes * decisions.local_tokens / len(parts)))
    return bandwidth * sum(part.forward_s for part in parts) / len(parts) / token_bytes


def offloaded_bytes(decisions: Decisions) -> float:
    """Return the bytes of a layer and token that may be offloaded on one rank: all skeletal ones.

    Keys and values are not, as those of earlier subsequences are read by every later one (SPPO 5.1).
    """
    first = subsequences_of(decisions, shape_of(decisions))[0].shape
    return sum(tensor.bytes for tensor in skeletal_of(decisions, first)) / first.tokens


def swap_each(decisions: Decisions, tokens: int) -> Decisions:
    """Return ``decisions`` with so many tokens of every subsequence swapped, or all of a part that has fewer.

    A window of theirs stays where anything is swapped: token-wise layer inputs always are.
    """
    parts = partition(decisions)
    each = tuple(min(tokens, part) for part in parts)
    some = len(parts) > 1 and 0 < sum(each) < sum(parts)
    return msgspec.structs.replace(
        decisions,
        swapped_tokens=sum(each),
        subsequence_swapped_tokens=each if some else (),
        offload_window=decisions.offload_window if sum(each) or decisions.recompute == "tokenwise" else 0,
    )


def swap_fraction(decisions: Decisions, alpha: float) -> Decisions:
    """Return ``decisions`` with at most the fraction ``alpha`` of all tokens swapped, as many of every subsequence.

    Rounded down to what whole row blocks of each can be.
    """
    parts, granule = partition(decisions), decisions.swap_granule
    wanted = sum(parts) if alpha >= 1 else int(alpha * sum(parts) + ROUNDING)
    blocks = bisect_right(range(-(-parts[0] // granule) + 1), wanted, key=lambda n: _swapped(parts, n * granule)) - 1
    return swap_each(decisions, blocks * granule)


def _swapped(parts: Sequence[int], tokens: int) -> int:
    return sum(min(tokens, part) for part in parts)
