"""Collectives and exchanges for ``value_rules.py``: of tokens, heads, partial sums, and parts of weights (METP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.work import Collective, Exchange
from memo_sim.program.verify.value_attention import gather_keys, scatter_keys, send_gradients
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_gradients import mark_reduced, move_sums, parts_of
from memo_sim.program.verify.value_rows import ParameterKey, Sum, Value
from memo_sim.program.verify.value_terms import chain, gradient_before_heads, whole

if TYPE_CHECKING:
    from memo_sim.program.verify.values import Values

Rule = Callable[[Call], None]


def _rescaled(call: Call, source: str, target: str, rename: Callable[[str], str | None]) -> None:
    """Carry values to an operand that has more or fewer rows, in proportion, under other names."""
    given, taken = call.tokens(source), call.tokens(target)
    for first, end, held, row in call.rows(source):
        low, high = first * taken // given, end * taken // given
        value = None if held is None else whole(call, source, held, row, end - first)
        name = None if value is None else rename(value.name)
        if value is not None and name is None:
            call.wrong(source, value, row, f"what {call.instruction.op} takes")
        result = None if value is None or name is None else value._replace(name=name)
        call.put(target, low, high - low, result, row * taken // given)


def all_gather(call: Call) -> None:
    """Gather token shards, keys and values, or what each rank received of one tensor."""
    work = call.work
    assert isinstance(work, Collective)
    if call.has("others"):  # what each rank received of a tensor that all of them hold
        rows = call.rows("shard")
        last = rows[-1]
        call.put("others", 0, call.tokens("others"), last.value, last.row + last.end - last.first)
        return
    if work.group == "tp":
        _rescaled(call, "shard", "full", lambda name: None if name.endswith(("*", "~")) else f"{name}*")
        return
    gather_keys(call)


def reduce_scatter(call: Call) -> None:
    """Sum partial sums over ranks, each its own rows."""
    work = call.work
    assert isinstance(work, Collective)
    if work.group == "tp":
        _rescaled(call, "full", "shard", lambda name: _summed(call.values, name))
        return
    scatter_keys(call)


def _summed(v: Values, name: str) -> str | None:
    """Return the name of a partial sum over ranks once it is summed; an embedding may get its positions yet."""
    if not name.endswith("~"):
        return None
    return "x.sum" if name == "x~" and v.model.learned_positions else name.removesuffix("~")


def all_reduce(call: Call) -> None:
    """Sum partial sums over ranks; sums over the ranks of gradients, norm and loss change no value."""
    work, family, buffer = call.work, call.family("tensor"), call.buffers["tensor"]
    assert isinstance(work, Collective)
    if family.kind in (FamilyKind.GRADS, FamilyKind.WHOLE_GRADS):
        mark_reduced(call, buffer, "stages" if work.group == "tied" else parts_of(call, buffer))
        return
    if family.kind is FamilyKind.SCALAR or buffer in call.values.sums:
        return
    for first, end, value, row in call.rows("tensor"):
        name = None
        if value is not None:
            name = SUMMED_IN_PLACE.get(value.name) or _summed(call.values, value.name)
            if name is None:
                call.wrong("tensor", value, row, "a partial sum")
        call.put(
            "tensor", first, end - first, None if value is None or name is None else value._replace(name=name), row
        )


def reduce_largest(call: Call) -> None:
    """Reduce the largest values of a step over a group of ranks, once."""
    work = call.work
    assert isinstance(work, Collective)
    buffer = call.buffers["tensor"]
    mark_reduced(call, buffer, work.group)
    if call.family("tensor").kind is FamilyKind.LARGEST:
        if (buffer, "found") not in call.values.reduced:
            call.fault("reduces largest values of weights before they were found")
        call.values.reduced.add((buffer, "largest"))


def enter_history(call: Call) -> None:
    """Enter the largest values of a step in the history, when they are reduced over all ranks with the same layers."""
    v, buffer = call.values, call.buffers["amax"]
    for group, ranks in (("tp", v.layout.tp), ("grads", v.layout.replicas)):
        if ranks > 1 and (buffer, group) not in v.reduced:
            call.fault(f"enters largest values that were not reduced over {group}")
    mark_reduced(call, buffer, "history")


SUMMED_IN_PLACE = {
    "loss.stats~": "loss.stats",
    "loss.maxima~": "loss.maxima",
    "loss.sums~": "loss.sums",
    "dk.all~": "dk.all",
    "dv.all~": "dv.all",
}


def all_to_all(call: Call) -> None:
    """Exchange rows between the two forms of Ulysses."""

    def rename(name: str) -> str | None:
        if name.endswith("|"):
            return f"{name[:-1]}^"
        return f"{name[:-1]}|" if name.endswith("^") else None

    _rescaled(call, "send", "recv", rename)


def heads_transpose(call: Call) -> None:
    """Pack rows by rank for an exchange, or unpack those that arrived."""
    for first, end, held, row in call.rows("source"):
        value = None if held is None else whole(call, "source", held, row, end - first)
        if value is not None:
            value = value._replace(name=value.name[:-1] if value.name.endswith("|") else f"{value.name}|")
        call.put("target", first, end - first, value, row)


def heads(source: str, target: str, given: str, made: Callable[[Call], str]) -> Rule:
    """Return the rule of an op that exchanges heads which tensor-parallel ranks share."""

    def rule(call: Call) -> None:
        wanted = gradient_before_heads(call.values) if given == "d_qkv" else given
        _rescaled(call, source, target, lambda name: made(call) if name == wanted else None)

    return rule


def parts_sum(call: Call) -> None:
    """Sum this rank's rows that every tensor-parallel rank has multiplied, in chunks (``tp_overlap``).

    What ranks send each other are the chunks of one row block, each for the rank of its place.
    """
    rows, tp = call.rows("parts"), call.values.tp
    known = [each.value for each in rows if each.value is not None]
    tokens = call.tokens("out")
    if len(known) != len(rows):
        call.put("out", 0, tokens, None)
        return
    first = min(each.row for each in rows)
    same = {value._replace(part=None) for value in known}
    expected = {first + n * tokens for n in range(tp)}
    distances = {value.part for value in known}
    name = _summed(call.values, known[0].name)
    if len(same) != 1 or {each.row for each in rows} != expected or len(distances) != tp or name is None:
        found = ", ".join(f"{each.value} (row {each.row})" for each in rows)
        call.fault(f"parts are not one from every rank of one tensor's rows: {found}")
        call.put("out", 0, tokens, None)
        return
    call.put("out", 0, tokens, known[0]._replace(name=name, part=None), first // tp)


def send_recv(call: Call) -> None:
    """What arrives is what this rank sends, from ``distance`` ranks before."""
    work = call.work
    assert isinstance(work, Exchange)
    source, target = call.buffers["send"], call.buffers["recv"]
    sums = call.values.sums.get(source)
    if sums is not None:
        _send_sums(call, sums, target)
        return
    rows = call.rows("send")
    if any(each.value is not None and each.value.name in ("d_kv", "zero") for each in rows):
        send_gradients(call, rows)
        return
    for first, end, value, row in rows:
        if value is not None and work.group == "tp" and not value.name.endswith("~"):
            at = row + _chunks_before(call, work) * call.tokens("send")
            call.put("recv", first, end - first, value._replace(part=None), at)
            continue
        call.put("recv", first, end - first, None if value is None else _shifted(work, value), row)


def _chunks_before(call: Call, work: Exchange) -> int:
    """Return how many chunks lie between this rank's chunk and the one that arrives, from ``distance`` ranks before."""
    v = call.values
    return (v.tp_rank - work.distance) % v.tp - v.tp_rank


