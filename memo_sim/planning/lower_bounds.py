"""Lower bounds of a plan: step time, device memory and host memory, from a few of its layers (``few_layers.py``).

The bound of the step time uses the compute lane's work W and the time I for which compute has to wait. A lane that is
busy for B slows compute beside it to the rate r. While compute waits, it does not:

    T >= W + I + (1 - r) max(0, B - I)

Without stages, forward and backward are such times, one after the other. Neither is shorter than its copies, which
have to wait for the first layer, and for which the last one waits (``few_layers.Halves``).

In a pipeline, every stage gives a bound, and the largest counts. A stage plays all micro-batches. Before, it waits for
its first input to pass the earlier stages; after, those have the last backward to play, or it ends the step itself.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import cycle
from math import inf

from msgspec import Struct
from msgspec.structs import astuple, replace

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.costs.pricing import NodeRates
from memo_sim.engine.layers import step_s_of_few_layers
from memo_sim.engine.memory import reserve_with
from memo_sim.memory.eager_framework import fused_loss, libraries_of
from memo_sim.memory.huggingface import absent_states
from memo_sim.planning.beside_kept import Change, has_waits, passes_beside
from memo_sim.planning.few_layers import Half, Halves, Held, Pass, Passes, gathers, of_one_pass
from memo_sim.planning.in_flight_bytes import LayerBytes, bytes_of_layers, in_flight_bytes, order_tells
from memo_sim.planning.pipeline_lower_bound import kept
from memo_sim.planning.presets import Policy
from memo_sim.planning.pricers import Pricers
from memo_sim.planning.recent import Recent
from memo_sim.planning.stage_alone import StageBytes, StagesAlone, stands_alone
from memo_sim.planning.stage_passes import SCHEDULES, ChunkSeconds, StagePasses, least_chunk
from memo_sim.planning.step_ends import KEPT, NO_END, BlockEnds, StepEnds
from memo_sim.planning.subsequences import PartTimes, part_prices
from memo_sim.planning.w_pass_bytes import waiting_bytes
from memo_sim.planning.window_bytes import WindowBytes
from memo_sim.program.analysis.communicators import least_communicators
from memo_sim.program.attention.ring import step_works
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.kinds import BlockKind, FamilyKind
from memo_sim.program.ir.work import PointToPoint
from memo_sim.program.layers.activations import REBUILT_FROM_SHARED, Activations, region
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.parameters import embed_block, experts_block, head_block, layer_block
from memo_sim.program.layout.recomputed_layers import ALL, in_groups
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import Stage, stages_of
from memo_sim.program.layout.stage_layers import layers_by_kind
from memo_sim.program.layout.subsequence import subsequences_of
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS
from memo_sim.program.pipeline.stage_p2p import transfer_bytes

MORE_ALONE = 1.03
"""A stage that is played as a whole is seldom slower by more than its slices; of a range, it is then not played."""

ALONE = (6, 8)
"""Layers of two models of which one has a window more, and which show what a layer of one kind adds."""
MOST_PARTS = 512
"""Number of plans whose passes are kept, about 2 KB each; one is asked for several times in a row."""
ROUNDING = 1e-9
"""Relative rounding error of a step time that is computed from few layers; in fact about 1e-14."""


class LowerBound(Struct, frozen=True):
    """Lower bounds: no plan is faster (seconds), or needs less (bytes of a device, bytes of a node's host)."""

    step_s: float
    device_bytes: int
    """Of the plan's buffers."""
    host_bytes_per_node: int
    beside_bytes: int = 0
    """Of a device, beside the buffers: what the plan's communicators take more than the profile reserves."""


class _Around(Struct, frozen=True):
    """Lower bounds of the seconds before a stage's first pass, and after its last one.

    ``after_s``: until the last backward of the first stage. ``end_s``: until the step ends, with ``after_s`` in it.
    """

    before_s: float
    after_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes that one layer of each kind keeps in one micro-batch: of one subsequence after the other."""

    host: tuple[int, ...]
    """Without statistics, which are blocks of their own (``engine/memory.py``)."""
    device: tuple[int, ...]
    """In the layer's own buffers."""
    slots: int
    """In the buffers that all layers share, with the rounding buffers."""

    @classmethod
    def of(cls, layers: Sequence[Activations]) -> _Kept:
        """Return the bytes of layers of each subsequence and kind, the first subsequence's first."""
        host, device = list[int](), list[int]()
        for each in layers:
            families, statistics = each.families(), {f"host.{t.name}" for t in each.tensors if t.statistics}
            host.append(sum(f.bytes for f in families if f.space == "host" and f.name not in statistics))
            device.append(sum(f.bytes for f in families if f.space == "device"))
        kinds = {each.layers.number: each for each in reversed(layers)}.values()
        buffers = [family for each in kinds for family in each.shared_families()]
        one_each = {family.name: family for family in (*region(buffers), *(f for f in buffers if not f.region))}
        return cls(tuple(host), tuple(device), sum(f.bytes * f.count for f in one_each.values()))


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of one rank's states of blocks of parameters: on the device, and on the host."""

    layers: list[tuple[int, int]]
    """Of a layer of each kind."""
    first: tuple[int, int]
    """Of what the first stage has beside its layers."""
    last: tuple[int, int]

    def of_stage(self, stage: Stage, kinds: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of a whole stage; ``kinds``: the number of the kind of every layer of the model."""
        held = [self.layers[kinds[layer]] for layer in stage.layers]
        held += [self.first] * stage.first + [self.last] * stage.last
        return sum(device for device, _ in held), sum(host for _, host in held)


class _Parts(Struct, frozen=True):
    """Passes of one micro-batch from which bounds are made."""

    whole: Pass
    """The whole model; where stages share nothing, only its head."""
    layers: tuple[Pass, ...]
    """One more layer of each kind; one for all kinds where each is as good. Zero where they are not needed."""
    halves: Halves | None = None
    """The forward and the backward of the whole model, in one stage; None where they are not told apart."""


class LowerBounds:
    """Lower bounds of plans on one cluster."""

    def __init__(self, hardware: Hardware, cluster: Cluster, passes: Passes | None = None) -> None:
        """``passes``: passes of the same devices with another amount of memory, whose lowerings are reused here."""
        self._reserve_bytes = sum(int(quantity.value) for quantity in hardware.reserve_bytes.values())
        self.device_room_bytes = int(hardware.device_memory_bytes.value) - self._reserve_bytes
        self.host_room_bytes = int((cluster.host_memory_bytes or hardware.host_memory_bytes).value)
        self._cluster = cluster
        self.passes = passes or Passes(hardware, cluster)
        self._prices = part_prices(hardware, cluster)
        self._ends = StepEnds(hardware, cluster)
        self._alone = StagesAlone(hardware, cluster)
        self._passes = StagePasses()
        self._pricers = Pricers(hardware, cluster)
        self._stage_bytes: dict[Decisions, StageBytes] = {}
        self._in_flight_bytes: dict[Decisions, int] = {}
        self._beside: dict[Layout, int] = {}
        self._blocks: dict[Decisions, _States] = {}
        """Splits into stages and policies share them."""
        self._computed: dict[tuple[Decisions, bool, bool, int], _Parts] = {}
        """The compute lane's part of passes, by ``of_one_pass`` and what else of the layout it depends on."""
        self._known_kept: Recent[Hashable, _Kept] = Recent(MOST_PARTS)
        """By what they depend on (``_kept_in``)."""
        self._known_layers: Recent[Hashable, dict[int, LayerBytes]] = Recent(MOST_PARTS)
        """By what they depend on (``_held_in_flight``)."""
        self._known_held: Recent[Hashable, tuple[Held, float]] = Recent(MOST_PARTS)
        """By what they depend on (``_held``)."""
        self._known_parts: Recent[Hashable, _Parts] = Recent(MOST_PARTS)
        """By what they depend on (``_parts``)."""
        self._hardware = hardware
        rates = NodeRates(hardware, cluster)
        beside = {"copy_s": Lane.D2H, "collective_s": Lane.TP, "p2p_s": Lane.P2P}
        self._slowed = {name: rates.rates(1 << Lane.COMPUTE | 1 << lane)[Lane.COMPUTE] for name, lane in beside.items()}
        """Compute's rate while one other lane is busy."""

    def shortfall_bytes(self, bound: LowerBound) -> int:
        """Return a lower bound of the missing bytes (``Prediction.missing_bytes``); 0 for plans that may fit."""
        device = bound.device_bytes + bound.beside_bytes - self.device_room_bytes
        return max(0, device) + max(0, bound.host_bytes_per_node - self.host_room_bytes)

    def of(self, decisions: Decisions) -> LowerBound:
        """Return the lower bounds of one plan.

        Raises:
            Infeasible: when the plan cannot be lowered, or the profile has not measured its work.
        """
        return self.between(decisions, decisions)

    def between(self, low: Decisions, high: Decisions) -> LowerBound:
        """Return lower bounds for all plans that swap at least as many rows as ``low`` and at most as many as ``high``.

        With more swapped rows, fewer rows are recomputed and copied, device memory does not grow, and host memory
        grows. A forward that is cut into two row blocks is no faster than a whole one.

        Raises:
            Infeasible: see ``of``.
        """
        return replace(self.memory_between(low, high), step_s=self.step_s_between(low, high))

    def where_it_fits(self, low: Decisions, high: Decisions) -> LowerBound:
        """Return the bounds of ``between``; where memory is known to be short, no time is computed: ``step_s`` is 0.

        Raises:
            Infeasible: see ``of``.
        """
        bound = self.memory_between(low, high)
        if self.shortfall_bytes(bound):
            return bound
        return replace(bound, step_s=self.step_s_between(low, high))

    def memory_between(self, low: Decisions, high: Decisions) -> LowerBound:
        """Return the memory of ``between``, from a few lowered layers; ``step_s`` is 0.

        Of multiplexed layouts, only the states are known.

        Raises:
            Infeasible: see ``of``.
        """
        device, host = self._states(low)
        layout = low.layout
        if layout.multiplexed:  # helper stages hold, swap and exchange other rows than their own: only this is certain
            return LowerBound(0.0, device, host * self._local(low), self._beside_bytes(low))
        # The first stage is ahead of its first backward by as many micro-batches as there are stages; with GPipe, by
        # all. With subsequences, it is ahead by as many subsequences, and by all those of one micro-batch. With an
        # offload window, a layer's rows leave before its backward begins, so how many are held is not known.
        stages = layout.pp if layout.subsequences == 1 else 1
        ahead = low.micro_batches if layout.schedule == "gpipe" else min(low.micro_batches, stages)
        kept = layout.pp > 1 and not low.offload_window
        in_flight = ahead * len(stages_of(low)[0].layers) if kept else 0
        # Modules of a framework keep more than the program, but not all of what it keeps.
        written_over = self._written_over_bytes(low)
        found = [self._held(each) for each in dict.fromkeys((low, high))]
        held_bytes = min(held.device_bytes for held, _ in found)
        least = 0 if low.modules == "huggingface" else held_bytes - written_over
        layer_bytes = min(added for _, added in found)
        if _unlike_stages(low):  # of which others may swap less than the one above
            host_bytes = min(self.memory(each).host_bytes_per_node for each in dict.fromkeys((low, high)))
        else:
            host_bytes = (host + min(held.host_bytes for held, _ in found)) * self._local(low)
        return LowerBound(
            step_s=0.0,
            device_bytes=max(device + int(max(least, in_flight * layer_bytes)), self._in_flight(high)),
            host_bytes_per_node=host_bytes,
            beside_bytes=self._beside_bytes(low),
        )

    def step_s_between(self, low: Decisions, high: Decisions) -> float:
        """Return the lower bound of ``between`` of the step seconds alone; which buffers live is not computed.

        Raises:
            Infeasible: see ``of``.
        """
        parts = self._either(low, high)
        if low.layout.multiplexed:
            return self._shared_s(parts.whole, low.layout.pp)
        return self._step_s(low, parts, self._ends.of(low))

    def _either(self, low: Decisions, high: Decisions) -> _Parts:
        few, many = self._parts(low), self._parts(high)
        if few == many:
            return few
        layers = tuple(_either(*each) for each in zip(few.layers, many.layers, strict=True))
        return _Parts(_either(few.whole, many.whole), layers, _either_halves(few.halves, many.halves))

    def of_one_stage(self, low: Decisions, high: Decisions, enough_s: float = inf) -> float:
        """Return a lower bound of the step seconds of the plans of ``between``, from a stage that is played alone.

        Played is the stage with most to compute, whose layers copy most, too; only its slices where these reach
        ``enough_s``. 0 where that gives no bound (``stage_alone.py``).

        Raises:
            Infeasible: when a plan cannot be lowered, or the profile has not measured its work.
        """
        if not stands_alone(low):
            return 0.0
        if low.layout.pp == 1:
            return self._alone.step_s(low, high, 0, before_s=0.0, after_s=0.0) or 0.0
        parts = self._computed_parts(kept(low))
        of_stages = self._of_stages(kept(low), parts.whole, parts.layers, None)
        stage = of_stages.index(max(of_stages))
        around = self._around_stages(low, parts.layers, self._ends.of(low))[stage]
        gain = self._gain_of_cuts if in_chunks(low) else 1.0  # the passes around the stage are priced whole
        before_s, after_s = around.before_s / gain, around.after_s / gain + (around.end_s - around.after_s)
        found_s = 0.0
        if enough_s < inf and (kernels_s := self._alone.kernels_s(low, high, stage)) is not None:
            found_s = before_s + kernels_s + after_s
            if found_s >= enough_s or (low != high and found_s * MORE_ALONE < enough_s):
                return found_s
        return max(found_s, self._alone.step_s(low, high, stage, before_s=before_s, after_s=after_s) or 0.0)

    def of_passes(self, low: Decisions, high: Decisions) -> float:
        """Return a lower bound of the step seconds of the plans of ``between``, from passes that wait for each other.

        0 where that gives no bound (``stage_passes.py``). Kernels' waits for collectives are counted for a single plan:
        between two plans, rows may be cut into blocks of which one hides the collectives of the other.

        Raises:
            Infeasible: when a plan cannot be lowered, or the profile has not measured its work.
        """
        layout = low.layout
        if layout.pp == 1 or layout.subsequences > 1 or layout.schedule not in SCHEDULES:
            return 0.0
        plans = [(self._parts(low), low), (self._parts(high), high)] if high != low else [(self._parts(low), low)]
        stages, chunks = stages_of(low), []
        for stage in stages:
            of_plans = [_chunks(plan, stage, parts, waits=len(plans) == 1) for parts, plan in plans]
            chunks.append([least_chunk(each) for each in zip(*of_plans, strict=True)])
        pricer, sent = self._pricers.of(low), transfer_bytes(low, shape_of(low))
        hops = [PointToPoint(sent, stage, (stage + 1) % layout.pp) for stage in range(layout.pp)]
        blocks = self._ends.of(low)
        ends = [blocks.of_stage(stage, low.model.layer_kinds) for stage in stages]
        updated_s = max(end.updated_s for end in ends)
        return self._passes.step_s(
            layout,
            low.micro_batches,
            chunks,
            hops_s=[pricer.seconds(hop) for hop in hops],
            ends_s=[end.reduced_s + updated_s for end in ends],
        )

    def rough(self, decisions: Decisions, *, keep: Decisions | None, any_alpha: bool = False) -> LowerBound:
        """Return lower bounds that are cheap: from states, kept and swapped tensors, and ``keep``'s compute lane.

        - ``any_alpha``: bounds for all plans that swap at least as much; more swapped tokens leave less on the device.
        - ``keep``: the plan of the same layout that keeps everything (``beside_s``), or None when it is not known.

        Subsequences are priced one by one instead, because lowering hundreds of them takes seconds.

        Raises:
            Infeasible: when ``keep`` cannot be lowered, or the profile has not measured its work.
        """
        bound = self.memory(decisions, any_alpha=any_alpha)
        if self.shortfall_bytes(bound):
            return bound
        if decisions.layout.subsequences == 1:
            return bound if keep is None else replace(bound, step_s=self.beside_s(keep, [Policy.of(decisions)]))
        parts = self._of_parts(decisions)
        if decisions.layout.multiplexed or in_chunks(decisions):
            return replace(bound, step_s=self._shared_s(parts.whole, decisions.layout.pp))
        return replace(bound, step_s=self._step_s(decisions, parts))

    def of_layout(
        self, keep: Decisions, beside: Sequence[Policy], *, waits: bool = False, gathered: bool = True
    ) -> LowerBound:
        """Return lower bounds of all plans of a layout: from states, and from the time of ``keep`` (``beside_s``).

        - ``keep``: the plan of the layout that keeps everything, or one that has at least its states.
        - ``beside``: the policies of the layout's plans; none where the time of ``keep`` says nothing about theirs.
        - ``waits``, ``gathered``: see ``beside_s``.

        Raises:
            Infeasible: when ``keep`` cannot be lowered, or the profile has not measured its work.
        """
        device, host = self._states(keep)
        host *= self._local(keep)
        bound = LowerBound(0.0, max(device, self._before_w_passes(keep)), host, self._beside_bytes(keep))
        if not beside or self.shortfall_bytes(bound):
            return bound
        return replace(bound, step_s=self.beside_s(keep, beside, waits=waits, gathered=gathered))

    def of_steps(self, keep: Decisions, policies: Iterable[Policy]) -> LowerBound:
        """Return the bounds of ``of_layout`` where only the attention of the later steps of a ring is counted.

        Nothing is lowered. A stage with the most layers plays these calls in every layer of every micro-batch; they are
        alike (``short_rings.py``).

        - ``keep``: see ``beside_s``; a plan for which ``steps_repeat``.

        Raises:
            Infeasible: when the profile has not measured the attention.
        """
        bound = self.of_layout(keep, ())
        if keep.kernels.head_groups > 1 or self.shortfall_bytes(bound):
            return bound
        pricer = self._pricers.of(keep)
        ring_s = sum(pricer.seconds(work) for work in step_works(keep, shape_of(keep).attention))
        calls = keep.micro_batches * max(len(stage.layers) for stage in stages_of(keep)) * (keep.layout.cp - 1)
        gain = self._gain_of_cuts if any(policy.attention_chunks for policy in policies) else 1.0
        return replace(bound, step_s=calls * ring_s / gain * (1 - ROUNDING))

    def beside_s(
        self, keep: Decisions, policies: Iterable[Policy], *, waits: bool = False, gathered: bool = True
    ) -> float:
        """Return a lower bound of the step seconds of all plans with ``policies`` on the layout of ``keep``.

        - ``keep``: the plan that keeps everything, without subsequences.
        - ``waits``: whether collectives and waits count beside compute, which costs more.
        - ``gathered``: whether what ZeRO 3 gathers and reduces in a pass is among these. A pass without it is never
          longer, and layouts with another number of replicas have the same one.

        See ``beside_kept.py``.

        Raises:
            Infeasible: when ``keep`` cannot be lowered, or the profile has not measured its work.
        """
        # Only what ``of_one_pass`` leaves of this plan is lowered, so rules need not allow it.
        lowered = keep if gathered else replace(keep, layout=replace(keep.layout, zero=0, zero_ranks=0))
        parts = self._parts(lowered, self.passes.waited) if waits else self._computed_parts(keep)
        found_s, known_s = inf, dict[Change, float]()
        knows_waits = any(has_waits(each) for each in (parts.whole, *parts.layers))
        for policy in _at_any_alpha(tuple(policies)):
            gain = self._gain_of_cuts if policy.attention_chunks else 1.0
            changes = passes_beside(keep, policy, waits=knows_waits, gain_of_pieces=self._gain_of_pieces)
            if any(s / gain >= found_s and more.adds_to(less) for more in changes for less, s in known_s.items()):
                continue
            for change in changes:
                if change not in known_s:
                    layers = [change.of(each) for each in parts.layers]
                    known_s[change] = self._step_s(keep, _Parts(change.of(parts.whole), tuple(layers)))
            found_s = min(found_s, max(known_s[change] for change in changes) / gain)
        return found_s

    def unswapped_s(self, decisions: Decisions) -> float:
        """Return a lower bound of the step seconds of a plan that ``rebuilds_all``, with any number of swapped rows.

        It is that of the plan which swaps none. Swapping adds copies, of inputs between device and host and of rows
        that stay beside them. It leaves no kernel and no collective out: every backward rebuilds its layer, whether or
        not the layer's input is still in a rounding buffer (``Activations.resident_differs``).

        Raises:
            Infeasible: see ``of``.
        """
        whole = replace(decisions, swapped_tokens=0)
        parts = self._parts(whole)
        return self._step_s(whole, parts, self._ends.of(whole))

    def copied_s(self, decisions: Decisions) -> float:
        """Return a lower bound of the step seconds of a plan that swaps and recomputes nothing.

        No plan that swaps more rows is faster. Kernels and waits are those of the plan that keeps everything, which
        others of the layout share. What layers copy follows from their bytes, at the highest rate. 0 where copies need
        not end before other layers begin.

        Raises:
            Infeasible: when the plan that keeps everything cannot be lowered, or the profile has not measured its work.
        """
        if decisions.recompute != "none" or not _rounding(decisions):
            return 0.0
        keep = kept(decisions)
        parts, model = self._parts(keep, self.passes.waited), decisions.model
        host_bytes = dict[int, int]()
        for stage in _unlike_stages(decisions) or [_shortest_stage(decisions)]:
            numbers = [kind.number or 0 for kind in layers_by_kind(model, stage)]
            host_bytes |= zip(numbers, self._kept_in(decisions, stage).host, strict=True)
        rates = NodeRates(self._hardware, self._cluster, self._local(decisions))
        per_byte = {
            name: 1 / (max(copies.alone.y) * rates.rates(1 << lane)[lane])
            for name, copies, lane in (("out_s", self._hardware.d2h, Lane.D2H), ("in_s", self._hardware.h2d, Lane.H2D))
        }
        waits = any(has_waits(each) for each in (parts.whole, *parts.layers))
        change = passes_beside(keep, Policy.of(decisions), waits=waits, gain_of_pieces=self._gain_of_pieces)[-1]
        whole, layers = change.of(parts.whole), [change.of(each) for each in parts.layers]
        if decisions.layout.pp == 1:
            held = [host_bytes[kind] for kind in model.layer_kinds]
            total = sum(held) - ROUNDING_BUFFERS * max(held)
            whole = replace(whole, **{name: max(0, total) * each for name, each in per_byte.items()})
        else:
            layers = [
                replace(one, **{name: host_bytes[kind] * each for name, each in per_byte.items()})
                for kind, one in enumerate(layers)
            ]
        return self._step_s(decisions, _Parts(whole, tuple(layers)))

    def memory(self, decisions: Decisions, *, any_alpha: bool = False, eager_too: bool = False) -> LowerBound:
        """Return lower bounds of memory alone, from states, kept and swapped tensors; nothing is lowered or priced.

        - ``any_alpha``: bounds for all plans that swap at least as much.
        - ``eager_too``: an eager framework is assumed to need what the program needs. It may need a little less,
          so this is no bound, but an estimate.
        """
        counts_device = not any_alpha and (eager_too or decisions.memory_policy != "eager")
        if decisions.offload_window:
            device, host = self._in_window(decisions)
            device = device if counts_device else self._states(decisions)[0]
            return LowerBound(0.0, device, host, self._beside_bytes(decisions))
        device, host = self._states(decisions)
        waiting = self._before_w_passes(decisions)
        if counts_device:
            device = max(device + self._held_bytes(decisions), self._in_flight(decisions))
        swapped = self._swapped_bytes(decisions)
        host_per_node = (host + swapped) * self._local(decisions)
        return LowerBound(0.0, max(device, waiting), host_per_node, self._beside_bytes(decisions))

    def _before_w_passes(self, decisions: Decisions) -> int:
        """Return a lower bound of a device's bytes before the first W pass, under every policy; 0 where none is known.

        An eager framework may need a little less than the program.
        """
        waiting = [] if decisions.memory_policy == "eager" else waiting_bytes(decisions)
        if not waiting:
            return 0
        states, kinds = self._states_of_blocks(decisions), decisions.model.layer_kinds
        stages = zip(stages_of(decisions), waiting, strict=True)
        return max(more + states.of_stage(stage, kinds)[0] for stage, more in stages)

    def _in_window(self, decisions: Decisions) -> tuple[int, int]:
        """Return lower bounds with an offload window: of the fullest device's bytes, and of those of a node's host.

        A node's host serves all ranks on the node, and several stages where these have fewer ranks than the node.
        """
        kinds, layout = decisions.model.layer_kinds, decisions.layout
        states = self._states_of_blocks(decisions)
        window, device, host = WindowBytes(decisions), list[int](), list[int]()
        for stage in stages_of(decisions):
            on_device, on_host = states.of_stage(stage, kinds)
            device.append(on_device + window.device_bytes(stage.index))
            host.append(on_host + window.host_bytes(stage.index))
        ranks, of_nodes = layout.devices // layout.pp, Counter[int]()
        for rank in range(layout.devices):
            of_nodes[rank // self._cluster.devices_per_node] += host[rank // ranks]
        return max(device), max(of_nodes.values())

    def host_states_bytes(self, decisions: Decisions) -> int:
        """Return the bytes of one rank's states in host memory."""
        return self._states(decisions)[1]

    def of_few_layers(self, decisions: Decisions) -> float | None:
        """Return the step seconds of a plan if it fits, but for ``ROUNDING``; None where few layers do not tell."""
        return step_s_of_few_layers(decisions, self._hardware, self._cluster)

    def reach(self, decisions: Decisions, limit_s: float) -> bool:
        """Return whether the plan is known not to fit, or to take at least ``limit_s``."""
        if self.lack_host(decisions):
            return True
        bound = self.where_it_fits(decisions, decisions)
        if bound.step_s >= limit_s or self.shortfall_bytes(bound) > 0:
            return True
        if limit_s == inf or decisions.layout.pp == 1:  # without stages, one stage alone is the plan
            return False
        if self.of_passes(decisions, decisions) >= limit_s:
            return True
        return self.of_one_stage(decisions, decisions, limit_s) >= limit_s

    def lack_device(self, decisions: Decisions, *, lowered: bool = True) -> bool:
        """Return whether the plan is known to need more device memory than there is.

        Without ``lowered``, few layers are not lowered for it: of a plan without stages, all cost no more.
        """
        if self.exceeds_device(self.rough(decisions, keep=None)):
            return True
        if of_stage := self.of_fullest_stage(decisions):
            return of_stage.total > self.device_room_bytes
        return lowered and self.exceeds_device(self.memory_between(decisions, decisions))

    def exceeds_device(self, bound: LowerBound) -> bool:
        """Return whether plans with this bound need more device memory than there is."""
        return bound.device_bytes + bound.beside_bytes > self.device_room_bytes

    def with_shortage(self, bound: LowerBound, shortfall_bytes: int) -> LowerBound:
        """Return ``bound`` for plans that are short of so many bytes of a device at least, or of more on a host."""
        device_bytes = self.device_room_bytes + shortfall_bytes - bound.beside_bytes
        return replace(bound, device_bytes=device_bytes, host_bytes_per_node=0)

    def of_fullest_stage(self, decisions: Decisions) -> StageBytes | None:
        """Return a lower bound of a device's bytes, from stages that are likely to need most; None where none is known.

        The first stage is ahead of its first backward by most micro-batches. Zero-bubble's last one defers most W
        passes. Where stages differ, those that follow may have more layers. Once a stage does not fit, no other counts.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        if decisions.layout.pp == 1 or not stands_alone(decisions) or decisions.memory_policy != "planned":
            return None
        if decisions not in self._stage_bytes:
            found = list[StageBytes]()
            for stage in _fullest_stages(decisions):
                found.append(self._alone.device_bytes(decisions, stage))
                if found[-1].total > self.device_room_bytes:
                    break
            self._stage_bytes[decisions] = max(found, key=lambda one: one.total)
        return self._stage_bytes[decisions]

    def of_last_stage(self, decisions: Decisions) -> StageBytes | None:
        """Return the device bytes of a plan's last stage; None where that is no lower bound of what the plan needs.

        With subsequences, no stage is likely to need more: others hold what they are ahead by, the last one the head.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        if decisions.layout.pp == 1 or decisions.memory_policy != "planned":
            return None
        if decisions not in self._stage_bytes:
            self._stage_bytes[decisions] = self._alone.last_stage_bytes(decisions)
        return self._stage_bytes[decisions]

    def lack_host(self, decisions: Decisions) -> bool:
        """Return whether host memory is known to be too small for the states and what one micro-batch swaps."""
        if decisions.offload_window:
            return self._in_window(decisions)[1] > self.host_room_bytes
        host = self._states(decisions)[1] + self._swapped_bytes(decisions)
        return host * self._local(decisions) > self.host_room_bytes

    def _layers(self, decisions: Decisions, stage: Stage) -> list[Activations]:
        """Return the activations of one micro-batch on a stage: of every subsequence and kind.

        The first subsequence's come first.
        """
        shape = shape_of(decisions)
        return [
            Activations(decisions, part.shape.of_layer(kind.shape), 1, stage, kind, part)
            for part in subsequences_of(decisions, shape)
            for kind in layers_by_kind(decisions.model, stage)
        ]

    def _kept_in(self, decisions: Decisions, stage: Stage) -> _Kept:
        """Return what layers of the kinds of a stage keep in one micro-batch; stages and replicas share it."""
        numbers = tuple(kind.number for kind in layers_by_kind(decisions.model, stage))
        key = of_one_pass(decisions), decisions.memory_policy, numbers
        return self._known_kept.of(key, lambda: _Kept.of(self._layers(decisions, stage)))

    def _swapped_bytes(self, decisions: Decisions) -> int:
        """Return a lower bound of the bytes that one micro-batch of any stage swaps, without lowering anything.

        Where layers differ, a stage with more of them may swap less than a shortest one.
        """
        if decisions.layout.multiplexed:
            return 0
        stages = _unlike_stages(decisions) or [_shortest_stage(decisions)]
        return min(self._swapped_on(decisions, stage) for stage in stages)

    def _swapped_on(self, decisions: Decisions, stage: Stage) -> int:
        """Return a lower bound of the bytes that one micro-batch of a stage swaps.

        The layers in the rounding buffers stay, for all subsequences.
        """
        layer = self._kept_in(decisions, stage).host
        if decisions.host_allocator == "power_of_two":
            layer = tuple(1 << (size - 1).bit_length() if size else 0 for size in layer)
        return max(0, _in_all_layers(decisions, stage, layer) - ROUNDING_BUFFERS * max(layer))

    def _held_bytes(self, decisions: Decisions) -> int:
        """Return a lower bound of the bytes that a stage's layers hold on the device when a backward begins.

        It counts the rounding buffers and the layers' own buffers; some layers that use rounding buffers have no
        others. It does not count what an eager framework adds, nor layers that are recomputed differently.
        """
        if decisions.recompute_layers != ALL or decisions.layout.multiplexed:
            return 0
        stage = _shortest_stage(decisions)
        kept = self._kept_in(decisions, stage)
        rounding = ROUNDING_BUFFERS * max(kept.device) if kept.slots else 0
        return kept.slots + max(0, _in_all_layers(decisions, stage, kept.device) - rounding)

    def _local(self, decisions: Decisions) -> int:
        return min(self._cluster.devices_per_node, decisions.layout.devices)

    def _parts(
        self, decisions: Decisions, passes: Callable[[Decisions, Sequence[LayerShape]], Pass] | None = None
    ) -> _Parts:
        """Return the passes of the whole model or of its head, and of one more layer of each kind (``_Parts``).

        Layouts that differ only in stages and replicas share them; without stages, ZeRO 3 gathers in every pass.
        """
        of = passes or self.passes.of
        return self._known_parts.of((of.__name__, _alike(decisions)), lambda: self._found_parts(decisions, of))

    def _found_parts(self, decisions: Decisions, of: Callable[[Decisions, Sequence[LayerShape]], Pass]) -> _Parts:
        if decisions.recompute_layers != ALL and decisions.layout.pp > 1:
            # Stages whose layers are recomputed differently compute at least as much as those that keep everything.
            # Their waits are left out.
            decisions, of = kept(decisions), self.passes.computed
        model, layout = decisions.model, decisions.layout
        if layout.pp == 1:
            every = [model.layer(n) for n in range(model.layers)]
            whole, halves = of(decisions, every), self.passes.halves(decisions, every) if of == self.passes.of else None
            return _Parts(whole, (_times(whole, 0),), halves)
        some = [[of(decisions, [shape] * count) for count in ALONE] for shape in model.layer_shapes]
        each = tuple(_added(more, fewer, ALONE[1] - ALONE[0]) for fewer, more in some)
        if layout.multiplexed:
            return _Parts(of(decisions, [model.layer(n) for n in range(model.layers)]), each)
        return _Parts(_head_of(some[0][0]), each)

    def _computed_parts(self, decisions: Decisions) -> _Parts:
        """Return the compute lane of ``_parts``; ZeRO 3 changes none of it."""
        layout = decisions.layout
        alike = of_one_pass(decisions), layout.pp > 1, layout.multiplexed, layout.devices
        if alike not in self._computed:
            self._computed[alike] = self._found_parts(decisions, self.passes.computed)
        return self._computed[alike]

    def _held(self, decisions: Decisions) -> tuple[Held, float]:
        """Return what a stage with the fewest layers holds of one micro-batch, and the bytes of one more layer."""
        kinds, stage = decisions.model.layer_kinds, _shortest_stage(decisions)
        key = _alike(decisions), decisions.layout.virtual_stages == 1, tuple(kinds[layer] for layer in stage.layers)
        return self._known_held.of(key, lambda: self._found_held(decisions))

    def _found_held(self, decisions: Decisions) -> tuple[Held, float]:
        """Return what ``_held`` does.

        Of layers that are recomputed differently, each holds its input at least, and a group of N layers one. A stage
        without chunks then holds what its layers alone hold.
        """
        model, layout = decisions.model, decisions.layout
        if layout.pp == 1:
            return self.passes.held(decisions, [model.layer(n) for n in range(model.layers)]), 0.0
        layers = [model.layer(n) for n in _shortest_stage(decisions).layers]
        if decisions.recompute_layers == ALL:
            some = [[self.passes.held(decisions, [each] * count) for count in ALONE] for each in model.layer_shapes]
            added = min((more.device_bytes - fewer.device_bytes) / (ALONE[1] - ALONE[0]) for fewer, more in some)
            return self.passes.held(decisions, layers), added
        activations = self._layers(decisions, _shortest_stage(decisions))
        kinds = {each.layers.number for each in activations}
        of_kinds = [[a for a in activations if a.layers.number == number] for number in kinds]
        kept_bytes = min(sum(f.bytes for each in parts for f in each.families()) for parts in of_kinds)
        group = int(decisions.recompute_layers.rpartition("-")[2]) if in_groups(decisions) else 1
        device = self.passes.held(decisions, layers).device_bytes if layout.virtual_stages == 1 else 0
        return Held(device, 0), kept_bytes / group

    def _of_parts(self, decisions: Decisions) -> _Parts:
        """Return the time of the kernels of all subsequences, and of one layer; what joins subsequences is left out.

        When rows are cut into blocks, collectives are cut too. Collectives and waits are then left out.
        """
        in_blocks = decisions.recompute == "tokenwise" or decisions.mlp_chunk_tokens > 0
        of_kinds = [self._prices.parts(decisions, kind) for kind in range(len(decisions.model.layer_shapes))]
        each = tuple(_of_subsequences(parts, in_blocks=in_blocks) for parts in of_kinds)
        layers = _sum([each[kind] for kind in decisions.model.layer_kinds])
        head_s = sum(part.head_compute_s for part in of_kinds[0])
        whole = replace(layers, compute_s=layers.compute_s + head_s, head_s=head_s)
        return _Parts(whole, each)

    def _beside_bytes(self, decisions: Decisions) -> int:
        """Return a lower bound of what communicators take on a device, less what the profile reserves for them."""
        if decisions.memory_policy != "planned":  # an eager framework makes others
            return 0
        layout = decisions.layout
        if layout not in self._beside:
            reserve = reserve_with(least_communicators(layout), self._hardware)
            self._beside[layout] = sum(reserve.values()) - self._reserve_bytes
        return self._beside[layout]

    def _in_flight(self, decisions: Decisions) -> int:
        """Return what a stage's device holds: its states, and what lives from pass to pass (``in_flight_bytes.py``).

        It holds for plans that swap no more. 0 where nothing is known.
        """
        if decisions not in self._in_flight_bytes:
            states, kinds = self._states_of_blocks(decisions), decisions.model.layer_kinds
            held = self._held_in_flight(decisions)
            of_stages = (states.of_stage(stages_of(decisions)[at], kinds)[0] + more for at, more in held.items())
            self._in_flight_bytes[decisions] = max(of_stages, default=0)
        return self._in_flight_bytes[decisions]

    def _held_in_flight(self, decisions: Decisions) -> dict[int, int]:
        """Return what lives from pass to pass on a stage's device, by stage; nothing where it is not known."""
        if not order_tells(decisions):
            return {}
        key = of_one_pass(decisions), decisions.layout.schedule == "zero-bubble"
        return in_flight_bytes(decisions, self._known_layers.of(key, lambda: bytes_of_layers(decisions)))

    def _written_over_bytes(self, decisions: Decisions) -> int:
        """Return the bytes of a pass's logit gradient, when an eager framework writes it over the logits."""
        if decisions.memory_policy != "eager" or decisions.loss != "auto":
            return 0
        if not fused_loss(libraries_of(decisions, self._hardware)):
            return 0
        shape = shape_of(decisions)
        rows = min(decisions.loss_chunk_tokens or shape.tokens, shape.tokens)
        return rows * shape.vocab * DTYPE_BYTES[decisions.dtype]

    def _step_s(self, decisions: Decisions, parts: _Parts, ends: BlockEnds | None = None) -> float:
        """Return a lower bound of the step seconds.

        ``ends``: the end of the step, by kind, where it is counted.
        """
        whole = parts.whole
        if decisions.layout.pp == 1:
            # The layers that stay in a rounding buffer are not among the copies of a whole model.
            pass_s = max(self._busy_s(whole), _with_copies_s(whole) if _rounding(decisions) else 0.0)
            if parts.halves:
                pass_s = max(pass_s, self._of_halves_s(parts.halves))
            passes_s = pass_s * decisions.micro_batches
            if ends is None:
                return passes_s
            (stage,) = stages_of(decisions)
            end = ends.of_stage(stage, decisions.model.layer_kinds)
            passes_s = max(passes_s, whole.compute_s * decisions.micro_batches + end.zeroed_s)
            return passes_s + end.reduced_s + end.updated_s
        return max(self._of_stages(decisions, whole, parts.layers, ends))

    def _of_stages(
        self, decisions: Decisions, whole: Pass, layers: Sequence[Pass], ends: BlockEnds | None
    ) -> list[float]:
        """Return the lower bound of the step seconds that each of several stages gives."""
        times, kinds, rounding = decisions.micro_batches, decisions.model.layer_kinds, _rounding(decisions)
        of = {number: layers[kind if len(layers) > 1 else 0] for number, kind in enumerate(kinds)}
        owns, found = dict[Hashable, Pass](), list[float]()
        for stage, around in zip(stages_of(decisions), self._around_stages(decisions, layers, ends), strict=True):
            resident = _most_resident(decisions, stage)
            held = tuple(kinds[layer] for layer in stage.layers) if len(layers) > 1 else len(stage.layers)
            alike = (held, resident, stage.last)
            if alike not in owns:
                owns[alike] = _own(stage, [of[layer] for layer in stage.layers], resident, whole)
            own = owns[alike]
            own_s = times * self._busy_s(own)
            if rounding:
                runs = [[of[layer] for layer in run] for run in stage.runs]
                own_s = max(own_s, times * own.compute_s + _waits_for_copies_s(decisions, stage, runs))
            found.append(around.before_s + own_s + around.end_s)
        return found

    def _around_stages(self, decisions: Decisions, layers: Sequence[Pass], ends: BlockEnds | None) -> list[_Around]:
        """Return lower bounds of what each stage waits for before its first pass and after its last one.

        A stage waits for the stages before it: for their first chunk's forward before its first pass, and for that
        chunk's backward after its last one. The chunks are those of one subsequence: the first one both comes first in
        forward and leaves last in backward. Updates wait for the gradients of all stages (``step_ends.py``).
        """
        kinds = decisions.model.layer_kinds
        forward_s = [one.first_forward_s for one in layers]
        # A backward ends with the kernel that makes the gradient which leaves. Before its own gradient arrives it
        # recomputes, with METP also the MLP's first rows. Zero-bubble's last W passes fill the wait. The first layer is
        # left out as a margin.
        backward_s = [0.0] * len(layers)
        if decisions.layout.schedule != "zero-bubble":
            twice = decisions.layout.metp > 1
            early_s = [one.first_rebuild_s + (one.first_forward_s if twice else 0.0) for one in layers]
            all_s = (one.first_compute_s - one.first_forward_s for one in layers)
            backward_s = [max(0.0, each_s - before_s) for each_s, before_s in zip(all_s, early_s, strict=True)]
        found: list[_Around] = []
        stages, before_s, after_s = stages_of(decisions), 0.0, 0.0
        of_stages = [ends.of_stage(stage, kinds) if ends else NO_END for stage in stages]
        updated_s = max(end.updated_s for end in of_stages)
        for stage, end in zip(stages, of_stages, strict=True):
            reduced_s = max(after_s + of_stages[0].reduced_s, end.reduced_s)
            found.append(_Around(before_s, after_s, reduced_s + updated_s))
            for layer in stage.runs[0]:
                kind = kinds[layer] if len(layers) > 1 else 0
                before_s += forward_s[kind]
                after_s += backward_s[kind] if layer else 0.0
        return found

    @cached_property
    def _gain_of_pieces(self) -> float:
        """By how much two collectives of some rows each are faster at most than one of all rows.

        Inside a node, some measured rates are higher with fewer bytes; across nodes, none is (``costs/network.py``).
        """
        return max([1.0, *(_most_fall(table.bus_bytes_per_s.y) for table in self._hardware.collectives)])

    def _shared_s(self, whole: Pass, stages: int) -> float:
        """Return a lower bound of the compute seconds of stages that share rows or attention chunks, cut anywhere."""
        return whole.compute_s / stages / self._gain_of_cuts

    @cached_property
    def _gain_of_cuts(self) -> float:
        """By how much cuts shorten attention at most: of a masked square they make smaller squares and a rectangle."""
        return max((1.0, *(table.most_gain for table in self._hardware.attention)))

    def _busy_s(self, one: Pass) -> float:
        """Return a lower bound of the seconds that compute is busy or waits in one pass."""
        slowed_s = self._slowed_s(one.compute_s, one.idle_s, one)
        return max(slowed_s, one.copy_s, one.collective_s, one.p2p_s)

    def _of_halves_s(self, halves: Halves) -> float:
        """Return a lower bound of the seconds of one pass, whose forward and backward come one after the other."""
        found = halves.outside_s
        for half in (halves.forward, halves.backward):
            slowed_s = self._slowed_s(half.kept_s + half.rebuild_s, half.idle_s, half)
            found += max(slowed_s, half.copy_s + half.around_s, half.collective_s, half.p2p_s)
        return found

    def _slowed_s(self, kernels_s: float, idle_s: float, beside: Pass | Half) -> float:
        """Return W + I + the sum of c (B - I) over the lanes that are busy for longer than compute waits.

        Compute at a rate of 1 - a beside one lane and of 1 - b beside another one has that of (1 - a) (1 - b) beside
        both, so at least ``a + (1 - a) b`` is lost: c is a for the lane that slows it most, and (1 - a) b for the next.
        """
        lost = [((1 - rate) * (getattr(beside, name) - idle_s), rate) for name, rate in self._slowed.items()]
        found, left = kernels_s + idle_s, 1.0
        for seconds, rate in sorted(lost, reverse=True):
            if seconds > 0.0:
                found += left * seconds
                left *= rate
        return found

    def _states(self, decisions: Decisions) -> tuple[int, int]:
        """Return the bytes of one rank's parameters, gradients and optimizer states: on the device, and on the host.

        With pipeline stages, only those of layers, on the stage that has the least of them.
        """
        model, layout = decisions.model, decisions.layout
        states = self._states_of_blocks(decisions)
        each, of = states.layers, model.layer_kinds
        device, host = _added_bytes(states.first, states.last) if layout.pp == 1 else (0, 0)
        if layout.pp == 1 or len(each) == 1:
            fewest = model.layers if layout.pp == 1 else len(_shortest_stage(decisions).layers)
            stages = {of if len(each) > 1 else (0,) * fewest}
        else:
            stages = {tuple(of[n] for n in stage.layers) for stage in stages_of(decisions)}
        held = (tuple(sum(each[kind][memory] for kind in kinds) for memory in (0, 1)) for kinds in stages)
        some_device, some_host = (min(some) for some in zip(*held, strict=True))
        return device + some_device, host + some_host

    def _states_of_blocks(self, decisions: Decisions) -> _States:
        """Return the states of the blocks of parameters that stages hold."""
        model, layout, adapters = decisions.model, decisions.layout, decisions.lora
        alike = decisions
        if decisions.fp8 == "none":
            # Neither the split into stages nor their order, nor what happens to activations changes a block's states.
            one_split = {"pp": min(2, layout.pp), "pp_layers": (), "schedule": "1f1b", "virtual_stages": 1}
            layout = replace(layout, subsequences=1, multiplexed=False, **one_split)
            alike = replace(decisions, layout=layout, **KEPT)
        if alike in self._blocks:
            return self._blocks[alike]
        absent = absent_states(decisions)
        embed, head = (block(model, layout.tp, adapters=adapters) for block in (embed_block, head_block))
        first = _states_bytes(Optimizer(decisions, embed, BlockKind.EMBED, 1), absent)
        last = _states_bytes(Optimizer(decisions, head, BlockKind.HEAD, 1), absent)
        if layout.pp > 1 and model.tied_embeddings:  # the last stage classifies with it, and has no positions
            again = embed_block(model, layout.tp, positions=False, adapters=adapters)
            last = _added_bytes(last, _states_bytes(Optimizer(decisions, again, BlockKind.EMBED, 1), absent))
        layers = []
        for shape in model.layer_shapes:
            block = layer_block(model, layout.divided, shape, ep=layout.ep, adapters=adapters)
            layers.append(_states_bytes(Optimizer(decisions, block, BlockKind.LAYER, 1), absent))
            experts = experts_block(model, layout.expert_divided, layout.ep, shape.experts, adapters)
            if experts is not None:
                more = _states_bytes(Optimizer(decisions, experts, BlockKind.EXPERTS, 1), absent)
                layers[-1] = _added_bytes(layers[-1], more)
        self._blocks[alike] = _States(layers, first, last)
        return self._blocks[alike]


def _of_subsequences(parts: Sequence[PartTimes], *, in_blocks: bool) -> Pass:
    """Return the pass of all subsequences through one layer; ``in_blocks``: without collectives and waits for them."""
    times_s = {
        "compute_s": sum(part.forward_compute_s + part.backward_compute_s for part in parts),
        "forward_s": sum(part.forward_compute_s for part in parts),
        "first_forward_s": parts[0].forward_compute_s,
        "first_compute_s": parts[0].forward_compute_s + parts[0].backward_compute_s,
    }
    if not in_blocks:
        times_s["idle_s"] = sum(part.idle_s for part in parts)
        times_s["collective_s"] = sum(part.collective_s for part in parts)
    return Pass(**{name: times_s.get(name, 0.0) for name in Pass.__struct_fields__})


@lru_cache(maxsize=64)
def _at_any_alpha(policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
    """Return the policies without what they say of alpha; thousands of layouts have the same."""
    return tuple(dict.fromkeys(dataclasses.replace(policy, alpha=None, hides=False) for policy in policies))


def rebuilds_all(decisions: Decisions) -> bool:
    """Return whether backward rebuilds every layer from its input, swapped or not, with no other buffers (``full``)."""
    own = decisions.recompute in REBUILT_FROM_SHARED and decisions.recompute_layers == ALL
    return own and not decisions.rounding_buffers and decisions.layout.subsequences == 1 and decisions.modules == "auto"


def _added_bytes(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return first[0] + second[0], first[1] + second[1]


def _states_bytes(optimizer: Optimizer, absent: frozenset[FamilyKind]) -> tuple[int, int]:
    """Return the bytes of a block's states on the device, without those that are absent there, and on the host."""
    families = optimizer.families()
    device = sum(f.bytes * f.count for f in families if f.space == "device" and f.kind not in absent)
    return device, sum(f.bytes * f.count for f in families if f.space == "host")


def _shortest_stage(decisions: Decisions) -> Stage:
    """Return the first pipeline stage with the fewest layers."""
    return min(stages_of(decisions), key=lambda stage: len(stage.layers))


def _alike(decisions: Decisions) -> Hashable:
    """Return what passes depend on: layouts that differ only in stages and replicas have the same."""
    layout, same = decisions.layout, decisions if gathers(decisions) else of_one_pass(decisions)
    return same, layout.pp > 1, layout.multiplexed, layout.devices


def _unlike_stages(decisions: Decisions) -> list[Stage]:
    """Return a stage with each of the lists of layer kinds that stages have; empty where all layers are alike."""
    kinds = decisions.model.layer_kinds
    if decisions.layout.pp == 1 or len(decisions.model.layer_shapes) == 1:
        return []
    return list({tuple(kinds[n] for n in stage.layers): stage for stage in stages_of(decisions)}.values())


def _fullest_stages(decisions: Decisions) -> list[int]:
    """Return the indices of the stages that are likely to need most memory, the likeliest first."""
    stages = stages_of(decisions)
    most = max(len(stage.layers) for stage in stages)
    longest = [stage.index for stage in stages if len(stage.layers) == most]
    ends = [longest[0], 0]
    if decisions.layout.schedule == "zero-bubble":
        ends = [longest[-1], len(stages) - 1, *ends]
    return list(dict.fromkeys(ends))


def _in_all_layers(decisions: Decisions, stage: Stage, layer: Sequence[int]) -> int:
    """Return the bytes in all layers of a stage; ``layer``: in one of each kind, of one subsequence after the other."""
    counts = [len(kind.layers) for kind in layers_by_kind(decisions.model, stage)]
    return sum(count * size for count, size in zip(cycle(counts), layer, strict=False))


def _most_resident(decisions: Decisions, stage: Stage) -> int:
    """Return how many layers of a stage's pass may find all their activations in a rounding buffer, at most.

    Their backward follows before other layers write the two buffers. On stages before the last, other micro-batches
    are played between a forward and its backward, where there are others. With an offload window, what stays is not
    a matter of rounding buffers.
    """
    swaps = decisions.swapped_tokens > 0 or decisions.recompute == "tokenwise" or decisions.rounding_buffers
    if not swaps or decisions.offload_window:
        return 0
    several = decisions.micro_batches > 1 and min(len(run) for run in stage.runs) >= ROUNDING_BUFFERS
    alone = stage.last or decisions.layout.schedule == "gpipe" or not several
    return min(len(stage.layers), ROUNDING_BUFFERS * stage.chunks) if alone else 0


def _chunks(decisions: Decisions, stage: Stage, parts: _Parts, *, waits: bool) -> list[ChunkSeconds]:
    """Return lower bounds of the passes of a stage's chunks; ``waits``: with kernels' waits for collectives.

    Before the gradient of its output arrives, a backward recomputes, with METP also the MLP's first rows.
    """
    kinds, resident = decisions.model.layer_kinds, _most_resident(decisions, stage)
    found = []
    for number, run in enumerate(stage.runs):
        layers = [parts.layers[kinds[layer] if len(parts.layers) > 1 else 0] for layer in run]
        one = _sum(layers)
        head_s = parts.whole.head_s if stage.last and number == stage.chunks - 1 else 0.0
        rebuild_s = one.rebuild_s - _most([each.rebuild_s for each in layers], resident)
        from_gradient_s = one.compute_s - one.forward_s - one.rebuild_s
        early_s = one.forward_s if decisions.layout.metp > 1 else 0.0
        forward_idle_s, idle_s = (one.forward_idle_s, one.backward_idle_s) if waits else (0.0, 0.0)
        # The waits of recomputing kernels are not told apart. They may be over before the gradient arrives.
        late_s = 0.0 if early_s or one.rebuild_s else idle_s
        found.append(
            ChunkSeconds(
                forward_s=one.forward_s + forward_idle_s + head_s,
                backward_s=from_gradient_s + rebuild_s + (late_s if resident else idle_s),
                from_gradient_s=from_gradient_s - early_s + late_s,
            )
        )
    return found


def _rounding(decisions: Decisions) -> bool:
    """Return whether a layer's copies have to end before other layers write its rounding buffer in the same pass."""
    swaps = decisions.recompute == "tokenwise" or (decisions.recompute == "none" and decisions.swapped_tokens > 0)
    plain = decisions.layout.subsequences == 1 and decisions.modules == "auto" and not in_chunks(decisions)
    return swaps and plain and not decisions.offload_window and decisions.recompute_layers == ALL


def _own(stage: Stage, layers: Sequence[Pass], resident: int, whole: Pass) -> Pass:
    """Return a lower bound of the pass of one micro-batch on a stage; ``whole``: the whole model, with the head."""
    own = _sum(layers)
    if resident:
        own = _with_resident(own, layers, resident)
    return replace(own, compute_s=own.compute_s + whole.head_s, head_s=whole.head_s) if stage.last else own


def _waits_for_copies_s(decisions: Decisions, stage: Stage, runs: Sequence[Sequence[Pass]]) -> float:
    """Return a lower bound of the seconds that a stage's kernels wait for copies; ``runs``: the layers of each chunk.

    Within one pass, all copies of a forward but those of the last two layers leave, and all of a backward but the first
    two come back. Where a forward is followed by the backward of another micro-batch, which finds nothing in the two
    rounding buffers, rows come back when those of the forward's last layers have left:

        compute   [F of n layers        ][B: layer 1 ][layers 2 to n      ]
        to host      [ n - 1 layers at least ]
        from host                            [ all but two layers    ]
    """
    layout, times = decisions.layout, decisions.micro_batches
    waits_s = 0.0
    for run in runs:
        out_s, in_s = (_least([getattr(each, name) for each in run], 2) for name in ("out_s", "in_s"))
        forward_s, backward_s = sum(each.forward_s for each in run), sum(each.backward_s for each in run)
        waits_s += times * (max(0.0, out_s - forward_s) + max(0.0, in_s - backward_s))
    if layout.schedule not in {"1f1b", "interleaved"} or _most_resident(decisions, stage):
        return waits_s
    later, chunks = layout.pp - 1 - stage.index, stage.chunks
    warmup = later if layout.schedule == "1f1b" else 2 * later + (chunks - 1) * layout.pp
    pairs = max(0, times * chunks - warmup)
    out_s, back_s, in_s = (
        min(_least([getattr(each, name) for each in run], count) for run in runs)
        for name, count in (("out_s", 1), ("backward_s", 1), ("in_s", 2))
    )
    forward_s = min(sum(each.forward_s for each in run) for run in runs)
    pair_s = max(out_s + in_s, out_s + back_s, forward_s + in_s)
    return max(waits_s, pairs * (pair_s - max(sum(each.compute_s for each in run) for run in runs)))


def _least(values: Sequence[float], without: int) -> float:
    """Return the sum of all values but the ``without`` largest."""
    return sum(values) - _most(values, without)


def _with_copies_s(one: Pass) -> float:
    """Return a lower bound of the seconds of a forward and a backward that wait for copies.

    A layer writes the rounding buffer of the second layer before it, whose rows have left by then. So the copies of all
    layers but the last two are played within the forward. In backward, rows come back into a buffer when the second
    layer after it has been there, so within the backward.
    """
    return one.compute_s + max(0.0, one.out_s - one.forward_s) + max(0.0, one.in_s - one.backward_s)


def _with_resident(stage: Pass, layers: Sequence[Pass], resident: int) -> Pass:
    """Return a stage's pass where ``resident`` of its layers copy and recompute nothing; lower bounds of each."""
    kept = replace(stage, compute_s=stage.compute_s - _most([each.rebuild_s for each in layers], resident))
    lanes = ("idle_s", "out_s", "in_s", "collective_s", "p2p_s")
    less = {lane: getattr(stage, lane) - _most([getattr(each, lane) for each in layers], resident) for lane in lanes}
    return replace(kept, **less)


def _most(values: Sequence[float], count: int) -> float:
    """Return the sum of the ``count`` largest values."""
    return sum(sorted(values, reverse=True)[:count])


def _sum(passes: Sequence[Pass]) -> Pass:
    """Return the pass of layers one after the other; layers of a kind share one pass."""
    kinds = {id(each): each for each in passes}
    counts = [(astuple(kinds[key]), count) for key, count in Counter(map(id, passes)).items()]
    if len(counts) == 1:
        ((seconds, count),) = counts
        return Pass(*(count * each for each in seconds))
    return Pass(*(sum(count * each[at] for each, count in counts) for at in range(len(Pass.__struct_fields__))))


def _added(more: Pass, fewer: Pass, layers: int) -> Pass:
    """Return the pass of one layer, from two passes of which one has ``layers`` more; zero when there are none."""
    pairs = zip(astuple(more), astuple(fewer), strict=True)
    return Pass(*((a - b) / max(1, layers) for a, b in pairs))


def _head_of(one: Pass) -> Pass:
    """Return the pass of a model's head alone."""
    return replace(_times(one, 0), compute_s=one.head_s, head_s=one.head_s)


def _times(one: Pass, layers: int) -> Pass:
    """Return the pass of ``layers`` equal layers."""
    return Pass(*(layers * each for each in astuple(one)))


def _most_fall(rates: Sequence[float]) -> float:
    """Return the largest ratio of a rate to a later one."""
    return max(rate / min(rates[at:]) for at, rate in enumerate(rates))


def _either(first: Pass, second: Pass) -> Pass:
    """Return a lower bound of both passes, with the recompute of the one that recomputes less; copies are not exact."""
    least = Pass(*map(min, astuple(first), astuple(second)))
    kept_s = min(first.compute_s - first.rebuild_s, second.compute_s - second.rebuild_s)
    return replace(least, compute_s=kept_s + least.rebuild_s)


def _either_halves(first: Halves | None, second: Halves | None) -> Halves | None:
    """Return halves that are no longer than those of either plan, or of plans between; None where one's are not known.

    Which kernels come before and after copies differs between plans.
    """
    if first is None or second is None:
        return None
    forward, backward = (
        Half(*map(min, astuple(a), astuple(b)))
        for a, b in ((first.forward, second.forward), (first.backward, second.backward))
    )
    return Halves(
        replace(forward, around_s=0.0), replace(backward, around_s=0.0), min(first.outside_s, second.outside_s)
    )
