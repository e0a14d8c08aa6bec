"""What a recorded allocation is for, by the stack that made it.

PyTorch's snapshot has the frames of each allocation, the innermost first: Python's, and the allocator's own C++ ones
where both were recorded. The innermost frame that a rule knows gives the class, so a checkpoint's recompute inside
backward is forward, and a forward inside an optimizer's closure, too:

    a file of an optimizer (torch/optim, apex, bitsandbytes)       optimizer states
    a file of FSDP                                                 gathered weights
    cuBLAS's or cuDNN's workspace                                  workspace
    cross_entropy, logits, lm_head ... in a function's name        logits and loss
    ``forward`` or a module's call                                 activations
    autograd's engine                                              gradients and backward
    construction of a module, ``to``, loading of weights           weights

Autograd's backward runs on threads without Python frames, so where C++ frames were not recorded, its buffers have no
stack. Neither have buffers that are older than the recording.
"""

from __future__ import annotations

import re
from typing import Any

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer states", "gradients and backward"
ACTIVATIONS, LOGITS, GATHERED, WORKSPACE = "activations", "logits and loss", "gathered weights", "workspace"
OLDER, UNKNOWN, WITHOUT_STACK = "older than the recording", "other", "no stack (autograd's backward has none)"

MOST_FRAMES = 256
_FILES = (
    (re.compile(r"[/\\](?:torch[/\\]optim|apex[/\\]optimizers|bitsandbytes[/\\]optim)[/\\]"), OPTIMIZER),
    (re.compile(r"[/\\]megatron[/\\].*[/\\]optimizer[/\\]"), OPTIMIZER),
    (re.compile(r"[/\\]_?fsdp[/\\]|[/\\]_?fully_shard"), GATHERED),
)
_NAMES = (
    (re.compile(r"CUDABlasHandle|[cC]ublasLt|getCUDABlasLtWorkspace|cudnn.*[Ww]orkspace"), WORKSPACE),
    (
        re.compile(r"cross_entropy|logits|lm_head|nll_loss|log_softmax|compute_loss|loss_function", re.IGNORECASE),
        LOGITS,
    ),
    (re.compile(r"^(?:forward|_call_impl|_wrapped_call_impl)$"), ACTIVATIONS),
    (re.compile(r"_engine_run_backward|autograd::(?:Engine|AccumulateGrad|generated)"), GRADIENTS),
    (re.compile(r"^(?:_apply|to|cuda|__init__|from_pretrained|load_state_dict|reset_parameters|init_\w+)$"), WEIGHTS),
)


def allocation_class(frames: Any, *, older: bool = False) -> str:
    """Return the class of an allocation; ``older``: it was made before the recording began."""
    if not isinstance(frames, list) or not frames:
        return OLDER if older else WITHOUT_STACK
    python = False
    for frame in frames[:MOST_FRAMES]:
        if not isinstance(frame, dict):
            continue
        file, name = str(frame.get("filename")), str(frame.get("name"))
        python = python or file.endswith(".py")
        for rule, found in _FILES:
            if rule.search(file):
                return found
        for rule, found in _NAMES:
            if rule.search(name):
                return found
    return UNKNOWN if python else WITHOUT_STACK
