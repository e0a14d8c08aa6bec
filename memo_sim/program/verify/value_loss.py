"""Kernels of the loss and of a trainer's metrics, for ``value_rules.py``."""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.ir.work import LinearLoss, TileGemm
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import Found, Wanted, add_gradient, agree, rowwise, weight
from memo_sim.program.verify.value_products import classifier_gradient, read_by_product
from memo_sim.program.verify.value_rows import Value, add_range

Rule = Callable[[Call], None]


def _labels(call: Call) -> dict[str, Wanted]:
    """Labels belong to no layer; -1 makes them agree with the logits, which are of the layer after the last."""
    return {"labels": ("input.labels", -1 - call.values.model.layers)}


def _rollout(call: Call) -> dict[str, Wanted]:
    """A policy's numbers of a token belong to no layer either; kernels without them read ``rollout`` of none."""
    return {"rollout": ("input.rollout", -1 - call.values.model.layers)}


def _add_loss(call: Call, found: Found, tokens: int) -> None:
    _, micro_batch, _, row = found
    ranges = call.values.loss.setdefault((micro_batch, 0), [])
    joined = add_range(ranges, row, row + tokens)
    if joined is None:
        call.fault(f"the loss has rows [{row}, {row + tokens}) of micro-batch {micro_batch} twice")
    else:
        call.values.loss[micro_batch, 0] = joined


def loss(
    logits: str,
    made: dict[str, Wanted],
    *,
    given: dict[str, Wanted] | None = None,
    labels: bool = True,
    adds: bool = False,
) -> Rule:
    """Return the rule of a kernel of the loss: it reads ``logits`` in role logits, labels, and ``given``.

    ``adds``: it adds its tokens' losses.
    """

    def rule(call: Call) -> None:
        wanted: dict[str, Wanted] = {"logits": logits} if logits else {}
        wanted |= given or {}
        wanted |= (_labels(call) | _rollout(call)) if labels else {}
        wanted = {role: want for role, want in wanted.items() if call.has(role)}
        for first, tokens, values in call.pieces(*wanted):
            found = agree(call, wanted, values, tokens)
            if found is not None and adds:
                _add_loss(call, found, tokens)
                if call.values.policy and not call.has("rollout"):
                    call.fault("the policy's objective is added without the rollout's numbers")
            for role, name in made.items():
                value = None
                if found is not None and isinstance(name, str):
                    summed = name if call.values.tp > 1 else name.removesuffix("~")
                    value = Value(summed, found[0], found[1])
                call.put(role, first, tokens, value, found[3] if found else 0)
        for role in ("product", "metrics"):
            if call.has(role):
                call.put(role, 0, call.tokens(role), None)

    return rule


def cross_entropy(call: Call) -> None:
    """One kernel; over a divided vocabulary it needs the sums over ranks, and reads none otherwise."""
    if call.has("stats") != (call.values.tp > 1):
        call.fault("stats of a divided vocabulary are missing, or not asked for")
    made: dict[str, Wanted] = {"grad": "d_logits"} if call.has("grad") else {"logits": "d_logits"}
    loss("logits", made, given={"stats": "loss.stats"}, adds=True)(call)


def metric(call: Call) -> None:
    """A trainer's metrics read the logits once more; nothing of the step reads what they make."""
    if call.has("logits"):
        rowwise(call, {"logits": "logits"}, {"out": "metric"})


def linear_statistics(call: Call) -> None:
    """The product with the classifier, and each token's sums over this rank's columns."""
    for first, tokens, values in call.pieces("x", "labels"):
        given, row = values[0]
        if (found := read_by_product(call, given, row, tokens)) is None:
            call.put("out", first, tokens, None)
            continue
        value, (name, kind, made) = found
        if made != "logits":
            call.wrong("x", value, row, "the input of the classifier")
        weight(call, "weight", f"{name}.weight", value.layer, kind)
        wanted: dict[str, Wanted] = {"x": value.name, **_labels(call)}
        agree(call, wanted, [(value, row), values[1]], tokens)
        summed = "loss.stats~" if call.values.tp > 1 else "loss.stats"
        call.put("out", first, tokens, Value(summed, value.layer, value.micro_batch), row)
    if call.has("logits"):
        call.put("logits", 0, call.tokens("logits"), None)


def linear_sum(call: Call) -> None:
    """The losses are added; each token's statistics become its log-sum-exp and its weight in the gradient."""
    loss("", {"stats": "loss.weights"}, given={"stats": "loss.stats"}, adds=True)(call)


