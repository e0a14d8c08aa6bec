"""What each op reads, makes and adds, by the mathematics of a transformer; by op, for ``values.py``.

A layer, forward, with the names of its values. ``*`` follows a tensor whose token shards were gathered (sequence
parallelism), ``~`` a partial sum over tensor-parallel ranks, ``^`` the head-sharded form of Ulysses, ``|`` rows that
are packed for its exchange, or have just arrived:

    x - norm1 - qkv (.0, .1: before norm of heads and rotary) - attn, lse - proj - resid = x + proj
      - norm2 - up - act - down - x of the next layer = resid + down          x of the last layer - final - logits

With experts (``value_experts.py``) the MLP is norm2 - dispatched - up - act - expert_out - down, where the middle ones
have dispatched rows.

Norms behind attention and MLP, where a model has them, make post_attn of proj and post_mlp of down; these are then the
terms of the sums. Sinks make attn and lse of attn.raw and lse.raw.

Backward, where ``d_`` is the gradient of a value. A sum passes its gradient on to both of its terms, so the gradient of
``down`` is that of the next ``x``, and that of ``proj`` is that of ``resid``:

    d_act = d_x (next) W_down      d_up = act'(up) d_act        d_norm2 = d_up W_up      d_resid = norm2' + d_x (next)
    d_attn = d_resid W_proj        d_qkv = attention'           d_norm1 = d_qkv W_qkv    d_x = norm1' + d_resid

Norms, residual sums, activations and the embedding have their rules here, other ops in modules of their own. A new op
needs a rule in the ``RULES`` of one of them.
"""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.verify import (
    value_adapters,
    value_attention,
    value_collectives,
    value_experts,
    value_gradients,
    value_latent,
    value_linear,
    value_loss,
    value_moves,
    value_scores,
)
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import Wanted, add_gradient, agree, rowwise, weight
from memo_sim.program.verify.value_rows import Value

Rule = Callable[[Call], None]
LAYER, EMBED, HEAD = BlockKind.LAYER, BlockKind.EMBED, BlockKind.HEAD


# Forward


def embed(call: Call) -> None:
    """Check the lookup of token rows, and of positions where one rank has the whole vocabulary."""
    v = call.values
    weight(call, "weight", "tokens.weight", None, EMBED)
    if v.tp == 1:
        weight(call, "positions", "positions.weight", None, EMBED)
    rowwise(call, {"ids": "input.ids"}, {"out": ("x~" if v.tp > 1 else "x", 1)})


def positions_add(call: Call) -> None:
    """Check the positions that are added to the sum of a divided lookup."""
    weight(call, "positions", "positions.weight", None, EMBED)
    rowwise(call, {"source": "x.sum"}, {"target": "x"})


NORMS = {
    "x": ("norm1", LAYER),
    "resid": ("norm2", LAYER),
    "proj": ("post_attn", LAYER),
    "down": ("post_mlp", LAYER),
}


def _norm_of(call: Call, role: str, value: Value | None) -> tuple[str, BlockKind, str] | None:
    """Return the name of the norm that reads ``value``: of its parameters, their block, and of its output."""
    if value is not None and value.name == "x" and value.layer == call.values.model.layers:
        return "norm", HEAD, "final"
    behind = value is not None and value.name in ("proj", "down")
    if value is None or value.name not in NORMS or (behind and not call.values.model.post_norms):
        if value is not None:
            call.wrong(role, value, 0, "x or resid")
        return None
    name, kind = NORMS[value.name]
    return name, kind, name


def norm(call: Call) -> None:
    """Check a norm: which one it is follows from what it reads."""
    for first, tokens, [(value, row)] in call.pieces("x"):
        found = _norm_of(call, "x", value)
        if found is None or value is None:
            for role in ("out", "stats", "saved"):
                call.put(role, first, tokens, None)
            continue
        name, kind, out = found
        weight(call, "weight", f"{name}.weight", value.layer, kind)
        weight(call, "bias", f"{name}.bias", value.layer, kind)
        call.put("out", first, tokens, value._replace(name=out), row)
        call.put("stats", first, tokens, value._replace(name=f"{out}_stats"), row)
        call.put("saved", first, tokens, value._replace(name=f"{out}_saved"), row)


def residual_add(call: Call) -> None:
    """Check one of the two residual sums of a layer, or the sum of experts and shared expert."""
    if value_experts.add_to_experts(call):
        return
    for first, tokens, values in call.pieces("x", "y"):
        y = values[1][0]
        attended, fed = ("post_attn", "post_mlp") if call.values.model.post_norms else ("proj", "down")
        if y is not None and y.name.startswith(fed):
            found, made, bias = agree(call, {"x": "resid", "y": fed}, values, tokens), ("x", 1), "ffn_down.bias"
        else:
            found, made, bias = agree(call, {"x": "x", "y": attended}, values, tokens), ("resid", 0), "proj.bias"
        value = None
        if found is not None:
            weight(call, "bias", bias, found[0])
            value = Value(made[0], found[0] + made[1], found[1])
        call.put("out", first, tokens, value, found[3] if found else 0)


