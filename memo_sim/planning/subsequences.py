"""Prices each subsequence of a stage, and computes how many of its tokens are offloaded (SPPO 5.2).

A subsequence's activations A_i are offloaded while the next one is computed. Subsequences with equal work take the same
time T. So the bytes that can be offloaded during one of them are the same for all, and alpha grows as they get shorter:

    alpha_i A_i = BW T,  at most A_i        the device then holds  M_i = M_{i-1} + A_i - alpha_{i-1} A_{i-1}

Every token has the same number of bytes, so a constant alpha_i A_i means that each subsequence swaps the same number of
tokens.

      subsequences of 8 5 4 3 tokens, four tokens hide under one      swapped 4 4 4 3      held 8 9 9 8
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import accumulate
from operator import add

import msgspec

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.bandwidth import offload_bandwidth
from memo_sim.planning.pricers import Pricers
from memo_sim.planning.question import Question
from memo_sim.program.ir.instruction import Instruction, Lane, Mode, Template
from memo_sim.program.ir.work import Attention, Collective, WindowedAttention, Work
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.expert_load import BALANCED
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.subsequence import subsequences_of
from memo_sim.program.layout.swap_format import swapped_bytes
from memo_sim.program.pipeline.stage_program import stage_templates

MOST_PART_TOKENS = 16 * 1024
ROUNDING = 1e-6
"""Rounding tolerance for a fraction of tokens, in tokens."""
LEFT_OUT = 0.05
"""Fraction of the hidden tokens that rounding down may lose."""
OCTAVES = 3
"""Number of halvings from 16K to 2K tokens per subsequence."""
AN_OCTAVE = 4
"""Numbers of subsequences that are tried for each halving; T has one flat valley."""


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of one subsequence on one rank: one layer's forward and backward, and the head."""

    tokens: int
    forward_s: float
    backward_s: float
    forward_compute_s: float
    backward_compute_s: float
    """Seconds of the compute lane alone, within forward and backward."""
    idle_s: float
    """Lower bound of compute's waits for collectives between two kernels, in both passes, without row blocks."""
    head_compute_s: float
    """Seconds of the compute lane for the head and the loss, forward and backward."""
    exchanges_s: float = 0.0
    """Part of forward and backward: collectives between the ranks that divide experts, on a lane of their own."""

    @property
    def collective_s(self) -> float:
        """Seconds of the collectives in both passes, on the lane that has more."""
        beside_s = self.forward_s + self.backward_s - (self.forward_compute_s + self.backward_compute_s)
        return max(beside_s - self.exchanges_s, self.exchanges_s) if self.exchanges_s else beside_s


@dataclass(frozen=True, slots=True)
class _Works:
    """Work of one layer of a subsequence on each lane, in forward and backward, and of the head, in order."""

    compute: tuple[tuple[Work, ...], tuple[Work, ...]]
    collective: tuple[tuple[Work, ...], tuple[Work, ...]]
    waited_for: tuple[tuple[Work, ...], ...]
    head: tuple[Work, ...]
    exchanges: tuple[tuple[Work, ...], tuple[Work, ...]]
    """Exchanges of experts' rows."""

    @classmethod
    def of(cls, alone: Decisions, window: int) -> _Works:
        """Return the work of a plan with one subsequence, whose tokens have a ``window`` unless that is 0.

        The window may be longer than the subsequence, which then has none for itself.
        """
        (stage,) = stages_of(alone)
        _, templates = stage_templates(alone, shape_of(alone), stage, 1, made={}, with_end=False)
        named = {template.name: template for template in templates}
        forward, backward, head = named["layer.fwd"], named["layer.bwd"], named["head"]
        forward_works, backward_works = (_on_lane(each, Lane.COMPUTE) for each in (forward, backward))
        return cls(
            (_in_window(forward_works, window), _in_window(backward_works, window)),
            (_on_lane(forward, Lane.TP, Lane.ULYSSES), _on_lane(backward, Lane.TP, Lane.ULYSSES)),
            tuple(each for template in (forward, backward) for each in waited_for(template) if not _of_cp(each)),
            _on_lane(head, Lane.COMPUTE),
            (_on_lane(forward, Lane.EP), _on_lane(backward, Lane.EP)),
        )


