"""Whether a tensor was changed in place after it was saved.

Torch checks this for what it saves itself, and leaves it out where hooks are set. An alias shares the tensor's version
counter; with its data taken away it watches the counter without holding the memory.
"""

from __future__ import annotations

from torch import Tensor


class Version:
    """The version a tensor had when it was saved.

    ``alias`` is the tensor without its history; with ``holding`` false it has lost its data.
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
        """Whether nothing has written to the tensor since (inference tensors do not count their versions)."""
        return self.number < 0 or self.alias._version == self.number

    def check(self) -> None:
        """Refuse a tensor that is no longer what was saved.

        Raises:
            RuntimeError: as autograd itself does.
        """
        if not self.unchanged:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.alias.dtype} {list(self._shape)} was saved at version {self.number} "
                f"and is at version {self.alias._version}"
            )