def _columns(call: Call) -> tuple[int, int]:
    work = call.work
    assert isinstance(work, LinearLoss | TileGemm)
    columns = work.n if isinstance(work, LinearLoss) else {"dgrad": work.k, "wgrad": work.m}[work.gemm_pass]
    return work.column, work.column + columns


def linear_gradient(call: Call) -> None:
    """The product with a tile of the classifier again, and the gradient of these logits."""
    for first, tokens, values in call.pieces("x", "stats", "labels"):
        given, row = values[0]
        if (found := read_by_product(call, given, row, tokens)) is None:
            call.put("out", first, tokens, None)
            continue
        value, (name, kind, _) = found
        weight(call, "weight", f"{name}.weight", value.layer, kind)
        wanted: dict[str, Wanted] = {"x": value.name, "stats": "loss.weights", **_labels(call)}
        agreed = agree(call, wanted, [(value, row), *values[1:]], tokens)
        made = None if agreed is None else Value(_tile(call), value.layer, value.micro_batch)
        call.put("out", first, tokens, made, row)


def _tile(call: Call) -> str:
    """Return the name of the gradient of a tile's logits."""
    return "d_logits[{}:{}]".format(*_columns(call))


def linear_dgrad(call: Call) -> None:
    """The gradient of the classifier's input: tiles are added in their order, each once."""
    begin, end = _columns(call)
    name, kind, made, *_ = classifier_gradient(call)
    roles = ("grad", "out") if begin else ("grad",)
    for first, tokens, values in call.pieces(*roles):
        wanted: dict[str, Wanted] = {"grad": _tile(call), "out": f"d_final[:{begin}]"}
        found = agree(call, {role: wanted[role] for role in roles}, values, tokens)
        if found is None:
            call.put("out", first, tokens, None)
            continue
        weight(call, "weight", f"{name}.weight", found[0], kind)
        result = made if end == call.values.vocab else f"d_final[:{end}]"
        call.put("out", first, tokens, Value(result, found[0], found[1]), found[3])


def linear_wgrad(call: Call) -> None:
    """The gradient of the classifier: rows of a chunk are added when all of its tiles were, in their order."""
    begin, end = _columns(call)
    name, kind, *_ = classifier_gradient(call)
    for _, tokens, values in call.pieces("grad", "x"):
        found = agree(call, {"grad": _tile(call), "x": f"final{call.values.full}"}, values, tokens)
        if found is None:
            continue
        done = call.values.tiles.pop((found[1], found[3]), 0)
        if done != begin:
            call.fault(f"adds columns from {begin} on of the classifier's gradient, after those before {done}")
        elif end < call.values.vocab:
            call.values.tiles[found[1], found[3]] = end
        else:
            source = "classifier" if kind is BlockKind.EMBED else 0
            add_gradient(call, "out", f"{name}.weight", found, tokens, source, kind)


RULES: dict[str, Rule] = {
    "cross_entropy": cross_entropy,
    "cross_entropy.fused": cross_entropy,
    "cross_entropy.stats": loss("logits", {"out": "loss.stats~", "exponentials": "loss.exponentials"}),
    "cross_entropy.log_softmax": loss("logits", {"out": "log_probs"}, labels=False),
    "cross_entropy.nll": loss("", {}, given={"log_probs": "log_probs"}, adds=True),
    "cross_entropy.metrics": loss("logits", {}, given={"log_probs": "log_probs"}),
    "cross_entropy.nll.bwd": loss("", {"grad": "d_log_probs"}, given={"log_probs": "log_probs"}),
    "cross_entropy.largest": loss("logits", {"maxima": "loss.maxima~"}, labels=False),
    "cross_entropy.gradient": loss("loss.softmax", {"logits": "d_logits"}, given={"sums": "loss.sums"}),
    "cross_entropy.log_softmax.bwd": loss(
        "", {"out": "d_logits"}, given={"grad": "d_log_probs", "log_probs": "log_probs"}, labels=False
    ),
    "cross_entropy.exponentials": loss(
        "logits", {"logits": "loss.exponentials", "sums": "loss.sums~"}, given={"maxima": "loss.maxima"}
    ),
    "cross_entropy.softmax": loss(
        "loss.exponentials", {"logits": "loss.softmax"}, given={"sums": "loss.sums"}, adds=True
    ),
    "metric.log_softmax": metric,
    "linear_loss.statistics": linear_statistics,
    "linear_loss.sum": linear_sum,
    "linear_loss.gradient": linear_gradient,
    "linear_loss.dgrad": linear_dgrad,
    "linear_loss.dgrad.add": linear_dgrad,
    "linear_loss.wgrad": linear_wgrad,
}
