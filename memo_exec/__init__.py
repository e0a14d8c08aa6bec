"""The executor: plays a plan's program with torch on real devices and times each instruction.

``memo_exec.run`` trains as a plan says (``memo_exec/api.py``). ``memo_exec.offload_activations`` needs no plan: it
offloads the activations that autograd saves, for any torch model. ``memo_exec.tokenwise`` swaps and recomputes by
token in the decoder layers of a transformers model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memo_exec.api import RunResult, run
    from memo_exec.decoder_layers import tokenwise
    from memo_exec.offload import OffloadActivations, keep_activations

    offload_activations = OffloadActivations

__all__ = ["RunResult", "keep_activations", "offload_activations", "run", "tokenwise"]


def __getattr__(name: str) -> object:
    """Import torch only when an attribute that needs it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name in ("RunResult", "run"):
            from memo_exec import api

            return api.RunResult if name == "RunResult" else api.run
        if name == "tokenwise":
            from memo_exec import decoder_layers

            return decoder_layers.tokenwise
        from memo_exec import offload
    except ModuleNotFoundError as error:
        from memo_sim.contract.errors import missing_package

        raise missing_package(error) or error from None
    return offload.keep_activations if name == "keep_activations" else offload.OffloadActivations


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
