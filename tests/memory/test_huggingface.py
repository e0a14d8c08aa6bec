"""What Hugging Face's modules keep of a recomputed layer, and what accelerate keeps of the states, by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from memo_sim.contract.experts import Experts
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.memory.eager_framework import eager_buffers
from memo_sim.memory.huggingface import module_buffers
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import Liveness, liveness
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_program
from memo_sim.program.verify.values import check_values

TOKENS, HIDDEN, FFN, HEADS, KV_HEADS, SIZE = 512, 64, 192, 4, 2, 16
QWEN = Model(
    name="qwen3-like",
    family="llama",
    layers=3,
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=SIZE,
    ffn_hidden=FFN,
    vocab=256,
    qk_norm=True,
    activation="silu",
    tied_embeddings=False,
)
QK = (HEADS + KV_HEADS) * SIZE
"""Features of queries and keys of a token."""


@dataclass(frozen=True)
class Lives:
    before: Liveness
    after: Liveness
    names: list[str]
    ids: list[str]

    def at(self, end: str) -> int:
        return next(n for n, name in enumerate(self.ids) if name.endswith(end))

    def buffer(self, start: str) -> int:
        return next(n for n, name in enumerate(self.names) if name.startswith(start))


def lived(**changes: Any) -> Lives:
    fields = {"model": QWEN, "seq_tokens": TOKENS, "layout": Layout(), "recompute": "full", "loss": "blocks"}
    decisions = Decisions(**{**fields, "memory_policy": "eager", "modules": "huggingface", **changes})
    program = lower(decisions)[0]
    columns = expand(program)
    lives = liveness(program, columns)
    eager, names = eager_buffers(program, columns, lives, own_loss=False, holds_outputs=False)
    after, names = module_buffers(program, columns, eager, names, decisions)
    assert len(names) == len(after.birth) == len(after.bytes)
    return Lives(lives, after, list(names), list(program.ids()))


def added(lives: Lives) -> dict[tuple[str, str, str], int]:
    """Return the bytes of the added tensors of the last layer by name, first and last instruction."""
    found = {}
    for n in range(len(lives.before.birth), len(lives.after.birth)):
        first, last = (lives.ids[int(column[n])] for column in (lives.after.birth, lives.after.death))
        if "/l2/" in first:
            name = lives.names[n].split("[")[0]
            found[name, first.split("/l2/")[1], last.split("/l2/")[1]] = int(lives.after.bytes[n])
    return found


def test_a_layer_keeps_what_its_modules_save() -> None:
    kept = {name: size for name, size in added(lived()).items() if "embed" not in name[0]}
    assert kept == {
        ("rms_norm.wide", "rec/norm1", "bwd/norm1.bwd"): 4 * TOKENS * HIDDEN,
        ("rms_norm.saved", "rec/norm1", "bwd/norm1.bwd"): 2 * TOKENS * HIDDEN,
        ("qk_norm.wide", "rec/qk_norm", "bwd/qk_norm.bwd"): 4 * TOKENS * QK,
        ("rms_norm.wide", "rec/norm2", "bwd/norm2.bwd"): 4 * TOKENS * HIDDEN,
        ("rms_norm.saved", "rec/norm2", "bwd/norm2.bwd"): 2 * TOKENS * HIDDEN,
        ("swiglu.saved", "rec/act", "bwd/act.bwd"): 2 * TOKENS * FFN,
    }


@pytest.mark.parametrize(
    ("rebuild", "silu"),
    [
        ("layer", {("rec/act.b0", "bwd/act.bwd.b0"), ("rec/act.b1", "bwd/act.bwd.b1")}),
        ("twice", {("rec/act.b0.again", "bwd/act.bwd.b0"), ("rec/act.b1.again", "bwd/act.bwd.b1")}),
    ],
)
def test_an_mlp_in_blocks_keeps_what_its_backward_reads(rebuild: str, silu: set[tuple[str, str]]) -> None:
    """Blocks that the layer's recompute runs without autograd save nothing."""
    kept = added(lived(mlp_chunk_tokens=256, mlp_rebuild=rebuild))
    assert {name[1:]: size for name, size in kept.items() if name[0] == "swiglu.saved"} == dict.fromkeys(
        silu, 2 * 256 * FFN
    )
    assert ("rms_norm.wide", "rec/norm2", "bwd/norm2.bwd.b1") in kept


