"""What a layout's gradients are held against beside one process's: those of torch's encoder layers, by autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from memo_exec import weights
from memo_exec.interpreter import Interpreter
from memo_sim.contract.plan import Decisions
from memo_sim.program.lower import lower
from tests.distributed.parity import TOLERANCE, global_batch, one_process, play, randomise, whole_gradients
from tests.distributed.team import Team

PARTS = {"qkv": "self_attn.in_proj_", "proj": "self_attn.out_proj.", "ffn_up": "linear1.", "ffn_down": "linear2."}
PARTS |= {"norm1": "norm1.", "norm2": "norm2."}
ENCODER_NAMES = {f"{ours}.{kind}": theirs + kind for ours, theirs in PARTS.items() for kind in ("weight", "bias")}
"""Names inside a layer: ours, and those of torch's encoder layer."""


def encoder_gradients(decisions: Decisions) -> dict[str, Tensor]:
    """Return the gradients of a step by autograd: layers are torch's ``TransformerEncoderLayer``, masked or not."""
    model, alone = decisions.model, one_process(decisions)
    with Interpreter(alone, lower(alone)[0]) as interpreter:
        randomise(interpreter)
        named = {name: value.clone().requires_grad_() for name, value in weights.named_parameters(interpreter).items()}
    ids, labels = global_batch(decisions, 1)
    x = named["embed/tokens.weight"][ids] + named["embed/positions.weight"][: decisions.seq_tokens]
    causal = torch.nn.Transformer.generate_square_subsequent_mask(decisions.seq_tokens)
    sizes = {"d_model": model.hidden, "nhead": model.heads, "dim_feedforward": model.ffn_hidden}
    for number in range(model.layers):
        layer = torch.nn.TransformerEncoderLayer(
            **sizes, dropout=0.0, activation="gelu", layer_norm_eps=model.norm_eps, batch_first=True, norm_first=True
        )
        own = {theirs: named[f"layer.{number}/{ours}"] for ours, theirs in ENCODER_NAMES.items()}
        x = torch.func.functional_call(layer, own, (x,), {"src_mask": None if model.bidirectional else causal})
    norm = (named["head/norm.weight"], named["head/norm.bias"])
    logits = functional.layer_norm(x, (model.hidden,), *norm, model.norm_eps) @ named["embed/tokens.weight"].t()
    functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    return {name: value.grad for name, value in named.items() if value.grad is not None}


def check_encoder(team: Team, decisions: Decisions) -> None:
    """Compare a layout's gradients of a step with those of torch's encoder layers."""
    wanted = encoder_gradients(decisions)
    found = whole_gradients(team.play(play, decisions.layout.devices, decisions, 1, {}))
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), name
