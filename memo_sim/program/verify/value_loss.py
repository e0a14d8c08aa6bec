"""Kernels of the loss and of a trainer's metrics, for ``value_rules.py``."""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import Found, Wanted, agree, rowwise
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
}
