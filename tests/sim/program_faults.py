"""What the independent checkers find wrong in the programs of a step."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.check import check_edges, check_program
from memo_sim.program.check_roles import check_deadlock, check_roles
from memo_sim.program.columns import expand
from memo_sim.program.edges import derive_edges
from memo_sim.program.lower import lower


def faults(decisions: Decisions) -> list[str]:
    """Return every fault of every role, of their meetings, and whatever would wait for ever."""
    programs = lower(decisions)
    columns = [expand(p) for p in programs]
    edges = [derive_edges(c) for c in columns]
    found = check_roles(programs) + check_deadlock(programs, columns, edges)
    for program, mine, orders in zip(programs, columns, edges, strict=True):
        found += check_program(program, mine) + check_edges(mine, orders)
    return found
