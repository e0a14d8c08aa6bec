"""Detects that a tensor was changed in place after autograd saved it.

Torch checks this for tensors that it saves itself, but not if saved-tensor hooks are set. An alias shares the tensor's
version counter. An alias without data can therefore watch the counter without holding the memory.
"""

from __future__ import annotations

from torch import Tensor


class Version:
    """The version of a tensor at the time it was saved.

    ``alias`` is the tensor detached from the graph; if ``holding`` is false, it has no data.
    """

    __slots__ = ("_shape", "alias", "number")

    def __init__(self, tensor: Tensor, *, holding: bool) -> None:
        self.number = -1 if tensor.is_inference() else tensor._version
        self._shape = tuple(tensor.shape)
        self.alias = tensor.detach()
        if not holding:
            self.alias.data = tensor.new_empty(0)

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
