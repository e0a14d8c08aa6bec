"""Makes process groups: one for each lane and kind of group that a program uses, in the same order on all ranks.

On GPUs one split of the world's communicator makes all groups of a key. Lanes play at the same time, and a collective
occupies multiprocessors until the other ranks have started it too. So the blocks (CTAs) of each communicator are
bounded: those of all keys together fit on the device.

``memo_sim.program.analysis.communicators`` lists their keys. Lanes play at the same time, so two lanes never share a
group. Within a lane, collectives follow program order, which is the same on every rank. A group has two or more ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from memo_exec.distributed.mesh import MeshCoordinates
from memo_sim.contract.plan import Layout
from memo_sim.program.analysis.communicators import Key, group_keys, stages_of_key
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Exchange, PointToPoint, Work
from memo_sim.program.layout.rank_order import stride

Groups = Mapping[Key, dist.ProcessGroup]


def communicates(work: Work) -> bool:
    """Return whether an instruction with this work waits for other ranks."""
    return isinstance(work, Collective | Exchange | PointToPoint)


def missing_groups(program: Program, layout: Layout, groups: Groups) -> list[Key]:
    """Return the keys of groups that ``program`` uses and ``groups`` lacks. A group of one rank is not needed."""
    return [key for key in group_keys(program) if key not in groups and any(len(g) > 1 for g in _ranks(key, layout))]


CPU = torch.device("cpu")
MOST_CTAS = 32
"""The most blocks of one communicator, which NCCL accepts in all versions."""


def make_groups(
    programs: Sequence[Program], mesh: MeshCoordinates, *, patience_s: float, device: torch.device = CPU
) -> dict[Key, dist.ProcessGroup]:
    """Make all groups and return those of this rank.

    Every rank of the job has to call this with the programs of all pipeline stages. ``patience_s`` is how long a call
    in a group waits for other ranks, in seconds.

    Raises:
        RuntimeError: when another rank has stopped.
    """
    patience = timedelta(seconds=patience_s)
    by_key = {
        key: [members for members in _ranks(key, mesh.layout) if len(members) > 1]
        for key in sorted({key for program in programs for key in group_keys(program)})
    }
    by_key = {key: groups for key, groups in by_key.items() if groups}
    found = {}
    world = _world_to_split(patience) if by_key and device.type == "cuda" else None
    for key, groups in by_key.items():
        if world is None:
            group = _new(groups, patience, mesh.rank)
        else:
            group = _split(groups, patience, most_ctas(len(by_key), device), world)
        if any(mesh.rank in members for members in groups):
            assert group is not None
            found[key] = group
    return found


def most_ctas(communicators: int, device: torch.device) -> int:
    """Return how many blocks each communicator may have, so that all of them and the world's fit on ``device``."""
    multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(MOST_CTAS, multiprocessors // (communicators + 1)))


def _world_to_split(patience: timedelta) -> dict[str, Any]:
    """Return the arguments that make ``split_group`` split NCCL's communicator of the world alone.

    The default group has gloo too, whose split takes no NCCL options. torch 2.13's ``split_group`` chooses a backend.
    Where it cannot, a world of NCCL alone is made.
    """
    if "backend" in inspect.signature(dist.split_group).parameters:
        return {"backend": "nccl"}
    return {"parent_pg": dist.new_group(backend="nccl", timeout=patience)}


def _split(
    groups: list[tuple[int, ...]], patience: timedelta, ctas: int, world: dict[str, Any]
) -> dist.ProcessGroup | None:
    """Return this rank's group of ``groups``, made by one split of the world; None when it is in none of them."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    ranks = [sorted(members) for members in groups]
    return dist.split_group(split_ranks=ranks, timeout=patience, pg_options=options, **world)


def _new(groups: list[tuple[int, ...]], patience: timedelta, rank: int) -> dist.ProcessGroup | None:
    """Return this rank's group of ``groups``, made one after the other; None when it is in none of them."""
    found = None
    for members in groups:
        group = dist.new_group(list(members), timeout=patience)
        if rank in members:
            found = group
    return found


def _ranks(key: Key, layout: Layout) -> list[tuple[int, ...]]:
    """Return the ranks of every group with this key, each group once."""
    name, devices = key[1], layout.devices
    if ">" in name:
        source, target = stages_of_key(key)
        apart = stride("pp", layout)
        return [(source * apart + i, target * apart + i) for i in range(apart)]
    groups = [tuple(MeshCoordinates(layout, rank).members(name)) for rank in range(devices)]
    # A group of only the first and the last stage ("tied") is wrong when computed from a stage between them: it would
    # contain ranks outside the layout.
    return list(dict.fromkeys(group for group in groups if max(group) < devices))
