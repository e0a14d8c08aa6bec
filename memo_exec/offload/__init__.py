"""``offload_activations``: moves the saved tensors of any torch model to host memory and back before backward.

It works on autograd's saved tensors alone. Swapping that follows a plan is in ``memo_exec/interpreter``, not here.
"""

from memo_exec.offload.context import OffloadActivations, keep_activations

__all__ = ["OffloadActivations", "keep_activations"]
