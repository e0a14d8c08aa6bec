"""Contexts of these tests copy as on a GPU: small tensors too, and to one slab after the first pass."""

from typing import Any

import pytest

from memo_exec.offload import context
from memo_exec.offload.host import HostMemory

OWN_CPU_BYTES = context.CPU_LEAST_BYTES


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_slab(limit_bytes: int | None, *, grows: bool, **options: Any) -> HostMemory:
        del grows
        return HostMemory(limit_bytes, **options)

    monkeypatch.setattr(context, "HostMemory", with_slab)
    monkeypatch.setattr(context, "CPU_LEAST_BYTES", context.LEAST_BYTES)


@pytest.fixture
def as_on_a_cpu(_as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo this for one test."""
    monkeypatch.setattr(context, "HostMemory", HostMemory)
    monkeypatch.setattr(context, "CPU_LEAST_BYTES", OWN_CPU_BYTES)
