"""Lower bound of the bytes that wait for W passes (zero-bubble), from sizes of buffers; nothing is lowered.

Stage s defers each W pass by s backwards. Before the first one it plays s + 1 backwards, or all of the step's. The last
of them has written its gradients, and no W pass has freed any:

    stage 2 of 3    F0 B0 F1 B1 F2 B2 | W0 F3 B3 W1 ...      at | the gradients of three micro-batches wait

What a W pass reads of one layer is the same under every policy. It lies in buffers of one micro-batch and layer each,
``deferred.*`` or ``skeletal.*`` (``program/layers/weight_gradients.py``). The gradient of the layer's output is not
counted: another layer wrote it.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layers.activations import Activations
from memo_sim.program.layers.weight_gradients import DeferredWeightGradients
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.stage_layers import LayersOfKind


def waiting_bytes(decisions: Decisions) -> list[int]:
    """Return a lower bound of what waits for W passes on a device of each stage; nothing where it is not known.

    It is not known for subsequences, which differ in length, and beside adapters, whose W passes read less.

    Raises:
        Infeasible: when the layout does not divide the model or the sequence.
    """
    layout, model = decisions.layout, decisions.model
    if layout.pp == 1 or layout.schedule != "zero-bubble" or layout.subsequences > 1 or decisions.lora is not None:
        return []
    shape, stages, shapes = shape_of(decisions), stages_of(decisions), model.layer_shapes
    of_kinds = []
    for number, each in enumerate(shapes):
        kind = LayersOfKind(number if len(shapes) > 1 else None, each, (0,))
        rows = shape.of_layer(each)
        held = Activations(decisions, rows, 1, stages[0], kind)
        of_kinds.append(DeferredWeightGradients(decisions, rows, held).layer_bytes)
    times = decisions.micro_batches
    of_layers = [of_kinds[kind] for kind in model.layer_kinds]
    return [min(stage.index + 1, times) * sum(of_layers[layer] for layer in stage.layers) for stage in stages]
