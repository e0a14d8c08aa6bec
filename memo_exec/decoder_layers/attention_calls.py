"""Sends a layer's attention call to a handler, in place of the function that transformers would have called.

Every attention module of transformers 5 asks ``AttentionInterface.get_interface`` for its function, right before the
call. While a handler is active in this thread, the answer is the handler, which receives the real function. Otherwise
nothing changes, so masks, configurations and other models are as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memo_sim.contract.errors import CannotRun, missing_package

AttentionFunction = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function; q, k and v are (batch, heads, tokens, head size)."""

    function: AttentionFunction
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: object
    named: dict[str, Any]


Handler = Callable[[AttentionCall], Tensor]
"""Takes the call, returns the attention output (batch, tokens, heads, head size)."""

_active = threading.local()


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Send attention calls of this thread to ``handler``."""
    previous = getattr(_active, "handler", None)
    _active.handler = handler
    try:
        yield
    finally:
        _active.handler = previous


def listen() -> None:
    """Make transformers ask for a handler before each attention call; a second call changes nothing.

    Raises:
        CannotRun: when transformers is not installed, or has no such place.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from None
    interface = getattr(transformers, "AttentionInterface", None)
    found = getattr(interface, "get_interface", None)
    if interface is None or found is None:
        raise CannotRun(
            "this transformers has no place where attention calls can be handled",
            got=f"transformers {transformers.__version__}",
            wanted="5.0 or later",
            hint="install memo[tokenwise]",
        )
    if getattr(found, "asks_memo", False):
        return

    def get_interface(self: Any, attn_implementation: str, default: AttentionFunction) -> AttentionFunction:
        function = found(self, attn_implementation, default)
        handler: Handler | None = getattr(_active, "handler", None)
        if handler is None:
            return function  # type: ignore[no-any-return]

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **named: Any
        ) -> tuple[Tensor, None]:
            return handler(AttentionCall(function, module, query, key, value, attention_mask, named)), None

        return attention

    get_interface.asks_memo = True  # type: ignore[attr-defined]
    interface.get_interface = get_interface
