"""Settings of the caching allocator: refused where the installed PyTorch refuses them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

import pytest

from memo_sim.contract.errors import UsageError
from memo_sim.memory.device_config import AllocatorConfig
from tests.refusals import refused


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_split_size_mb": 19}, "max_split_size_mb"),
        ({"max_split_size_mb": 32, "large_segment_size_mb": 34}, "max_split_size_mb"),
        ({"max_non_split_rounding_mb": 19}, "max_non_split_rounding_mb"),
        ({"max_non_split_rounding_mb": 33, "large_segment_size_mb": 34}, "max_non_split_rounding_mb"),
        ({"roundup_power2_divisions": 3}, "roundup_power2_divisions"),
        ({"roundup_power2_divisions": 0}, "roundup_power2_divisions"),
        ({"garbage_collection_threshold": 1.0}, "garbage_collection_threshold"),
        ({"large_segment_size_mb": 10}, "large_segment_size_mb"),
        ({"large_segment_size_mb": 21, "expandable_segments": True}, "large_segment_size_mb"),
        ({"expandable_segments": True, "max_split_size_mb": 100}, "expandable_segments"),
    ],
)
def test_settings_that_pytorch_refuses_are_refused(settings: dict[str, float], named: str) -> None:
    with refused(UsageError, where=named):
        AllocatorConfig(**settings)  # type: ignore[arg-type]


TOLD_TO_TORCH = """
import sys, torch
for settings in sys.argv[1:]:
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20," + settings)
        print("taken")
    except ValueError:
        print("refused")
"""


def test_settings_are_refused_where_torch_refuses_them() -> None:
    """Compares the parser of the installed PyTorch, which needs no GPU, with ours on every setting near its limits."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    cases: list[Mapping[str, float]] = [
        *({"large_segment_size_mb": size} for size in (9, 10, 11, 19, 20, 21, 64)),
        *({"max_split_size_mb": size} for size in (19, 20, 21, 100)),
        *({"max_non_split_rounding_mb": size} for size in (19, 20, 21)),
        *({"large_segment_size_mb": 64, "max_split_size_mb": size} for size in (63, 64, 65)),
        *({"large_segment_size_mb": 64, "max_non_split_rounding_mb": size} for size in (63, 64)),
        *({"roundup_power2_divisions": number} for number in (0, 1, 2, 3, 64, 96)),
        *({"garbage_collection_threshold": share} for share in (0.01, 0.5, 0.99, 1.0, 1.5)),
    ]
    told = [",".join(f"{name}:{value}" for name, value in case.items()) for case in cases]
    done = subprocess.run([sys.executable, "-c", TOLD_TO_TORCH, *told], capture_output=True, text=True, check=False)
    if "_accelerator_setAllocatorSettings" in done.stderr:
        pytest.skip("this torch has another name for it")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["taken" if _is_taken(case) else "refused" for case in cases]


def _is_taken(settings: Mapping[str, float]) -> bool:
    try:
        AllocatorConfig(**settings)  # type: ignore[arg-type]
    except UsageError:
        return False
    return True
