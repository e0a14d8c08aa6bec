"""Moves for ``value_rules.py``: copies, casts, swapping to the host, parameters, and transfers between stages."""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.ir.kinds import STATE_KINDS, BlockKind, FamilyKind, TemplateKind
from memo_sim.program.layout.fp8 import delayed
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_gradients import all_of
from memo_sim.program.verify.value_rows import Sum, Value
from memo_sim.program.verify.value_terms import whole

LAYER = BlockKind.LAYER

Rule = Callable[[Call], None]


def copy(call: Call) -> None:
    """Carry values and sums along; a row of the host is offloaded once and comes back once."""
    source, target = call.family("source"), call.family("target")
    if source.kind in STATE_KINDS and target.kind in STATE_KINDS:
        same = call.values.layer_of(call.buffers["source"]) == call.values.layer_of(call.buffers["target"])
        if not same or source.block is not target.block:
            call.fault(f"copies {source.name} to {target.name} of another layer")
        return
    found = call.values.sums.get(call.buffers["source"])
    if found:
        call.values.sums[call.buffers["target"]] = dict(found)
        return
    chunk = call.own_chunk("target")
    for first, end, value, row in call.rows("source"):
        if chunk and value is not None:
            v = call.values
            call.put(
                "target", first, end - first, value._replace(name=f"{value.name}*"), row * v.tp + v.tp_rank * chunk
            )
        else:
            call.put("target", first, end - first, value, row)


def offload(call: Call) -> None:
    """Carry values to the host, where they wait for one prefetch."""
    copy(call)
    if call.family("target").kind is FamilyKind.PER_LAYER:
        waiting = call.values.offloaded
        buffer = call.buffers["target"]
        if waiting.get(buffer, 0) + call.tokens("target") > call.family("target").tokens:
            call.fault(f"offloads to {call.family('target').name}, whose rows were not prefetched yet")
        waiting[buffer] = waiting.get(buffer, 0) + call.tokens("target")


def prefetch(call: Call) -> None:
    """Carry values back from the host, where an offload has left them."""
    copy(call)
    if call.family("source").kind is FamilyKind.PER_LAYER:
        buffer = call.buffers["source"]
        left = call.values.offloaded.get(buffer, 0) - call.tokens("source")
        if left < 0:
            call.fault(f"prefetches rows of {call.family('source').name} that no offload left there")
        call.values.offloaded[buffer] = max(left, 0)


def zero(call: Call) -> None:
    """Clear sums of gradients of parameters; other rows hold zeros."""
    operand, buffer = call.operands["target"], call.buffers["target"]
    if call.family("target").features == 1:
        all_of(call, "target")
        call.values.sums[buffer] = {}
        call.values.reduced -= {(buffer, "replicas"), (buffer, "vectors"), (buffer, "matrices")}
        return
    call.put("target", 0, operand.tokens, Value("zero", -1, -1))


def params_gather(call: Call) -> None:
    """Gather a block of parameters from the ranks' shards; of parameters that ranks updated, the trained ones."""
    if not call.has("full"):
        buffer = call.buffers["tensor"]
        block, narrow = call.values.block_of(buffer), call.values.narrow(buffer)
        if call.family("tensor").kind is FamilyKind.PARAMS_FP8:
            all_of(call, "tensor")
        else:
            all_of(call, "tensor", block.trained_elements - narrow if block else None)
        call.values.reduced.add((call.buffers["tensor"], "gathered"))
        return
    rows = call.rows("shard")
    value = rows[0].value
    if value is not None and (
        len(rows) != 1 or value.name != "params" or call.tokens("shard") != call.family("shard").tokens
    ):
        call.wrong("shard", value, rows[0].row, "a rank's shard of one block")
        value = None
    call.put("full", 0, call.tokens("full"), value, rows[0].row)


def params_move(source: str, target: str) -> Rule:
    """Return the rule of an op that copies or casts rows."""

    def rule(call: Call) -> None:
        for first, end, value, row in call.rows(source):
            call.put(target, first, end - first, value, row)

    return rule


