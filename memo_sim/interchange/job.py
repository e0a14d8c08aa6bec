"""A job: what a framework is asked to train, in memo's words, without the machine that it runs on.

A plan becomes a job when everything is left out that a framework decides itself; its system (``planning/presets.py``)
fills that in. So the job of an exported plan and the job that is read from the exported files are the same, and so are
their decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import CHOSEN, DEGREES, PINNED, Chosen, Pins, States
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.planning.contradictions import repinned
from memo_sim.planning.question import Question
from memo_sim.planning.space import candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Chosen):
    """One job. ``pins`` hold what the framework's files say; None is what it decides itself."""

    model: Model
    seq_tokens: int
    pins: Pins = field(default_factory=Pins)
    deterministic: bool = False

    def question(self, cluster: Cluster, hardware: Hardware, system: str) -> Question:
        """Return the job as a question on a cluster under a system; pins without effect are left out."""
        chosen: dict[str, Any] = {knob.name: getattr(self, knob.name) for knob in CHOSEN}
        asked = Question(
            model=self.model,
            cluster=cluster,
            hardware=hardware,
            seq_tokens=self.seq_tokens,
            system=system,
            pins=self.pins,
            **chosen,
        )
        return repinned(asked)

    def decisions(self, cluster: Cluster, hardware: Hardware, system: str) -> Decisions:
        """Return the plan of the job. It may use fewer devices than the cluster has.

        Raises:
            Infeasible: when no plan can have these decisions.
            UsageError: when they contradict each other, or need more devices than there are.
        """
        used = prod(getattr(self.pins, name) or 1 for name in DEGREES)
        found, _ = candidates(self.question(part_of(cluster, used), hardware, system))
        return msgspec.structs.replace(found[0].base, deterministic=self.deterministic)


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """Return the part of a cluster that ``devices`` devices are: whole nodes, or some devices of one.

    Raises:
        UsageError: when the cluster has no such part.
    """
    here = cluster.devices_per_node
    if devices > cluster.devices or (devices > here and devices % here):
        raise UsageError(
            "the layout does not fit on the cluster",
            where=cluster.name,
            got=f"{devices} devices",
            wanted=f"at most {cluster.devices}; above {here}, whole nodes of {here}",
            hint="name another --cluster",
        )
    if devices <= here:
        return msgspec.structs.replace(cluster, nodes=1, devices_per_node=devices)
    return msgspec.structs.replace(cluster, nodes=devices // here)


def job_of(decisions: Decisions, names: tuple[str, ...], **changes: Any) -> Job:
    """Return the job of a plan: the knobs called ``names`` as the plan has them, then ``changes``; no other pins.

    Model, sequence, batch and dtype are always the plan's.
    """
    holders = (decisions.layout, decisions, decisions.kernels)
    taken: dict[str, Any] = {
        name: next(getattr(holder, name) for holder in holders if hasattr(holder, name)) for name in (*names, *_ALWAYS)
    }
    taken |= {name: None for name in _EMPTY if name in taken and not taken[name]}
    taken |= changes
    return Job(
        model=decisions.model,
        seq_tokens=decisions.seq_tokens,
        pins=Pins(**{knob.name: taken[knob.name] for knob in PINNED if knob.name in taken}),
        deterministic=decisions.deterministic,
        **{knob.name: taken[knob.name] for knob in CHOSEN if knob.name in taken},
    )


_ALWAYS = ("micro_batch", "global_batch", "dtype")
_EMPTY = ("pp_layers", "zero_ranks")
"""Pins that are left out where a plan has the empty value."""


def moments_as_parameters(states: States) -> States:
    """Return the states that torch's AdamW has, whose moments are of the parameters' dtype."""
    return "pure-bf16" if states == "pure-bf16-fp32-moments" else states
