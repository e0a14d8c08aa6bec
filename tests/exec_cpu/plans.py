"""Makes plan files of small models that train on bytes, with or without a prediction."""

from pathlib import Path
from typing import Any

from memo_sim.contract import codec
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, MovedBytes, Plan, Prediction
from memo_sim.memory.place import place
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower, program_sha256
from tests.exec_cpu.small import decide, gpt

BYTES = 256


def byte_decisions(**changes: Any) -> Decisions:
    """Return decisions for a small GPT over bytes that swaps half of the tokens and has two micro-batches."""
    fields: dict[str, Any] = {"seq_tokens": 256, "micro_batch": 1, "global_batch": 2}
    fields |= {"recompute": "tokenwise", "swapped_tokens": 128}
    return decide(changes.pop("model", gpt(vocab=BYTES)), **(fields | changes))


def placed(decisions: Decisions) -> Placement:
    """Return a placement of the decisions' program."""
    return place(requests_of(lower(decisions)[0]), solver="greedy")


def plan_of(decisions: Decisions, prediction: Prediction | None = None, *, placement: Placement | None = None) -> Plan:
    return Plan(
        decisions=decisions,
        program_sha256=program_sha256(lower(decisions)),
        placement_sha256=codec.sha256_of(placement) if placement is not None else "",
        prediction=prediction,
    )


def write_plan(path: Path, decisions: Decisions | None = None, prediction: Prediction | None = None) -> Path:
    """Write a plan, and its placement beside it."""
    decisions = decisions or byte_decisions()
    placement = placed(decisions) if decisions.memory_policy == "planned" else None
    if placement is not None:
        codec.write(path.with_name(f"{path.stem}.placement.json"), placement)
    codec.write(path, plan_of(decisions, prediction, placement=placement))
    return path


def predicted(step_s: float = 0.1, **changes: Any) -> Prediction:
    fields: dict[str, Any] = {"status": "ok", "step_s": step_s, "mfu": 0.5, "lanes": {"compute": step_s}}
    fields |= {"peak_device_bytes": 10**6, "moved_bytes": MovedBytes(d2h=5, h2d=5)}
    return Prediction(**(fields | changes))
