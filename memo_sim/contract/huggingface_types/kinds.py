"""Hugging Face's model types that memo reads, and its names for kinds of attention."""

from __future__ import annotations

SUPPORTED = (
    *("deepseek_v2", "deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe"),
)

WITH_EXPERTS = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")

QWEN_MOE = ("qwen2_moe", "qwen3_moe")

WITH_LATENT = ("deepseek_v2", "deepseek_v3")

GEMMA3, GPT_OSS = "gemma3_text", "gpt_oss"

ALWAYS_WINDOWED = ("mistral", "mixtral", "phi3")
"""Types whose every layer has the window of ``sliding_window``, which no other field turns off."""

SLIDING, FULL = "sliding_attention", "full_attention"
