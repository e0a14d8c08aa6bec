"""The torch dtype for each dtype name in programs."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
