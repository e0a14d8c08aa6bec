"""Finds the longest sequence that each system trains: doubles the length until it fails, then bisects to 8K tokens.

Each attempt is one step in a new process, because the state of a process that ran out of memory is undefined. All
systems have the same layers and model states. If the planner finds no plan for memo, the attempt fails without a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from benchmarks.gpu.case import Case, Kind
from benchmarks.gpu.plans import Refused, model_of
from benchmarks.gpu.rivals import RIVALS
from benchmarks.gpu.row import Row, row_of
from benchmarks.gpu.session import Session
from benchmarks.gpu.side_by_side import MEMO, systems


@dataclass
class Bracket:
    """Bisection state: the longest sequence that ran and the shortest that failed, in tokens."""

    granule: int
    first: int
    most: int
    ran: int = 0
    failed: int | None = None

    @property
    def next(self) -> int | None:
        """The next length to try, or None once the answer is known.

        >>> Bracket(granule=8, first=16, most=64, ran=32).next
        64
        >>> Bracket(granule=8, first=16, most=64, ran=32, failed=64).next
        48
        """
        if self.failed is None:
            longer = self.ran * 2 if self.ran else self.first
            return longer if longer <= self.most else None
        middle = (self.ran + self.failed) // 2 // self.granule * self.granule
        return middle if middle > self.ran else None


def run(session: Session) -> None:
    """Search the longest sequence of every system that is not compiled; mark searches that the budget ends early."""
    wanted = (name for name in systems() if name not in RIVALS or not RIVALS[name].compiled)
    chosen = list(wanted)[:2] if session.scale.quick else list(wanted)
    for name in chosen:
        _search(session, name, systems()[name])


def _search(session: Session, name: str, kind: Kind) -> None:
    scale = session.scale
    bracket = Bracket(scale.longest_granule, scale.longest_from, scale.longest_to)
    last: Row | None = None
    first_failure = ""
    case = _case(session, name, kind, scale.longest_from)
    while (tokens := bracket.next) is not None:
        case = _case(session, name, kind, tokens)
        if scale.seconds([case]) > session.budget.left_s:
            break
        row = _try(session, case)
        session.tell(f"longest   {name}: {tokens} tokens {row.status}")
        if row.status in ("not run", "not installed", "error"):
            first_failure, last = row.message, row
            break
        if row.status == "ok":
            bracket.ran, last = tokens, row
        else:
            bracket.failed, first_failure = tokens, row.message
    _record(session, case, bracket, last, first_failure)


def _case(session: Session, name: str, kind: Kind, tokens: int) -> Case:
    model = model_of(session.scale.rival_model, session.scale.longest_layers)
    policy = MEMO.get(name, "")
    return session.case(model, tokens, rival=name, kind=kind, part="longest", policy=policy, steps=1, warm_ups=0)


def _try(session: Session, case: Case) -> Row:
    if case.kind == "memo":
        found = session.get_plan(case)
        if isinstance(found, Refused):
            return row_of(case, found.status, found.reason)
        case = msgspec.structs.replace(case, plan=str(found))
    return session.launcher.one(case)


def _record(session: Session, case: Case, bracket: Bracket, last: Row | None, failure: str) -> None:
    """Record the longest sequence that ran with its figures, the shortest that failed, and the failure's reason."""
    known = bracket.next is None
    if last is not None and last.status in ("not installed", "error"):
        session.record(last)
        return
    if not bracket.ran:
        session.note(case, "oom" if known else "not run", failure or "not run because the time budget is too small")
        return
    assert last is not None
    session.record(
        msgspec.structs.replace(last, sequence=bracket.ran, message=failure, fails_at=bracket.failed, complete=known)
    )
