"""Searches larger micro-batches, after the search of the question's own.

Products of short sequences run faster with more rows. Tried are 2, 4 and 8 times the sequences on the layouts of the
fastest plans, each with what the fastest plan there does with activations. Of these, plans are played whose lower
bounds do not lose to the best plan.

    llama3-8b, 2k tokens, 512 sequences, eight H100     micro-batch 1: 11.4 s, 2: 10.3 s, 4: 11.1 s
    8k tokens in 4 subsequences, 16 sequences, tp 4 pp 2               1: 2.79 s, 2: 2.35 s, 8: 2.28 s
"""

from __future__ import annotations

from dataclasses import replace

from memo_sim.contract.plan import Layout
from memo_sim.contract.units import KIB
from memo_sim.planning.outcome import SearchResult
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import search_beside

SIZES = (2, 4, 8)
"""Micro-batches that are tried, in those of the question."""
LAYOUTS = 3
"""Layouts that they are tried on: those of the fastest plans."""
MOST_SEQUENCE_TOKENS, MOST_TOKENS = 16 * KIB, 32 * KIB
"""Longest sequence that they are tried for, and most tokens of a rank's part, or of one of its subsequences: products
reach their full rate there."""


def are_searched(question: Question) -> bool:
    """Return whether larger micro-batches are searched for a question."""
    short = question.seq_tokens <= MOST_SEQUENCE_TOKENS and question.global_batch > question.micro_batch
    return question.open_micro_batch and question.preset.searches_micro_batches and short


def with_larger_micro_batches(question: Question, found: SearchResult, *, siblings: float) -> SearchResult:
    """Return the result of a search with plans of larger micro-batches beside it, where they may be the best.

    ``siblings``: which policies are evaluated on the best plan's layout and micro-batch (``search``).
    """
    best = found.best
    if best is None or not are_searched(question):
        return found
    quickest = dict[Layout, Policy]()
    for one in found.ranked:
        if one.prediction.status == "ok" and len(quickest) < LAYOUTS:
            quickest.setdefault(one.decisions.layout, one.policy)
    results = dict[int, SearchResult]()
    for times in SIZES:
        size = times * question.micro_batch
        chosen = {layout: policy for layout, policy in quickest.items() if _can_play(question, layout, size)}
        if chosen:
            results[size] = search_beside(replace(question, micro_batch=size), best, chosen, found)
            played = results[size].best  # which may be slower than its bound said
            best = best if played is None else min(best, played, key=lambda e: e.rank_key)
    if best is not found.best:
        size, layout = best.decisions.micro_batch, best.decisions.layout
        asked = replace(question, micro_batch=size)
        results[-size] = search_beside(asked, best, {layout: best.policy}, results[size], siblings=siblings)
    ranked = {e.decisions: e for result in (found, *results.values()) for e in result.ranked}
    pruned = found.pruned + sum(result.pruned for size, result in results.items() if size > 0)
    in_order = sorted(ranked.values(), key=lambda e: e.rank_key)
    fastest = next((e.fastest for e in results.values() if e.fastest and e.fastest.decisions == best.decisions), None)
    return replace(found, ranked=in_order, evaluated=len(ranked), pruned=pruned, fastest=fastest or found.fastest)


def _can_play(question: Question, layout: Layout, size: int) -> bool:
    decisions = replace(question, micro_batch=size).decisions(layout)
    whole = question.global_batch % (size * layout.dp) == 0
    return whole and decisions.local_tokens <= MOST_TOKENS * layout.subsequences
