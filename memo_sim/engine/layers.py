"""Identical layers are played a few times and repeated: how long a step takes, without playing all of it.

Middle layers are alike, and once a pass is under way each finds the lanes as the one before did. So a plan of a few
layers is lowered and played, and a window of each run over its layers (forward, backward, what the step does layer by
layer before and after them) stands for the layers that are left out. Two layers, because they take turns in two
rounding buffers, and the window before it for comparison:

      played     | l0 l1 l2 l3 l4 l5 l6 l7 l8 l9 |        eighty layers   | l0 ... l5 | l6 l7 x 36 | l8 l9 |
                             |<--->|<--->| window

As with micro-batches (``repetition.py``) this is looked at, not assumed: every instruction of a window comes as much
later than its like of the window before, and nothing of another run plays beside it. Then the repetition is exact.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions
from memo_sim.engine.playback import Playback
from memo_sim.engine.repetition import STEADY
from memo_sim.engine.simulate import simulate
from memo_sim.program.ir.program import Program

FEW = 10
"""Layers played: as many at the run's start as it needs to get under way, two windows, and the last two, whose
activations stay. One more where the number of layers is odd."""
WINDOW = 2
BEHIND = 2
"""Layers after the window."""


def step_s_of_few_layers(decisions: Decisions, hardware: Hardware, cluster: Cluster) -> float | None:
    """Return the step time (seconds) of a plan that fits, from a few of its layers.

    None where that says nothing: of pipelines and of few layers, where memory is not planned (an allocator's stalls
    depend on everything that is held), and where the layers are not seen to repeat.

    Raises:
        Infeasible: when the plan cannot be lowered, or the profile has not measured its work.
    """
    layers = decisions.model.layers
    few = FEW + layers % WINDOW
    layout = decisions.layout
    if layers <= few or layout.pp > 1 or decisions.memory_policy != "planned":
        return None
    if layout.replicas > 1 and layout.zero < 3:
        return None  # whole blocks are gathered beside the first layers, or summed beside the norm's kernels
    model = msgspec.structs.replace(decisions.model, layers=few)
    simulation = simulate(msgspec.structs.replace(decisions, model=model), hardware, cluster, predict=False)
    (stage,) = simulation.stages
    if simulation.memory.fault is not None:
        return None
    times, added_s, playback = (layers - few) // WINDOW, 0.0, stage.playback
    firsts = np.searchsorted(stage.columns.instance, np.arange(len(stage.program.instances) + 1)).tolist()
    for run in _runs(stage.program, few):
        window_s = _window_s(stage.program, playback, firsts, run)
        if window_s is None:
            return None
        added_s += times * window_s * int(stage.weights[firsts[run[few - BEHIND - WINDOW]]])
    return playback.span_s + stage.repetition.added_s(playback) + added_s


def _runs(program: Program, layers: int) -> list[list[int]]:
    """Return the runs over all layers, as the instances that each layer begins with, in program order.

    What stands among the layers of a pass (copies, collectives) belongs to that pass's run.
    """
    passes: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    others: dict[str, list[int]] = defaultdict(list)
    for number, instance in enumerate(program.instances):
        kind, _, phase = program.templates[instance.template].name.partition(".")
        if kind != "layer":
            continue
        if (phase := phase.partition(".")[0]) in ("fwd", "bwd"):
            passes[phase, instance.micro_batch, instance.subsequence].append(number)
        elif instance.place.startswith("step/"):
            others[phase].append(number)
    inside = [(run[0], run[-1]) for run in passes.values()]
    apart = [run for run in others.values() if not any(run[0] < last and first < run[-1] for first, last in inside)]
    return [run for run in [*passes.values(), *apart] if len(run) == layers]


def _window_s(program: Program, playback: Playback, firsts: list[int], run: list[int]) -> float | None:
    """Return how long a run's window takes; None where it does not take as long as the window before it."""
    first, middle, last = (run[len(run) - BEHIND - n * WINDOW] for n in (2, 1, 0))
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
    # Of the run too: what the layer behind the last begins with may be gathered while that one plays.
    return None if beside.any() else float(shifts[0])
