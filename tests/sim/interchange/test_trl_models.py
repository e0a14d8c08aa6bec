"""Adapters, experts, latents, windows and Gemma's layers in jobs of TRL and accelerate, to and fro."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memo_sim.answers.import_job import decisions_of
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.interchange.framework import Framework, Read, Source
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.plan_paths import differences

CLUSTER, HARDWARE = load_cluster("h100-1x8")
SHARDED = Layout(dp=8, zero=3)
TRL = FRAMEWORKS["trl"]
LORA = "r=16,alpha=32,targets=q+v+proj"
PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "experts": ("mixtral-tiny", "trl-fsdp2", {"recompute": "full"}),
    "experts that are kept": ("mixtral-tiny", "trl-layouts", {}),
    "latents": ("mla-tiny", "trl-layouts", {"recompute": "full"}),
    "deepseek": ("deepseek-tiny", "trl-layouts", {"recompute": "full"}),
    "sinks": ("gpt-oss-tiny", "trl-layouts", {"recompute": "full"}),
    "gemma": ("gemma3-tiny", "trl-layouts", {"recompute": "full"}),
    "adapters": ("llama-tiny", "trl-layouts", {"adapters": LORA, "recompute": "full"}),
    "adapters beside experts": ("mixtral-tiny", "trl-layouts", {"adapters": f"{LORA},rslora"}),
}


def plan_of(name: str) -> Decisions:
    """Return one of the plans."""
    model, _, changes = PLANS[name]
    kernels = Kernels(attention="flash3")
    return Decisions(
        model=load_model(model), layout=SHARDED, seq_tokens=4096, global_batch=8, kernels=kernels, **changes
    )


def read(framework: Framework, files: dict[str, str]) -> Read:
    """Return what is read of written files."""
    return framework.read(tuple(Source(name, text) for name, text in files.items()), {})


@pytest.mark.parametrize("framework", ["trl", "accelerate"])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_comes_back_as_it_is_priced(framework: str, name: str) -> None:
    of, plan, system = FRAMEWORKS[framework], plan_of(name), PLANS[name][1]
    if plan.lora is not None and framework != "trl":
        assert of.sayings["decisions.adapters"].how == "none"
        return
    job = of.jobs(plan)[0]
    assert of.predicted_by(job) == system
    assert bool(of.own_operators(job)) == (system != of.system)
    there, _ = decisions_of(of.priced(job), CLUSTER, HARDWARE, system)
    back = read(of, of.files(job, Launch(1, 8), ())).job
    again, _ = decisions_of(of.priced(back), CLUSTER, HARDWARE, of.predicted_by(back))
    assert not differences(again, there)
    lost = set(differences(plan, there))
    assert not {"decisions.adapters", "decisions.recompute", "model.latent", "model.sinks"} & lost
    # transformers moves no selection bias, which the files cannot say either
    assert ("model.layer_pattern" in lost) == (name == "deepseek")


def test_the_arguments_of_adapters() -> None:
    files = TRL.files(TRL.jobs(plan_of("adapters"))[0], Launch(1, 8), ())
    assert 'lora_target_modules: ["q_proj", "v_proj", "o_proj"]' in files["sft.yaml"]
    assert "dtype: bfloat16" in files["sft.yaml"]  # of the frozen weights
    assert (
        TRL.beside(
            replace(plan_of("adapters"), recompute="tokenwise"), TRL.jobs(plan_of("adapters"))[0], Launch(1, 8), ()
        )
        == {}
    )


@pytest.mark.parametrize(
    ("said", "adapters", "told"),
    [
        ("lora_r: 8", "r=8,alpha=32,targets=q+v", "PEFT's default"),
        ("lora_target_modules: all-linear", "r=16,alpha=32,targets=qkv+proj+ffn", "default is 0.05"),
        ("lora_target_modules: [q_proj, down_proj]\nlora_dropout: 0", "r=16,alpha=32,targets=q+down", ""),
        ("lora_target_modules: [q_proj, lm_head]", "none", "training of all parameters"),
        ("lora_target_modules: [q_proj]\nuse_dora: true", "r=16,alpha=32,targets=q", "low-rank adapters of linear"),
    ],
)
def test_arguments_that_users_write(said: str, adapters: str, told: str) -> None:
    files = TRL.files(TRL.jobs(replace(plan_of("adapters"), adapters="none"))[0], Launch(1, 8), ())
    files["sft.yaml"] += f"use_peft: true\n{said}\n"
    found = read(TRL, files)
    assert found.job.adapters == adapters
    assert told in " ".join((*found.assumed, *(option.why for option in found.ignored)))


def test_adapters_without_use_peft_are_nothing() -> None:
    files = TRL.files(TRL.jobs(replace(plan_of("adapters"), adapters="none"))[0], Launch(1, 8), ())
    files["sft.yaml"] += "lora_r: 8\n"
    found = read(TRL, files)
    assert found.job.adapters == "none"
    assert [option.why for option in found.ignored if option.key == "lora_r"] == ["nothing, without use_peft"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("adapters", {"adapters": "r=16,alpha=2.5,targets=q"}, "whole number"),
        ("adapters", {"adapters": "r=16,alpha=2,targets=q", "model": load_model("gpt-tiny")}, "packed Q, K and V"),
        ("sinks", {"layout": Layout(tp=8, sequence_parallel=True)}, "no attention windows"),
    ],
)
def test_what_trl_cannot_say_is_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TRL.jobs(replace(plan_of(name), **changes))


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
@pytest.mark.parametrize("name", ["experts", "latents", "sinks", "gemma"])
def test_other_frameworks_refuse_by_name(framework: str, name: str) -> None:
    with pytest.raises(UsageError, match="memo writes no options of"):
        FRAMEWORKS[framework].jobs(plan_of(name))
