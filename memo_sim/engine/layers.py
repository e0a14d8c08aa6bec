"""Computes a step's time from a few of its layers: identical layers are played once and repeated.

Middle layers are identical, and after the first few of a pass, each layer starts with the same state of the lanes. So a
plan with few layers is lowered and played. In each run over its layers (forward, backward, and the step's work layer by
layer before and after them), a window stands for the layers that are left out. A window has two layers, because layers
alternate between two rounding buffers. The window before it serves for comparison:

      played     | l0 l1 l2 l3 l4 l5 l6 l7 l8 l9 |        eighty layers   | l0 ... l5 | l6 l7 x 36 | l8 l9 |
                             |<--->|<--->| window

Where layers differ, the windows lie in their longest repeated stretch (``program/layout/repeated_layers.py``).

As with micro-batches (``repetition.py``), the repetition is checked, not assumed. Every instruction of a window must
come the same time after its counterpart in the window before, and no other run may overlap with the window. Then the
result is exact.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions
from memo_sim.engine.fast_loop import run_fast
from memo_sim.engine.playback import Playback
from memo_sim.engine.repetition import STEADY
from memo_sim.engine.simulate import simulate
from memo_sim.program.ir.kinds import BlockKind, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.repeated_layers import RepeatedLayers, repeated_layers

AHEAD = 4
"""Layers before the windows: enough for the run to become steady."""
BEHIND = 2
"""Layers after the window: the last two, whose activations stay."""

LAYER_PASSES = (TemplateKind.FORWARD, TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)
"""Templates of which each layer has one instance a pass."""


def step_s_of_few_layers(decisions: Decisions, hardware: Hardware, cluster: Cluster) -> float | None:
    """Return the step time (seconds) of a plan that fits, from a few of its layers.

    None when that is not possible: for pipelines, for models in which few layers repeat, when layers are recomputed
    differently or are not seen to repeat, and when memory is not planned (an allocator's stalls depend on everything
    that is held).

    Raises:
        Infeasible: when the plan cannot be lowered, or the profile has not measured its work.
    """
    model, layout = decisions.model, decisions.layout
    few = repeated_layers([model.layer(n) for n in range(model.layers)], windows=2, beside=AHEAD + BEHIND)
    if not few.times or layout.pp > 1 or decisions.memory_policy != "planned" or decisions.recompute_layers != ALL:
        return None
    if layout.replicas > 1 and (layout.zero < 3 or layout.shards == 1):
        return None  # whole blocks are gathered beside the first layers, or reduced beside the gradient norm's kernels
    played = msgspec.structs.replace(decisions, model=model.of_layers(few.shapes))
    simulation = simulate(played, hardware, cluster, predict=False, loop=run_fast)
    (stage,) = simulation.stages
    if simulation.memory.fault is not None:
        return None
    added_s, playback = 0.0, stage.playback
    firsts = stage.columns.starts.tolist()
    for run in _runs(stage.program, len(few.shapes)):
        end = _end_of_window(stage.program, run, few)
        window_s = _window_s(stage.program, playback, firsts, run, [end - n * few.window for n in (2, 1, 0)])
        if window_s is None:
            return None
        added_s += few.times * window_s * int(stage.weights[firsts[run[end - few.window]]])
    return playback.span_s + stage.repetition.added_s(playback) + added_s


def _runs(program: Program, layers: int) -> list[list[int]]:
    """Return the runs over all layers; each lists the first instance of every layer, in program order.

    Other instances among the layers of a pass (copies, collectives) belong to that pass's run.
    """
    passes: dict[tuple[bool, int, int], list[int]] = defaultdict(list)
    others: dict[TemplateKind, list[int]] = defaultdict(list)
    for number, instance in enumerate(program.instances):
        template = program.templates[instance.template]
        if template.block is not BlockKind.LAYER:
            continue
        if template.kind in LAYER_PASSES:
            forward = template.kind is TemplateKind.FORWARD
            passes[forward, instance.micro_batch, instance.subsequence].append(number)
        elif template.kind.of_step:
            others[template.kind].append(number)
    inside = [(run[0], run[-1]) for run in passes.values()]
    apart = [run for run in others.values() if not any(run[0] < last and first < run[-1] for first, last in inside)]
    return [run for run in [*passes.values(), *apart] if len(run) == layers]


def _end_of_window(program: Program, run: list[int], few: RepeatedLayers) -> int:
    """Return the position in a run after its last window, near the end of the stretch that repeats."""
    layers = len(few.shapes)
    upward = program.instances[run[0]].layer < program.instances[run[-1]].layer
    return min(few.end if upward else layers - few.first, layers - BEHIND)


def _window_s(
    program: Program, playback: Playback, firsts: list[int], run: list[int], places: list[int]
) -> float | None:
    """Return the seconds of a run's window, or None when it differs from the window before it.

    ``places``: the positions in the run at which the window before begins, the window begins, and it ends.
    """
    first, middle, last = (run[place] for place in places)
    templates = [instance.template for instance in program.instances[first:last]]
    if templates[: middle - first] != templates[middle - first :]:
        return None
    before, window = (slice(firsts[a], firsts[b]) for a, b in ((first, middle), (middle, last)))
    start_s, end_s = playback.start_s, playback.end_s
    shifts = np.concatenate([each[window] - each[before] for each in (start_s, end_s)])
    if np.ptp(shifts) > STEADY * playback.span_s:
        return None
    beside = (start_s < start_s[window.stop]) & (end_s > start_s[window.start])
    beside[firsts[run[0]] : firsts[run[-1] + 1]] = False
    # This includes the run itself: what follows the last layer may be gathered while the window plays.
    return None if beside.any() else float(shifts[0])
