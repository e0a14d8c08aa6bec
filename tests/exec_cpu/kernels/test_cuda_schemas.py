"""Every call of a whole step on a CUDA device matches its operator's schema; the step runs on fake tensors.

Nothing is computed. With a CUDA build of torch, the tensors are on its fake device. Otherwise they are fakes that
report a CUDA device.
"""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from memo_exec.kernels import attention_torch_cudnn
from memo_exec.kernels.attention_backend import Mask
from memo_exec.observe.fake_player import observe_fake
from memo_sim.contract.plan import Kernels
from memo_sim.program.lower import lower
from tests.exec_cpu.small import LATENT_MODELS, decide, gpt, llama
from tests.pairs import covering

POLICIES: list[dict[str, Any]] = [
    {"recompute": "full", "seq_tokens": 320, "micro_batch": 1, "attention_chunk_tokens": 128},
    {"recompute": "full", "swapped_tokens": 256},
    {"recompute": "tokenwise", "swapped_tokens": 128},
    {"swapped_tokens": 256, "states": "host"},
    {"states": "bf16"},
    {"recompute": "tokenwise", "adapters": "r=8,alpha=8,targets=q+v+ffn"},
]


REBUILT = {"rebuild_qkv": True, "recompute": "tokenwise", "swapped_tokens": 128}
FAMILIES = [(family, kernel) for kernel in ("torch-flash", "torch-cudnn") for family in (gpt, llama)]


@pytest.mark.parametrize(("policy", "chosen"), covering(POLICIES, FAMILIES, every=2))
def test_every_call_matches_its_operator(policy: dict[str, Any], chosen: tuple[Any, str]) -> None:
    family, kernel = chosen
    decisions = decide(family(layers=2), dtype="bf16", kernels=Kernels(attention=kernel), **policy)
    (program,) = lower(decisions)
    observed = observe_fake(decisions, program)
    assert observed.unexplained == ()
    assert {"attention", "attention.bwd"} <= observed.workspaces.keys()


@pytest.mark.parametrize("kernel", ["torch-cudnn", "torch-flash"])
@pytest.mark.parametrize("policy", [pytest.param({}, marks=pytest.mark.slow), REBUILT], ids=["keep", "rebuilt"])
def test_latent_attention_plays_on_fake_tensors(kernel: str, policy: dict[str, Any]) -> None:
    """Values are narrower than keys; the declared workspace has what the calls allocate, padded where they pad."""
    model = msgspec.structs.replace(LATENT_MODELS["latent"], layers=2)
    decisions = decide(model, dtype="bf16", kernels=Kernels(attention=kernel), **policy)
    (program,) = lower(decisions)
    assert observe_fake(decisions, program).unexplained == ()


def test_a_call_that_does_not_match_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_bias(q: Tensor, k: Tensor, v: Tensor, *results: Tensor, mask: Mask, scale: float | None) -> None:
        del results, mask, scale
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v)

    monkeypatch.setattr(attention_torch_cudnn, "forward", without_a_bias)
    decisions = decide(llama(layers=2), dtype="bf16", kernels=Kernels(attention="torch-cudnn"))
    (program,) = lower(decisions)
    with pytest.raises(RuntimeError, match="attn_bias"):
        observe_fake(decisions, program)
