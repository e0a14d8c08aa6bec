"""q, k and v over all tokens: joined for attention's forward, and again for its backward from rows with other fates.

Attention saves its inputs. Where all rows have one fate, kept or swapped, so have the joined tensors. Otherwise nothing
of them is held: each block's rows have their own fate, and backward joins them again.

Some attention functions repeat keys and values first, once for each query head that shares them. Backward makes such a
copy again from the joined rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memo_exec.decoder_layers.policy import Fate
from memo_exec.decoder_layers.recompute import BlockRecompute
from memo_exec.decoder_layers.saved import Packed, SavedTensors
from memo_exec.offload.view import View

_MOVES = {"ExpandBackward0", "CloneBackward0", "UnsafeViewBackward0", "ViewBackward0", "SliceBackward0"}
_HEADS, _SHARERS = 1, 2
"""Dimensions: heads of (batch, heads, tokens, head size), and the one that is put in to repeat them."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One row block's part of a joined tensor."""

    first: int
    end: int
    fate: Fate
    tensor: Tensor
    """(batch, heads, tokens of the block, head size)."""
    recompute: BlockRecompute | None


@dataclass(frozen=True, slots=True)
class Joined:
    """The object that autograd holds for a view of a joined tensor, or of its heads repeated."""

    rows: JoinedRows
    repeats: int
    view: View

    def tensor(self) -> Tensor:
        """Return the view, in new memory."""
        whole = self.rows.joined()
        if self.repeats > 1:
            whole = whole.repeat_interleave(self.repeats, _HEADS)
        return self.view.over(whole.untyped_storage())


class JoinedRows:
    """One of q, k and v; ``name`` says which."""

    def __init__(self, name: str, parts: Sequence[Rows], saved: SavedTensors) -> None:
        self.whole: Tensor | None = _join([part.tensor for part in parts])
        self._shape = self.whole.shape
        self._name = name
        self._parts: Sequence[Rows] = parts
        self._saved = saved
        self._held: list[tuple[int, int, Callable[[], Tensor]]] = []

    def forget(self) -> None:
        """Drop the tensors of forward; only what backward needs stays."""
        self.whole = None
        self._parts = ()

    def pack(self, tensor: Tensor) -> Packed | None:
        """Return what autograd is to hold for a saved tensor; None when it is not made from these rows alone."""
        assert self.whole is not None
        if tensor.untyped_storage()._cdata == self.whole.untyped_storage()._cdata:
            fates = {part.fate for part in self._parts}
            if len(fates) == 1 and Fate.RECOMPUTE not in fates:
                return self._saved.pack(*fates)(tensor)
            repeats = 1
        elif (repeats := self._repeats(tensor)) == 0 or all(part.fate is Fate.KEEP for part in self._parts):
            return None
        self._hold()
        return Joined(self, repeats, View.of(tensor))

    def joined(self) -> Tensor:
        """Return all rows, in the memory format of forward."""
        first = self._held[0][2]()
        if len(self._held) == 1:
            return first
        batch, heads, tokens, size = self._shape
        whole = torch.empty((batch, tokens, heads, size), dtype=first.dtype, device=first.device).transpose(1, 2)
        whole[:, :, self._held[0][0] : self._held[0][1]] = first
        del first
        for begin, end, rows in self._held[1:]:
            whole[:, :, begin:end] = rows()
        return whole

    def _hold(self) -> None:
        for part in self._parts if not self._held else ():
            if part.recompute is not None:
                part.recompute.wanted_parts.add(self._name)
                self._saved.count_recomputed(part.tensor)
                self._held.append((part.first, part.end, _from_recompute(part.recompute, self._name)))
            else:
                packed = self._saved.pack(part.fate)(part.tensor)
                self._held.append((part.first, part.end, _from_saved(self._saved, packed)))

    def _repeats(self, tensor: Tensor) -> int:
        """Return how often each head is repeated in a copy of the joined tensor; 0 when it is something else."""
        assert self.whole is not None
        batch, heads, tokens, size = self._shape
        if tensor.dim() != 4 or self.whole.grad_fn is None or not tensor.is_contiguous():
            return 0
        repeats = tensor.shape[_HEADS] // heads
        if tensor.shape != (batch, heads * repeats, tokens, size) or repeats < 2:
            return 0
        node, unsqueezed = tensor.grad_fn, False
        while node is not None and node is not self.whole.grad_fn:
            if node.name() == "UnsqueezeBackward0" and not unsqueezed:
                unsqueezed = getattr(node, "_saved_dim", None) == _SHARERS
            elif node.name() not in _MOVES:
                return 0
            inputs = [each for each, _ in node.next_functions]
            node = inputs[0] if len(inputs) == 1 else None
        return repeats if node is not None and unsqueezed else 0


def _from_recompute(recompute: BlockRecompute, name: str) -> Callable[[], Tensor]:
    return lambda: recompute.part(name)


def _from_saved(saved: SavedTensors, packed: Packed) -> Callable[[], Tensor]:
    return lambda: saved.unpack(packed)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all blocks as one tensor (batch, heads, tokens, head size), tokens before heads in memory."""
    return parts[0] if len(parts) == 1 else torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)
