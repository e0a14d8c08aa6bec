"""SPPO's heuristic solver (6.1): the fastest sequence parallelism, pipeline and number of subsequences.

It does not look at memory. F(N) is the time of a stage's forward and backward over all N subsequences. The step time of
p stages is

    T = (p - 1 + N) / N * F(N),    of which (p - 1) F(N) / N is the bubble

More subsequences make the bubble smaller and the kernels less efficient; F(N) has that from the profile. The paper
restricts two things. Sequence parallelism stays inside a node. N is chosen so that a subsequence has 2K to 16K tokens
on average. (The text says "N within the range of 2K to 16K"; N of 32 to 160 in Table 4 agree with that.)

The paper also says to avoid stages across nodes, but its own Table 4 does not: with SP inside a node, there is no other
way to use several nodes for one sequence. So stages use all other devices, wherever they are, and the engine prices
their p2p transfers on the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.planning.attention_kernels import attention_kernel, head_groups
from memo_sim.planning.question import Question
from memo_sim.planning.subsequences import PartPrices, counts, part_prices
from memo_sim.program.layout.shape import shape_of

_ANSWERED = 4
"""Number of questions whose choices are cached; the search for layouts and the explanation both ask for them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One combination (SP, PP, N), with the seconds that the formula gives."""

    sp: int
    pp: int
    subsequences: int
    work_s: float
    """F(N): seconds of a stage's forward and backward of one sequence."""

    @property
    def bubble_s(self) -> float:
        """Seconds of the bubble: (p - 1) F(N) / N."""
        return (self.pp - 1) * self.work_s / self.subsequences

    @property
    def step_s(self) -> float:
        """T, in seconds."""
        return self.work_s + self.bubble_s


def solve(
    question: Question, *, sps: Iterable[int] | None = None, numbers: Iterable[int] | None = None
) -> list[Choice]:
    """Return every choice that divides the model and the sequence, the fastest by the formula first.

    All devices work on one sequence, so SP x PP is their number. ``sps`` replaces the default degrees, which divide a
    node's devices. ``numbers`` replaces the default numbers of subsequences (``counts``).

    Raises:
        Infeasible: when there is no choice.
    """
    cluster, model = question.cluster, question.model
    tried = list(counts(question.seq_tokens) if numbers is None else numbers)
    prices = part_prices(question.hardware, cluster)
    found: list[Choice] = []
    inside = range(1, cluster.devices_per_node + 1) if sps is None else sps
    for sp in inside:
        pp, rest = divmod(cluster.devices, sp)
        if rest or model.layers % pp:
            continue
        for number in tried:
            try:
                found.append(_choice(question, prices, sp, pp, number))
            except Infeasible:
                continue
    if not found:
        raise Infeasible(
            "no sequence parallelism inside a node with pipeline stages divides this model and sequence",
            where=cluster.name,
            got=f"{model.heads} heads, {model.layers} layers, {question.seq_tokens} tokens",
            wanted=f"SP x PP = {cluster.devices} devices",
            hint="use a cluster of another size",
        )
    return sorted(found, key=lambda choice: choice.step_s)


_answered: list[tuple[Question, list[Choice]]] = []


def allowed(question: Question) -> list[Choice]:
    """Return the choices that a question's pins allow, the fastest by the formula first; solved once per question.

    Empty when the solver does not apply: for several sequences, or when the pins leave no choice.
    """
    for asked, found in _answered:
        if asked is question:
            return found
    found = _allowed(question)
    _answered.append((question, found))
    del _answered[:-_ANSWERED]
    return found


def _allowed(question: Question) -> list[Choice]:
    pins = question.pins
    if question.global_batch > 1 or (pins.dp or 1) > 1:
        return []
    numbers = [pins.subsequences] if isinstance(pins.subsequences, int) else None
    try:
        solved = solve(question, sps=None if pins.tp is None else [pins.tp], numbers=numbers)
    except Infeasible:
        return []
    return [choice for choice in solved if pins.pp in (None, choice.pp)]


def _choice(question: Question, prices: PartPrices, sp: int, pp: int, number: int) -> Choice:
    cut = question.partition(number)
    layout = Layout(tp=sp, sequence_parallel=sp > 1, pp=pp, subsequences=number, partition=cut)
    base = Decisions(model=question.model, layout=layout, seq_tokens=question.seq_tokens, dtype=question.dtype)
    kernel = attention_kernel(question)
    whole = msgspec.structs.replace(base, layout=msgspec.structs.replace(layout, subsequences=1))
    groups = head_groups(shape_of(whole), whole, kernel)
    layer_s = prices.layer_s(msgspec.structs.replace(base, kernels=Kernels(attention=kernel, head_groups=groups)))
    return Choice(sp, pp, number, layer_s * (question.model.layers // pp))
