"""One layer's forward under token-wise alpha, and what its backward needs.

The layer's input is packed first, then the row blocks run (``row_block.py``). A block's saved tensors have the block's
fate. Attention's saved tensors are of two kinds: q, k and v have the fates of their rows, and everything else (the
output, the log-sum-exp, copies that a kernel made) is kept or swapped whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memo_exec.decoder_layers.attention_calls import AttentionCall
from memo_exec.decoder_layers.joined_rows import Joined, JoinedRows, Rows
from memo_exec.decoder_layers.layer_swap import CountedSwap, LayerBlocks, LayerSwap
from memo_exec.decoder_layers.meta_copy import counted
from memo_exec.decoder_layers.policy import Fate, LayerPolicy
from memo_exec.decoder_layers.recompute import NAMES, AutocastState, BlockRecompute, Place
from memo_exec.decoder_layers.row_block import RowBlock
from memo_exec.decoder_layers.saved import Packed, SavedTensors
from memo_sim.contract.errors import CannotRun

WHOLE = ("attention_mask",)
"""Arguments that only attention reads, for all tokens."""

Forward = Callable[..., Any]


def rows_of(name: str, value: object, tokens: int, first: int, end: int) -> object:
    """Return the rows of one argument: along dimension 1 (batch first), or 0 where there is one dimension."""
    if name in WHOLE:
        return value
    if isinstance(value, tuple | list):
        return type(value)([rows_of(name, each, tokens, first, end) for each in value])
    if isinstance(value, Tensor):
        dim = 1 if value.dim() > 1 else 0
        if value.dim() and value.shape[dim] == tokens:
            return value.narrow(dim, first, end - first)
    return value


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors of an argument."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, tuple | list) else []


class LayerForward:
    """One forward pass of one layer; ``where`` names it in errors."""

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        policy: LayerPolicy,
        swap: LayerSwap | CountedSwap,
        *,
        first: bool,
        where: str,
    ) -> None:
        self._forward = forward
        self._policy = policy
        self._swap = swap
        self._module = module
        self._where = where
        self._attended: Packed
        self.blocks: LayerBlocks = swap.begin(first=first)
        self.saved: SavedTensors

    def run(self, x: Tensor, named: Mapping[str, Any]) -> Any:
        """Return what the layer's forward returns for x (batch, tokens, hidden).

        Raises:
            CannotRun: when the layer is one that row blocks cannot play.
        """
        tokens = x.shape[1]
        shared = [tensor for value in named.values() for tensor in tensors_in(value)]
        self.saved = SavedTensors(self._swap, self.blocks, self._module, shared)
        packed = self.saved.pack(self._policy.whole)(x) if self._is_recomputed(tokens) else None
        rows: list[RowBlock] = []
        recomputes: list[BlockRecompute | None] = []
        spans = self._policy.blocks(tokens)
        for first, end, fate in spans:
            mine = {name: rows_of(name, value, tokens, first, end) for name, value in named.items()}
            recompute = None
            if fate is Fate.RECOMPUTE:
                recompute = self._recompute(x, packed, mine, first, end)
            rows.append(RowBlock(self._block(x, mine, first, end), self._hooks(fate, recompute)))
            recomputes.append(recompute)
        try:
            calls = [
                self._called(block.start(), end - first) for block, (first, end, _) in zip(rows, spans, strict=True)
            ]
            out = self._attend(calls, named, recomputes)
            found = [
                self._finished(block, out[:, first:end]) for block, (first, end, _) in zip(rows, spans, strict=True)
            ]
        finally:
            for block in rows:
                block.close()
        self.saved.end_forward()
        return self._whole(found)

    def _is_recomputed(self, tokens: int) -> bool:
        return any(fate is Fate.RECOMPUTE for _, _, fate in self._policy.blocks(tokens))

    def _block(self, x: Tensor, named: Mapping[str, Any], first: int, end: int) -> Callable[[], Any]:
        return lambda: self._forward(x[:, first:end], **named)

    def _hooks(self, fate: Fate, recompute: BlockRecompute | None) -> Callable[[], AbstractContextManager[Any]]:
        if recompute is not None:
            place_or_kept = recompute.pack
            return lambda: saved_tensors_hooks(place_or_kept, self._unpack)
        return lambda: saved_tensors_hooks(self.saved.pack(fate), self._unpack)

    def _recompute(self, x: Tensor, packed: Packed, named: Mapping[str, Any], first: int, end: int) -> BlockRecompute:
        forward, saved, needs_grad = self._forward, self.saved, x.requires_grad

        def inputs() -> tuple[Tensor, Tensor]:
            rows = saved.unpack(packed)[:, first:end].detach().requires_grad_(needs_grad)
            attended = saved.unpack(self._attended)[:, first:end].detach()
            return rows, attended.requires_grad_(self._attended_needs_grad)

        found = BlockRecompute(lambda rows: forward(rows, **named), inputs, saved)
        found.autocast = AutocastState(x.device.type)
        return found

    def _unpack(self, packed: Packed) -> Tensor:
        with torch.no_grad():
            if isinstance(packed, Place):
                return packed.recompute.unpack(packed)
            return packed.tensor() if isinstance(packed, Joined) else self.saved.unpack(packed)

    def _called(self, call: AttentionCall | None, rows: int) -> AttentionCall:
        if call is None:
            raise self._refuse("the layer does not call attention through transformers' AttentionInterface")
        if call.named.get("dropout"):
            raise self._refuse("attention has dropout", hint="set the configuration's attention_dropout to 0")
        for tensor in (call.q, call.k, call.v):
            if tensor.dim() != 4 or tensor.shape[2] != rows:
                raise self._refuse(
                    "attention reads other keys than those of the layer's own tokens",
                    got=f"a tensor of {tuple(tensor.shape)} for {rows} tokens",
                )
        return call

    def _attend(
        self, calls: list[AttentionCall], named: Mapping[str, Any], recomputes: list[BlockRecompute | None]
    ) -> Tensor:
        """Run attention over all tokens, and pack its output."""
        spans = self._policy.blocks(sum(call.q.shape[2] for call in calls))
        joined = []
        for name, parts in zip(NAMES, zip(*((call.q, call.k, call.v) for call in calls), strict=True), strict=True):
            rows = [Rows(*span, part, again) for span, part, again in zip(spans, parts, recomputes, strict=True)]
            joined.append(JoinedRows(name, rows, self.saved))
        call = calls[0]
        q, k, v = (each.whole for each in joined)
        # What the layer passes on to attention is given for all tokens again.
        arguments = {name: named.get(name, value) for name, value in call.named.items()}
        pack_rest = self.saved.pack(self._policy.whole)

        def pack(tensor: Tensor) -> Packed:
            if type(tensor) is Tensor:
                for each in joined:
                    if (packed := each.pack(tensor)) is not None:
                        return packed
            return pack_rest(tensor)

        function = counted(call.function) if call.q.is_meta else call.function
        with saved_tensors_hooks(pack, self._unpack):
            out, _ = function(call.module, q, k, v, call.mask, **arguments)
        for each in joined:
            each.forget()
        if out.dim() < 3 or out.shape[1] != spans[-1][1]:
            raise self._refuse(
                "the attention function returns another shape", got=tuple(out.shape), wanted="(batch, tokens, ...)"
            )
        self._attended_needs_grad = out.requires_grad
        if any(recomputes):
            self._attended = pack_rest(out)
        return out

    def _finished(self, block: RowBlock, attended: Tensor) -> Any:
        found, ended = block.finish(attended)
        if not ended:
            raise self._refuse("the layer calls attention more than once")
        return found

    def _whole(self, found: list[Any]) -> Any:
        """Return the results of all blocks as one."""
        if isinstance(found[0], Tensor):
            return found[0] if len(found) == 1 else torch.cat(found, 1)
        if isinstance(found[0], tuple) and all(each is None for result in found for each in result[1:]):
            return (self._whole([result[0] for result in found]), *found[0][1:])
        raise self._refuse("the layer returns more than its hidden states", got=type(found[0]).__name__)

    def _refuse(self, what: str, *, got: object = None, hint: str | None = None, wanted: object = None) -> CannotRun:
        return CannotRun(
            f"token-wise alpha cannot play this layer: {what}", where=self._where, got=got, wanted=wanted, hint=hint
        )