@dataclass(frozen=True, slots=True)
class _Priced:
    """Seconds of the work of one layer of a subsequence without earlier keys, and of the head."""

    compute: tuple[tuple[tuple[float, Attention | None], ...], ...]
    """Of every kernel in forward and in backward, with its work where earlier keys add to it."""
    beside_s: tuple[float, ...]
    idle_s: float
    head_s: float
    exchanges_s: tuple[float, ...]

    @classmethod
    def of(cls, works: _Works, pricer: Pricer) -> _Priced:
        """Return the seconds of some works."""
        seconds = pricer.seconds
        return cls(
            tuple(tuple((seconds(work), _with_earlier(work)) for work in each) for each in works.compute),
            tuple(reduce(add, map(seconds, each), 0.0) for each in works.collective),
            sum(max(map(seconds, each)) for each in works.waited_for),
            reduce(add, map(seconds, works.head), 0.0),
            tuple(reduce(add, map(seconds, each), 0.0) for each in works.exchanges),
        )


class PartPrices:
    """Prices layers of subsequences: like a sequence of as many tokens, plus attention to the keys of the prefix.

    Experts are those of such a sequence: each subsequence is routed and exchanged by itself.

    Plans that differ only in what they keep, swap or recompute, or in the order of their stages, are priced once.
    """

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self.hardware = hardware
        self.cluster = cluster
        self._pricers = Pricers(hardware, cluster)
        self._alone: dict[tuple[Decisions, int], _Works] = {}
        self._known: dict[tuple[Decisions, int], list[PartTimes]] = {}

    def parts(self, decisions: Decisions, kind: int = 0) -> list[PartTimes]:
        """Return the times of every subsequence in a layer of the model's layer kind ``kind``.

        Raises:
            Infeasible: when the layout does not divide the model or the sequence, there are fewer granules than
                subsequences, or the profile has not measured the work.
        """
        alike = msgspec.structs.replace(
            decisions,
            layout=msgspec.structs.replace(decisions.layout, schedule="1f1b", virtual_stages=1, multiplexed=False),
            recompute="none",
            early_stop=False,
            swapped_tokens=0,
            subsequence_swapped_tokens=(),
            mlp_chunk_tokens=0,
            mlp_rebuild="block",
            offload_window=0,
            memory_policy="planned",
        )
        key, layer = (alike, kind), decisions.model.layer_shapes[kind]
        if key not in self._known:
            sizes = partition(decisions)
            pricer = self._pricers.of(decisions)
            priced = {tokens: _Priced.of(self._works(alike, layer, tokens), pricer) for tokens in dict.fromkeys(sizes)}
            starts = [0, *accumulate(sizes)]
            self._known[key] = [
                _part(alike, pricer, priced[tokens], start, tokens)
                for start, tokens in zip(starts, sizes, strict=False)
            ]
        return self._known[key]

    def forward_s(self, decisions: Decisions) -> float:
        """Return the seconds of all subsequences' forwards in the average layer.

        Raises:
            Infeasible: as ``parts``.
        """
        return self._mean(decisions, lambda part: part.forward_s)

    def layer_s(self, decisions: Decisions) -> float:
        """Return the seconds of all subsequences' forwards and backwards in the average layer.

        Raises:
            Infeasible: as ``parts``.
        """
        return self._mean(decisions, lambda part: part.forward_s + part.backward_s)

    def _mean(self, decisions: Decisions, seconds: Callable[[PartTimes], float]) -> float:
        """Return the sum over all subsequences in the average layer."""
        counts = Counter(decisions.model.layer_kinds)
        of_kinds = {kind: sum(map(seconds, self.parts(decisions, kind))) for kind in counts}
        if len(of_kinds) == 1:
            return of_kinds.popitem()[1]
        return sum(counts[kind] * each for kind, each in of_kinds.items()) / decisions.model.layers

    def _works(self, decisions: Decisions, layer: LayerShape, tokens: int) -> _Works:
        """Return the work of a subsequence of ``tokens`` that has no earlier keys, in layers of the shape ``layer``."""
        layout, sequences = decisions.layout, decisions.micro_batch
        window = layer.window if layer.window < decisions.seq_tokens else 0
        divided = layer.experts is not None and layout.ep > 1  # over replicas, which have other experts of the layer
        if not divided:
            decisions = msgspec.structs.replace(
                decisions, expert_capacity=0.0, expert_overflow="drop", expert_overlap=False
            )
        if layer.experts is None:
            decisions = msgspec.structs.replace(decisions, expert_load=BALANCED, fp8_experts=False)
        dp = layout.dp if divided else 1
        alone = msgspec.structs.replace(
            decisions,
            model=decisions.model.of_layers([layer] * 2),
            layout=Layout(
                tp=layout.tp,
                sequence_parallel=layout.sequence_parallel,
                cp=layout.cp,
                cp_exchange=layout.cp_exchange,
                ulysses=layout.ulysses,
                uneven_heads=layout.uneven_heads,
                dp=dp,
                ep=layout.ep if divided else 1,
                expert_tp=layout.expert_tp if divided else 0,
            ),
            seq_tokens=tokens * layout.cp * layout.ulysses // sequences,
            global_batch=sequences * dp,
        )
        if (alone, window) not in self._alone:
            self._alone[alone, window] = _Works.of(alone, window)
        return self._alone[alone, window]


