"""Answers about latent attention say what heads and latents take, and what computing or padding heads costs."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import pytest

from memo_sim.answers.left_out import left_out
from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.result import Result
from memo_sim.planning.attention_kernels import attention_kernel
from memo_sim.planning.question import Pins, Question
from memo_sim.reasons.remedies import changes

DEEPSEEK = LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
MODEL = msgspec.structs.replace(
    load_model("llama3-8b"), layers=4, kv_heads=32, head_dim=192, latent=DEEPSEEK, name="four layers"
)


def asked(**pins: object) -> Question:
    given = Pins(**({"tp": 1, "cp": 1, "dp": 8, "zero": 3, "recompute": "none"} | pins))
    return Question(MODEL, *load_cluster("h100-1x8"), 1 << 14, system="memo", global_batch=8, pins=given)


@lru_cache(maxsize=2)
def answered(attention: str | None, rebuilt: bool) -> Result:
    return what_if(asked(attention=attention, rebuild_qkv=rebuilt)).result


def said(result: Result) -> tuple[str, str]:
    """Return the reason and the assumption about latent attention."""
    (line,) = [each for each in result.why if each.startswith("Latent attention:")]
    (assumption,) = [each for each in result.summary.assumptions if each.name == "latent attention"]
    return line, assumption.value


def test_heads_are_expanded_and_kept_unless_they_are_rebuilt() -> None:
    """Of a token: 32 heads of 192, 192 and 128 features; latents of 2112 and, normed, of 2048."""
    line, value = said(answered(None, rebuilt=False))
    assert value.startswith("expanded to Q, K and V of heads, as in training: 16,384 features a token, latents 4,160;")
    assert "take 0.50 GiB on a rank, the latents that they come from 0.13 GiB" in line
    assert "With --rebuild-qkv" in line
    again, value = said(answered(None, rebuilt=True))
    assert "; backward computes heads again from latents;" in value
    assert "Backward computes the heads again, in " in again


def test_rebuilt_heads_take_time_in_place_of_memory() -> None:
    kept, rebuilt = (answered(None, rebuilt=each).plans[0] for each in (False, True))
    assert rebuilt.step_s > kept.step_s
    assert rebuilt.peak_device_bytes < kept.peak_device_bytes


def test_a_kernel_that_pads_values_is_named() -> None:
    """Backward's five products are over 3 x 192 + 2 x 128 features, padded 5 x 192."""
    result = what_if(asked(attention="flash2")).result
    line, value = said(result)
    assert value.endswith("flash2 pads values from 128 to 192 features with zeros")
    assert line.endswith(": 15 % more FLOPs in backward.")
    assert (
        "flash3 computes backward with values of 192 features in place of 128" in said(answered(None, rebuilt=False))[1]
    )
    assert "The kernel" not in said(what_if(asked(attention="torch-cudnn")).result)[0]


@pytest.mark.parametrize(("value_dim", "kernel"), [(128, "flash3"), (64, "torch-cudnn")])
def test_the_newest_kernel_that_takes_the_heads_is_chosen(value_dim: int, kernel: str) -> None:
    latent = msgspec.structs.replace(DEEPSEEK, value_dim=value_dim)
    model = msgspec.structs.replace(MODEL, latent=latent)
    question = Question(model, *load_cluster("h100-1x8"), 1 << 14, "any", global_batch=8, pins=asked().pins)
    assert attention_kernel(question) == kernel


def test_a_kernel_without_these_heads_is_refused_by_name() -> None:
    latent = msgspec.structs.replace(DEEPSEEK, value_dim=64)
    model = msgspec.structs.replace(MODEL, latent=latent)
    pins = asked(attention="flash3").pins
    question = Question(model, *load_cluster("h100-1x8"), 1 << 14, "any", global_batch=8, pins=pins)
    with pytest.raises(Infeasible, match="no form for these widths"):
        what_if(question)


def test_rebuilding_heads_is_a_change_to_try() -> None:
    decisions = what_if(asked()).best_simulation.decisions
    assert "--rebuild-qkv" in [change.options for change in changes(asked(), decisions)]
    again = msgspec.structs.replace(decisions, rebuild_qkv=True)
    assert "--rebuild-qkv" not in [change.options for change in changes(asked(), again)]


def test_what_is_refused_beside_latents_is_not_offered() -> None:
    model, (cluster, hardware) = load_model("mla-tiny"), load_cluster("h100-1x8")
    for system in ("any", "memo"):
        offered = str(left_out(Question(model, cluster, hardware, 1 << 14, system=system, global_batch=8)))
        assert not any(each in offered for each in ("--tp-overlap", "metp"))
        assert ("subsequences" in offered) == (system == "any")
