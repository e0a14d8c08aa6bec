"""Detects that a tensor was changed in place after autograd saved it.

Torch checks this for tensors that it saves itself, but not if saved-tensor hooks are set. An alias shares the tensor's
version counter. An alias without data can therefore watch the counter without holding the memory.
"""

from __future__ import annotations

from torch import Tensor


class Version:
    """The version of a tensor at the time it was saved; ``alias`` has its counter, and no data."""

    __slots__ = ("_shape", "alias", "number")

    def __init__(self, tensor: Tensor) -> None:
        self._remember(tensor, tensor.detach())
        self.alias.data = tensor.new_empty(0)

    def _remember(self, tensor: Tensor, alias: Tensor) -> None:
        self.number = -1 if tensor.is_inference() else tensor._version
        self._shape = tensor.shape
        self.alias = alias

    @property
    def unchanged(self) -> bool:
        """Whether nothing has written to the tensor since; always true for inference tensors, which have no version."""
        return self.number < 0 or self.alias._version == self.number

    def check(self) -> None:
        """Refuse a tensor that has changed since it was saved.

        Raises:
            RuntimeError: if it has changed; autograd itself raises the same error.
        """
        if not self.unchanged:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.alias.dtype} {list(self._shape)} was saved at version {self.number} "
                f"and is at version {self.alias._version}"
            )


class Kept(Version):
    """The object that autograd holds for a tensor that stays on the device.

    Its alias is the tensor detached from the graph, because a reference to the tensor itself would form a cycle. A leaf
    is its own alias: it holds no graph. Autograd itself keeps leaves, so new ``data`` of a parameter means the same.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, tensor: Tensor) -> None:
        self._remember(tensor, tensor if tensor.is_leaf else tensor.detach())

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: if something has written to it since it was saved.
        """
        self.check()
        return self.alias
