"""``memo_exec.tokenwise``: gradients, bytes and memory of wrapped transformers models."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import memo_exec
from memo_exec.decoder_layers.wrap import Tokenwise
from tests.exec_cpu.decoder_layers.small_models import (
    FAMILIES,
    TOKENS,
    equal,
    error,
    gradients,
    keep_cut,
    small_model,
    token_ids,
)
from tests.exec_cpu.offload.test_offload_activations import LiveBytes

TOLERANCE = 1e-5
QUICK = ("llama", "gemma3_text", "mixtral")
"""Families of the default run: dense, windowed with norms on both sides, experts."""
GROUPED_PRODUCTS = ("mixtral", "qwen3_moe", "gpt_oss")
"""Families whose grouped products have no fp32 shapes on the meta device, so their bytes are predicted in bf16."""


def wrapped(model: Any, **arguments: Any) -> Tokenwise:
    found: Tokenwise = memo_exec.tokenwise(model, **arguments).memo_tokenwise
    return found


def padded(ids: Tensor) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    mask[0, -20:] = 0
    return {"attention_mask": mask}


def packed(ids: Tensor) -> dict[str, Any]:
    return {"position_ids": torch.cat([torch.arange(40), torch.arange(TOKENS - 40)])[None].expand_as(ids)}


CASES: dict[str, tuple[int, Callable[[Tensor], dict[str, Any]]]] = {
    "one sequence": (1, lambda ids: {}),
    "two sequences": (2, lambda ids: {}),
    "padded": (2, padded),
    "packed": (1, packed),
}


def check(model: Any, alpha: float, ids: Tensor, named: dict[str, Any], *, resident: int) -> None:
    """Compare with plain autograd and with everything kept at the same cut, over two steps."""
    plain = gradients(model, ids, **named)
    kept = keep_cut(model, alpha)
    wanted = gradients(model, ids, **named)
    kept.undo()
    own = wrapped(model, alpha=alpha, resident_layers=resident, debug=True)
    for _ in range(2):  # the first has no host slab yet
        found = gradients(model, ids, **named)
        assert equal(found, wanted)
        bytes_moved = own.report()
        assert bytes_moved.restored_bytes == bytes_moved.swapped_bytes > 0
    assert error(found, plain) < TOLERANCE
    own.undo()
    assert equal(gradients(model, ids, **named), plain)


def runs_by_default(family: str, case: str) -> bool:
    return (family in QUICK and case == "one sequence") or (family, case) == ("llama", "padded")


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=() if runs_by_default(family, case) else pytest.mark.slow)
        for family in FAMILIES
        for case in CASES
        if family != "qwen3_next"
    ],
)
def test_gradients_are_those_of_keeping_everything_at_the_same_cut(family: str, case: str) -> None:
    batch, named = CASES[case]
    ids = token_ids(batch)
    check(small_model(family), 0.3, ids, named(ids), resident=1)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("family", QUICK)
def test_gradients_at_any_alpha(family: str, alpha: float) -> None:
    ids = token_ids(2)
    check(small_model(family), alpha, ids, {}, resident=0)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_in_bf16(family: str, autocast: bool) -> None:
    model, ids = small_model(family, torch.float32 if autocast else torch.bfloat16), token_ids()

    def step() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    kept = keep_cut(model, 0.4)
    wanted = step()
    kept.undo()
    own = wrapped(model, alpha=0.4, resident_layers=1, debug=True)
    assert equal(step(), wanted)
    if autocast:  # copies of the weights in bf16 stay, and are not swapped for each row block
        weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() > 1)
        assert 2 * weights <= own.report().layers[0].kept_bytes <= 2.1 * weights


@pytest.mark.parametrize("whole", ["swap", "keep"])
def test_bytes_are_those_predicted_and_counted_by_hand(whole: str) -> None:
    """A Llama layer under eager kernels, on 96 tokens of which 29 are swapped."""
    model, ids = small_model("llama", num_key_value_heads=4), token_ids()
    own = wrapped(model, alpha=0.3, whole=whole, resident_layers=2)
    wanted = own.predict(TOKENS)
    gradients(model, ids)
    assert own.report() == wanted
    first, last = wanted.layers[0], wanted.layers[-1]
    row, wide = 64 * 4, 160 * 4
    # q, k, v; three normed rows each (what the norm reads, what it scales, what the products read); the residual is
    # read by the second norm alone; gate, its activation, up, and their product.
    rows = 3 * row + 2 * 3 * row + 4 * wide
    statistics = 2 * 4
    boundaries = TOKENS * (2 * row + 4 * 4)  # input, attention output, log-sum-exp of four heads
    assert first.swapped_bytes + first.kept_bytes >= 29 * rows
    assert first.recomputed_bytes % 67 == 0
    assert first.recomputed_bytes // 67 == (first.swapped_bytes + first.kept_bytes - boundaries) // 29
    assert rows - 3 * row <= first.recomputed_bytes // 67 <= rows + statistics
    assert (last.swapped_bytes, last.recomputed_bytes) == (0, 0)
    assert last.kept_bytes >= first.swapped_bytes + first.recomputed_bytes
    assert first.kept_bytes < 1024 if whole == "swap" else first.kept_bytes >= boundaries


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3_next", "deepseek_v3")])
def test_bytes_of_every_family_are_those_predicted(family: str) -> None:
    # DeepSeek's heads of q and v differ in size, for which PyTorch has no flash kernel on a CPU.
    dtype = torch.bfloat16 if family in GROUPED_PRODUCTS else torch.float32
    model = small_model(family, dtype)
    own = wrapped(model, alpha=0.3, resident_layers=1)
    wanted = own.predict(TOKENS, batch=2)
    gradients(model, token_ids(2))
    assert own.report() == wanted


def test_memory_after_forward_is_what_is_kept() -> None:
    """The test counts storages itself and does not rely on our report."""
    model, ids = small_model("llama"), token_ids()

    def after_forward(own: Tokenwise) -> int:
        for _ in range(2):  # the second makes the host slab
            gradients(model, ids)
        live = LiveBytes(dict(model.named_parameters()))
        with live:
            loss = model(input_ids=ids, labels=ids).loss
            own.synchronize()
            found = live.now() - own.host_bytes  # on a CPU, the slab's bytes are among them
        loss.backward()
        return found

    kept = keep_cut(model, 0.3)
    most, kept_bytes = after_forward(kept), kept.report().kept_bytes
    kept.undo()
    own = wrapped(model, alpha=0.3, resident_layers=0)
    positions = ids.nbytes  # an argument of every layer, which recompute needs again
    saved = most - after_forward(own) + positions
    assert saved == kept_bytes - own.report().kept_bytes > 0.9 * kept_bytes
    assert own.host_bytes >= own.report().swapped_bytes


def test_tensors_live_no_longer_than_needed() -> None:
    model, ids = small_model("llama"), token_ids()
    wrapped(model, alpha=0.3, resident_layers=0)
    seen: list[weakref.ref[Tensor]] = []
    model.model.layers[1].register_forward_hook(
        lambda module, given, found: seen.extend((weakref.ref(given[0]), weakref.ref(found)))
    )
    gc.disable()
    try:
        loss = model(input_ids=ids, labels=ids).loss
        assert [each() for each in seen] == [None, None]
        loss.backward()
    finally:
        gc.enable()


def test_backward_can_run_twice_over_a_retained_graph() -> None:
    model, ids = small_model("llama"), token_ids()
    own = wrapped(model, alpha=0.3, resident_layers=1, debug=True)
    loss = model(input_ids=ids, labels=ids).loss
    parameters = list(model.parameters())
    one = torch.autograd.grad(loss, parameters, retain_graph=True)
    two = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert own.report().restored_bytes == 2 * own.report().swapped_bytes


def test_what_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs once for all tokens; of the other operators, the rows after the cut run again, the last not."""
    model, ids = small_model("llama"), token_ids()
    wrapped(model, alpha=0.3, resident_layers=0)
    attended: list[int] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def attention(query: Tensor, *rest: Tensor, **named: Any) -> Tensor:
        attended.append(query.shape[2])
        return own(query, *rest, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    rows: dict[str, list[int]] = {"q_proj": [], "o_proj": [], "up_proj": [], "down_proj": []}
    for name, module in model.model.layers[0].named_modules():
        if (seen := rows.get(name.rpartition(".")[2])) is not None:
            module.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].shape[1]))
    gradients(model, ids)
    assert attended == [TOKENS] * 4
    cut, rest = 29, TOKENS - 29
    assert rows["q_proj"] == rows["o_proj"] == rows["up_proj"] == [cut, rest, rest]
    finished: list[int] = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *given: finished.append(given[1][0].shape[1]))
    gradients(model, ids)
    assert finished == [cut, rest]


