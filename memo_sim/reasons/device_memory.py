"""Says what fills device memory: the peak, the planned arena, and what PyTorch's allocator reserves."""

from __future__ import annotations

from memo_sim.contract.hardware import SAFETY
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds
from memo_sim.engine.simulate import ALLOCATOR, Simulation
from memo_sim.memory.huggingface import absent_states
from memo_sim.planning.arena import Arena
from memo_sim.planning.outcome import SearchResult
from memo_sim.program.arena.library_workspaces import RESULTS
from memo_sim.views.plan_table import short_by

MODULES = " Autograd keeps what Hugging Face's modules save of a layer (--modules huggingface)."
"""What an eager framework holds with them."""
CPU_OFFLOAD = (
    " Parameters and gradients are in host memory with the optimizer states, as accelerate's CPUOffloadPolicy has them;"
    " the time of their copies is not predicted."
)
"""What accelerate moves besides, with states host."""
FREED = {"recorded": "when the device has passed their work", "events": "when a tensor dies"}
"""When that is, by ``Decisions.streams``; auto leaves it to the libraries."""
STAGE = "stage"


def peak(simulation: Simulation) -> str:
    """Say when the most device memory is in use, by what, and what is reserved beside it."""
    prediction = simulation.prediction
    by_class = sorted(prediction.peak_by_class.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in by_class)
    memory = simulation.most_live.memory
    beside = memory.reserve.get(RESULTS, 0)
    parts = [f"{format_bytes(beside)} for {RESULTS}"] if beside else []
    if margin := memory.reserve.get(SAFETY, 0):
        parts.append(f"{format_bytes(margin)} to keep free, --safety-gib")
    libraries = f" (including {' and '.join(parts)})" if parts else ""
    room = (
        f"plus {format_bytes(memory.reserve_bytes)} reserve{libraries}, of {format_bytes(memory.device_capacity_bytes)}"
    )
    peak = f"{format_bytes(prediction.peak_device_bytes)} alive ({listed})"
    return f"Device memory peaks at {simulation.peak_id}: {peak}, {room}."


def planned_arena(simulation: Simulation, arena: Arena) -> list[str]:
    """Say how large the planned arena is, and how far it is above the lower bound."""
    placement = arena.placement
    largest, gap = arena.prediction.peak_device_bytes, placement.arena_bytes - placement.lower_bound_bytes
    elsewhere = arena.whole and largest > placement.arena_bytes
    size = placement.arena_bytes if elsewhere else largest
    proof = "exactly the lower bound" if not gap else f"{format_bytes(gap)} above the lower bound"
    text = (
        f"Planned arena: {format_bytes(size)} for {counted(len(placement.ids), 'buffer')}, {proof} ({placement.solver})"
    )
    if len(simulation.stages) > 1:
        text += f"; this is the arena of {_stage_number(placement.name)}, whose placement the plan holds"
    if elsewhere:
        text += f"; the executor places the other stages by first fit, in up to {format_bytes(largest)}"
    if not arena.whole:
        text += f"; planned for {simulation.program.micro_batches} micro-batches: a placement of all would be too large"
    return [f"{text}."]


def _stage_number(name: str) -> str:
    """Return the name of a program as people count stages: ``stage 1`` for ``stage0``."""
    number = name.removeprefix(STAGE)
    return f"stage {int(number) + 1}" if number.isdigit() else name


def allocator(simulation: Simulation) -> list[str]:
    """Say how much the caching allocator reserves for a plan without planned memory, and what its calls cost."""
    prediction = simulation.prediction
    if prediction.reserved_bytes is None:
        return []
    who = "an eager framework" if simulation.decisions.memory_policy == "eager" else "the caching allocator"
    above = prediction.reserved_bytes / prediction.peak_device_bytes - 1
    often = prediction.allocation_retries / simulation.decisions.micro_batches
    reserved = format_bytes(prediction.reserved_bytes)
    text = f"Memory is not planned: {who} reserves {reserved}, {format_percent(above)} above the peak"
    retries = f"{often:.3g} {_retries(often)} per micro-batch" if often else "no allocation retries"
    stalled = sum(s.seconds for s in prediction.stalls if s.waits_for == ALLOCATOR)
    share = (
        f"; compute waits for its calls for {format_percent(stalled / prediction.step_s)} of the step"
        if prediction.step_s
        else ""
    )
    freed = FREED.get(simulation.decisions.streams)
    waits = f" Memory that other streams use comes back {freed} (--streams {simulation.decisions.streams})."
    own = MODULES if simulation.decisions.modules == "huggingface" else ""
    offloaded = CPU_OFFLOAD if absent_states(simulation.decisions) else ""
    return [f"{text}; {retries}{share if stalled else ''}.{waits if freed else ''}{own}{offloaded}"]


def limited(found: SearchResult) -> list[str]:
    """Say what limiting PyTorch's allocator gains, and how a user does it."""
    best = found.best
    if best is None or best.unlimited is None:
        return []
    limit = best.decisions.allocator_limit_gib
    text = f"PyTorch's allocator is limited to {limit} GiB of the device (torch.cuda.set_per_process_memory_fraction)"
    if best.unlimited.step_s is None:
        short = short_by(best.unlimited)
        return [f"{text}: with all of it, fragmentation is worse and the plan does not fit ({short})."]
    slower_s = best.unlimited.step_s - (best.prediction.step_s or 0.0)
    retries, fewer = best.unlimited.allocation_retries, best.prediction.allocation_retries
    often = f"there are {retries} {_retries(retries)} instead of {fewer}"
    more = "each one releases more" if retries == fewer else often
    why = f"each retry releases the whole cache; without the limit {more}"
    return [f"{text}: {why}, and the step is {format_seconds(slower_s)} longer."]


def _retries(number: float) -> str:
    return "allocation retry" if number == 1 else "allocation retries"
