"""Shows answers as text: the verdict and what it assumes first, then only the details that are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.longest import Longest, bound_in_words
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.plan import PlanRow
from memo_sim.contract.result import Result
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.contract.units import counted, format_percent, format_tokens
from memo_sim.views.longest_table import tried_table
from memo_sim.views.plan_table import plans_table, ranked_table
from memo_sim.views.stage_numbers import from_one
from memo_sim.views.summary_text import summary_lines
from memo_sim.views.text_table import warning_lines

MOST_LISTED = 12
"""Plans of a Pareto front that are listed at most."""
TOLERANCE, MEMORY_TO_TIME = 0.01, 5
"""A plan of a front is not listed beside one that is as good within this fraction of time, and times five of memory."""
FRONT = "Pareto front of step time, device memory and host memory"


def answer_text(result: Result, *, why: bool = False, top: int | None = None, searched: bool = True) -> str:
    """Return the answer to a what-if question, without a final newline.

    ``why`` adds the reasons, ``top`` a table of so many ranked plans; a whole Pareto front is shown where there is one.
    ``searched``: plans were compared, so that there is more to ask for.
    """
    head = one_line(
        f"{result.model} on {result.cluster}, {format_tokens(result.seq_tokens)} tokens{_of(result.system)}"
    )
    if result.summary is None:  # no plan can be evaluated: the reasons are the answer
        return _blocks([*warning_lines(result.warnings), f"{head}: no plan", plans_table(result, top=top), *result.why])
    blocks = [*warning_lines(result.warnings), "\n".join([head, *summary_lines(result.summary)])]
    blocks += ["\n".join(one_line(more.text) for more in result.more_memory)] if result.more_memory else []
    if top is not None:
        blocks.append(plans_table(result, top=top))
    if result.front_is_whole:
        blocks.append(_front(result.front))
    if why:
        blocks.append("\n".join(map(one_line, result.why)))
    details = {
        "--why (reasons)": not why,
        "--top 3 (ranked plans)": searched and top is None,
        "--pareto (time against memory)": searched and not result.front_is_whole,
        "--one-more-gib (what more memory buys)": searched and not result.more_memory,
    }
    return _blocks([*blocks, *_more(details)])


def longest_text(document: Longest, *, why: bool = False) -> str:
    """Return the answer to how long sequences can be, without a final newline; ``why`` adds lengths and reasons."""
    head = one_line(f"{document.model} on {document.cluster}{_of(document.system)}")
    if document.seq_tokens:
        head += f": {format_tokens(document.seq_tokens)} tokens at most (limited by {bound_in_words(document.bound)})"
    else:
        head += f": not even {format_tokens(document.step_tokens)} tokens fit ({bound_in_words(document.bound)})"
    first, *others = document.why or [""]
    verdict = [head, *(summary_lines(document.summary) if document.summary else []), one_line(first)]
    blocks = [*warning_lines(document.warnings), "\n".join(verdict)]
    blocks += ["\n".join(one_line(more.text) for more in document.more_memory)] if document.more_memory else []
    if why or document.summary is None:
        blocks += [tried_table(document), "\n".join(map(one_line, others))]
    return _blocks(
        [
            *blocks,
            *_more(
                {
                    "--why (lengths tried, reasons)": not why and document.summary is not None,
                    "--one-more-gib (what more memory buys)": not document.more_memory,
                }
            ),
        ]
    )


def _of(system: str) -> str:
    """Return the system that was asked for, where it is not the default search."""
    return f", system {system}" if system not in ("", DEFAULT_SYSTEM) else ""


def thinned(front: Sequence[PlanRow]) -> tuple[list[PlanRow], float]:
    """Return the plans of a front that a reader has to choose from, and the tolerance in time.

    A plan is left out where a listed one is slower by at most the tolerance, and needs at most ``MEMORY_TO_TIME`` times
    the tolerance of the front's largest device memory more, and as little more host memory. The tolerance grows until
    few plans are left. The plans with the least device memory and the least host memory are always listed.
    """
    slower = TOLERANCE
    while len(listed := _listed(front, slower)) > MOST_LISTED:
        slower += TOLERANCE / 2
    return listed, slower


def _listed(front: Sequence[PlanRow], slower: float) -> list[PlanRow]:
    room = [MEMORY_TO_TIME * slower * max((_memory(plan)[i] for plan in front), default=0) for i in range(2)]
    ends = [min(front, key=lambda plan: (_memory(plan)[i], plan.step_s or 0.0), default=None) for i in range(2)]
    found: list[PlanRow] = []
    for plan in front:
        if plan in ends or not any(_is_as_good(other, plan, slower, room) for other in found):
            found.append(plan)
    return found


def _is_as_good(listed: PlanRow, plan: PlanRow, slower: float, room: Sequence[float]) -> bool:
    more = [mine - theirs for mine, theirs in zip(_memory(listed), _memory(plan), strict=True)]
    fast = (listed.step_s or 0.0) <= (1 + slower) * (plan.step_s or 0.0)
    return fast and all(bytes_more <= most for bytes_more, most in zip(more, room, strict=True))


def _memory(plan: PlanRow) -> tuple[int, int]:
    return plan.peak_device_bytes, plan.peak_host_bytes_per_node


def _front(front: Sequence[PlanRow]) -> str:
    listed, slower = thinned(front)
    left = len(front) - len(listed)
    within = f"{format_percent(slower)} of time and {format_percent(MEMORY_TO_TIME * slower, 0)} of memory"
    note = f" ({counted(left, 'plan')} left out: a listed one is as good within {within})" if left else ""
    return f"{FRONT}{note}:\n{ranked_table(listed)}"


def _more(details: dict[str, bool]) -> list[str]:
    """Return the line that names the details that were not asked for."""
    names = [name for name, there in details.items() if there]
    return [f"More: {', '.join(names)}."] if names else []


def _blocks(blocks: Sequence[str]) -> str:
    return from_one("\n\n".join(block for block in blocks if block))
