"""Sums of parameters' gradients for ``value_rules.py``: added, reduced over ranks, and used by the optimizer."""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.ir.kinds import BlockKind, FamilyKind
from memo_sim.program.layout.fp8 import narrow_elements
from memo_sim.program.layout.fp8 import runs as fp8_runs
from memo_sim.program.verify.value_attention import accumulate as accumulate_queries_keys_values
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_rows import Sum, add_range

EMBED, LAYER = BlockKind.EMBED, BlockKind.LAYER

Rule = Callable[[Call], None]


def move_sums(call: Call, source: str, target: str) -> None:
    """Add the sums of gradients in an operand to those of another."""
    if call.buffers[target] not in call.values.sums and call.family(target).kind is FamilyKind.GRADS:
        call.fault(f"adds to {call.family(target).name}, which was not zeroed")
    operand, into = call.operands[source], call.values.sums.setdefault(call.buffers[target], {})
    given, sharded = call.values.sums.get(call.buffers[source], {}), False
    family = call.family(target)
    block = call.values.block_of(call.buffers[target]) if family.kind is FamilyKind.GRADS else None
    if call.family(source).kind is FamilyKind.WHOLE_GRADS and family.kind is FamilyKind.GRADS and block is not None:
        sharded = True
        if missing := call.values.unreduced(call.buffers[source]):
            call.fault(f"{source} is added before it was summed over the {' and '.join(missing)}")
    for key, each in given.items():
        parameter = call.values.parameter(key[0], key[2], key[1])
        assert parameter is not None  # its gradient was added
        if sharded and block is not None:
            run = call.instruction.run
            runs = fp8_runs(call.values.decisions, block)
            if run and run != next(n for n, first, size in runs if first <= parameter.first < first + size):
                continue
        elif not operand.first <= each.first < operand.first + operand.tokens:
            continue
        if family.kind is FamilyKind.GRADS and key[0] is LAYER and call.values.layer_of(call.buffers[target]) != key[1]:
            call.fault(
                f"adds gradients of layer {key[1]} to those of layer {call.values.layer_of(call.buffers[target])}"
            )
            continue
        summed = into.setdefault(key, Sum(parameter.first))
        summed.anything = summed.anything or each.anything
        for (micro_batch, term), ranges in each.tokens.items():
            for low, high in ranges:
                if not summed.add((micro_batch, term), low, high):
                    call.fault(
                        f"gradient of {key[2]} of layer {key[1]}, micro-batch {micro_batch}: rows [{low}, {high}) twice"
                    )


def accumulate(call: Call) -> None:
    """Add gradients: of parameters, or of queries, keys and values."""
    source, target = call.family("x"), call.family("out")
    grads = (FamilyKind.GRADS, FamilyKind.WHOLE_GRADS)
    if source.kind in grads or target.kind in grads or call.buffers["x"] in call.values.sums:
        move_sums(call, "x", "out")
        return
    accumulate_queries_keys_values(call)


def flatten(call: Call) -> None:
    """Copy gradients into the tensor that ranks reduce."""
    source, target, reduced = call.buffers["source"], call.buffers["target"], call.values.reduced
    call.values.sums[target] = dict(call.values.sums.get(source, {}))
    reduced -= {(target, "replicas"), (target, "vectors"), (target, "matrices")}
    reduced |= {(target, what) for buffer, what in reduced if buffer == source}


def reduce_gradients(call: Call) -> None:
    """Sum gradients over the ranks that hold the same parameters; each rank then has all of them, or its shard."""
    all_of(call, "tensor")
    mark_reduced(call, call.buffers["tensor"], "replicas")


def all_of(call: Call, role: str, count: int | None = None) -> None:
    """Check that an operand is all of its buffer, or its first ``count`` elements."""
    operand, elements = call.operands[role], call.family(role).tokens if count is None else count
    if (operand.first, operand.tokens) != (0, elements):
        call.fault(f"{role} is [{operand.first}, {operand.first + operand.tokens}), not all of {elements} elements")


def parts_of(call: Call, buffer: int) -> str:
    """Return what a sum of parts of gradients is about: the vectors at the end of a block, or matrices before them."""
    operand = call.operands["tensor"]
    block = call.values.kind_of_block(buffer)
    return "vectors" if operand.first + operand.tokens == block.trained_elements else "matrices"


