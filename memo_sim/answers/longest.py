"""Finds the longest sequence that fits: doubles the length until it does not fit, then bisects.

Bisection assumes that a sequence fits wherever a longer one fits. This is not always true: a layout may divide a longer
sequence and not a shorter one, and memory is rounded. So the next few multiples above the result are evaluated too. If
one of them fits, the search continues from there and says so.

    64k to 512k fit, 1m does not | 768k fits, 896k does not, 832k fits | 896k, 960k and 1m: none fits | 832k
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from memo_sim.answers.what_if import Answer, what_if
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.longest import NO_PLAN, Bound, Longest, Tried, bound_in_words
from memo_sim.contract.peaks import warnings_about
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import MOST_TOKENS, counted, format_seconds, format_tokens
from memo_sim.planning.question import Question
from memo_sim.planning.refusals import NothingDivides, tokens_that_divide
from memo_sim.planning.search import SearchResult, search
from memo_sim.planning.space import candidates

CHECKED = 3
"""How many multiples above the longest are evaluated to show that they do not fit."""


@dataclass(frozen=True)
class LongestAnswer:
    """The document, and the what-if answer at the longest length (None when no length fits)."""

    document: Longest
    question: Question
    answer: Answer | None


def longest(
    question: Question,
    *,
    step_tokens: int,
    most_step_s: float | None = None,
    price_per_device_hour: float | None = None,
    progress: Progress | None = None,
) -> LongestAnswer:
    """Return the longest multiple of ``step_tokens`` that fits and takes at most ``most_step_s``.

    Where no layout divides ``step_tokens``, the step is their smallest multiple that some layout divides. The length
    of ``question`` is ignored. ``progress`` receives (lengths evaluated, most lengths to evaluate).

    Raises:
        UsageError: when pinned knobs contradict each other or the cluster, or the step is too long.
    """
    if not 0 < step_tokens <= MOST_TOKENS:
        raise UsageError("the step is out of range", got=step_tokens, wanted=f"1 to {MOST_TOKENS} tokens")
    asked_tokens, step_tokens = step_tokens, _divided(question, step_tokens)
    scan = _Scan(question, step_tokens, most_step_s, price_per_device_hour, progress=progress)
    low, high = 0, scan.double(0)
    holes: list[int] = []
    while True:
        low = scan.between(low, high)
        answer = scan.answer(low)
        if low and answer is None:  # its live bytes fit, but no arena does
            high = low
            low = max((n for n, tried in scan.tried.items() if tried.fits and n < high), default=0)
            continue
        above = scan.first_fit_above(low)
        if above is None:
            break
        holes += [n for n in range(low + 1, above) if n in scan.tried]
        low, high = above, scan.double(above)
    refused = scan.at(low + 1) if low < scan.most else None
    bound: Bound = refused.bound or NO_PLAN if refused else "limit of tokens"
    document = Longest(
        model=question.model.name,
        cluster=question.cluster.name,
        system=question.system,
        step_tokens=step_tokens,
        most_step_s=most_step_s,
        seq_tokens=low * step_tokens,
        best=answer.result.best if answer else None,
        bound=bound,
        tried=[scan.tried[n] for n in sorted(scan.tried)],
        warnings=answer.result.warnings if answer else warnings_about(question.hardware, {}),
        why=[
            *_reasons(scan, low, refused, holes),
            *_coarser(asked_tokens, step_tokens),
            *(answer.result.why if answer else []),
        ],
        summary=answer.result.summary if answer else None,
    )
    return LongestAnswer(document, scan.asked(max(low, 1)), answer)


class _Scan:
    """The lengths evaluated so far, in multiples of the step."""

    def __init__(
        self,
        question: Question,
        step_tokens: int,
        most_step_s: float | None,
        price_per_device_hour: float | None,
        *,
        progress: Progress | None,
    ) -> None:
        self.question = question
        self.step_tokens = step_tokens
        self.most_step_s = most_step_s
        self.price_per_device_hour = price_per_device_hour
        self.most = MOST_TOKENS // step_tokens
        self.tried: dict[int, Tried] = {}
        self._progress = progress

    def asked(self, multiple: int) -> Question:
        """Return the question at a multiple of the step."""
        return replace(self.question, seq_tokens=multiple * self.step_tokens)

    def at(self, multiple: int) -> Tried:
        """Return whether a multiple fits."""
        if multiple not in self.tried:
            self.tried[multiple] = self._try(multiple * self.step_tokens)
            if self._progress:
                self._progress(len(self.tried), max(len(self.tried), 2 * self.most.bit_length()))
        return self.tried[multiple]

    def double(self, low: int) -> int:
        """Return the first multiple, doubling from ``low``, that does not fit; one past the most when all do."""
        multiple = max(1, 2 * low)
        while multiple <= self.most and self.at(multiple).fits:
            multiple *= 2
        return min(multiple, self.most + 1)

    def between(self, low: int, high: int) -> int:
        """Return the longest multiple below ``high`` that fits, by bisection; ``high`` does not fit."""
        low = max([low, *(n for n, tried in self.tried.items() if tried.fits and n < high)])
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.at(middle).fits else (low, middle)
        return low

    def first_fit_above(self, low: int) -> int | None:
        """Return a multiple just above ``low`` that fits, or None."""
        upto = min(low + CHECKED, self.most)
        return next((n for n in range(low + 1, upto + 1) if self.at(n).fits), None)

    def answer(self, multiple: int) -> Answer | None:
        """Return the answer at a multiple; None, noted in ``tried``, where no plan has an arena that fits."""
        if not multiple:
            return None
        answer = what_if(self.asked(multiple), price_per_device_hour=self.price_per_device_hour)
        if answer.result.best is not None:
            return answer
        worst = answer.result.plans[0]
        self.tried[multiple] = Tried(
            seq_tokens=multiple * self.step_tokens, fits=False, bound="device memory", reason=worst.reason
        )
        return None

    def _try(self, seq_tokens: int) -> Tried:
        model = self.question.model
        if model.learned_positions and seq_tokens > model.max_positions:
            reason = f"the position table ends at {model.max_positions}"
            return Tried(seq_tokens=seq_tokens, fits=False, bound="positions", reason=reason)
        enough_s = float("inf") if self.most_step_s is None else self.most_step_s
        try:
            found = search(replace(self.question, seq_tokens=seq_tokens), enough_s=enough_s)
        except Infeasible as error:
            why: Bound = "divisibility" if isinstance(error, NothingDivides) else NO_PLAN
            wanted = f"; wanted: {error.wanted}" if error.wanted else ""
            hint = f"; next: {error.hint}" if error.hint else ""
            reason = f"{error.what}: {error.got}{wanted}{hint}"
            return Tried(seq_tokens=seq_tokens, fits=False, bound=why, reason=reason)
        return self._judged(found, seq_tokens, enough_s)

    @staticmethod
    def _judged(found: SearchResult, seq_tokens: int, enough_s: float) -> Tried:
        nearest = found.ranked[0].prediction
        if nearest.step_s is None:
            bounds: dict[str, Bound] = {"gpu_oom": "device memory", "host_oom": "host memory"}
            bound = bounds.get(nearest.status, NO_PLAN)
            return Tried(seq_tokens=seq_tokens, fits=False, bound=bound, reason=nearest.reason)
        if nearest.step_s > enough_s:
            reason = f"the fastest step takes {format_seconds(nearest.step_s)}"
            return Tried(seq_tokens=seq_tokens, fits=False, step_s=nearest.step_s, bound="time limit", reason=reason)
        return Tried(seq_tokens=seq_tokens, fits=True, step_s=nearest.step_s)


def _divided(question: Question, step_tokens: int) -> int:
    """Return the smallest multiple of the step that some layout divides; the step itself where there is none."""
    beyond = tokens_that_divide(question)
    beyond //= gcd(beyond, step_tokens)
    for multiple in (n for n in range(1, beyond + 1) if beyond % n == 0 and n * step_tokens <= MOST_TOKENS):
        try:
            candidates(replace(question, seq_tokens=multiple * step_tokens))
        except Infeasible:
            continue
        return multiple * step_tokens
    return step_tokens


def _coarser(asked_tokens: int, step_tokens: int) -> list[str]:
    if step_tokens == asked_tokens:
        return []
    asked, step = format_tokens(asked_tokens), format_tokens(step_tokens)
    return [f"No layout divides {asked} tokens, the requested step; the step is {step} instead."]


def _reasons(scan: _Scan, low: int, refused: Tried | None, holes: list[int]) -> list[str]:
    """Return what limits the length, and what was assumed and checked."""
    step = format_tokens(scan.step_tokens)
    if refused is None:
        lines = [f"Nothing limits the length up to {format_tokens(scan.most * scan.step_tokens)} tokens."]
    else:
        limit = bound_in_words(refused.bound or NO_PLAN)
        lines = [f"{format_tokens(refused.seq_tokens)} tokens do not fit ({limit}): {refused.reason}."]
    checked = [format_tokens(n * scan.step_tokens) for n in range(low + 1, min(low + CHECKED, scan.most) + 1)]
    lines.append(
        f"The search evaluated {counted(len(scan.tried), 'multiple')} of {step}; it assumes that a length fits if a "
        "longer one fits."
    )
    if checked:
        lines[-1] += f" Above the longest it evaluated {', '.join(checked)}: none fits."
    if holes:
        listed = ", ".join(format_tokens(n * scan.step_tokens) for n in sorted(set(holes)))
        lines.append(f"The assumption does not hold everywhere: {listed} does not fit although a longer sequence does.")
    return lines