def test_two_passes_before_backward() -> None:
    """Layers of both passes have blocks on the host at the same time."""
    model, one = small_model("llama"), token_ids()
    other = one.flip(1)

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(input_ids=one, labels=one).loss + model(input_ids=other, labels=other).loss
        loss.backward()
        return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}

    plain = step()
    own = wrapped(model, alpha=0.3, resident_layers=0, debug=True)
    first = step()
    assert error(first, plain) < TOLERANCE
    assert equal(step(), first)
    assert own.report().restored_bytes == own.report().swapped_bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_gradients_of_routers_auxiliary_loss(family: str) -> None:
    model, ids = small_model(family), token_ids()
    plain = gradients(model, ids, output_router_logits=True)
    assert not equal(plain, gradients(model, ids))
    wrapped(model, alpha=0.3, resident_layers=0, debug=True)
    assert error(gradients(model, ids, output_router_logits=True), plain) < TOLERANCE


def test_passes_without_gradients_are_as_before() -> None:
    model, ids = small_model("llama"), token_ids()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        own = wrapped(model, alpha=0.3)
        assert torch.equal(model(input_ids=ids).logits, wanted)
    assert own.report().swapped_bytes == 0


def test_frozen_weights_need_fewer_bytes() -> None:
    """Only the adapters' inputs are saved, as PEFT trains them."""
    model, ids = small_model("llama"), token_ids()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    plain = gradients(model, ids)
    own = wrapped(model, alpha=0.3, resident_layers=1, debug=True)
    wanted = own.predict(TOKENS)
    assert error(gradients(model, ids), plain) < TOLERANCE
    assert own.report() == wanted
    assert wanted.layers[0].recomputed_bytes < wanted.layers[1].recomputed_bytes  # its input needs no gradient


def test_the_report_is_a_table() -> None:
    model = small_model("llama")
    own = wrapped(model, alpha=0.3)
    lines = str(own.predict(TOKENS)).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "0-1", "2-3", "all"]
    assert str(own) == "token-wise alpha 0.3 on 4 layers of LlamaForCausalLM"
