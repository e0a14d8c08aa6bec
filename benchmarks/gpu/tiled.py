"""A layer whose MLP runs in tiles of the sequence, as in ALST, so that its wide tensors exist for one tile at a time.

Only the input of a tile is kept; backward runs the tile's forward again, then its backward. Usually the layer is
checkpointed too, so the MLP's forward runs three times. Weight gradients accumulate tile by tile in the parameters'
dtype. The number of tiles is ceil(tokens / hidden), which is ALST's default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.model import Layer


def tiled_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the layer's output on (batch, tokens, hidden)."""
    assert isinstance(layer, Layer)
    out: Tensor = TiledMLP.apply(layer.attend(x), layer)  # type: ignore[no-untyped-call]
    return out


def tile_tokens(tokens: int, hidden: int) -> int:
    """Return the number of tokens of one tile."""
    tiles = -(-tokens // hidden)
    return -(-tokens // tiles)


class TiledMLP(torch.autograd.Function):
    """``layer.mlp(x)`` in tiles; backward adds the parameters' gradients to their ``grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        """Return the output, and save only the input."""
        ctx.save_for_backward(x)
        ctx.layer = layer
        out = torch.empty_like(x)
        for rows in _tiles(x, layer):
            out[:, rows] = layer.mlp(x[:, rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the input's gradient, computed tile by tile."""
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        for rows in _tiles(x, ctx.layer):
            tile = x[:, rows].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.layer.mlp(tile)
            torch.autograd.backward(out, grads[0][:, rows])
            assert tile.grad is not None
            grad_x[:, rows] = tile.grad
        return grad_x, None


def _tiles(x: Tensor, layer: Layer) -> list[slice]:
    tokens, size = x.shape[1], tile_tokens(x.shape[1], layer.model.hidden)
    return [slice(first, min(tokens, first + size)) for first in range(0, tokens, size)]
