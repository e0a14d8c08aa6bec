"""Asks one what-if question about several clusters, and ranks the clusters by price or by tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from memo_sim.answers.what_if import Answer, without_answer
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.results import Results
from memo_sim.planning.question import Question


@dataclass(frozen=True)
class SeveralAnswers:
    """The document, and question and answer of its first cluster (None when no plan fits on any)."""

    document: Results
    question: Question | None
    answer: Answer | None


def several_clusters(
    questions: Sequence[Question],
    ask: Callable[[Question, float | None], Answer],
    prices: Sequence[float | None],
) -> SeveralAnswers:
    """Return the answers of ``ask`` to each question, ranked.

    ``prices``: of a device of each cluster for an hour, in one currency. When every cluster has one, the lowest price
    of a billion tokens comes first; otherwise the most tokens per second of the whole cluster.

    Raises:
        UsageError: as ``ask``, when pinned knobs contradict each other or a cluster.
    """
    priced = all(price is not None for price in prices)
    found = []
    for question, price in zip(questions, prices, strict=True):
        try:
            answer = ask(question, price)
        except Infeasible as error:
            answer = Answer(without_answer(question, error), None, None)
        found.append((question, answer))
    found.sort(key=lambda pair: _key(pair[1], priced=priced))
    document = Results(
        model=questions[0].model.name,
        seq_tokens=questions[0].seq_tokens,
        ranked_by="price" if priced else "tokens per second",
        results=[answer.result for _, answer in found],
    )
    question, answer = found[0]
    fits = answer.result.best is not None
    return SeveralAnswers(document, question if fits else None, answer if fits else None)


def _key(answer: Answer, *, priced: bool) -> tuple[bool, float]:
    """Return what clusters are ranked by, the lowest first."""
    summary = answer.result.summary
    if summary is None or summary.step_s is None:
        return True, float(summary.shortfall_bytes) if summary else inf
    if priced:
        return False, summary.price_per_billion_tokens or 0.0
    return False, -summary.tokens_per_step / summary.step_s
