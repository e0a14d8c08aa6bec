"""The attention kernels that a plan can name, and the words by which a user asks for one.

A word stands for one generation of an algorithm, and several kernels may implement it: ``flash2`` is flash-attn 2 or
torch's build of it. Which of them a question gets depends on the GPU's profile and on the year of the user's libraries
(``planning/attention_kernels.py``). A year means the libraries that were released by its end.

Years: flash-attn's tags (v0.2.1 of November 2022, v2.0.0 of July 2023, fa4-v4.0.0.beta0 of March 2026; ``hopper/`` was
added in July 2024); PyTorch 2.2 (January 2024) brought FlashAttention-2, 2.5 (October 2024) cuDNN's attention.

This module imports neither msgspec nor click: ``memo-sim --help`` reads it at every start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Libraries = Literal["2022", "2023", "2024", "2025", "2026"]
"""Year of PyTorch, flash-attn and Transformer Engine."""
AttentionName = Literal[
    "plain",
    "flash",
    "flash1",
    "flash2",
    "flash3",
    "flash4",
    "cudnn",
    "triton-flash",
    "torch-flash",
    "torch-cudnn",
    "te-fused",
    "torch-flash-cpu",
]
"""What a user may ask for: a generation, or a kernel by its name. flash: the newest that GPU and libraries have."""

FLASH = "flash"
"""The newest generation of flash attention that the GPU's profile and the libraries have."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One kernel: what it is, since when, and where a user gets it."""

    generation: AttentionName
    """The word that stands for it."""
    since: Libraries
    """First year whose libraries have it."""
    title: str
    """The algorithm, and what has to be installed for it."""
    executed: bool = True
    """Whether memo-exec can run it; all of them can be priced."""
    windows: bool = True
    """Whether its calls take a window; plans with windows are refused for the others."""
    documents: bool = True
    """Whether one of its calls takes packed documents (flash-attn's varlen, THD), or memo-exec calls it by document."""


ATTENTION_KERNELS: dict[str, AttentionKernel] = {
    "flash1": AttentionKernel(
        "flash1", "2022", "FlashAttention 1 (flash-attn 0.2 to 1.0)", executed=False, windows=False
    ),
    "triton-flash": AttentionKernel(
        "flash1",
        "2022",
        "FlashAttention 1 in Triton (flash-attn 0.2 to 1.0, flash_attn_triton)",
        executed=False,
        windows=False,
        documents=False,
    ),
    "flash2": AttentionKernel("flash2", "2023", "FlashAttention-2 (needs the package flash-attn 2)"),
    "flash3": AttentionKernel(
        "flash3", "2024", "FlashAttention-3 (needs flash_attn_interface, which PyTorch does not bring)"
    ),
    "flash4": AttentionKernel("flash4", "2026", "FlashAttention-4 (needs the package flash-attn-4)"),
    "torch-flash": AttentionKernel("flash2", "2024", "FlashAttention-2 inside PyTorch 2.2 and later"),
    "torch-cudnn": AttentionKernel(
        "cudnn", "2024", "cuDNN's attention inside PyTorch 2.5 and later", windows=False, documents=False
    ),
    "te-fused": AttentionKernel("cudnn", "2023", "cuDNN's attention (needs the package transformer-engine)"),
    "torch-flash-cpu": AttentionKernel("torch-flash-cpu", "2023", "PyTorch's flash attention on the CPU"),
    "plain": AttentionKernel(
        "plain",
        "2022",
        "attention without a flash kernel, which writes every score to memory",
        executed=False,
        windows=False,
        documents=False,
    ),
}
"""Every kernel that a plan can name. Of two kernels of one generation, a question gets the first that has a curve."""

PRICED_ONLY = frozenset(name for name, kernel in ATTENTION_KERNELS.items() if not kernel.executed)
"""Kernels that memo-exec does not have."""

PADS_VALUES = frozenset(("flash2", "torch-flash", "torch-flash-cpu"))
"""Kernels whose values have as many features as queries and keys, so that zeros pad narrower ones
(flash-attention's csrc/flash_attn/flash_api.cpp; torch's aten operators of flash attention)."""


WIDENS_BACKWARD = frozenset(("flash3",))
"""Kernels that compute backward as if narrow values were as wide as keys, without copies of them (hopper/flash_api.cpp,
``head_size_v_rounded = head_size_rounded``)."""


def computes_values_wide(kernel: str, *, backward: bool) -> bool:
    """Return whether a kernel computes with narrow values as if they had the width of queries and keys."""
    return kernel in PADS_VALUES or (backward and kernel in WIDENS_BACKWARD)


def pads_values(kernel: str) -> bool:
    """Return whether a kernel needs narrow values padded to the width of queries and keys."""
    return kernel in PADS_VALUES


def takes_values(kernel: str, head_dim: int, value_dim: int) -> bool:
    """Return whether a kernel can compute with queries and keys of ``head_dim`` features and values of ``value_dim``.

    Kernels that pad take narrower values. flash-attn 3 has kernels for 192 and 128 (hopper/flash_api.cpp), flash-attn 4
    for these and for any two widths up to 128 (flash_attn/cute/interface.py). cuDNN takes any two widths up to its
    limit. The first generation and attention without a flash kernel take none.
    """
    if value_dim == head_dim:
        return True
    match kernel:
        case "flash3":
            return 128 < head_dim <= 192 and 96 < value_dim <= 128
        case "flash4":
            return (head_dim, value_dim) == (192, 128) or max(head_dim, value_dim) <= 128
        case "torch-cudnn" | "te-fused":
            return True
        case _:
            return pads_values(kernel) and value_dim < head_dim


FLASH_GENERATIONS: tuple[AttentionName, ...] = ("flash4", "flash3", "flash2", "flash1")
"""Generations of flash attention on GPUs, the newest first."""