def _part(decisions: Decisions, pricer: Pricer, priced: _Priced, start: int, tokens: int) -> PartTimes:
    layout = decisions.layout
    earlier = start * layout.ulysses // decisions.micro_batch
    # Queries meet the earlier keys of each rank in a call of their own, or those of all ranks in one.
    calls = 1 if layout.cp_exchange == "all_gather" else layout.cp
    compute_s = [_seconds(each, pricer, earlier * layout.cp // calls, calls) for each in priced.compute]
    forward_s, backward_s = (
        busy + (waits + exchanges)
        for busy, waits, exchanges in zip(compute_s, priced.beside_s, priced.exchanges_s, strict=True)
    )
    busy = compute_s[0], compute_s[1], priced.idle_s, priced.head_s
    return PartTimes(tokens, forward_s, backward_s, *busy, sum(priced.exchanges_s))


_PREPARED = 4
"""Number of (profile, cluster) pairs whose prices are cached; several modules ask for the same subsequences."""
_prepared: list[PartPrices] = []


def part_prices(hardware: Hardware, cluster: Cluster) -> PartPrices:
    """Return the prices for a profile and a cluster, cached per object."""
    for found in _prepared:
        if found.hardware is hardware and found.cluster is cluster:
            return found
    _prepared.append(PartPrices(hardware, cluster))
    del _prepared[:-_PREPARED]
    return _prepared[-1]


def _of_cp(works: tuple[Work, ...]) -> bool:
    """Return whether a kernel waits for keys of other cp ranks: calls over earlier keys hide these exchanges."""
    return any(isinstance(work, Collective) and work.group == "cp" for work in works)


def _on_lane(template: Template, *lanes: Lane) -> tuple[Work, ...]:
    return tuple(instruction.work for instruction in template.instructions if instruction.lane in lanes)


def _in_window(works: tuple[Work, ...], window: int) -> tuple[Work, ...]:
    """Return works in which causal attention has a window, unless that is 0."""
    if not window:
        return works
    return tuple(
        WindowedAttention(**{f.name: getattr(work, f.name) for f in fields(work)}, window=window)
        if type(work) is Attention and work.mask == "causal"
        else work
        for work in works
    )


def _with_earlier(work: Work) -> Attention | None:
    """Return the work of attention that has more to do where there are earlier keys."""
    if isinstance(work, Attention) and (isinstance(work, WindowedAttention) or work.mask == "causal"):
        return work
    return None


def _seconds(
    kernels: Sequence[tuple[float, Attention | None]], pricer: Pricer, earlier_tokens: int, calls: int
) -> float:
    """Return the seconds of kernels, with attention to earlier keys: ``calls`` calls of ``earlier_tokens`` each.

    The causal call of a subsequence's own tokens stands for its queries: beside cp there are more calls over its keys.
    """
    total = 0.0
    for seconds, work in kernels:
        total += seconds
        if not earlier_tokens or work is None:
            continue
        if isinstance(work, WindowedAttention):
            keys = work.q_tokens + min(earlier_tokens, work.window - 1)
            total += pricer.seconds(replace(work, k_tokens=keys)) - seconds
        else:
            total += calls * pricer.seconds(replace(work, k_tokens=earlier_tokens, mask="none"))
    return total


def waited_for(template: Template) -> list[tuple[Work, ...]]:
    """Return the collectives that each kernel waits for at least, one entry per kernel that waits.

    The previous kernel makes what they read, and the kernel reads what they make:

        compute      [A]      [B]
        collective      [C ]           B waits for all of C, and nothing hides that
    """
    found, behind = list[tuple[Work, ...]](), list[Instruction]()
    last: Instruction | None = None
    for one in template.instructions:
        if isinstance(one.work, Collective):
            if last is not None and _follows(one, last):
                behind.append(one)
        elif one.lane is Lane.COMPUTE:
            if works := tuple(each.work for each in behind if _follows(one, each)):
                found.append(works)
            last, behind = one, []
    return found


def _follows(second: Instruction, first: Instruction) -> bool:
    """Return whether ``second`` reads rows that ``first`` writes."""
    return any(
        read.mode & Mode.READ
        and written.mode & Mode.WRITE
        and read.slot == written.slot
        and max(read.first, written.first) < min(read.first + read.tokens, written.first + written.tokens)
        for read in second.operands
        for written in first.operands
    )


def counts(seq_tokens: int, an_octave: int = AN_OCTAVE) -> list[int]:
    """Return numbers of subsequences that give 16K down to 2K tokens each, ``an_octave`` per halving; at least 1."""
    lengths = [MOST_PART_TOKENS / 2 ** (i / an_octave) for i in range(OCTAVES * an_octave + 1)]
    return sorted({max(1, round(seq_tokens / length)) for length in lengths})


def held_bytes(sizes: Sequence[float], alphas: Sequence[float]) -> list[float]:
    """Return M_i: the activations on the device while subsequence i is computed, after earlier ones were offloaded.

    The maximum is at the last subsequence k that is not offloaded whole: the sum of (1 - alpha_j) A_j before it, plus
    A_k. (The paper prints M_max = (1 - alpha_{k-1}) A_{k-1}, which leaves out what earlier subsequences keep.)
    """
    left = [size * (1 - alpha) for size, alpha in zip(sizes, alphas, strict=True)]
    return [kept + size for kept, size in zip(accumulate([0.0, *left]), sizes, strict=False)]


def most_held_bytes(decisions: Decisions) -> float:
    """Return the most bytes of activations that a stage's forwards of one sequence hold, without K and V (SPPO 5.2)."""
    token_bytes = offloaded_bytes(decisions) * max(len(stage.layers) for stage in stages_of(decisions))
    parts, swapped = partition(decisions), swapped_parts(decisions)
    alphas = [some / part for some, part in zip(swapped, parts, strict=True)]
    return max(held_bytes([token_bytes * part for part in parts], alphas))


def hide(question: Question, decisions: Decisions, prices: PartPrices) -> tuple[Decisions, ...]:
    """Return plans in which each subsequence swaps what hides under the next one's forward (SPPO 5.2).

    The first plan rounds down to whole row blocks. If that loses much, a second plan rounds up. Its copies do not quite
    hide, but it may cut fewer subsequences in two. Only playing both shows which is faster. A second plan that swaps
    everything is left out, because a full swap is another candidate.

    Raises:
        Infeasible: as ``PartPrices.parts``.
    """
    granule, exact = decisions.swap_granule, hidden_tokens(question, decisions, prices)
    tried = [swap_each(decisions, tokens) for tokens in rounded(exact, granule)]
    return (tried[0], *(up for up in tried[1:] if up.alpha < 1))


def rounded(tokens: float, granule: int) -> tuple[int, ...]:
    """Return ``tokens`` rounded down to whole granules, and also rounded up when rounding down loses much.

    1729 tokens in granules of 1024 give 1024 and 2048; 40,033 tokens give only 39,936.
    """
    down = int(tokens / granule) * granule
    return (down, down + granule) if tokens - down > LEFT_OUT * tokens else (down,)


def hidden_tokens(question: Question, decisions: Decisions, prices: PartPrices) -> float:
    """Return the tokens of a subsequence whose offload takes as long as a subsequence's forward, not rounded.

    Raises:
        Infeasible: as ``PartPrices.parts``.
    """
    parts, token_bytes = decisions.layout.subsequences, offloaded_bytes(decisions)
    bandwidth = offload_bandwidth(question, decisions, int(token_bytes * decisions.local_tokens / parts))
    return bandwidth * prices.forward_s(decisions) / parts / token_bytes


def offloaded_bytes(decisions: Decisions) -> float:
    """Return the bytes per layer and token that one rank may offload: those of all skeletal tensors.

    Where layers differ, these are those of the average layer.

    The KV cache of the prefix is not offloaded, because every later subsequence reads it (SPPO 5.1).
    """
    first = subsequences_of(decisions, shape_of(decisions))[0].shape
    model = decisions.model
    of_kinds = [
        sum(swapped_bytes(decisions, tensor) for tensor in skeletal_of(decisions, first, layer))
        for layer in model.layer_shapes
    ]
    whole = of_kinds[0] if len(of_kinds) == 1 else sum(of_kinds[kind] for kind in model.layer_kinds) / model.layers
    return whole / first.tokens


def swap_each(decisions: Decisions, tokens: int) -> Decisions:
    """Return ``decisions`` with ``tokens`` tokens of every subsequence swapped, or all of a shorter one.

    The offload window stays only if something is swapped; token-wise layer inputs always are.
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
    """Return ``decisions`` with at most the fraction ``alpha`` of tokens swapped, equally many of every subsequence.

    The number is rounded down to whole row blocks.
    """
    parts, granule = partition(decisions), decisions.swap_granule
    wanted = sum(parts) if alpha >= 1 else int(alpha * sum(parts) + ROUNDING)
    blocks = bisect_right(range(-(-parts[0] // granule) + 1), wanted, key=lambda n: _swapped(parts, n * granule)) - 1
    return swap_each(decisions, blocks * granule)


def _swapped(parts: Sequence[int], tokens: int) -> int:
    return sum(min(tokens, part) for part in parts)
