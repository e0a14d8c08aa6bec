"""Fused row-wise kernels in the GPU benchmark: they are checked, used in plans if they work, and named in rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu import checks, child
from benchmarks.gpu.case import FUSED, Case, named
from benchmarks.gpu.plans import Plans, model_of
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.hardware import Curve
from memo_sim.contract.plan import Kernels, Plan
from memo_sim.program.operators.workspaces import FUSED_KINDS
from tests.benchmarks.test_gpu_script import KERNELS, launcher, session


def profile(folder: Path) -> str:
    """Write a profile whose fused kernels are faster than torch's; return its path."""
    hardware = load_hardware("h100-sxm5-80gb")
    fast = Curve(x=[1.0, 1e12], y=[3e13, 3e13], source=hardware.memory_bound_bytes_per_s.source)
    fused = msgspec.structs.replace(hardware, fused_rowwise_bytes_per_s={"triton": dict.fromkeys(FUSED_KINDS, fast)})
    codec.write(folder / "fused.json", fused)
    return str(folder / "fused.json")


@pytest.mark.parametrize(("kernels", "chosen"), [(KERNELS, "torch"), ([*KERNELS, FUSED], "triton")])
def test_plans_name_fused_kernels_where_they_work(kernels: list[str], chosen: str, tmp_path: Path) -> None:
    path = Plans(tmp_path, profile(tmp_path), kernels).get(model_of("llama3-8b", 2), 16384, "planned")
    assert isinstance(path, Path)
    assert codec.read(path, Plan).decisions.kernels.rowwise == chosen


@pytest.mark.parametrize("works", [True, False])
def test_fused_kernels_are_listed_only_if_they_work(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {"torch": "", FUSED: "" if works else "no compiler"}
    monkeypatch.setattr("memo_exec.machine.rowwise_kernels.tried_rowwise_kernels", lambda machine: tried)
    row = child.play(Case(rival="machine", kind="machine", part="checks"))
    assert (FUSED in row.backend.split(",")) is works
    assert "torch-flash-cpu" in row.backend.split(",")


def test_every_policy_is_checked_with_fused_kernels(tmp_path: Path) -> None:
    here = session(tmp_path, launcher(tmp_path, ""), cluster=None)
    here.kernels = ["torch-flash", "torch-cudnn"]
    without = checks._policies(here, model_of("llama-tiny", 2))
    here.kernels = [*here.kernels, FUSED]
    cases = checks._policies(here, model_of("llama-tiny", 2))
    added = cases[len(without) :]
    assert cases[: len(without)] == without
    assert [case.rival for case in added] == [
        f"memo, {policy}, torch-flash + triton" for policy in ("keep", "token-wise", "full recompute", "full swap")
    ]
    for case in added:
        assert codec.read(Path(case.plan), Plan).decisions.kernels == Kernels(attention="torch-flash", rowwise="triton")
    assert named(Kernels(attention="flash3")) == "flash3"
