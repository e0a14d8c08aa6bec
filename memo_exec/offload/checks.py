"""Debug mode: what comes back is what went, and memory that may be reused holds poison first."""

from __future__ import annotations

import torch
from torch import Tensor

POISON = 0xFF
"""Bytes of 0xFF are a NaN in every floating dtype."""


def total(data: Tensor) -> Tensor:
    """Return a sum over bytes in which every place counts, on their device: nothing synchronises with the host."""
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    rest = data[words.numel() * 8 :].long()
    places = torch.arange(1, words.numel() + 1, device=data.device)
    return (words * places).sum() ^ (rest * torch.arange(1, rest.numel() + 1, device=data.device)).sum()


def poison(data: Tensor) -> None:
    """Fill bytes with what no number is."""
    data.fill_(POISON)


def check(data: Tensor, wanted: Tensor) -> None:
    """Compare bytes that came back with the checksum of those that went.

    Raises:
        RaceFound: when they differ.
    """
    if not torch.equal(total(data), wanted):
        from memo_exec.interpreter.race_checks import RaceFound

        raise RaceFound(f"{data.numel()} bytes came back from the host as other bytes than were offloaded")
