"""What a step with a policy's objective leaves out, by what its own forward takes."""

from __future__ import annotations

import numpy as np

from memo_sim.contract.units import format_percent, format_seconds
from memo_sim.engine.simulate import Simulation
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.kinds import Phase

OF_BACKWARD = (".bwd", ".dgrad", ".wgrad")
"""Ends of operators of the head that play a backward, in the head's forward."""


def policy(simulation: Simulation) -> list[str]:
    """Say how long the step's forwards take, which a reference model of the same size would take again."""
    if simulation.decisions.objective != "grpo":
        return []
    forward_s, step_s = 0.0, simulation.prediction.step_s
    for stage in simulation.stages:
        chosen = stage.per_instruction(_of_forward)
        forward_s = max(forward_s, float(np.sum(stage.seconds * chosen * stage.weights)))
    share = f" ({format_percent(forward_s / step_s)} of the step)" if step_s else ""
    text = (
        f"GRPO: forwards take {format_seconds(forward_s)} of compute{share}. A reference model of this size, and"
        " log-probabilities of a model that has been updated since, would take as long again each; neither is included,"
        " nor is generation."
    )
    return [text]


def _of_forward(instruction: Instruction) -> float:
    forward = instruction.phase is Phase.FORWARD and instruction.lane is Lane.COMPUTE
    return float(forward and not instruction.op.endswith(OF_BACKWARD))
