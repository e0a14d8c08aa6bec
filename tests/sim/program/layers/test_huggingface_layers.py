"""Layers that keep what Hugging Face's modules save: their tensors by hand, and the independent checkers.

``tests/exec_cpu/decoder_layers/test_simulated_bytes.py`` compares their bytes with those of transformers' own modules.
"""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.memory.eager_framework import eager_buffers
from memo_sim.memory.huggingface import module_buffers
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from tests.sim.small_programs import LLAMA, decide, faults_of

PLAIN_NORMS = msgspec.structs.replace(LLAMA, qk_norm=False)
LAYOUTS = [Layout(), Layout(cp=4, zero=3, cp_exchange="all_gather"), Layout(cp=2, dp=2, zero=3)]
POLICIES = [("none", 0.0), ("none", 1.0), ("tokenwise", 0.0), ("tokenwise", 0.5), ("tokenwise", 1.0)]


def decided(policy: tuple[str, float], model: Model = LLAMA, layout: Layout | None = None, **more: str) -> Decisions:
    fields = {"modules": "huggingface", "memory_policy": "eager", "loss": "checkpointed"}
    return decide(model, layout, policy, **fields, **more)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_program_passes_the_independent_checkers(layout: Layout, policy: tuple[str, float]) -> None:
    for model, dtype in ((LLAMA, "bf16"), (PLAIN_NORMS, "bf16"), (LLAMA, "fp32")):
        assert faults_of(decided(policy, model, layout, dtype=dtype)) == []


def test_what_a_layer_keeps_of_a_token() -> None:
    """Hidden 256, 8 + 4 heads of 32, FFN 640; what the modules save beside memo's tensors is in the second column."""
    plan = decided(("none", 0.0))
    found = {t.name: t.bytes // t.tokens for t in skeletal_of(plan, shape_of(plan), LLAMA.layer(0))}
    assert found == {
        "x": 2 * 256,
        "norm1": 2 * 256,
        "norm1_saved": 6 * 256,
        "norm1_stats": 4,
        "qk_saved": 6 * 384,
        "qk_stats": 4 * 12,
        "qkv": 2 * 512,
        "attn": 2 * 256,
        "lse": 4 * 8,
        "norm2": 2 * 256,
        "norm2_saved": 6 * 256,
        "norm2_stats": 4,
        "up": 4 * 640,
        "silu": 2 * 640,
        "act": 2 * 640,
    }
    wide = msgspec.structs.replace(plan, dtype="fp32")
    found = {t.name: t.bytes // t.tokens for t in skeletal_of(wide, shape_of(wide), LLAMA.layer(0))}
    kept = ("x", "resid", "qk_raw", "norm1_saved", "norm2_saved", "qk_saved")  # nothing is copied by a cast
    assert [found[name] for name in kept] == [4 * each for each in (256, 256, 384, 256, 256, 384)]


@pytest.mark.parametrize(("policy", "moved"), [(("none", 1.0), False), (("tokenwise", 0.5), True)])
def test_a_layers_input_goes_to_the_host_for_recompute_alone(policy: tuple[str, float], moved: bool) -> None:
    (program,) = lower(decided(policy))
    copied = {name.rsplit("/", 1)[1] for name, instruction in program.walk() if instruction.lane is Lane.D2H}
    assert ("x" in copied) is moved
    assert {"norm1_saved", "qk_saved", "silu", "attn", "lse"} <= copied
    assert not copied & {"resid", "qk_raw"}


def test_a_kept_input_is_freed_when_no_backward_reads_it() -> None:
    (program,) = lower(decided(("none", 0.0)))
    columns = expand(program)
    lives, names = liveness(program, columns), list(program.ids())
    family = next(n for n, each in enumerate(program.all_families) if each.name == "skeletal.x")
    deaths = [names[int(lives.death[n])] for n in range(len(lives.death)) if lives.family[n] == family]
    assert deaths
    assert all(name.endswith("fwd/resid_add") for name in deaths)


def test_an_eager_framework_adds_nothing_that_the_program_has() -> None:
    decisions = decided(("tokenwise", 0.5))
    (program,) = lower(decisions)
    columns = expand(program)
    eager, names = eager_buffers(program, columns, liveness(program, columns), own_loss=False, holds_outputs=False)
    assert list(module_buffers(program, columns, eager, names, decisions)[1]) == list(names)