def quantise(call: Call) -> None:
    """Carry values to their copies in FP8, by rows and by columns; master weights, when they have been updated."""
    if call.family("x").kind is FamilyKind.MASTER:
        _of_updated(call)
        v, block = call.values, call.family("x").block
        current = not delayed(v.decisions) and block is not None and v.shards(block) > 1
        if current and not (call.has("largest") and (call.buffers["largest"], "largest") in v.reduced):
            call.fault("quantises a share of master weights before the largest values of all shares were reduced")
        v.reduced.add((call.buffers["out"], "quantised"))
    largest = [buffer for role, buffer in call.buffers.items() if role.partition(".")[0] == "amax"]
    if any((buffer, "history") in call.values.reduced for buffer in largest):
        call.fault("notes a largest value after the step's were entered in the history")
    for first, end, value, row in call.rows("x"):
        for copy in ("out", "columns"):
            call.put(copy, first, end - first, value, row)


def find_largest(call: Call) -> None:
    """Find the largest values of a rank's share of master weights, when they have been updated."""
    _of_updated(call)
    call.values.reduced.add((call.buffers["out"], "found"))


def _of_updated(call: Call) -> None:
    """Check that the master weights that an operator reads were updated in this step."""
    v, block, rows = call.values, call.family("x").block, call.operands["x"]
    updated = v.updated.get((block, v.layer_of(call.buffers["x"])), []) if block else []
    if not any(first <= rows.first and rows.first + rows.tokens <= end for first, end in updated):
        call.fault("quantises master weights that were not updated")


def recv(call: Call) -> None:
    """What a stage receives follows from the micro-batch and layer of the transfer, and from the kind of the buffer.

    ``verify/stages.py`` checks that the sender sends the same.
    """
    v, at, family, operand = call.values, call.instance, call.family("recv"), call.operands["recv"]
    template = v.program.templates[at.template]
    start = v.starts[at.subsequence] + at.first
    shard = start // v.tp if v.gathered else start
    helped = template.kind in (TemplateKind.HELPER_FORWARD, TemplateKind.HELPER_BACKWARD)
    own = at.layer in v.layers
    value, row = None, shard
    match family.kind:
        case FamilyKind.SKELETAL:
            value = Value("x", at.layer, at.micro_batch)
        case FamilyKind.STAGE_BOUNDARY | FamilyKind.HEAD_INPUT:
            leaves = helped and not family.name.startswith("stage.x")
            value = Value("x", at.layer + leaves, at.micro_batch)
            row = shard + operand.first
        case FamilyKind.INPUT_GRADIENT:
            enters = helped and own
            value = Value("d_x", at.layer + (not enters), at.micro_batch)
            row = shard + operand.first
        case FamilyKind.GATHERED:
            value, row = Value("params", at.layer, -1, None, LAYER), 0
        case FamilyKind.WHOLE_GRADS | FamilyKind.PER_LAYER if family.features == 1:
            sums = v.sums.setdefault(call.buffers["recv"], {})
            for parameter in v.block(LAYER, at.layer).parameters:
                sums[LAYER, at.layer, parameter.name] = Sum(parameter.first, anything=True)
            return
        case FamilyKind.PER_LAYER if family.buffer_class.value == "kv_cache" and "d_kv" not in family.name:
            value, row = Value("kv", at.layer, at.micro_batch), operand.first
        case _:
            value = None
    call.put("recv", 0, operand.tokens, value, row)


def send(call: Call) -> None:
    """A stage sends what the message is for: the input of a layer, its gradient, or for helpers other tensors."""
    v, at = call.values, call.instance
    if (
        v.sums.get(call.buffers["send"]) is not None
        or v.program.templates[at.template].kind is not TemplateKind.TRANSFER
    ):
        return
    gradient = call.family("send").kind is FamilyKind.INPUT_GRADIENT
    wanted = Value("d_x", at.layer, at.micro_batch) if gradient else Value("x", at.layer + 1, at.micro_batch)
    start = v.starts[at.subsequence]
    for first, end, held, row in call.rows("send"):
        value = None if held is None else whole(call, "send", held, row, end - first)
        begin = (start // v.tp if v.gathered else start) + call.operands["send"].first + first
        if value is not None and (value != wanted or row != begin):
            call.wrong("send", value, row, f"{wanted} (row {begin})")


RULES: dict[str, Rule] = {
    "copy": copy,
    "d2h": offload,
    "h2d": prefetch,
    "zero": zero,
    "params.all_gather": params_gather,
    "swap.round": params_move("x", "out"),
    "swap.widen": params_move("x", "out"),
    "params.cast": params_move("x", "out"),
    "params.copy_out": params_move("source", "target"),
    "params.largest": find_largest,
    "params.quantize": quantise,
    "params.transpose": params_move("x", "out"),
    "fp8.quantize": quantise,
    "fp8.transpose": quantise,
    "send": send,
    "recv": recv,
}
