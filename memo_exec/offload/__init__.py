"""``offload_activations``: saved tensors of any torch model go to the host and come back before backward.

It works on autograd's saved tensors and knows no plan and no program.
"""

from memo_exec.offload.context import OffloadActivations, keep_activations

__all__ = ["OffloadActivations", "keep_activations"]
