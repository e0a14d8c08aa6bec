"""SPPO's heuristic solver (6.1): sequence parallelism, pipeline stages and subsequences of least time, memory unasked.

With F(N) the forward and backward of a stage over all N subsequences, p stages take

    T = (p - 1 + N) / N * F(N),    (p - 1) F(N) / N of it the bubble

More subsequences make the bubble smaller and kernels less efficient, which F(N) has from the profile. What the paper
restricts: no sequence parallelism across nodes, and N such that a subsequence has 2K to 16K tokens on average (the text
says "N within the range of 2K to 16K"; Table 4's N of 32 to 160 are that). It also says to avoid stages across nodes,
which its own Table 4 does not: SP inside a node leaves no other way to use several nodes for one sequence. So stages
are as many as the other devices, wherever they are, and the network prices their hand-overs in the engine.
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
"""Questions whose choices are kept: layouts ask for them, and what explains the best plan."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One (SP, PP, N), and the seconds that the formula gives it."""

    sp: int
    pp: int
    subsequences: int
    work_s: float
    """F(N): a stage's forward and backward of one sequence."""

    @property
    def bubble_s(self) -> float:
        """(p - 1) F(N) / N."""
        return (self.pp - 1) * self.work_s / self.subsequences

    @property
    def step_s(self) -> float:
        """T."""
        return self.work_s + self.bubble_s


def solve(
    question: Question, *, sps: Iterable[int] | None = None, numbers: Iterable[int] | None = None
) -> list[Choice]:
    """Return every choice that divides the model and the sequence, the fastest by the formula first.

    All devices hold one sequence: SP x PP of them. ``sps``: in place of what divides a node's devices. ``numbers``: of
    subsequences, in place of ``counts``.

    Raises:
        Infeasible: when there is none.
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
            "no sequence parallelism inside a node and pipeline stages divide this model and sequence",
            where=cluster.name,
            got=f"{model.heads} heads, {model.layers} layers, {question.seq_tokens} tokens",
            wanted=f"SP x PP = {cluster.devices} devices",
            hint="a cluster of another size",
        )
    return sorted(found, key=lambda choice: choice.step_s)


_answered: list[tuple[Question, list[Choice]]] = []


def allowed(question: Question) -> list[Choice]:
    """Return the choices that a question's pins allow, the fastest by the formula first; solved once per question.

    None where the solver cannot answer: for several sequences, or where what is pinned divides nothing that it knows.
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
    cut = question.pins.partition
    layout = Layout(tp=sp, sequence_parallel=sp > 1, pp=pp, subsequences=number, partition=cut)
    base = Decisions(model=question.model, layout=layout, seq_tokens=question.seq_tokens, dtype=question.dtype)
    kernel = attention_kernel(question)
    whole = msgspec.structs.replace(base, layout=msgspec.structs.replace(layout, subsequences=1))
    groups = head_groups(shape_of(whole), whole, kernel)
    parts = prices.parts(msgspec.structs.replace(base, kernels=Kernels(attention=kernel, head_groups=groups)))
    layer_s = sum(part.forward_s + part.backward_s for part in parts)
    return Choice(sp, pp, number, layer_s * (question.model.layers // pp))
