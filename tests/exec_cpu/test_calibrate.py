"""Calibration: a valid profile from single operators, that prices every operator of the models it is for."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memo_exec.calibrate import calibrate
from memo_exec.kernels import KERNELS
from memo_exec.probes import grid as grids
from memo_exec.probes.operators import Bench, operators_of
from memo_exec.probes.tables import Timed, attention_tables, gemm_tables, rowwise_curves
from memo_exec.probes.timing import Effort, Sample, of_passes, sample_of
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_model
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions
from memo_sim.program.instruction import Lane
from memo_sim.program.lower import lower
from memo_sim.program.work import Attention, Gemm, Rowwise
from tests.exec_cpu.small import CPU_KERNELS

FEW = replace(
    grids.CPU,
    widths=(64,),
    lengths=(256,),
    head_dims=(32,),
    heads=(2,),
    attention_lengths=(128, 256),
    copy_bytes=(2**14, 2**18),
    beside_s=0.1,
    message_bytes=(2**10, 2**14, 2**18, 2**20, 2**22),
    message_s=0.02,
)


@pytest.fixture(scope="module")
def profile() -> Hardware:
    found = calibrate(grid=FEW, command="a test")
    assert found is not None
    return found


def test_the_profile_can_be_written_and_read_back(profile: Hardware, tmp_path: Path) -> None:
    codec.write(tmp_path / "here.json", profile)
    assert codec.read(tmp_path / "here.json", Hardware) == profile


def test_every_number_says_where_it_came_from(profile: Hardware) -> None:
    assert {source.kind for name, source in profile.sources.items() if name != "link"} == {"measured"}
    assert profile.provenance["torch"] == torch.__version__
    assert {"device", "compute_threads", "created", "seconds", "command", "passes", "dispatch_us", "ranks"} <= set(profile.provenance)


def test_curves_cover_every_operator_of_the_tiny_models(profile: Hardware) -> None:
    assert {table.gemm_pass for table in profile.gemm} == {"fprop", "dgrad", "wgrad"}
    assert {table.attention_pass for table in profile.attention} == {"forward", "backward"}
    for name in ("gpt-tiny", "llama-tiny"):
        decisions = Decisions(
            model=load_model(name), seq_tokens=512, swapped_tokens=128, kernels=CPU_KERNELS, dtype="fp32"
        )
        works = [i.work for _, i in lower(decisions)[0].walk() if i.lane is Lane.COMPUTE]
        missing = {work.kind for work in works if isinstance(work, Rowwise)} - set(profile.rowwise_bytes_per_s)
        assert not missing


def test_copies_and_slowdown_are_plausible(profile: Hardware) -> None:
    assert profile.compute_slowdown["copy"].value >= 1
    for rates in (profile.d2h, profile.h2d):
        assert all(1e8 < rate < 1e12 for rate in rates.alone.y)
        assert 1e8 < rates.duplex.value < 1e12
    assert 0 < profile.launch_floor_s.value < 1e-3


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    calibrate(grid=replace(FEW, beside_s=0.01), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_operators_are_those_of_the_program_each_once() -> None:
    decisions = next(grids.decisions(FEW, "torch-flash-cpu"))
    operators = operators_of([decisions, decisions])
    assert len({operator.key for operator in operators}) == len(operators)
    works = {i.work for _, i in lower(decisions)[0].walk() if i.lane is Lane.COMPUTE and i.op in KERNELS}
    assert {operator.instruction.work for operator in operators} >= works  # and those of templates without instances


def test_every_operator_can_be_timed_by_itself() -> None:
    bench = Bench(torch.device("cpu"), cache_bytes=2**20)
    for operator in operators_of(grids.decisions(FEW, "torch-flash-cpu")):
        assert bench.seconds(operator, Effort(repeats=1, seconds=0.0)).seconds > 0


def test_long_operators_are_left_out() -> None:
    few = replace(FEW, most_flops=1e6, most_bytes=1e5)
    assert not any(few.wanted(o) and isinstance(o.instruction.work, Attention) for o in operators_of([_middle()]))
    assert all(
        o.instruction.work.flops <= 1e6
        for o in operators_of([_middle()])
        if few.wanted(o) and isinstance(o.instruction.work, Gemm)
    )


def _middle() -> Decisions:
    return grids.middle(FEW, "torch-flash-cpu")


def test_a_sample_is_the_middle_and_leaves_outliers_out() -> None:
    assert sample_of([1.0, 1.1, 0.9, 1.0, 50.0]).seconds == 1.0
    assert sample_of([1.0, 1.1, 0.9, 1.0, 50.0]).spread == pytest.approx(0.05)


def test_a_pass_that_a_neighbour_slowed_does_not_count() -> None:
    sample = of_passes([Sample(1.0, 0.1), Sample(1.1, 0.1), Sample(4.0, 0.1)])
    assert sample.seconds == 1.1
    assert sample.spread == pytest.approx(1.5 / 1.1)


def test_tables_average_equal_works_and_join_near_points() -> None:
    gemm = Gemm(64, 32, 16, "fprop", "fp32")
    rowwise = [Rowwise("gelu", 10, 600, 400), Rowwise("gelu", 5, 640, 400)]
    causal, whole = (Attention(1, 64, 64, mask, 2, 2, 16, False, "k", "fp32") for mask in ("causal", "none"))
    timed = [Timed.of(gemm, Sample(seconds, 0.1), 0.5) for seconds in (1.0, 2.0)]
    timed += [Timed(work, 2.0, 0.0) for work in rowwise] + [Timed(causal, 1.0, 0.0), Timed(whole, 1.6, 0.0)]
    (table,) = gemm_tables(timed, "s")
    assert table.rows == [[64.0, 32.0, 16.0, gemm.flops / 2.0]]
    assert rowwise_curves(timed, "s")["gelu"].y == [pytest.approx(2040 / 4.0)]
    (attention,) = attention_tables(timed, "s")
    assert attention.rows == [[64.0, 2.0, causal.flops]]
    assert attention.full_mask_gain == pytest.approx(2 / 1.6)


# The loop: calibrate, plan, run, compare. Three sizes by three policies, as a user would.

SIZES = {
    "gpt 128 wide": ({"family": "gpt", "hidden": 128, "layers": 4}, 2048),
    "llama 256 wide": ({"family": "llama", "hidden": 256, "layers": 3}, 1024),
    "gpt 512 wide": ({"family": "gpt", "hidden": 512, "layers": 2}, 1024),
}
POLICIES = {
    "keep": ["--recompute", "none", "--alpha", "0"],
    "alpha 0.5": ["--recompute", "tokenwise", "--alpha", "0.5"],
    "full recompute": ["--recompute", "full"],
}


def shell(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("here") / "here.json"
    shell("memo_exec", "calibrate", "-o", str(path))
    return path


def model_file(path: Path, shape: dict[str, Any]) -> Path:
    gpt, heads = shape["family"] == "gpt", shape["hidden"] // 32
    fields = {"schema": "memo.model/1", "name": path.stem, "heads": heads, "head_dim": 32, "vocab": 256}
    fields |= {"kv_heads": heads if gpt else heads // 2, "ffn_hidden": (4 if gpt else 3) * shape["hidden"]}
    fields |= {"tied_embeddings": gpt, "qkv_bias": gpt, "linear_bias": gpt, "max_positions": 8192 if gpt else 0}
    path.write_text(json.dumps(fields | shape | {"activation": "gelu" if gpt else "silu"}))
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", SIZES)
def test_the_step_is_predicted_before_the_run(here: Path, tmp_path: Path, size: str, policy: str) -> None:
    shape, tokens = SIZES[size]
    model, plan = model_file(tmp_path / "model.json", shape), tmp_path / "plan.json"
    question = [str(model), "--cluster", str(here), "--seq-len", str(tokens), "-o", str(plan)]
    shell("memo_sim", "what-if", *question, *POLICIES[policy])
    best = None
    for _ in range(3):  # a neighbour's load can slow a whole run
        document = json.loads(shell("memo_exec", "run", str(plan), "--steps", "8", "--json"))
        assert document["ratio"]["peak_device_bytes"] == 1.0
        assert document["predicted"]["moved_bytes"] == document["measured"]["moved_bytes"]
        best = min((document["ratio"]["step_s"], best or 1e9), key=lambda ratio: abs(ratio - 1))
        if abs(best - 1) <= 0.1:
            break
    assert best == pytest.approx(1.0, abs=0.2)
