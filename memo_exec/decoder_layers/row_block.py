"""One row block of a layer's forward, which pauses where attention is called.

All blocks run up to attention first. Attention then runs once, over all tokens, as the model's own function. Then each
block goes on with its rows of the output:

    block 0   norm, q k v projections, rotary | pause |           | o projection, residual, norm, MLP
    block 1                                   |       norm, q k v |                                  o projection, ...
    attention                                                     over both

The pause is a greenlet, because the layer's forward is transformers' own code, and it is called once for each block.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from greenlet import GreenletExit, greenlet
from torch import Tensor

from memo_exec.decoder_layers.attention_calls import AttentionCall, handled_by

Hooks = Callable[[], AbstractContextManager[Any]]


class RowBlock:
    """The forward of one row block; ``hooks`` makes the context that decides about its saved tensors."""

    def __init__(self, forward: Callable[[], Any], hooks: Hooks) -> None:
        self._forward = forward
        self._hooks = hooks
        self._inside = ExitStack()
        self._greenlet = greenlet(self._play)
        # Variables that transformers sets around a forward are those of this context.
        self._greenlet.gr_context = contextvars.copy_context()

    def start(self) -> AttentionCall | None:
        """Run up to the attention call and return it; None when the forward ended without one."""
        call: AttentionCall = self._greenlet.switch()
        return None if self._greenlet.dead else call

    def finish(self, attended: Tensor) -> tuple[Any, bool]:
        """Go on with the rows of the attention output; return the result, and whether it is the forward's."""
        found = self._greenlet.switch(attended)
        return found, self._greenlet.dead

    def close(self) -> None:
        """End a forward that has not ended, after an error elsewhere."""
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def _play(self) -> Any:
        self._enter()
        try:
            return self._forward()
        finally:
            self._inside.close()

    def _attention(self, call: AttentionCall) -> Tensor:
        # Handlers and hooks belong to the thread, so they would act on the other blocks too.
        self._inside.close()
        attended: Tensor = self._greenlet.parent.switch(call)
        self._enter()
        return attended

    def _enter(self) -> None:
        self._inside.enter_context(handled_by(self._attention))
        self._inside.enter_context(self._hooks())
