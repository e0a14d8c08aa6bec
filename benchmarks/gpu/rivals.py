"""The rivals: other ways to save activation memory, each a function ``run_layers(model, x)`` over a plain model.

A rival whose library is missing is still listed, with the reason. Libraries are called as their documentation shows.
The head is outside of all rivals, because its loss keeps no activations. Random states are not saved, because nothing
here is random.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.gpu.model import PlainModel
from benchmarks.gpu.tiled import tiled_layer
from memo_exec.offload import OffloadActivations

RunLayers = Callable[[PlainModel, Tensor], Tensor]

KEPT_OPERATORS = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


@dataclass(frozen=True)
class Rival:
    """One rival; ``needs`` is (module, name in it) of a library that may be missing."""

    about: str
    run_layers: RunLayers
    compiled: bool = False
    needs: tuple[str, str] | None = None

    def why_not(self) -> str:
        """Return why the rival cannot run here, or "" if it can."""
        if self.needs is None:
            return ""
        try:
            _find(*self.needs)
        except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library is missing
            return f"{type(error).__name__}: {error}"
        return ""


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def keep_all(model: PlainModel, x: Tensor) -> Tensor:
    """Run plain autograd, which keeps all saved tensors on the device."""
    for layer in model.layers:
        x = layer(x)
    return x


def checkpointed(model: PlainModel, x: Tensor) -> Tensor:
    """Checkpoint every layer: keep only its input, and run it again in backward."""
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    return x


def checkpointed_on_cpu(model: PlainModel, x: Tensor) -> Tensor:
    """Checkpoint every layer with its input in pinned host memory, as transformers does."""
    for layer in model.layers:
        with save_on_cpu(pin_memory=True):
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    return x


def sequence_tiled(model: PlainModel, x: Tensor) -> Tensor:
    """Checkpoint every layer with its input in pinned host memory; run the MLP in sequence tiles (``tiled.py``)."""
    for layer in model.layers:
        with save_on_cpu(pin_memory=True):
            x = checkpoint(tiled_layer, layer, x, use_reentrant=False, preserve_rng_state=False)
    return x


def attention_kept(model: PlainModel, x: Tensor) -> Tensor:
    """Checkpoint selectively: keep attention's output and log-sum-exp on the device, recompute everything else."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return x


def _policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    del context, arguments, named
    kept = getattr(operator, "_opname", "") in KEPT_OPERATORS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def saved_on_cpu(model: PlainModel, x: Tensor) -> Tensor:
    """Move all tensors that autograd saves to pinned host memory."""
    with save_on_cpu(pin_memory=True):
        return keep_all(model, x)


def transformer_engine(model: PlainModel, x: Tensor) -> Tensor:
    """Offload all layers but the last with transformer-engine, whose backward hook restores each one."""
    layers = len(model.layers)
    context, synchronise = _transformer_engine(max(1, layers - 1), layers)
    for layer in model.layers:
        with context:
            x = layer(x)
        x = synchronise(x)
    return x


@cache
def _transformer_engine(offloaded: int, layers: int) -> Any:
    make = _find("transformer_engine.pytorch", "get_cpu_offload_context")
    return make(enabled=True, num_layers=offloaded, model_layers=layers)


def torchtune(model: PlainModel, x: Tensor) -> Tensor:
    """Move every saved tensor to pinned host memory on a separate stream, which may lag by up to five layers."""
    with _torchtune():
        return keep_all(model, x)


@cache
def _torchtune() -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = _find("torchtune.training", "OffloadActivations")()
    return context


def memo_hooks(model: PlainModel, x: Tensor) -> Tensor:
    """Run our own saved-tensor hooks around the same plain model."""
    with hooks_of(1.0):
        return keep_all(model, x)


def memo_hooks_half(model: PlainModel, x: Tensor) -> Tensor:
    """Run our own hooks with half of the bytes offloaded."""
    with hooks_of(0.5):
        return keep_all(model, x)


@cache
def hooks_of(fraction: float) -> OffloadActivations:
    """Return the context that offloads ``fraction`` of the bytes; there is one per process and fraction."""
    return OffloadActivations(fraction=fraction)


RIVALS = {
    "autograd keep-all": Rival("plain autograd", keep_all),
    "checkpoint": Rival("torch.utils.checkpoint, non-reentrant, every layer", checkpointed),
    "checkpoint, input offloaded": Rival(
        "save_on_cpu(pin_memory) around checkpoint: transformers' gradient checkpointing with offload, on our model",
        checkpointed_on_cpu,
    ),
    "sequence tiling": Rival(
        "checkpoint with offload, MLP and loss in tiles of the sequence, as in ALST (DeepSpeed, Arctic)",
        sequence_tiled,
    ),
    "checkpoint, attention kept": Rival("selective checkpoint that saves attention", attention_kept),
    "save_on_cpu": Rival("torch.autograd.graph.save_on_cpu(pin_memory)", saved_on_cpu),
    "transformer-engine offload": Rival(
        "get_cpu_offload_context, all layers but one",
        transformer_engine,
        needs=("transformer_engine.pytorch", "get_cpu_offload_context"),
    ),
    "torchtune OffloadActivations": Rival(
        "torchtune.training.OffloadActivations", torchtune, needs=("torchtune.training", "OffloadActivations")
    ),
    "memo offload_activations": Rival("memo_exec.offload_activations around plain autograd", memo_hooks),
    "memo offload_activations, half": Rival("the same with fraction 0.5", memo_hooks_half),
    "autograd keep-all, compiled": Rival("plain autograd, layers compiled", keep_all, compiled=True),
    "checkpoint, compiled": Rival("checkpoint of compiled layers", checkpointed, compiled=True),
    "checkpoint, input offloaded, compiled": Rival(
        "save_on_cpu around checkpoint of compiled layers", checkpointed_on_cpu, compiled=True
    ),
}
"""Rivals that run the plain model, by the name that appears in rows."""

FRACTIONS = {"memo offload_activations": 1.0, "memo offload_activations, half": 0.5}

HUGGING_FACE = "Hugging Face checkpoint with offload"
"""Name of the rival that is not a plain model: transformers' Llama and its own checkpointing (``huggingface.py``)."""


def host_bytes(rival: str, device: torch.device) -> int | None:
    """Return the peak of pinned bytes: those of torch's allocator plus the slab of our hooks; None on a CPU."""
    if device.type == "cpu":
        return None
    slab = hooks_of(fraction).statistics.host_bytes if (fraction := FRACTIONS.get(rival)) else 0
    pinned = torch.cuda.host_memory_stats()
    # Older torch versions report locked memory as reserved, newer ones as allocated.
    return slab + max(int(pinned.get(f"{name}_bytes.peak", 0)) for name in ("allocated", "reserved"))
