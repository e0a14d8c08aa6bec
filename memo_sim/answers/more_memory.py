"""Answers what one more GiB of device memory or host memory would gain: asks the same question with more memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from memo_sim.answers.longest import LongestAnswer, longest
from memo_sim.answers.what_if import Answer, row
from memo_sim.contract.result import MoreMemory
from memo_sim.contract.units import GIB, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.planning.outcome import Evaluated
from memo_sim.planning.question import Question, with_memory
from memo_sim.planning.search import best_with_more_memory
from memo_sim.reasons.runner_up import label

Space = Literal["device", "host"]
SPACES: tuple[Space, ...] = ("device", "host")
WHERE = {"device": "on each device", "host": "of each node's host memory"}


def with_one_more_gib(question: Question, space: Space) -> Question:
    """Return the question with one GiB more on each device, or on each node's host."""
    host = question.cluster.host_memory_bytes or question.hardware.host_memory_bytes
    sizes = {"device": question.hardware.device_memory_bytes, "host": host}
    added: dict[str, int | None] = {f"{s}_bytes": int(sizes[s].value) + GIB if s == space else None for s in SPACES}
    cluster, hardware = with_memory(question.cluster, question.hardware, **added)
    return replace(question, cluster=cluster, hardware=hardware)


def with_what_more_buys(question: Question, answer: Answer) -> Answer:
    """Return the answer, extended by what one more GiB of each kind of memory gains.

    Plans are compared by their live bytes, as in the search.
    """
    found, documents = answer.found, []
    if found is None:
        return answer
    for space in SPACES:
        best = best_with_more_memory(with_one_more_gib(question, space), found)
        saved_s = _saved_s(found.best, best)
        documents.append(
            MoreMemory(
                space=space,
                added_bytes=GIB,
                best=row(best.decisions, best.prediction, system=best.policy.label) if best else None,
                saved_s=saved_s,
                text=f"One more GiB {WHERE[space]} {_worth(found.best, best, saved_s)}.",
            )
        )
    result = msgspec.structs.replace(answer.result, more_memory=documents)
    return replace(answer, result=result)


def with_what_more_holds(
    question: Question, found: LongestAnswer, *, step_tokens: int, most_step_s: float | None
) -> LongestAnswer:
    """Return the longest sequence, extended by how much longer it gets with one more GiB of each kind of memory."""
    documents = []
    before = found.document.seq_tokens
    for space in SPACES:
        asked = with_one_more_gib(question, space)
        longer = longest(asked, step_tokens=step_tokens, most_step_s=most_step_s).document
        gain = longer.seq_tokens - before
        worth = f"lets {format_tokens(gain)} more tokens fit" if gain > 0 else "lets no longer sequence fit"
        documents.append(
            MoreMemory(
                space=space,
                added_bytes=GIB,
                best=longer.best,
                seq_tokens=longer.seq_tokens,
                text=f"One more GiB {WHERE[space]} {worth}, in steps of {format_tokens(step_tokens)}.",
            )
        )
    return replace(found, document=msgspec.structs.replace(found.document, more_memory=documents))


def _saved_s(before: Evaluated | None, after: Evaluated | None) -> float | None:
    if before is None or after is None or before.prediction.step_s is None or after.prediction.step_s is None:
        return None
    return before.prediction.step_s - after.prediction.step_s


def _worth(before: Evaluated | None, after: Evaluated | None, saved_s: float | None) -> str:
    if after is None:
        return "is not enough for any plan to fit"
    if saved_s is None or before is None:
        return f"lets {label(after)} fit"
    step_s = (before.prediction.step_s or 0.0) or 1.0
    if saved_s <= 0:
        return "gains nothing: the best plan stays the same"
    gain = f"makes the step {format_seconds(saved_s)} ({format_percent(saved_s / step_s, 2)}) shorter"
    return f"{gain}: {label(after)} with {format_bytes(after.prediction.peak_device_bytes)} on a device"
