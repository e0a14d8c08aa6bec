"""Triton's row-wise kernels compile to Hopper binaries; the assembler is in Triton's wheel.

The tests are skipped without Triton and in its interpreter. test_kernels_triton.py checks the computed numbers.
"""

from __future__ import annotations

import importlib.util
import os
import re
from importlib import import_module
from typing import Any

import pytest

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),  # Triton 3.9 announces a change in its next version
]
BF16, FP32, INT, LONG = "*bf16", "*fp32", "i32", "i64"
NORM = [BF16, BF16, BF16, BF16, FP32, INT, INT, INT, "fp32"]
NORM_BACKWARD = [BF16, BF16, BF16, FP32, BF16, BF16, FP32, *[INT] * 7]
ROTATE = [BF16, FP32, INT, INT, INT, "fp32", "fp32"]
MERGE = [BF16, FP32, BF16, FP32, *[INT] * 7]
QK_NORM_BACKWARD = [*[BF16] * 4, FP32, *[INT] * 6, "fp32"]
REDUCTION_BYTES = 28
"""Local memory in which CUDA's accurate sine and cosine reduce large angles; only angles above 105,615 use it."""
E4M3, E5M2 = "*fp8e4nv", "*fp8e5"
EXPERT_ROWS = [FP32, "*i32", BF16, *[INT] * 14]
EXPERT_GRADIENTS = [FP32, "*i32", FP32, *[INT] * 10]
TILES = {"TILE": 128, "DEPTH": 128}
LINEAR_LOSS = {
    (part, operand): types
    for operand in (BF16, FP32)
    for part, types in {
        "statistics": [operand, operand, "*i64", FP32, FP32, FP32, *[INT] * 5],
        "gradient": [operand, operand, "*i64", FP32, FP32, operand, *[INT] * 6],
    }.items()
}
LINEAR_LOSS_BLOCK = {"ROWS": 128, "COLUMNS": 128, "FEATURES": 64, "WIDEN": False}
LINEAR_LOSS_CONSTANTS = {"statistics": {**LINEAR_LOSS_BLOCK, "SPLIT": 2048}, "gradient": LINEAR_LOSS_BLOCK}
KERNELS: list[tuple[str, list[str], dict[str, Any], int]] = [
    ("norm._forward_kernel", NORM, {"CENTRED": True, "BIASED": True, "BLOCK": 8192}, 16),
    ("norm._forward_kernel", NORM, {"CENTRED": False, "BIASED": False, "BLOCK": 4096}, 8),
    ("norm._backward_kernel", NORM_BACKWARD, {"CENTRED": True, "RESIDUAL": True, "BIASED": True, "BLOCK": 8192}, 16),
    ("norm._backward_kernel", NORM_BACKWARD, {"CENTRED": False, "RESIDUAL": False, "BIASED": False, "BLOCK": 4096}, 8),
    ("activation._gelu_kernel", [BF16, BF16, BF16, LONG], {"TANH": True, "BACKWARD": True, "BLOCK": 1024}, 4),
    ("activation._gelu_kernel", [BF16, BF16, BF16, LONG], {"TANH": False, "BACKWARD": True, "BLOCK": 1024}, 4),
    ("activation._swiglu_kernel", [BF16, BF16, INT, INT, INT], {"BLOCK": 1024}, 4),
    ("activation._swiglu_backward_kernel", [BF16, BF16, BF16, INT, INT, INT, INT], {"BLOCK": 1024}, 4),
    ("rotary._rotate_kernel", ROTATE, {"HALF": 64, "HEADS": 8, "BLOCK": 64}, 2),
    ("rotary._rotate_kernel", ROTATE, {"HALF": 48, "HEADS": 8, "BLOCK": 64}, 2),
    ("qk_norm._forward_kernel", [*[BF16] * 4, *[INT] * 4, "fp32"], {"SIZE": 128, "HEADS": 8, "BLOCK": 128}, 4),
    ("qk_norm._backward_kernel", QK_NORM_BACKWARD, {"SIZE": 128, "HEADS": 32, "BLOCK": 128}, 8),
    ("qk_norm._backward_kernel", QK_NORM_BACKWARD, {"SIZE": 96, "HEADS": 32, "BLOCK": 128}, 8),
    ("merge._merge_kernel", MERGE, {"SIZE": 128, "HEADS": 8, "BLOCK": 128}, 4),
    (
        "loss._cross_entropy_kernel",
        [BF16, "*i64", BF16, FP32, INT, INT, INT, "fp32"],
        {"IGNORED": -100, "BLOCK": 4096},
        8,
    ),
    (
        "swap_rounding._round_kernel",
        [BF16, "*u8", FP32, *[INT] * 4],
        {"LEAST": 1e-30, "LARGEST": 448.0, "BLOCK": 4096},
        4,
    ),
    ("swap_rounding._widen_kernel", ["*u8", FP32, BF16, *[INT] * 4], {"BLOCK": 4096}, 4),
    ("fp8_experts._rows_kernel", [E4M3, FP32, E4M3, *EXPERT_ROWS], {"BLOCKS": True, **TILES}, 8),
    ("fp8_experts._rows_kernel", [E5M2, FP32, E4M3, *EXPERT_ROWS], {"BLOCKS": False, **TILES}, 8),
    ("fp8_experts._gradients_kernel", [E4M3, FP32, E4M3, *EXPERT_GRADIENTS], {"BLOCKS": True, **TILES}, 8),
    ("fp8_experts._gradients_kernel", [E5M2, FP32, E4M3, *EXPERT_GRADIENTS], {"BLOCKS": False, **TILES}, 8),
    *(
        (f"linear_loss._{part}_kernel", LINEAR_LOSS[part, operand], constants, 8)
        for operand in (BF16, FP32)
        for part, constants in LINEAR_LOSS_CONSTANTS.items()
    ),
]


@pytest.mark.parametrize(("name", "types", "constants", "warps"), KERNELS, ids=lambda value: str(value)[:40])
def test_it_compiles_for_hopper(name: str, types: list[str], constants: dict[str, Any], warps: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module, kernel = name.split(".")
    function = getattr(import_module(f"memo_exec.kernels.triton_{module}"), kernel)
    given = iter(types)
    signature = {n: "constexpr" if n in constants else next(given) for n in function.arg_names}
    assert next(given, None) is None
    source = ASTSource(function, signature, constants)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert len(compiled.asm["cubin"]) > 0
    text = compiled.asm["ptx"]
    spilled = sum(int(size) for size in re.findall(r"\.local .*\[(\d+)\];", text))
    assert spilled == (REDUCTION_BYTES if module == "rotary" else 0)  # no registers are spilled to local memory
    assert ("ld.local" in text) == (module == "rotary")
    assert "cos.approx" not in text  # it is off by more than a rounding from angles of a few turns on