def activation(call: Call) -> None:
    """Check the activation between the products of the MLP, or of the shared expert."""
    if _is_shared(call):
        rowwise(call, {"x": "shared_up"}, {"out": "shared_act"})
        return
    rowwise(call, {"x": "up"}, {"out": "act", "silu": "silu"})


def _is_shared(call: Call) -> bool:
    """Return whether an activation reads the first product of a shared expert."""
    value = call.rows("x")[0].value if call.has("x") else None
    return value is not None and value.name == "shared_up"


# Backward


def activation_backward(call: Call) -> None:
    """Check the backward of ``activation``."""
    if _is_shared(call):
        rowwise(call, {"grad": "d_shared_act", "x": "shared_up"}, {"grad_x": "d_shared_up"})
        return
    silu: dict[str, Wanted] = {"silu": "silu"} if call.has("silu") else {}
    rowwise(call, {"grad": "d_act", "x": "up", **silu}, {"grad_x": "d_up"})


def _input_of(saved: Value | None) -> Value | None:
    """Return the input of the norm that saved these rows."""
    names = {f"{name}_saved": given for given, (name, _) in NORMS.items()}
    return None if saved is None else saved._replace(name=names.get(saved.name, saved.name))


def norm_backward(call: Call) -> None:
    """Check the backward of a norm, which also adds the gradient of the residual branch.

    Where modules save rows of their own (``saved``), these may stand for the norm's input.
    """
    residual = call.has("residual_grad")
    roles = ["grad", *(role for role in ("x", "saved") if call.has(role)), "stats"]
    roles += ["residual_grad"] if residual else []
    for first, tokens, values in call.pieces(*roles):
        x = values[1][0] if call.has("x") else _input_of(values[1][0])
        which = _norm_of(call, roles[1], x)
        if which is None or x is None:
            call.put("out", first, tokens, None)
            continue
        name, kind, out = which
        named = {"grad": f"d_{out}", "x": x.name, "saved": f"{out}_saved", "stats": f"{out}_stats"}
        wanted: dict[str, Wanted] = {role: named[role] for role in roles if role in named}
        behind = name in ("post_attn", "post_mlp")
        if behind:  # a sum passes its gradient on to both of its terms
            wanted["grad"] = "d_resid" if name == "post_attn" else ("d_x", 1)
        if residual:
            wanted["residual_grad"] = ("d_x", 1) if name == "norm2" else "d_resid"
        if residual != (kind is LAYER and not behind):
            call.fault(f"residual_grad is {'' if residual else 'not '}given")
        found = agree(call, wanted, values, tokens)
        if found is not None:
            weight(call, "weight", f"{name}.weight", found[0], kind)
            add_gradient(call, "grad_weight", f"{name}.weight", found, tokens, 0, kind)
            add_gradient(call, "grad_bias", f"{name}.bias", found, tokens, 0, kind)
        value = None if found is None else Value(f"d_{x.name}", found[0], found[1])
        call.put("out", first, tokens, value, found[3] if found else 0)


def embed_backward(call: Call) -> None:
    """Add the rows of the gradient of the first layer's input to that of the embedding."""
    v = call.values
    wanted: dict[str, Wanted] = {"ids": ("input.ids", -1), "grad": f"d_x{v.full}"}
    for _, tokens, values in call.pieces(*wanted):
        found = agree(call, wanted, values, tokens)
        if found is not None:
            add_gradient(call, "grad_weight", "tokens.weight", found, tokens, "lookup", EMBED)
            add_gradient(call, "grad_positions", "positions.weight", found, tokens, 0, EMBED)


def nothing(call: Call) -> None:
    """Play a kernel that changes the value of no row."""


RULES: dict[str, Rule] = {
    "embed": embed,
    "positions.add": positions_add,
    "layer_norm": norm,
    "rms_norm": norm,
    "residual_add": residual_add,
    "gelu": activation,
    "swiglu": activation,
    "geglu": activation,
    "gelu.bwd": activation_backward,
    "swiglu.bwd": activation_backward,
    "geglu.bwd": activation_backward,
    "layer_norm.bwd": norm_backward,
    "rms_norm.bwd": norm_backward,
    "embed.bwd": embed_backward,
    "metric.nll": nothing,
    "grads.check": nothing,
    "grads.scale": nothing,
    **value_linear.RULES,
    **value_adapters.RULES,
    **value_attention.RULES,
    **value_scores.RULES,
    **value_latent.RULES,
    **value_experts.RULES,
    **value_loss.RULES,
    **value_collectives.RULES,
    **value_moves.RULES,
    **value_gradients.RULES,
}
"""The rule of every op."""
