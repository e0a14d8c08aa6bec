"""What a plan cannot go below: step time, device memory and host memory, from a few of its layers (``passes.py``).

Below the step time lie the compute lane's work W and the time I for which it has to stand still. A lane beside compute
that is busy for B slows compute to the rate r; compute escapes that only by standing still as well:

    T >= W + (1 - r) B + r I

Of a pipeline's stages the one with most to do has the mean at least; the last waits for its first input to pass the
others, and the first for the last gradient. Every micro-batch passes every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.costs.pricing import NodeRates
from memo_sim.engine.layers import step_s_of_few_layers
from memo_sim.memory.eager import libraries_of
from memo_sim.planning.passes import Pass, Passes
from memo_sim.planning.subsequences import part_prices
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.layers.activations import Activations
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.parameters import Block, embed_block, head_block, layer_block
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.subsequence import subsequences_of
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS

ROUNDING = 1e-9
"""Of a step time that few layers tell: it is that of all layers but for rounding, some 1e-14."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """No plan is faster (seconds), and none needs less (bytes of a device, of a node's host)."""

    step_s: float
    device_bytes: int
    host_bytes_per_node: int


class LowerBounds:
    """The floors of plans on one cluster."""

    def __init__(self, hardware: Hardware, cluster: Cluster, passes: Passes | None = None) -> None:
        """``passes``: those of the same devices with another amount of memory, whose lowerings serve here too."""
        reserve = sum(int(quantity.value) for quantity in hardware.reserve_bytes.values())
        self.device_room_bytes = int(hardware.device_memory_bytes.value) - reserve
        self.host_room_bytes = int((cluster.host_memory_bytes or hardware.host_memory_bytes).value)
        self._cluster = cluster
        self.passes = passes or Passes(hardware, cluster)
        self._prices = part_prices(hardware, cluster)
        self._not_repeated: set[Layout] = set()
        """Layouts whose layers were not seen to repeat: they are not lowered to see that again."""
        self._hardware = hardware
        rates = NodeRates(hardware, cluster)
        beside = {"copy_s": Lane.D2H, "collective_s": Lane.COLLECTIVE, "p2p_s": Lane.P2P}
        self._slowed = {name: rates.rates(1 << Lane.COMPUTE | 1 << lane)[Lane.COMPUTE] for name, lane in beside.items()}
        """Compute's rate while a lane beside it is busy."""

    def shortfall_bytes(self, bound: LowerBound) -> int:
        """Return what is missing at least, looking at the device first; 0 for what may fit.

        Where the host alone is known to be short it is 1: the device may be short as well, by as little, and an
        outcome tells that first.
        """
        device, host = bound.device_bytes - self.device_room_bytes, bound.host_bytes_per_node - self.host_room_bytes
        return device if device > 0 else int(host > 0)

    def of(self, decisions: Decisions) -> LowerBound:
        """Return the floor of one plan.

        Raises:
            Infeasible: when the plan cannot be lowered, or the profile has not measured its work.
        """
        return self._bound(decisions, *self._parts(decisions))

    def between(self, low: Decisions, high: Decisions) -> LowerBound:
        """Return the floor of every plan that swaps as many rows as ``low`` at least and as ``high`` at most.

        More rows swapped are fewer rows rebuilt and copied aside, no more device memory, and more host memory. A
        forward that is cut into two row blocks is no faster than a whole one.
        """
        parts = zip(self._parts(low), self._parts(high), strict=True)
        return self._bound(low, *(_either(few, many) for few, many in parts))

    def rough(self, decisions: Decisions, *, keep: Decisions | None, any_alpha: bool = False) -> LowerBound:
        """Return a floor that costs little: of states, what is held and swapped, and the compute lane of ``keep``.

        ``any_alpha``: that of the plans which swap at least as much, none of which holds as much on the device.
        ``keep``: the same layout's plan that keeps everything, None where that is not at hand. All others compute as
        much; full recompute plays attention's forward twice. Subsequences are priced one by one instead: lowering
        hundreds of them costs seconds.
        """
        device, host = self._states(decisions)
        layers, parts = self._layers(decisions)
        device += 0 if any_alpha else self._held_bytes(layers, parts)
        bound = LowerBound(0.0, device, (host + self._swapped_bytes(layers, parts)) * self._local(decisions))
        if self.shortfall_bytes(bound):
            return bound
        if decisions.layout.subsequences > 1:
            (whole, layer), again = self._of_parts(decisions), False
        elif keep is not None:
            whole, _, layer = self._parts(keep, self.passes.computed)
            again = decisions.recompute == "full"
        else:
            return bound
        if decisions.layout.multiplexed or in_chunks(decisions):
            return replace(bound, step_s=self._shared_s(_compute(whole, again), decisions.layout.pp))
        return replace(bound, step_s=self._step_s(decisions, _compute(whole, again), _compute(layer, again)))

    def reach(self, decisions: Decisions, limit_s: float) -> bool:
        """Return whether the plan is known not to fit, or to take ``limit_s`` at least."""
        if self.lack_host(decisions):
            return True
        if limit_s < inf and decisions.layout not in self._not_repeated:
            repeated_s = step_s_of_few_layers(decisions, self._hardware, self._cluster)
            if repeated_s is None:
                self._not_repeated.add(decisions.layout)
            elif repeated_s * (1 - ROUNDING) >= limit_s:
                return True
        bound = self.of(decisions)
        return bound.step_s >= limit_s or self.shortfall_bytes(bound) > 0

    def lack_device(self, decisions: Decisions) -> bool:
        """Return whether the plan is known to need more device memory than there is."""
        room = self.device_room_bytes
        return self.rough(decisions, keep=None).device_bytes > room or self.of(decisions).device_bytes > room

    def lack_host(self, decisions: Decisions) -> bool:
        """Return whether host memory is known not to hold states and what one micro-batch swaps."""
        host = self._states(decisions)[1] + self._swapped_bytes(*self._layers(decisions))
        return host * self._local(decisions) > self.host_room_bytes

    def _layers(self, decisions: Decisions) -> tuple[int, list[Activations]]:
        """Return how many layers a stage has, and the activations of one micro-batch there, of every subsequence."""
        stage, shape = stages_of(decisions)[0], shape_of(decisions)
        return len(stage.layers), [
            Activations(decisions, part.shape, 1, stage, part) for part in subsequences_of(decisions, shape)
        ]

    def _swapped_bytes(self, layers: int, parts: list[Activations]) -> int:
        """Return what one micro-batch of a stage swaps at least, without lowering anything.

        Of its layers, of all subsequences, as many stay as there are rounding buffers. Which subsequences stay in a
        window says the order: none are counted.
        """
        decisions = parts[0].decisions
        if decisions.offload_window or decisions.layout.multiplexed:
            return 0
        layer = [self._layer_bytes(each) for each in parts]
        return max(0, layers * sum(layer) - ROUNDING_BUFFERS * max(layer))

    def _held_bytes(self, layers: int, parts: list[Activations]) -> int:
        """Return what a stage's layers hold on the device where one micro-batch's backward begins, at least.

        Rounding buffers, and what layers have to themselves; of layers that take turns in those, some have nothing
        else. What leaves a window is not counted, nor what an eager framework makes of any of it.
        """
        decisions = parts[0].decisions
        if decisions.offload_window or decisions.layout.multiplexed or decisions.memory_policy == "eager":
            return 0
        slots = sum(f.bytes * f.count for f in parts[0].shared_families())
        layer = [sum(f.bytes for f in each.families() if f.space == "device") for each in parts]
        return slots + max(0, layers * sum(layer) - (ROUNDING_BUFFERS * max(layer) if slots else 0))

    def _layer_bytes(self, kept: Activations) -> int:
        """Return what one layer of a subsequence swaps, statistics left out: they are blocks of their own."""
        apart = {f"host.{t.name}" for t in kept.tensors if t.statistics}  # engine/memory.py
        layer = sum(f.bytes for f in kept.families() if f.space == "host" and f.name not in apart)
        if kept.decisions.host_allocator == "power_of_two" and layer:
            return 1 << (layer - 1).bit_length()
        return layer

    def _local(self, decisions: Decisions) -> int:
        return min(self._cluster.devices_per_node, decisions.layout.devices)

    def _parts(
        self, decisions: Decisions, passes: Callable[[Decisions, int], Pass] | None = None
    ) -> tuple[Pass, Pass, Pass]:
        """Return a pass of the whole model, of a stage's layers, and what one layer adds (nothing without stages)."""
        of = passes or self.passes.of
        layers = decisions.model.layers
        held = layers // decisions.layout.pp
        whole, stage = of(decisions, layers), of(decisions, held)
        names = [f.name for f in fields(Pass)]
        added = {name: (getattr(whole, name) - getattr(stage, name)) / max(1, layers - held) for name in names}
        return whole, stage, Pass(**added)

    def _of_parts(self, decisions: Decisions) -> tuple[Pass, Pass]:
        """Return what the kernels of all subsequences take, and those of one layer; what joins them is left out.

        Where rows are cut in blocks, collectives are as well: they are left out then, and what kernels wait for.
        """
        parts = self._prices.parts(decisions)
        in_blocks = decisions.recompute == "tokenwise" or decisions.mlp_chunk_tokens > 0
        times_s = {
            "compute_s": sum(part.forward_compute_s + part.backward_compute_s for part in parts),
            "forward_s": sum(part.forward_compute_s for part in parts),
            "first_forward_s": parts[0].forward_compute_s,
            "first_compute_s": parts[0].forward_compute_s + parts[0].backward_compute_s,
        }
        if not in_blocks:
            times_s["idle_s"] = sum(part.idle_s for part in parts)
            times_s["collective_s"] = sum(part.forward_s + part.backward_s for part in parts) - times_s["compute_s"]
        layer = Pass(**{f.name: times_s.get(f.name, 0.0) for f in fields(Pass)})
        layers, head_s = _times(layer, decisions.model.layers), sum(part.head_compute_s for part in parts)
        return replace(layers, compute_s=layers.compute_s + head_s, head_s=head_s), layer

    def _bound(self, decisions: Decisions, whole: Pass, stage: Pass, layer: Pass) -> LowerBound:
        device, host = self._states(decisions)
        layout = decisions.layout
        if layout.multiplexed:  # guests hold, swap and exchange other rows than their stage's: what is left is sure
            return LowerBound(self._shared_s(whole, layout.pp), device, host * self._local(decisions))
        # The first stage is as many micro-batches ahead of its first backward as there are stages; with GPipe all. Of
        # subsequences it is as many ahead, and those of one micro-batch.
        # Within an offload window a layer's rows leave before its backward comes: how many are there is not known.
        stages = layout.pp if layout.subsequences == 1 else 1
        ahead = decisions.micro_batches if layout.schedule == "gpipe" else min(decisions.micro_batches, stages)
        kept = layout.pp > 1 and not decisions.offload_window
        in_flight = ahead * decisions.model.layers // layout.pp if kept else 0
        in_place = self._written_over_bytes(decisions)
        return LowerBound(
            step_s=self._step_s(decisions, whole, layer),
            device_bytes=device + int(max(stage.device_bytes - in_place, in_flight * layer.device_bytes)),
            host_bytes_per_node=(host + int(stage.host_bytes)) * self._local(decisions),
        )

    def _written_over_bytes(self, decisions: Decisions) -> int:
        """Return the bytes of a pass's logits' gradient, where an eager framework writes it over the logits."""
        if decisions.memory_policy != "eager" or libraries_of(decisions, self._hardware) == "2024":
            return 0
        shape = shape_of(decisions)
        rows = min(decisions.loss_chunk_tokens or shape.tokens, shape.tokens)
        return rows * shape.vocab * DTYPE_BYTES[decisions.dtype]

    def _step_s(self, decisions: Decisions, whole: Pass, layer: Pass) -> float:
        layout, times, layers = decisions.layout, decisions.micro_batches, decisions.model.layers
        mean_s = self._busy_s(whole) * times / layout.pp
        if layout.pp == 1:
            return mean_s
        # The last stage has its layers' work, and the others' chunks before its first and behind its last: those of one
        # subsequence, the first both to come forward and to leave backward.
        others = (layout.pp - 1) * layers // (layout.pp * layout.virtual_stages)
        around_s = others * layer.first_forward_s
        if layout.schedule != "zero-bubble":  # whose last weight gradients fill that wait
            # The last layer's gradient leaves its pass before the pass has ended: one layer less is waited for.
            around_s += (others - 1) * (layer.first_compute_s - layer.first_forward_s)
        held = layers // layout.pp
        last = _times(layer, held)
        last = replace(last, compute_s=last.compute_s + whole.head_s)
        return max(mean_s, times * self._busy_s(last) + around_s)

    def _shared_s(self, whole: Pass, stages: int) -> float:
        """Return the least that stages compute which share the work, its rows or chunks of attention cut anywhere.

        A cut turns a masked square of attention into a smaller one and a rectangle, which may be faster.
        """
        gain = max((table.most_gain for table in self._hardware.attention), default=1.0)
        return whole.compute_s / stages / max(1.0, gain)

    def _busy_s(self, one: Pass) -> float:
        """Return how long compute is busy or waits in one pass."""
        found = one.compute_s + one.idle_s
        for name, rate in self._slowed.items():
            found = max(found, one.compute_s + (1 - rate) * getattr(one, name) + rate * one.idle_s)
        return max(found, one.copy_s, one.collective_s, one.p2p_s)

    def _states(self, decisions: Decisions) -> tuple[int, int]:
        """Return bytes of parameters, gradients and optimizer states of one rank: on the device, on the host.

        Of a pipeline's stages: those of the layers, which every stage has.
        """
        model, layout = decisions.model, decisions.layout
        blocks: list[tuple[Block, str, int]] = [
            (layer_block(model, layout.divided), "layer", model.layers // layout.pp)
        ]
        if layout.pp == 1:
            blocks += [(embed_block(model, layout.tp), "embed", 1), (head_block(model, layout.tp), "head", 1)]
        families = [f for block, kind, count in blocks for f in Optimizer(decisions, block, kind, count).families()]
        device, host = (sum(f.bytes * f.count for f in families if f.space == space) for space in ("device", "host"))
        return device, host


def _times(one: Pass, layers: int) -> Pass:
    """Return the pass of so many layers that are alike."""
    return Pass(**{f.name: layers * getattr(one, f.name) for f in fields(Pass)})


def _compute(one: Pass, attention_again: bool) -> Pass:
    """Return a pass with attention's forward twice if said so."""
    return replace(one, compute_s=one.compute_s + (one.attention_s if attention_again else 0.0))


def _either(first: Pass, second: Pass) -> Pass:
    """Return what both take at least, and with the rebuilding of the one that rebuilds less; copies are left out."""
    least = {f.name: min(getattr(first, f.name), getattr(second, f.name)) for f in fields(Pass)}
    kept_s = min(first.compute_s - first.rebuild_s, second.compute_s - second.rebuild_s)
    return replace(Pass(**least), compute_s=kept_s + least["rebuild_s"])
