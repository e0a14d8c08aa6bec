"""Answers with products in FP8 say what runs in it and what it takes; devices and kernels without it are refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.left_out import left_out
from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import Fp8Recipe
from memo_sim.contract.plan import Layout
from memo_sim.contract.result import Result
from memo_sim.contract.units import GIB
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.fp8 import fp8_layouts
from memo_sim.planning.kernels_elsewhere import kernels_elsewhere
from memo_sim.planning.question import Pins, Question
from memo_sim.program.ir.work import Fp8Gemm, Gemm

MODEL = msgspec.structs.replace(load_model("llama3-8b"), layers=4)


def asked(fp8: Fp8Recipe, cluster: str = "h100-1x8", **pins: object) -> Question:
    given = Pins(**({"tp": 2, "cp": 1, "dp": 4, "zero": 1, "recompute": "none", "alpha": 0.0} | pins))
    return Question(MODEL, *load_cluster(cluster), 1 << 13, system="memo", global_batch=4, fp8=fp8, pins=given)


def answer(fp8: Fp8Recipe, **pins: object) -> Result:
    return what_if(asked(fp8, **pins)).result


def test_an_answer_says_what_runs_in_fp8_and_what_it_takes() -> None:
    plain, tensor = answer("none"), answer("tensor")
    assert tensor.plans[0].step_s < plain.plans[0].step_s
    assert (tensor.plans[0].fp8, tensor.plans[0].executable) == ("tensor", True)
    (line,) = [each for each in tensor.why if each.startswith("FP8")]
    # Two bytes for each of 4 x 218,103,808 / 2 elements of matrices.
    assert "a rank holds 2 FP8 copies of them, 0.81 GiB, made once a step" in line
    (assumption,) = [each for each in tensor.summary.assumptions if each.name == "FP8"]
    assert assumption.option == "--fp8"
    assert "MFU counts against the bf16 peak" in assumption.value
    assert "linear products in FP8 (tensor)" in tensor.summary.plan
    assert not [each for each in plain.why if "FP8" in each]


def test_an_answer_says_that_weights_are_in_fp8_alone() -> None:
    plain, alone = (what_if(replace(asked("tensor"), fp8_params=given)).result for given in (False, True))
    (line,) = [each for each in alone.why if each.startswith("FP8")]
    # As many bytes as FP8 copies; the bf16 weights, twice as many, are gone.
    assert "A rank holds 0.81 GiB of their weights, in FP8 alone" in line
    assert plain.plans[0].peak_device_bytes - alone.plans[0].peak_device_bytes > 0.8 * GIB
    assert "linear products in FP8 (tensor, weights in FP8 alone)" in alone.summary.plan
    (assumption,) = [each for each in alone.summary.assumptions if each.name == "FP8"]
    assert "no bf16 copy (--fp8-params)" in assumption.value
    assert "memo-exec's kernels have run on no GPU yet" in assumption.value
    assert alone.plans[0].executable


def test_fp8_parameters_without_fp8_are_refused() -> None:
    with pytest.raises(UsageError, match="only where products read them so"):
        what_if(replace(asked("none"), fp8_params=True))


def test_fp8_is_named_where_it_was_not_tried() -> None:
    (line,) = [each for each in left_out(asked("none")) if "FP8" in each.what]
    assert line.option == "--fp8 delayed or tensor or block"
    assert not [each for each in left_out(asked("none", "a100-1x8")) if "FP8" in each.what]
    assert not [each for each in left_out(asked("block")) if "FP8" in each.what]


@pytest.mark.parametrize(
    ("recipe", "cluster", "what"),
    [
        ("tensor", "a100-1x8", "the device has no FP8 tensor cores"),
        ("block", "rtx4090-1x8", "the profile has no rates of FP8 products"),
        ("mx", "h100-1x8", "no rates of FP8 products with such scales"),
        ("block", "b200-1x8", "no rates of FP8 products with such scales"),
    ],
)
def test_what_a_device_does_not_have_is_refused_by_name(recipe: Fp8Recipe, cluster: str, what: str) -> None:
    with pytest.raises(Infeasible, match=what) as refused:
        what_if(asked(recipe, cluster))
    assert refused.value.got == f"--fp8 {recipe}"
    assert refused.value.hint


def test_layouts_of_products_are_the_devices() -> None:
    assert [fp8_layouts(load_cluster(f"{name}-1x8")[1]) for name in ("h100", "h200", "b200")] == ["tn", "tn", "any"]
    (plan,) = [asked("tensor").decisions(Layout(tp=2, sequence_parallel=True, dp=4))]
    moved, changed = kernels_elsewhere(asked("none", "b200-1x8"), plan)
    assert (moved.fp8, moved.fp8_layouts) == ("tensor", "any")
    assert any("FP8" in each for each in changed)
    with pytest.raises(Infeasible, match="no FP8 tensor cores"):
        kernels_elsewhere(asked("none", "a100-1x8"), plan)


@pytest.mark.parametrize("cluster", ["h100-1x8", "h200-1x8", "b200-1x8"])
def test_a_large_product_is_faster_than_in_bf16_and_slower_than_the_peak(cluster: str) -> None:
    named, hardware = load_cluster(cluster)
    pricer = Pricer(hardware, named, Layout())
    kinds = sorted({t.dtype for t in hardware.gemm if t.dtype.startswith("fp8")})
    assert len(kinds) == 2
    for gemm_pass in ("fprop", "dgrad", "wgrad"):
        shape = (16384, 8192, 8192, gemm_pass, "bf16")
        slow, flops = pricer.seconds(Gemm(*shape)), 2 * 16384 * 8192 * 8192
        for kind in kinds:
            fast = pricer.seconds(Fp8Gemm(*shape, kind))
            assert 1.3 < slow / fast < 2.3
            assert flops / fast < 2 * hardware.peak_flops["bf16"].value
