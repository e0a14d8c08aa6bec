"""Contexts of these tests copy as on a GPU: small tensors too, at once, and to one slab after the first pass."""

from functools import partial

import pytest

from memo_exec.offload import context
from memo_exec.offload.host import HostMemory
from memo_exec.offload.moves import Moves
from memo_exec.offload.swap import Swap

OWN_CPU_BYTES = context.CPU_LEAST_BYTES


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "Moves", lambda *given, **options: Swap(_slab(), *given, **options))
    monkeypatch.setattr(context, "CPU_LEAST_BYTES", context.LEAST_BYTES)


_slab = partial(HostMemory, None, pinned=False)


@pytest.fixture
def as_on_a_cpu(_as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo this for one test."""
    monkeypatch.setattr(context, "Moves", Moves)
    monkeypatch.setattr(context, "CPU_LEAST_BYTES", OWN_CPU_BYTES)
