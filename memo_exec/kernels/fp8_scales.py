"""The scales of the tensors that were quantised to FP8, by the addresses of their copies, and scratch for the kernels.

A scale lives as long as its copy: the next tensor that is quantised to the same range of addresses replaces it. Lanes
that move a copy to the host and back copy its scale on the device, so the program's edges order scales as copies.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SCRATCH_BYTES = 32 * 2**20
"""Of numbers in fp32: those that are being rounded, and a part of a weight's gradient before it is added."""
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
CELLS = 4096
"""Scales that are allocated at once."""


class Fp8Scales:
    """Scales by address. ``wide`` is scratch: a flat fp32 tensor that every kernel of the compute lane may write."""

    def __init__(self, device: torch.device, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self.wide = torch.empty(scratch_bytes // 4, device=device)
        self._cells = torch.ones(CELLS, device=device)
        self._used = 0
        self._of: dict[tuple[int, int], Tensor] = {}
        self._lock = threading.Lock()

    def made(self, copy: Tensor) -> Tensor:
        """Return the scale of ``copy``, shape (1,), for the kernel that writes it."""
        key = (copy.data_ptr(), copy.numel())
        with self._lock:
            if key not in self._of:
                if self._used == len(self._cells):
                    self._cells, self._used = torch.ones_like(self._cells), 0
                self._of[key] = self._cells[self._used : self._used + 1]
                self._used += 1
            return self._of[key]

    def carry(self, source: Tensor, target: Tensor) -> None:
        """Give ``target``, to which all of a copy is moved, its scale; nothing for other tensors."""
        found = self._of.get((source.data_ptr(), source.numel()))
        if found is not None and source.dtype in FORMATS:
            self.made(target).copy_(found)

    def of(self, copy: Tensor) -> Tensor:
        """Return the scale of ``copy``, shape (1,).

        Raises:
            ValueError: when no tensor was quantised to just these addresses.
        """
        found = self._of.get((copy.data_ptr(), copy.numel()))
        if found is None:
            raise ValueError("a product in FP8 reads rows that were not quantised together, so they have no scale")
        return found