def mark_reduced(call: Call, buffer: int, what: str) -> None:
    """Note that gradients were summed over ranks; twice is a fault."""
    if (buffer, what) in call.values.reduced:
        call.fault(f"sums {call.values.family(buffer).name} over the {what} a second time")
    call.values.reduced.add((buffer, what))


def reduce_shards(call: Call) -> None:
    """Sum this rank's shard of gradients over the groups of ranks that divide them."""
    for buffer in set(call.buffers.values()):
        mark_reduced(call, buffer, "groups")


def grad_norm(call: Call) -> None:
    """Add a block's gradient to the norm, once, when it is complete."""
    v, buffer = call.values, call.buffers["grads"]
    if not _is_shard(call, "grads"):
        all_of(call, "grads")
    if buffer in v.normed:
        call.fault(f"adds {call.family('grads').name} to the norm a second time")
    v.normed.add(buffer)
    _used(call, buffer)


def _used(call: Call, buffer: int) -> None:
    """Check that gradients were summed over ranks; with ZeRO 2 and 3, each use was before it was added."""
    v, family = call.values, call.family("grads")
    block = v.block_of(buffer) if family.kind is FamilyKind.GRADS else None
    whole_block = block is not None and family.tokens == block.trained_elements
    missing = v.unreduced(buffer) if family.kind is FamilyKind.GRADS and whole_block else []
    tied = v.model.tied_embeddings and v.layout.pp > 1 and family.block is EMBED
    if tied and family.kind is FamilyKind.GRADS and (buffer, "stages") not in v.reduced:
        missing.append("stages")
    if v.copies(family.block) > 1 and family.kind is FamilyKind.GRADS and (buffer, "groups") not in v.reduced:
        missing.append("groups")
    if missing:
        call.fault(f"uses {family.name} before it was summed over the {' and '.join(missing)}")


def update(call: Call) -> None:
    """Update a run of a block's parameters: gradients, states and parameters of one layer."""
    v, family = call.values, call.family("grads")
    places = {call.values.layer_of(b) for role, b in call.buffers.items() if role not in ("norm", "workspace")}
    if len(places) != 1 or family.block is None:
        call.fault(f"updates states of layers {sorted(places)} together")
        return
    key = (family.block, places.pop())
    states = {(call.operands[r].first, call.tokens(r)) for r in ("master", "moment1", "moment2") if call.has(r)}
    first, tokens = min(states)
    joined_ranges = add_range(v.updated.get(key, []), first, first + tokens)
    if len(states) != 1 or joined_ranges is None:
        call.fault(f"updates elements {sorted(states)} of the states of {key[0]}, not one run of them once")
    v.updated[key] = joined_ranges or []
    # Whole parameters and gradients begin with the run itself, shards with what the ranks before them have of it.
    block = v.block(family.block, key[1])
    runs = {name: first for name, first, _ in fp8_runs(v.decisions, block)}
    begun = runs[call.instruction.run]
    narrow = narrow_elements(v.decisions, block)
    narrow_share = -(-narrow // v.shards(family.block))
    for role in ("grads", "params"):
        if call.has(role):
            operand = call.operands[role]
            wanted = first if call.family(role).tokens == call.family("moment1").tokens else begun
            if role == "params" and narrow:
                whole = call.family(role).tokens == block.elements - narrow
                wanted = begun - narrow if whole else first - narrow_share
            if (operand.first, operand.tokens) != (wanted, tokens):
                call.fault(f"{role} begins with element {operand.first}, not {wanted}")
    _used(call, call.buffers["grads"])


def _is_shard(call: Call, role: str) -> bool:
    """Return whether an operand is this rank's shard at the start of a whole block of gradients."""
    v, family = call.values, call.family(role)
    return family.block is not None and v.layout.zero == 1 and v.replicas(family.block) > 1


RULES: dict[str, Rule] = {
    "grad.accumulate": accumulate,
    "grads.flatten": flatten,
    "grads.reduce_scatter": reduce_gradients,
    "grads.all_reduce": reduce_gradients,
    "shards.all_reduce": reduce_shards,
    "grad_norm": grad_norm,
    "adamw.decay": update,
    "adamw.no_decay": update,
    "router.balance": update,
}
