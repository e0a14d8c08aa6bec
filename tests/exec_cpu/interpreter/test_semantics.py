"""Tests the semantics of training: accumulation, counted targets, loss chunks, optimizer states, dtypes."""

import pytest
import torch

from memo_exec.training import weights
from tests.exec_cpu.small import MODELS, batch, counted, decide, gpt, gradients, llama, losses, one_step, play, scalars

CLOSE = 2e-6


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest max |difference| / max |wanted| over all tensors."""
    return max(float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_micro_batches_add_up_to_one_batch(name: str) -> None:
    whole = decide(MODELS[name], micro_batch=4)
    ((ids, labels),) = batch(whole, ignored=0.3)
    labels[:100] = -100  # so that the micro-batches have different numbers of counted targets
    parts = list(zip(ids.chunk(4), labels.chunk(4), strict=True))

    one, wanted = one_step(whole, [(ids, labels)])
    four, found = one_step(decide(MODELS[name], micro_batch=1, global_batch=4), parts)

    assert four.loss == pytest.approx(one.loss, rel=1e-6)
    assert four.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert worst(found, wanted) < CLOSE


@pytest.mark.parametrize("chunk", [32, 100])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_loss_in_chunks_equals_whole(name: str, chunk: int) -> None:
    batches = batch(decide(MODELS[name]), ignored=0.1)
    whole, wanted = one_step(decide(MODELS[name]), batches)
    chunked, found = one_step(decide(MODELS[name], loss_chunk_tokens=chunk), batches)
    assert chunked.loss == pytest.approx(whole.loss, rel=1e-6)
    assert worst(found, wanted) < CLOSE


def test_loss_in_chunks_needs_less_memory() -> None:
    peaks = [one_step(decide(gpt(vocab=2000), loss_chunk_tokens=n))[0].peak_device_bytes for n in (0, 64)]
    assert peaks[1] < peaks[0]


def test_targets_that_do_not_count_change_nothing() -> None:
    decisions = decide(llama())
    ((ids, labels),) = batch(decisions)
    labels[-1] = -100
    changed = ids.clone()
    changed[-1] = (ids[-1] + 1) % decisions.model.vocab
    one, _ = one_step(decisions, [(ids, labels)])
    two, _ = one_step(decisions, [(changed, labels)])
    assert one.loss == two.loss
    assert counted([(ids, labels)]) == decisions.local_tokens - 1


def test_untrained_loss_is_that_of_a_uniform_guess() -> None:
    decisions = decide(gpt())
    batches = batch(decisions)
    with play(decisions) as interpreter:
        weights.initialize(interpreter)
        loss = interpreter.run_step(batches, scalars(batches)).loss
    assert loss == pytest.approx(torch.tensor(float(decisions.model.vocab)).log().item(), rel=0.02)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_states_on_the_host_train_alike(clip: float | None) -> None:
    curves = [losses(decide(gpt(), states=states), steps=6, clip=clip) for states in ("fp32", "host")]
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)


def test_bf16_states_train_nearly_alike() -> None:
    wide, narrow = (losses(decide(llama(), states=states), steps=12) for states in ("fp32", "bf16"))
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=5e-3)


def test_clipping_is_torchs() -> None:
    decisions = decide(gpt())
    batches = batch(decisions)
    with play(decisions) as interpreter:
        before = [p.clone().requires_grad_() for p in weights.named_parameters(interpreter).values()]
        record = interpreter.run_step(batches, scalars(batches, clip=0.3))
        after = list(weights.named_parameters(interpreter).values())
        scaled = [held.view for held in weights.held_by(interpreter, "grads")]
        assert record.grad_norm > 0.3
        norm = torch.stack([g.square().sum() for g in scaled]).sum().sqrt()
        assert float(norm) == pytest.approx(0.3, rel=1e-5)
        decayed = [p for p in before if p.dim() == 2]
        rest = [p for p in before if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
        for p, g in zip(before, scaled, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for mine, wanted in zip(after, before, strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama-biased", "qwen3"])
@pytest.mark.parametrize("policy", [{}, {"recompute": "tokenwise", "swapped_tokens": 128}])
def test_bf16_is_near_fp32(name: str, policy: dict[str, object]) -> None:
    wide = decide(MODELS[name], global_batch=4)
    narrow = decide(MODELS[name], global_batch=4, dtype="bf16", **policy)
    reference, wanted = one_step(wide)
    record, found = one_step(narrow)
    assert record.loss == pytest.approx(reference.loss, rel=0.01)
    assert record.moved.d2h == 0 if not policy else record.moved.d2h > 0
    for key, value in wanted.items():
        assert float((found[key] - value).norm() / value.norm()) < 0.1, key


def test_bf16_parameters_are_rounded_masters() -> None:
    decisions = decide(llama(), dtype="bf16", states="bf16")
    batches = batch(decisions)
    with play(decisions) as interpreter:
        interpreter.run_step(batches, scalars(batches))
        for kind in ("embed", "layer", "head"):
            master = interpreter.buffer(f"master.{kind}")
            assert torch.equal(interpreter.buffer(f"params.{kind}"), master.bfloat16())
            assert master.dtype == torch.float32
        assert gradients(interpreter)["embed/tokens.weight"].dtype == torch.float32


def test_recompute_in_bf16_is_bitwise_too() -> None:
    _, wanted = one_step(decide(llama(), dtype="bf16"))
    for policy in ({"recompute": "full"}, {"swapped_tokens": 256}, {"recompute": "tokenwise", "swapped_tokens": 128}):
        _, found = one_step(decide(llama(), dtype="bf16", **policy))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
