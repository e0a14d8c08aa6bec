"""Decides which saved tensors may be offloaded: plain strided ones on the context's device that are no parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memo_exec.offload.statistics import Why

PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Eligible:
    """The eligibility rules of one context."""

    def __init__(self, device: torch.device, min_bytes: int, model: nn.Module | None) -> None:
        self._device = device
        self._min_bytes = min_bytes
        self._model = model
        self._held: set[int] = set()
        self._known: dict[torch.device, bool] = {}
        """Whether tensors of a device may be offloaded; to ask a device for its type takes longer than to look here."""

    def look_again(self) -> None:
        """Record the storages of the model's parameters and buffers again; optimizers and FSDP may replace them."""
        if self._model is None:
            return
        tensors = [*self._model.parameters(), *self._model.buffers()]
        plain = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        self._held = {t.untyped_storage()._cdata for t in plain if type(t) in PLAIN and _is_plain(t)}

    def refuse(self, tensor: Tensor) -> Why | None:
        """Return why a tensor must stay on the device, or None if it may be offloaded."""
        if self._is_held(tensor):
            return Why.PARAMETER
        if type(tensor) is not Tensor or not _is_plain(tensor):
            return Why.KIND
        if not self._is_ours(tensor.device):
            return Why.DEVICE
        least = max(1, self._min_bytes)
        if tensor.nbytes < least or tensor.untyped_storage().nbytes() < least:
            return Why.SMALL
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return Why.CAPTURED
        return None

    def _is_held(self, tensor: Tensor) -> bool:
        root = tensor._base
        if root is None:
            root = tensor
        kind = type(root)
        # A buffer that is registered as such is a plain tensor with a mark. ``isinstance`` asks for marks in Python
        # code of torch, which takes longer than all else here.
        if kind is nn.Parameter or (kind is Tensor and getattr(root, "_is_buffer", False)):
            return True
        if kind is not Tensor and isinstance(root, (nn.Parameter, nn.Buffer)):
            return True
        held = self._held
        return bool(held) and type(tensor) is Tensor and _is_plain(tensor) and tensor.untyped_storage()._cdata in held

    def _is_ours(self, device: torch.device) -> bool:
        ours = self._known.get(device)
        if ours is None:
            own = self._device
            ours = self._known[device] = device.type == own.type and own.index in (None, device.index)
        return ours


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, has real storage, and is not wrapped by a functorch transform."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_inference()
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
