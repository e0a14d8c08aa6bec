"""Offload bandwidth of one device while all devices of its node offload and compute runs at the same time."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.costs.pricing import NodeRates, Pricer
from memo_sim.planning.question import Question
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Copy


def offload_bandwidth(question: Question, decisions: Decisions, size_bytes: int) -> float:
    """Return the rate (bytes/s) at which one device of the question's cluster offloads ``size_bytes``."""
    alone = size_bytes / Pricer(question.hardware, question.cluster, decisions.layout).seconds(Copy(size_bytes, "d2h"))
    busy = 1 << Lane.COMPUTE | 1 << Lane.D2H
    return alone * NodeRates(question.hardware, question.cluster).rates(busy)[Lane.D2H]
