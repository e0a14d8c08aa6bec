"""The executor: plays a plan's program with torch on real devices and times each instruction.

``memo_exec.run`` trains as a plan says, ``verify`` checks its gradients, ``compare`` holds a measured step against the
prediction, ``calibrate`` measures this machine (``memo_exec/api.py``). ``memo_exec.offload_activations`` needs no plan:
it offloads the activations that autograd saves, for any torch model. ``memo_exec.tokenwise`` swaps and recomputes by
token in the decoder layers of a transformers model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memo_exec.api import (
        CalibrateResult,
        ComparisonResult,
        RunResult,
        VerifyResult,
        calibrate,
        compare,
        run,
        verify,
    )
    from memo_exec.decoder_layers import tokenwise
    from memo_exec.offload import OffloadActivations, keep_activations

    offload_activations = OffloadActivations

__all__ = [
    "CalibrateResult",
    "ComparisonResult",
    "RunResult",
    "VerifyResult",
    "calibrate",
    "compare",
    "keep_activations",
    "offload_activations",
    "run",
    "tokenwise",
    "verify",
]

_ELSEWHERE = {
    "keep_activations": ("memo_exec.offload", "keep_activations"),
    "offload_activations": ("memo_exec.offload", "OffloadActivations"),
    "tokenwise": ("memo_exec.decoder_layers", "tokenwise"),
}
"""Names that are not of ``memo_exec.api``: their rooms, and what they are called there."""


def __getattr__(name: str) -> object:
    """Import torch only when an attribute that needs it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    room, own = _ELSEWHERE.get(name, ("memo_exec.api", name))
    try:
        module = import_module(room)
    except ModuleNotFoundError as error:
        from memo_sim.contract.errors import missing_package

        raise missing_package(error) or error from None
    return getattr(module, own)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
