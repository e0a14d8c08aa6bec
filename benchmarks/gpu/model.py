"""The models that the rivals train: the same as memo's, in plain torch with autograd, and optimised.

- Q, K and V are one matrix product, and so are the two halves of a gated FFN.
- Attention is torch's scaled_dot_product_attention, on the backend that the caller allows.
- Rotary saves no tensors, and logits are computed in chunks.

Parameters have memo's names, so that all systems start from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.gpu.loss import ChunkedLoss
from memo_exec.kernels.frequencies import inverse_frequencies
from memo_sim.contract.model import Model


class Rotary(torch.autograd.Function):
    """Rotary embedding of the pairs (i, i + head_dim / 2); x is (batch, tokens, heads, head_dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rotated heads."""
        ctx.tables = cos, sin  # not as saved tensors, because hooks would offload the tables with every layer
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradients, rotated by the negative angles."""
        cos, sin = ctx.tables
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    one, two = x.chunk(2, dim=-1)
    first, second = out.chunk(2, dim=-1)
    torch.mul(one, cos, out=first).addcmul_(two, sin, value=-1)
    torch.mul(two, cos, out=second).addcmul_(one, sin)
    return out


class Positions:
    """Cosines and sines of every position, (tokens, 1, head_dim / 2); models with learned positions have none."""

    def __init__(self, model: Model, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies = inverse_frequencies(model, tokens)
        angles = torch.outer(torch.arange(tokens).float(), frequencies).unsqueeze(1).to(device)
        factor = 1.0 if model.rope_scaling is None else model.rope_scaling.attention_factor
        self.cos, self.sin = (factor * angles.cos()).to(dtype), (factor * angles.sin()).to(dtype)


class Layer(nn.Module):
    """One transformer layer on (batch, tokens, hidden)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        h, qkv = model.hidden, model.q_width + 2 * model.kv_width
        up = (2 if model.gated else 1) * model.ffn_hidden
        self.model = model
        self.norm1, self.norm2 = _norm(model, h), _norm(model, h)
        self.qkv = nn.Linear(h, qkv, bias=model.qkv_bias)
        self.proj = nn.Linear(model.q_width, h, bias=model.linear_bias)
        self.ffn_up = nn.Linear(h, up, bias=model.linear_bias)
        self.ffn_down = nn.Linear(model.ffn_hidden, h, bias=model.linear_bias)
        if model.qk_norm:
            self.q_norm, self.k_norm = _norm(model, model.head_dim), _norm(model, model.head_dim)
        self.positions: Positions | None = None
        self.compiled = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return self.mlp(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        """Return the layer's input plus attention."""
        out: Tensor = x + self.proj(self._attention(self.norm1(x)))
        return out

    def mlp(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the MLP of ``x``; each token is independent of the others."""
        up = self.ffn_up(self.norm2(x))
        if self.model.gated:
            gate, up = up.chunk(2, dim=-1)
            act = F.silu(gate) * up
        else:
            act = F.gelu(up, approximate="tanh" if self.model.activation == "gelu_tanh" else "none")
        out: Tensor = x + self.ffn_down(act)
        return out

    def _attention(self, x: Tensor) -> Tensor:
        m = self.model
        packed = self.qkv(x).unflatten(-1, (-1, m.head_dim))
        q, k, v = packed.split([m.heads, m.kv_heads, m.kv_heads], dim=2)
        if m.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.positions is not None:
            q, k = self._rotated(q), self._rotated(k)
            # Copy V, because a view would keep the unrotated Q and K alive.
            v = v.contiguous()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=m.heads != m.kv_heads)
        return out.transpose(1, 2).flatten(2)

    def _rotated(self, x: Tensor) -> Tensor:
        assert self.positions is not None
        cos, sin = self.positions.cos, self.positions.sin
        if not self.compiled:
            rotated: Tensor = Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
            return rotated
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def _norm(model: Model, width: int) -> nn.Module:
    if model.family == "gpt":
        return nn.LayerNorm(width, eps=model.norm_eps)
    return nn.RMSNorm(width, eps=model.norm_eps)


class PlainModel(nn.Module):
    """The whole model; the caller of ``loss`` decides how the layers run."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        if model.learned_positions:
            self.positions = nn.Embedding(model.max_positions, model.hidden)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = _norm(model, model.hidden)
        if not model.tied_embeddings:
            self.classifier = nn.Linear(model.hidden, model.vocab, bias=False)

    def loss(
        self, ids: Tensor, labels: Tensor, scale: float, run_layers: Callable[[PlainModel, Tensor], Tensor]
    ) -> Tensor:
        """Return ``scale`` times the summed loss; ids and labels are (sequences, tokens)."""
        x = self.tokens(ids)
        if self.model.learned_positions:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(run_layers(self, x))
        weight = self.tokens.weight if self.model.tied_embeddings else self.classifier.weight
        loss: Tensor = ChunkedLoss.apply(x.flatten(0, 1), weight, labels.flatten(), scale)  # type: ignore[no-untyped-call]
        return loss

    def by_memo_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (memo's name, parameter) for every parameter."""
        for name, parameter in self.named_parameters():
            place, _, rest = name.partition(".")
            if place == "layers":
                number, _, rest = rest.partition(".")
                yield f"layer.{number}/{rest}", parameter
            else:
                yield f"{'embed' if place in ('tokens', 'positions') else 'head'}/{name}", parameter


def build(model: Model, tokens: int, device: torch.device, dtype: torch.dtype) -> PlainModel:
    """Return a model whose weights are allocated but not initialised."""
    with torch.device("meta"):
        plain = PlainModel(model)
    plain = plain.to(dtype).to_empty(device=device)
    positions = None if model.learned_positions else Positions(model, tokens, device, dtype)
    for layer in plain.layers:
        assert isinstance(layer, Layer)
        layer.positions = positions
    return plain
