"""What is said where no layout of a question can be lowered.

Some layouts do not divide a number: the sequence, the global batch, heads, layers. Others divide and are refused for
something else: a knob, or what a kernel can count. Where the sequence is not to blame the second kind is the answer:
it is what stands between the question and a plan.
"""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import SWAP_GRANULE_TOKENS
from memo_sim.planning.layouts import layouts
from memo_sim.planning.question import Question

OF_THE_SEQUENCE = ("seq_tokens", "tokens of a rank")
"""Where a refusal names the sequence's length."""

DIVIDED = ("global_batch", "heads", "kv_heads", "ffn_hidden", "layout.pp", *OF_THE_SEQUENCE)
"""Where a refusal names a number that a degree does not divide."""

SHOWN_REASONS = 4


class NothingDivides(Infeasible):
    """A question whose numbers no layout divides."""


def tokens_that_divide(question: Question) -> int:
    """Return tokens whose multiples every layout divides: a row block for each of as many ranks as there are, twice."""
    return 2 * question.cluster.devices * SWAP_GRANULE_TOKENS


def refusal(question: Question, refused: list[tuple[Infeasible, str]]) -> Infeasible:
    """Return what to say of a question whose layouts are all ``refused``: each error, and that with its layout."""
    asked, model = question.seq_tokens, question.model
    if model.learned_positions and asked > model.max_positions:
        return Infeasible(
            "the sequence is longer than the model's position table",
            where=model.name,
            got=f"{asked} tokens",
            wanted=f"at most {model.max_positions}",
            hint=f"--seq-len {model.max_positions}, or a model without learned positions",
        )
    errors = [error for error, _ in refused]
    blamed = {error.where for error in errors}
    whole = tokens_that_divide(question)
    near = max(whole, round(asked / whole) * whole)
    by_length = bool(blamed.intersection(OF_THE_SEQUENCE)) and near != asked
    others = [one for one in refused if one[0].where not in DIVIDED]
    if others and not by_length:
        return _other_than_division(others)
    if len({error.what for error in errors}) == 1 and not blamed.intersection(("global_batch", *OF_THE_SEQUENCE)):
        return _as(NothingDivides, errors[0])
    hint = "the first reason says which number has to change"
    what = "no layout divides this model and sequence"
    if blamed == {"global_batch"}:
        least = question.micro_batch * min(layout.dp for layout in layouts(question))
        hint = f"--global-batch {least}, or another multiple of micro-batch x dp"
        small = question.global_batch < least
        what = f"the batch is {'too small for' if small else 'not a multiple of micro-batch x'} dp"
    if by_length:
        hint = f"--seq-len {near}, or another multiple of {whole} tokens, divides any way"
    return NothingDivides(
        what,
        where=f"{question.cluster.name}, {asked} tokens, global batch {question.global_batch}",
        got=_listed([text for _, text in refused]),
        wanted="degrees that divide heads (tp, ulysses, metp), tokens (cp, metp: 2 a rank), the global batch (dp)",
        hint=hint,
    )


def _other_than_division(refused: list[tuple[Infeasible, str]]) -> Infeasible:
    """Return the first of the refusals; where they differ, all of them."""
    first = refused[0][0]
    if len({error.what for error, _ in refused}) == 1:
        return first
    reasons = _listed([text for _, text in refused])
    return Infeasible(
        "no layout that divides can be played", where=first.where, got=reasons, wanted=first.wanted, hint=first.hint
    )


def _as(kind: type[Infeasible], error: Infeasible) -> Infeasible:
    return kind(error.what, where=error.where, got=error.got, wanted=error.wanted, hint=error.hint)


def _listed(texts: list[str]) -> str:
    """Return the first few different ones; layouts that differ in ZeRO have the same words."""
    reasons = list(dict.fromkeys(texts))
    more = len(reasons) - SHOWN_REASONS
    return "; ".join(reasons[:SHOWN_REASONS]) + (f"; and {more} more" if more > 0 else "")
