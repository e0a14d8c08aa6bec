"""What a machine's FP8 products need, and whether its profile has rates of them."""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import Fp8Layouts, Fp8Recipe
from memo_sim.program.layout.fp8 import PRODUCTS

ANY_LAYOUT = ("Blackwell",)
"""Generations whose FP8 products take operands in every layout (cuBLAS's table of FP8 layouts; Hopper: TN alone)."""
NO_UNITS = ("Ampere", "Volta")
"""Generations without FP8 in their tensor cores."""


def fp8_layouts(hardware: Hardware) -> Fp8Layouts:
    """Return the layouts that FP8 products take on a device."""
    return "any" if hardware.generation in ANY_LAYOUT else "tn"


def check_fp8(hardware: Hardware, recipe: Fp8Recipe) -> None:
    """Refuse a recipe whose products the device or its profile does not have.

    Raises:
        Infeasible: naming the recipes that the profile has rates of.
    """
    if recipe == "none":
        return
    measured = {table.dtype for table in hardware.gemm}
    if PRODUCTS[recipe] in measured:
        return
    known = [name for name, products in PRODUCTS.items() if products in measured]
    if known:
        raise Infeasible(
            "the profile has no rates of FP8 products with such scales",
            where=hardware.name,
            got=f"--fp8 {recipe}",
            wanted=", ".join(("none", *known)),
            hint="another --fp8: MXFP8 needs Blackwell, and rates with scales of 128 values are Hopper's",
        )
    without = hardware.generation in NO_UNITS or hardware.device == "cpu"
    raise Infeasible(
        "the device has no FP8 tensor cores" if without else "the profile has no rates of FP8 products",
        where=hardware.name,
        got=f"--fp8 {recipe}",
        wanted="none",
        hint="leave --fp8 out, or a cluster of H100, H200 or B200 (--cluster h100-1x8)",
    )
