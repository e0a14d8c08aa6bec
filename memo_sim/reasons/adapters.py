"""What low-rank adapters save and cost: weights that are trained, states, tensors that backward does not read."""

from __future__ import annotations

import msgspec
import numpy as np

from memo_sim.contract.adapters import NONE
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES, format_bytes, format_seconds
from memo_sim.engine.simulate import Simulation
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.work import AdapterGemm
from memo_sim.program.layers.frozen_products import unread
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower

UNITS = ((1e9, " billion"), (1e6, " million"), (1.0, ""))


def trained_weights(decisions: Decisions) -> str:
    """Return how many parameters are trained, of how many: ``42 million of 8.03 billion parameters``."""
    lora = decisions.lora
    assert lora is not None  # asked about adapters alone
    return f"{_shown(lora.params(decisions.model))} of {_shown(decisions.model.total_params)} parameters"


def _shown(count: float) -> str:
    size, unit = next((size, unit) for size, unit in UNITS if count >= size)
    value = count / size
    return f"{value:.3g}{unit}" if value < 1_000 else f"{value:,.0f}{unit}"


def adapters(simulation: Simulation) -> list[str]:
    """Say how long the adapters' products take, and what frozen weights save in states and in tensors of a layer."""
    decisions = simulation.decisions
    if decisions.lora is None:
        return []
    taken = 0.0
    for stage in simulation.stages:
        products = stage.per_instruction(lambda i: float(isinstance(i.work, AdapterGemm)))
        taken = max(taken, float(np.sum(stage.seconds * products * stage.weights)))
    own, all_trained = (_states_bytes(each) for each in (decisions, msgspec.structs.replace(decisions, adapters=NONE)))
    text = (
        f"Adapters: {trained_weights(decisions)} are trained. Their products take {format_seconds(taken)} of a rank's"
    )
    text += " step; a frozen product has no weight gradient, so its backward has half the FLOPs. Parameters, gradients"
    text += f" and optimizer states take {format_bytes(own)} on a device; with all weights trained, the same layout"
    text += f" would take {format_bytes(all_trained)}."
    return [f"{text}{_not_kept(decisions)}"]


def _states_bytes(decisions: Decisions) -> int:
    """Return the bytes of states on the device of the stage with the most."""
    programs = lower(decisions, micro_batches=1)
    states = BufferClass.STATE
    return max(
        sum(f.bytes * f.count for f in p.families if f.buffer_class is states and f.space == "device") for p in programs
    )


def _not_kept(decisions: Decisions) -> str:
    """Return which tensors a layer does not keep because no gradient reads them."""
    layer = decisions.model.layer(decisions.model.layers - 1)
    dropped = unread(decisions, experts=layer.experts is not None)
    tensors = skeletal_of(decisions, shape_of(decisions), layer)
    freed = [tensor for tensor in tensors if tensor.name in dropped]
    if not freed or decisions.recompute == "full":
        return ""
    size = sum(tensor.tokens * tensor.features * DTYPE_BYTES[tensor.dtype] for tensor in freed)
    names = ", ".join(tensor.name for tensor in freed)
    return f" No gradient reads {names}, so a layer keeps {format_bytes(size)} less of a micro-batch."
