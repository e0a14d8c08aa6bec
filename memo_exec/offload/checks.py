"""Checks of debug mode: checksums of offloaded bytes, and poison in memory that is about to be reused."""

from __future__ import annotations

import torch
from torch import Tensor

POISON = 0xFF
"""Bytes of 0xFF are a NaN in every floating dtype."""


def total(data: Tensor) -> Tensor:
    """Return a position-dependent checksum of bytes, as a tensor on their device; the host does not synchronise."""
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    rest = data[words.numel() * 8 :].long()
    places = torch.arange(1, words.numel() + 1, device=data.device)
    return (words * places).sum() ^ (rest * torch.arange(1, rest.numel() + 1, device=data.device)).sum()


def poison(data: Tensor) -> None:
    """Fill bytes with NaN patterns."""
    data.fill_(POISON)


def check(data: Tensor, wanted: Tensor) -> None:
    """Compare restored bytes with the checksum of the offloaded ones.

    Raises:
        RaceFound: if they differ.
    """
    if not torch.equal(total(data), wanted):
        from memo_exec.interpreter.race_checks import RaceFound

        raise RaceFound(f"{data.numel()} bytes restored from the host differ from the bytes that were offloaded")
