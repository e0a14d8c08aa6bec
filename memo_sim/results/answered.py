"""Questions and plans answered as results, for the command line and the Python functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memo_sim.answers import more_memory, named_values
from memo_sim.answers import what_if as what_if_answer
from memo_sim.contract import codec
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.plan import Plan
from memo_sim.contract.progress import Progress
from memo_sim.planning.processes import processes
from memo_sim.planning.question import Question
from memo_sim.results.planned import WhatIfResult
from memo_sim.views.typed_result import PathLike


def answered(
    question: Question,
    *,
    top: int = 10,
    pareto: bool = False,
    one_more_gib: bool = False,
    price_per_gpu_hour: float | None = None,
    jobs: int = 1,
    explained: bool = True,
    progress: Progress | None = None,
    command: str = "",
) -> WhatIfResult:
    """Return the answer to a question, searched by ``jobs`` processes.

    ``explained``: whether reasons are shown (``what_if``). ``command`` is what the plan's file says that made it.

    Raises:
        UsageError: when pinned knobs contradict each other or the cluster.
    """
    if top < 1:
        raise UsageError("not a number of plans", got=top, wanted="from 1")
    named_values.number("price_per_gpu_hour", price_per_gpu_hour, *named_values.PRICES)
    wanted: dict[str, Any] = {"top": top, "pareto": pareto, "price_per_device_hour": price_per_gpu_hour}
    wanted["explained"] = explained
    with processes(jobs):
        try:
            answer = what_if_answer.what_if(question, **wanted, progress=progress)
        except Infeasible as error:
            return WhatIfResult(question, what_if_answer.without_answer(question, error), None, command, error)
        if one_more_gib:
            answer = more_memory.with_what_more_buys(question, answer)
    return WhatIfResult(question, answer.result, answer, command)


def priced(
    plan: Plan,
    question: Question,
    *,
    where: Plan | PathLike,
    price_per_gpu_hour: float | None = None,
    command: str = "",
) -> WhatIfResult:
    """Return the answer for a plan as the only candidate; ``where`` names its file.

    Raises:
        BadInput: when the plan cannot be played.
    """
    named_values.number("price_per_gpu_hour", price_per_gpu_hour, *named_values.PRICES)
    try:
        with codec.of_file("the plan" if isinstance(where, Plan) else Path(where)):
            answer = what_if_answer.price(plan, question, price_per_device_hour=price_per_gpu_hour)
    except Infeasible as error:
        return WhatIfResult(question, what_if_answer.without_answer(question, error), None, command, error, plan)
    return WhatIfResult(question, answer.result, answer, command, given=plan)
