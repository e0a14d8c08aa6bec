"""What a layout is held against beside one process: torch's encoder layers, by autograd.

Of each layer: what attention and the MLP add to the residual, the layer's output, and the gradients of all of these
and of what attention, the MLP and the layer are given. Of the model: the gradients of its parameters.
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
"""What an instruction of a layer is given, under the reference's names: all ranks' sums, biases added."""
WRITTEN = {"fwd/out_add": "output", "bwd/norm1.bwd": "input.grad", "bwd/norm2.bwd": "attention.grad"}
"""What its ``out`` is; the residual's gradient is that of attention's output, and the layer's that of its input."""

Rows = dict[str, list[Tensor]]
"""Tensors of a layer by name, (tokens, hidden), micro-batch by micro-batch, in the order they were made."""


def encoder(decisions: Decisions) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return a step's gradients of parameters, and what passes through every layer (sequences, tokens, hidden)."""
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
    """Return a hook that remembers a module's output; attention's comes with its weights, which nobody asked for."""

    def hook(_module: object, _given: object, out: Tensor | tuple[Tensor, None]) -> None:
        seen[name] = out[0] if isinstance(out, tuple) else out

    return hook


def play_layers(member: Member, decisions: Decisions) -> tuple[Played, Rows]:
    """Play a step on a rank; return also what passes through its layers."""
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
    """Return what passes through every layer, put together from the ranks' rows."""
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
    """Compare a step of a layout with torch's encoder layers: micro-batches of one sequence, whole on its ranks."""
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
