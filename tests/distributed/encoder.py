"""A second reference for layouts, besides one process: torch's encoder layers with autograd.

For each layer it gives the outputs of attention, the MLP and the layer, and the gradients of these outputs and of the
inputs of attention, the MLP and the layer. For the model it gives the gradients of all parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, Kernel
from memo_exec.training import weights
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.token_order import token_runs
from memo_sim.program.lower import lower
from tests.distributed.parity import TOLERANCE, Played, global_batch, one_process, play, randomise, whole_gradients
from tests.distributed.team import Member, Team

PARTS = {"qkv": "self_attn.in_proj_", "proj": "self_attn.out_proj.", "ffn_up": "linear1.", "ffn_down": "linear2."}
PARTS |= {"norm1": "norm1.", "norm2": "norm2."}
ENCODER_NAMES = {f"{ours}.{kind}": theirs + kind for ours, theirs in PARTS.items() for kind in ("weight", "bias")}
"""Names inside a layer: ours, and those of torch's encoder layer."""


READ: dict[str, dict[str, Callable[[Call], Tensor]]] = {
    "fwd/resid_add": {"attention": lambda call: call["y"] + call["bias"]},
    "fwd/out_add": {"ffn": lambda call: call["y"] + call["bias"]},
    "bwd/norm1.bwd": {"norm1.grad": lambda call: call["grad"].clone()},
    "bwd/norm2.bwd": {"norm2.grad": lambda call: call["grad"].clone()},
}
"""Inputs of a layer's instructions, by the reference's names. They are summed over ranks; biases are added here."""
WRITTEN = {"fwd/out_add": "output", "bwd/norm1.bwd": "input.grad", "bwd/norm2.bwd": "attention.grad"}
"""The reference's name of each instruction's ``out``: the layer's output, and the gradients of the layer's input and of
attention's output, which norm1 and norm2 add to the residual's gradient."""

Rows = dict[str, list[Tensor]]
"""Tensors of layers by name, each (tokens, hidden), in the order in which the rank computed them."""


def encoder(decisions: Decisions) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return a step's gradients of parameters, and the tensors of every layer, each (sequences, tokens, hidden)."""
    model, alone = decisions.model, one_process(decisions)
    with Interpreter(alone, lower(alone)[0]) as interpreter:
        randomise(interpreter)
        named = {name: value.clone().requires_grad_() for name, value in weights.named_parameters(interpreter).items()}
    ids, labels = global_batch(decisions, 1)
    x = named["embed/tokens.weight"][ids] + named["embed/positions.weight"][: decisions.seq_tokens]
    causal = torch.nn.Transformer.generate_square_subsequent_mask(decisions.seq_tokens)
    sizes = {"d_model": model.hidden, "nhead": model.heads, "dim_feedforward": model.ffn_hidden}
    passed: list[dict[str, Tensor]] = []
    for number in range(model.layers):
        layer = torch.nn.TransformerEncoderLayer(
            **sizes, dropout=0.0, activation="gelu", layer_norm_eps=model.norm_eps, batch_first=True, norm_first=True
        )
        seen: dict[str, Tensor] = {"input": x}
        parts = {"attention": layer.self_attn, "ffn": layer.linear2, "norm1": layer.norm1, "norm2": layer.norm2}
        for name, part in parts.items():
            part.register_forward_hook(_kept(seen, name))
        own = {theirs: named[f"layer.{number}/{ours}"] for ours, theirs in ENCODER_NAMES.items()}
        x = torch.func.functional_call(layer, own, (x,), {"src_mask": None if model.bidirectional else causal})
        seen["output"] = x
        for value in seen.values():
            value.retain_grad()
        passed.append(seen)
    norm = (named["head/norm.weight"], named["head/norm.bias"])
    logits = functional.layer_norm(x, (model.hidden,), *norm, model.norm_eps) @ named["embed/tokens.weight"].t()
    functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    for seen in passed:
        seen |= {f"{name}.grad": value.grad for name, value in list(seen.items()) if value.grad is not None}
    return {name: value.grad for name, value in named.items() if value.grad is not None}, passed


def _kept(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Return a hook that stores a module's output. Attention returns a pair, of which the second entry is None."""

    def hook(_module: object, _given: object, out: Tensor | tuple[Tensor, None]) -> None:
        seen[name] = out[0] if isinstance(out, tuple) else out

    return hook


def play_layers(member: Member, decisions: Decisions) -> tuple[Played, Rows]:
    """Play a step on a rank; also return the tensors of its layers."""
    rows: Rows = defaultdict(list)

    def watched(kernel: Kernel) -> Kernel:
        def play_and_keep(call: Call) -> None:
            name = call.instruction.name
            for tensor, read in READ.get(name, {}).items():
                rows[tensor].append(read(call))
            kernel(call)
            if name in WRITTEN:
                rows[WRITTEN[name]].append(call["out"].clone())

        return play_and_keep

    own = {op: watched(KERNELS[op]) for op in ("residual_add", "layer_norm.bwd")}
    return play(member, decisions, 1, {"kernels": {**KERNELS, **own}}), dict(rows)


def whole_layers(decisions: Decisions, ranks: list[Rows]) -> list[dict[str, Tensor]]:
    """Return the tensors of every layer, assembled from the ranks' rows."""
    layers, sequences = decisions.model.layers, decisions.global_batch
    shape = (sequences, decisions.seq_tokens, decisions.model.hidden)
    found: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for rank, rows in enumerate(ranks):
        tokens = torch.cat([torch.arange(run.token, run.token + run.tokens) for run in token_runs(decisions, rank)])
        for name, made in rows.items():
            assert len(made) == layers * sequences, name
            for number, values in enumerate(made):
                sequence, turn = divmod(number, layers)
                layer = layers - 1 - turn if name.endswith(".grad") else turn
                found[layer].setdefault(name, torch.full(shape, torch.nan))[sequence, tokens] = values
    return found


def check_encoder(team: Team, decisions: Decisions) -> None:
    """Compare a step of a layout with torch's encoder layers. Micro-batches have one sequence."""
    gradients, layers = encoder(decisions)
    ranks = team.play(play_layers, decisions.layout.devices, decisions)
    found = whole_gradients([played for played, _ in ranks])
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), name
    for layer, (ours, theirs) in enumerate(zip(whole_layers(decisions, [r for _, r in ranks]), layers, strict=True)):
        assert set(ours) == {name for names in READ.values() for name in names} | set(WRITTEN.values())
        for name, values in ours.items():
            wanted = theirs[name].detach()
            assert (values - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), f"layer {layer}: {name}"
