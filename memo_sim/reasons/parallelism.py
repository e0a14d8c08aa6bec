"""Says what parallelism costs a step: pipeline stages, ZeRO, Ulysses, and tensor parallelism in chunks."""

from __future__ import annotations

from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.question import Question
from memo_sim.program.layout.rank_order import ENDS, degree

FSDP = {"fsdp1": " as torch's FSDP1 has it (--sharding fsdp1)", "fsdp2": " as torch's FSDP2 has it (--sharding fsdp2)"}
"""Whose ZeRO it is, if it is not memo-exec's."""


def pipeline(simulation: Simulation) -> list[str]:
    """Say what pipeline stages send to each other, how unequal they are, and whether the step time is exact."""
    layout, count = simulation.decisions.layout, simulation.decisions.micro_batches
    if layout.pp == 1:
        return []
    compute_s = [stage.compute_s for stage in simulation.stages]
    sent = format_bytes(max(stage.sent_bytes for stage in simulation.stages))
    text = (
        f"{layout.pp} pipeline stages run {counted(count, 'micro-batch', 'es')} with the {layout.schedule} schedule; a "
        f"rank sends at most {sent} per step to other stages, and the slowest stage computes "
        f"{format_percent(max(compute_s) / min(compute_s) - 1)} longer than the fastest"
    )
    if not simulation.steady:
        played = simulation.program.micro_batches
        text += f". {played} micro-batches reach no steady state: the step time assumes the slowest stage's pace"
    return [f"{text}."]


def sharding(question: Question, simulation: Simulation) -> list[str]:
    """Say how many bytes ZeRO 2 and 3 gather and reduce, and how long compute waits for that."""
    layout, moved = simulation.decisions.layout, simulation.collective_bytes
    if layout.zero < 2:
        asked = FSDP.get(question.pins.sharding or "")
        return [f"ZeRO 2 and 3 are not used here, so nothing is{asked}."] if asked else []
    if degree(ENDS, layout) == 1:
        return [f"ZeRO {layout.zero} has no effect here: no two ranks hold the same parameters."]
    held = "gradients" if layout.zero == 2 else "gradients and parameters"
    if layout.replicas == 1:
        held += " of embedding and head, which METP replicates"
    if simulation.decisions.zero_params == "cast":
        held += ", the latter in fp32, cast for every gather (--zero-params cast)"
    names = {
        "params.all_gather": "gathers {}",
        "grads.reduce_scatter": "reduce-scatters {}",
        "shards.all_reduce": "all-reduces {} between groups",
    }
    over = f" over groups of {layout.shards} ranks" if "shards.all_reduce" in moved else ""
    *others, last = [text.format(format_bytes(moved[op])) for op, text in names.items() if op in moved]
    does = f"{', '.join(others)} and {last}" if others else last
    waited = sum(s.seconds for s in simulation.prediction.stalls if s.lane == "compute" and s.waits_for in names)
    whose = FSDP.get(simulation.decisions.sharding, "")
    text = f"ZeRO {layout.zero}{over}{whose}: a rank holds a shard of {held}; per step it {does}"
    return [f"{text}; compute waits {format_seconds(waited)} for these collectives."]


def overlap(question: Question, simulation: Simulation) -> list[str]:
    """Say that the pinned overlap has nothing to overlap in this layout."""
    asked, has = question.pins.overlap, simulation.decisions.overlap
    if asked in (None, has):
        return []
    return [
        f"Overlap {asked} is replaced by {has}: no two ranks hold the same parameters, so there is nothing to overlap."
    ]


def ulysses(simulation: Simulation) -> list[str]:
    """Say how many bytes Ulysses exchanges, and how long compute waits for that."""
    degree, moved = simulation.decisions.layout.ulysses, simulation.collective_bytes.get("all_to_all", 0)
    if degree == 1:
        return []
    waited = sum(s.seconds for s in simulation.prediction.stalls if (s.lane, s.waits_for) == ("compute", "all_to_all"))
    text = f"Ulysses {degree}: a rank exchanges {format_bytes(moved)} per step between sequence-sharded and"
    return [f"{text} head-sharded tensors; compute waits {format_seconds(waited)} for these all-to-alls."]


def tp_chunks(simulation: Simulation) -> list[str]:
    """Say what tensor parallelism in chunks exchanges beside which products."""
    layout = simulation.decisions.layout
    if layout.tp_overlap == "none":
        return []
    waited = sum(s.seconds for s in simulation.prediction.stalls if (s.lane, s.waits_for) == ("compute", "send_recv"))
    text = f"Exchanges of tp are cut into {layout.tp} chunks, which ranks send to each other beside products"
    also = " and for those of cp" if layout.cp > 1 and layout.cp_exchange == "ring" else ""
    return [f"{text} (--tp-overlap chunked); compute waits {format_seconds(waited)} for them{also}."]
