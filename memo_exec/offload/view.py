"""Geometry of a tensor in its storage: the bytes it covers, and how to rebuild it over a copy of those bytes.

gapless   the view covers every byte between its first and its last; these bytes are copied unchanged
packed    the view has gaps (a column block, one of q, k, v); only its own elements are copied, with the dimensions
          in the same order

storage   [ q0 k0 v0 | q1 k1 v1 | q2 k2 v2 ]     k has gaps; its packed copy is  [ k0 k1 k2 ]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
"""Copies start at a multiple of this in the storage, so that kernels see the same alignment as in forward."""


@dataclass(frozen=True, slots=True)
class View:
    """Geometry of a strided tensor; ``first_bytes`` is its offset in the storage or in the copy."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first_bytes: int
    conj: bool = False
    neg: bool = False

    @staticmethod
    def of(tensor: Tensor) -> View:
        """Return the geometry of a strided tensor."""
        first_bytes = int(tensor.storage_offset()) * tensor.element_size()
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return View(tensor.dtype, size, stride, first_bytes, tensor.is_conj(), tensor.is_neg())

    @property
    def own_bytes(self) -> int:
        """Bytes of the elements; an expanded dimension counts once."""
        return math.prod(n for n, step in zip(self.size, self.stride, strict=True) if step) * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """Offset of the end of the last element."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.first_bytes + (last + 1) * self.dtype.itemsize

    @property
    def gapless(self) -> bool:
        """Whether the view covers every byte from its first to its last."""
        return self.own_bytes >= self.end_bytes - self.first_bytes

    def reach(self, storage_bytes: int) -> tuple[int, int]:
        """Return the aligned range (first, end) of storage bytes that contains the view."""
        first = self.first_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        end = -(-self.end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return first, min(end, storage_bytes)

    def after(self, first_bytes: int) -> View:
        """Return the view's geometry in a copy that starts at byte ``first_bytes`` of the storage."""
        return replace(self, first_bytes=self.first_bytes - first_bytes)

    def packed(self) -> View:
        """Return the geometry without gaps, at the start of a packed copy."""
        stride, step = [0] * len(self.size), 1
        for dim in sorted(range(len(self.size)), key=lambda d: (self.stride[d], -d)):
            if self.stride[dim]:
                stride[dim] = step
                step *= self.size[dim]
        return replace(self, stride=tuple(stride), first_bytes=0)

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor with this geometry over ``storage``."""
        found = self._raw(storage, self.size, self.stride)
        if self.conj:
            found = found.conj()
        return torch._neg_view(found) if self.neg else found

    def gathered(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the elements as new contiguous bytes, in the order of ``packed``."""
        elements = self.elements(storage)
        return torch.empty(elements.shape, dtype=self.dtype, device=storage.device).copy_(elements).view(-1)

    def elements(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a strided tensor over ``storage`` with each element once, in the order of ``packed``."""
        kept = tuple(n if step else 1 for n, step in zip(self.size, self.stride, strict=True))
        order = sorted(range(len(kept)), key=lambda d: (-self.stride[d], d))
        return self._raw(storage, tuple(kept[d] for d in order), tuple(self.stride[d] for d in order))

    def _raw(self, storage: torch.UntypedStorage, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Return the tensor over ``storage`` without its lazy conjugate and negation bits."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.first_bytes // self.dtype.itemsize, size, stride)


def bytes_of(storage: torch.UntypedStorage, first: int, end: int) -> Tensor:
    """Return bytes ``first`` to ``end`` of a storage as a tensor, which keeps the storage alive."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, first, (end - first,), (1,))