def _shifted(work: Exchange, value: Value) -> Value:
    if work.group == "tp":
        return value._replace(part=("tp", work.distance))
    if value.name == "params":
        hop = value.part[1] if isinstance(value.part, tuple) else 0
        return value._replace(part=("hop", hop + 1))
    terms = value.terms
    if value.name == "kv" and terms is None:  # a chunk's keys leave the rank that computed them
        return value._replace(terms=("shift", work.distance))
    if isinstance(terms, tuple):
        terms = ("shift", terms[1] + work.distance, *terms[2:])
    return value._replace(terms=terms)


def _send_sums(call: Call, sums: dict[ParameterKey, Sum], target: int) -> None:
    """Pass sums of gradients on: each has the terms of as many ranks as it has hops behind it (METP)."""
    first, end = call.operands["send"].first, call.operands["send"].first + call.tokens("send")
    moved = {key: each for key, each in sums.items() if first <= each.first < end}
    into = call.values.sums.setdefault(target, {})
    for key in [key for key, each in into.items() if first <= each.first < end]:
        del into[key]
    for key, each in moved.items():
        if ("hop", each.hop) not in {source for _, source in each.tokens}:
            call.fault(f"the gradient of {key[2]} of layer {key[1]} is sent on without this rank's terms")
        into[key] = Sum(each.first, each.hop + 1, each.anything, {k: list(r) for k, r in each.tokens.items()})


def broadcast(call: Call) -> None:
    """Carry a part of the weights to all ranks (METP)."""
    work = call.work
    assert isinstance(work, Collective)
    for first, end, value, row in call.rows("own"):
        moved = None if value is None else value._replace(part=("root", work.root))
        call.put("tensor", first, end - first, moved, row)


def reduce(call: Call) -> None:
    """Add a part's gradients, summed over ranks, to those of the rank that has its weights (METP)."""
    work = call.work
    assert isinstance(work, Collective)
    move_sums(call, "tensor", "total")
    for key, each in call.values.sums.get(call.buffers["tensor"], {}).items():
        if any(source != ("root", work.root) for _, source in each.tokens):
            call.fault(f"{key[2]} is reduced to rank {work.root}, but has terms of {[s for _, s in each.tokens]}")


RULES: dict[str, Rule] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_gather.sequences": gather_keys,
    "reduce_scatter.sequences": scatter_keys,
    "all_reduce": all_reduce,
    "loss.all_reduce": all_reduce,
    "loss.max_reduce": all_reduce,
    "fp8.max_reduce": reduce_largest,
    "fp8.history": enter_history,
    "cross_entropy.all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "heads.transpose": heads_transpose,
    "heads.all_gather": heads("shard", "full", "qkv.part", lambda _: "qkv.ranks"),
    "heads.pick": heads("source", "target", "qkv.ranks", lambda call: chain(call.values)[0]),
    "heads.place": heads("source", "target", "d_qkv", lambda _: "d_qkv.ranks"),
    "heads.reduce_scatter": heads("full", "shard", "d_qkv.ranks", lambda _: "d_qkv.part"),
    "parts.sum": parts_sum,
    "send_recv": send_recv,
    "broadcast": broadcast,
    "reduce": reduce,
}