def test_the_residual_sum_dies_when_its_fp32_copy_was_made() -> None:
    lives = lived()
    resid = lives.buffer("layer.bwd/resid")
    assert lives.ids[int(lives.before.death[resid])].endswith("bwd/norm2.bwd")
    assert lives.ids[int(lives.after.death[resid])].endswith("rec/out_add")
    output = lives.buffer("layer.bwd/rebuilt_out")
    assert lives.after.death[output] == lives.before.death[output]  # a non-reentrant checkpoint keeps no output


def held(lives: Lives, family: str) -> int:
    mine = [n for n, name in enumerate(lives.names[: len(lives.before.birth)]) if name.startswith(family)]
    return int(lives.after.bytes[mine][lives.after.on_device[mine]].sum())


def test_one_knob_says_what_parameters_are_stored() -> None:
    layout = Layout(dp=4, zero=3)
    assert held(lived(layout=layout, global_batch=4, zero_params="cast"), "params.") == 0
    assert held(lived(layout=layout, global_batch=4, zero_params="cast"), "grads.") > 0
    for stored in ("auto", "stored"):
        assert held(lived(layout=layout, global_batch=4, zero_params=stored), "params.") > 0
    assert held(lived(layout=layout, global_batch=4, states="pure-bf16"), "params.") > 0


def test_accelerate_moves_parameters_and_gradients_to_the_host_with_the_states() -> None:
    lives = lived(layout=Layout(dp=4, zero=3), global_batch=4, states="host")
    assert held(lives, "params.") == held(lives, "grads.") == 0


def test_the_classifiers_gradient_is_summed_before_the_last_layers_backward() -> None:
    lives = lived(layout=Layout(dp=4, zero=3), global_batch=4)
    head = lives.buffer("whole_grads.head")
    assert lives.before.death[head] > lives.after.death[head]
    assert lives.after.death[head] > lives.at("fwd/classifier.wgrad.c0")
    assert lives.after.death[head] < lives.at("l2/rec/norm1")
    layer = lives.buffer("whole_grads.layer")
    assert np.array_equal(lives.before.death[layer], lives.after.death[layer])


def test_experts_keep_their_dispatched_rows_and_the_result_of_the_second_product() -> None:
    """Saved in recompute: rows (h), up (2w), silu (w), act (w), down (h); backward copies no rows again."""
    width, chosen, count = 48, 2, 4
    experts = Experts(count=count, per_token=chosen, hidden=width)
    model = msgspec.structs.replace(QWEN, experts=experts)
    lives = lived(model=model, kernels=Kernels(rowwise="eager"), early_stop=True)
    rows = TOKENS * chosen
    assert added(lives)["experts.swiglu.saved", "rec/act", "bwd/act.bwd"] == 2 * rows * width
    names = {"dispatched": HIDDEN, "expert_out": HIDDEN, "up": 2 * width, "act": width}
    layer = [at for at, name in enumerate(lives.ids) if "/l2/bwd/" in name]
    held = lives.at("/l2/bwd/dispatch.grad")
    alive = (lives.after.birth <= held) & (lives.after.death >= held)
    for name, features in names.items():
        found = [n for n in np.flatnonzero(alive) if lives.names[n].split("[")[0].endswith(name)]
        assert [int(lives.after.bytes[n]) for n in found if lives.after.bytes[n]].count(2 * rows * features) >= 1, name
    assert not any("dispatch.again" in lives.ids[at] for at in layer)


def test_the_program_of_modules_experts_passes_the_checks() -> None:
    model = msgspec.structs.replace(QWEN, experts=Experts(count=4, per_token=2, hidden=48))
    layout, kernels = Layout(dp=2, zero=3), Kernels(rowwise="eager")
    given: dict[str, Any] = {
        "model": model,
        "layout": layout,
        "kernels": kernels,
        "seq_tokens": TOKENS,
        "global_batch": 2,
    }
    decisions = Decisions(
        **given, memory_policy="eager", modules="huggingface", recompute="full", early_stop=True, loss="blocks"
    )
    program = lower(decisions)[0]
    columns = expand(program)
    assert check_program(program, columns) == []
    assert check_values(program, columns, decisions) == []
