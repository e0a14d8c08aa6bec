"""Poison: bytes of ones, which debug mode writes where no instruction may read before another one has written.

Such bytes are NaN in every floating dtype and -1 in signed integers. No arithmetic of ours gives this NaN: processors
make NaN with other bits, and debug mode stops at the first instruction that reads any NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


def fill(tensor: Tensor) -> None:
    """Poison a contiguous tensor."""
    tensor.view(-1).view(torch.uint8).fill_(0xFF)


def is_whole(tensor: Tensor) -> bool:
    """Return whether every byte of a contiguous tensor is poison; False for an empty tensor."""
    return tensor.numel() > 0 and bool((_words(tensor) == -1).all())


def fingerprint(tensor: Tensor) -> int:
    """Return the sum of a contiguous tensor's bytes as signed words; a tensor that changed nearly always has another.

    It takes no memory as large as the tensor, unlike a copy.
    """
    return int(_words(tensor).sum(dtype=torch.int64))


def _words(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as integers, as wide as its size and address allow."""
    flat = tensor.view(-1).view(torch.uint8)
    width = next(d for n, d in _WORDS if flat.numel() % n == 0 and flat.data_ptr() % n == 0)
    return flat.view(width)
