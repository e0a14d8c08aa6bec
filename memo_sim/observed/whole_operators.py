"""PyTorch's operators that are one piece of work, products and attention, and which inputs have their sizes."""

from __future__ import annotations

OPERANDS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
"""Where the two factors stand among the inputs of an operator that is a product."""
QUERY: dict[str, tuple[str, int, bool, int]] = {
    "aten::_scaled_dot_product_flash_attention": ("torch-flash", 0, True, 4),
    "aten::_scaled_dot_product_flash_attention_backward": ("torch-flash", 1, True, 11),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("torch-flash-cpu", 0, True, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": ("torch-flash-cpu", 1, True, 7),
    "aten::_scaled_dot_product_cudnn_attention": ("torch-cudnn", 0, True, 6),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("torch-cudnn", 1, True, 14),
    "aten::_flash_attention_forward": ("torch-flash", 0, False, 8),
    "aten::_flash_attention_backward": ("torch-flash", 1, False, 11),
    "flash_attn::_flash_attn_forward": ("flash2", 0, False, 5),
    "flash_attn::_flash_attn_backward": ("flash2", 1, False, 11),
}
"""Attention operators: kernel, where the queries stand among the inputs (keys follow), whether heads come before
tokens, and where the flag for a causal mask stands."""


def is_whole(name: str) -> bool:
    """Whether what runs inside an operator belongs to it, such as a product's own copy of a factor."""
    return name in OPERANDS or name in QUERY
