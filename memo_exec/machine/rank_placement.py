"""Derives the arena of a rank whose program is not the one that the plan's placement was made for.

A plan has one placement, made for the rank that needs the most memory.

- Other context-parallel ranks have the same buffers. They use the same addresses, at other times.
- Another pipeline stage has other buffers. First fit places them: in order of birth, at the lowest free address.

Both are checked like the plan's own placement.
"""

from __future__ import annotations

from memo_sim.contract.errors import CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import Requests
from memo_sim.program.arena.check_placement import check_placement, largest_live_sum
from memo_sim.program.arena.first_fit import arena_bytes, offsets_of

FIRST_FIT = "first-fit"


def rank_placement(placement: Placement, requests: Requests) -> Placement:
    """Return a placement for ``requests``.

    It uses the addresses of ``placement`` when names and sizes of all buffers are equal, and first fit otherwise.

    Raises:
        CannotRun: when two buffers share an address while both live.
    """
    placed = dict(zip(placement.ids, zip(placement.size_bytes, placement.offset_bytes, strict=True), strict=True))
    wanted = dict(zip(requests.ids, requests.size_bytes, strict=True))
    alike = wanted == {name: size for name, (size, _) in placed.items()}
    offsets = [placed[name][1] for name in requests.ids] if alike else offsets_of(requests)
    return _checked(requests, offsets, solver=placement.solver if alike else FIRST_FIT)


def first_fit_placement(requests: Requests) -> Placement:
    """Return a placement of ``requests`` by first fit, for a program that no plan has a placement of."""
    return _checked(requests, offsets_of(requests), solver=FIRST_FIT)


def _checked(requests: Requests, offsets: list[int], *, solver: str) -> Placement:
    found = Placement(
        name=requests.name,
        program_sha256=requests.program_sha256,
        arena_bytes=arena_bytes(requests, offsets),
        lower_bound_bytes=largest_live_sum(requests),
        alignment_bytes=requests.alignment_bytes,
        solver=solver,
        ids=requests.ids,
        lower=requests.lower,
        upper=requests.upper,
        size_bytes=requests.size_bytes,
        offset_bytes=offsets,
        classes=requests.classes,
    )
    if faults := check_placement(found, requests):
        raise CannotRun(
            "the plan's arena does not serve this rank",
            where=requests.name,
            got=faults[0],
            wanted="no address shared by two buffers that live at the same time",
            hint="make the plan with memo-sim what-if --memory-policy caching",
        )
    return found
