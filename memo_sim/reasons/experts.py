"""What experts cost: the weights that a token uses, the products of all experts, and an uneven load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memo_sim.contract.experts import Experts
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import format_bytes, format_seconds
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.question import Question
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.work import Collective, GroupedGemm
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layers.rowwise import of_a_block
from memo_sim.program.layout.expert_load import (
    BALANCED,
    capacity_rows,
    received_rows,
    received_sizes,
    rows_of,
    shown_load,
    sizes_of,
)
from memo_sim.program.layout.rank_order import EP
from memo_sim.program.layout.rowwise_blocks import is_rowwise, routed_at_once, routed_unit
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.subsequence import subsequences_of

UNITS = ((1e9, " billion"), (1e6, " million"), (1.0, ""))


def active_weights(model: Model) -> str:
    """Return how many of the model's parameters one token uses."""
    size, unit = next((size, unit) for size, unit in UNITS if model.active_params >= size)
    return f"{_digits(model.active_params / size)} of {_digits(model.total_params / size)}{unit} parameters"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 1_000 else f"{value:,.0f}"


def experts(question: Question, simulation: Simulation) -> list[str]:
    """Say how long the experts' products take, and how much of that an uneven load costs."""
    decisions, of = simulation.decisions, simulation.decisions.model.mixture
    if of is None:
        return []
    layout, rows = decisions.layout, routed_at_once(decisions)[0] * of.per_token
    pricer = Pricer(question.hardware, question.cluster, decisions.layout, rowwise=decisions.kernels.rowwise)
    taken, even = 0.0, 0.0
    for stage in simulation.stages:
        products = stage.per_instruction(lambda i: float(isinstance(i.work, GroupedGemm)))
        alike = stage.per_instruction(lambda i: _balanced_s(i, decisions, pricer))
        own, others = (float(np.sum(each * stage.weights)) for each in (stage.seconds * products, alike))
        taken, even = max((taken, even), (own, others))
    chosen = f"{of.per_token} of {of.count}" + (" and a shared one" if of.shared else "")
    text = f"Experts: a token goes to {chosen}, and uses {active_weights(decisions.model)}, which"
    text += f" MFU counts. The products of all experts take {format_seconds(taken)} of a rank's step."
    if layout.ep > 1:
        return [f"{text} {_divided(simulation, of, rows, taken - even)}"]
    if decisions.expert_load == BALANCED:
        unit = "" if (part := routed_unit(decisions)) == "layer" else f" of a {part}"
        even_rows = f"{rows / of.count:,.0f} rows{unit}"
        return [f"{text} Every expert is assumed to get {even_rows}; --expert-load says otherwise."]
    most = rows_of(of, rows, decisions.expert_load)[0]
    text += f" With a load {shown_load(decisions.expert_load)} the fullest expert gets {most:,} of {rows:,} rows"
    text += f" ({most * of.count / rows:.1f} times the mean): the products take {format_seconds(abs(taken - even))}"
    return [f"{text} {'longer' if taken >= even else 'less'} than with balanced experts, and memory is the same."]


def _divided(simulation: Simulation, of: Experts, rows: int, more_s: float) -> str:
    """Say what expert parallelism exchanges, and what an uneven load and the capacity cost.

    ``rows``: those of one rank that are dispatched at once, of a layer, of a subsequence or of a row block.
    """
    decisions, ep = simulation.decisions, simulation.decisions.layout.ep
    layer = next(each for each in decisions.model.layer_shapes if each.experts)
    load = decisions.expert_load
    unit = "row block" if is_rowwise(decisions) else routed_unit(decisions)
    shape = max((each.shape for each in subsequences_of(decisions, shape_of(decisions))), key=lambda s: s.tokens)
    if is_rowwise(decisions):
        shape = of_a_block(decisions, shape)
    received = received_rows(of, rows, load, ep, shape.of_layer(layer).pair_rows)
    capacity = shape.of_layer(layer).expert_rows
    what = {"row block": "a block's tensors"}.get(unit, f"a {unit}'s kept tensors")
    moved = [float(np.sum(s.per_instruction(_exchanged_bytes) * s.weights)) for s in simulation.stages]
    waited = sum(
        s.seconds for s in simulation.prediction.stalls if (s.lane, s.waits_for) == ("compute", "experts.all_to_all")
    )
    text = (
        f"{ep} ranks divide them: a rank sends {format_bytes(int(max(moved)))} a step in all-to-alls of the capacity,"
    )
    text += f" for which compute waits {format_seconds(waited)}. Under the {load} load the fullest rank gets"
    text += f" {received:,} rows of a {unit}, {received / rows:.2f} times the mean of {rows:,}, and the others wait for"
    text += f" it: its products take {format_seconds(abs(more_s))} {'longer' if more_s >= 0 else 'less'} than balanced"
    text += f" ones. Buffers have places for {capacity:,} rows, {capacity / rows:.2f} times the mean:"
    tensors = skeletal_of(decisions, shape, layer)
    size = sum(t.bytes for t in tensors if t.tokens == capacity) * (1 - rows / capacity)
    return f"{text} {format_bytes(int(size))} more of {what} (--expert-capacity)."


def _exchanged_bytes(instruction: Instruction) -> float:
    """Return the bytes that a rank sends to the ranks that divide its experts."""
    work = instruction.work
    return float(work.bytes) if isinstance(work, Collective) and work.group == EP else 0.0


def _balanced_s(instruction: Instruction, decisions: Decisions, pricer: Pricer) -> float:
    """Return the seconds of the experts' product if every expert had equally many rows; 0 for other ops."""
    work, of, ep = instruction.work, decisions.model.mixture, decisions.layout.ep
    if of is None or not isinstance(work, GroupedGemm):
        return 0.0
    operand = next(operand for operand in instruction.operands if operand.role in ("x", "grad"))
    parts = [tokens * of.per_token for tokens in set(routed_at_once(decisions))]
    if ep == 1:
        rows = next((each for each in parts if each == operand.tokens), parts[0])
        sizes = sizes_of(of, rows, BALANCED, operand.first, work.rows)
    else:
        given, load = decisions.expert_capacity, decisions.expert_load
        rooms = {ep * capacity_rows(of, each, load, ep, given): each for each in parts}
        rows = rooms.get(operand.tokens, parts[0])
        sizes = received_sizes(of, rows, BALANCED, ep, rows, operand.first, operand.tokens)
    return pricer.seconds(replace(work, sizes=sizes))
