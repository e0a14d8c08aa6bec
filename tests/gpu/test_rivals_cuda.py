"""The rivals of the GPU benchmark on a CUDA device have equal gradients and really move bytes to the host.

Not yet run on a GPU.
"""

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.backend import best_backend
from benchmarks.gpu.model import PlainModel, build
from benchmarks.gpu.rivals import RIVALS, RunLayers, host_bytes, keep_all
from memo_exec.training.weights import initial
from memo_sim.contract.model import Model
from tests.exec_cpu.small import VOCAB, gpt, llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = 2048
MODELS = {
    "llama": llama(hidden=512, heads=8, kv_heads=2, head_dim=64, ffn_hidden=1024),
    "gpt": gpt(hidden=512, heads=8, kv_heads=8, head_dim=64, ffn_hidden=2048, max_positions=0),
}
OFFLOADERS = [
    "checkpoint, input offloaded",
    "sequence tiling",
    "save_on_cpu",
    "transformer-engine offload",
    "torchtune OffloadActivations",
]
OFFLOADERS += ["memo offload_activations", "memo offload_activations, half"]


def on_cuda(model: Model) -> PlainModel:
    built = build(model, TOKENS, torch.device("cuda"), torch.bfloat16)
    for name, parameter in built.by_memo_name():
        parameter.data.copy_(initial(name, parameter.shape, layers=model.layers, seed=1, device="cuda"))
    return built


@cache
def backend_of(model: Model) -> SDPBackend:
    """Return a fixed backend for all runs of a model; the fastest may vary if two have similar speed."""
    return best_backend(model, TOKENS, torch.device("cuda"), torch.bfloat16)


def gradients(model: PlainModel, run_layers: RunLayers) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids, labels = (torch.randint(0, VOCAB, (1, TOKENS), generator=generator).cuda() for _ in range(2))
    model.zero_grad(set_to_none=True)
    with sdpa_kernel([backend_of(model.model)]):
        model.loss(ids, labels, 1 / TOKENS, run_layers).backward()
    torch.cuda.synchronize()
    return {name: p.grad.float() for name, p in model.by_memo_name() if p.grad is not None}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", [name for name, rival in RIVALS.items() if not rival.compiled])
def test_gradients_are_those_of_keeping_all(name: str, family: str) -> None:
    if why_not := RIVALS[name].why_not():
        pytest.skip(why_not)
    model = on_cuda(MODELS[family])
    wanted = gradients(model, keep_all)
    noise = gradients(model, keep_all)
    for _ in range(2):
        found = gradients(model, RIVALS[name].run_layers)
        for key, value in wanted.items():
            # Attention's backward adds in any order, so the difference of two plain runs gives the tolerance.
            least = 2 * float((noise[key] - value).norm()) + 2.0**-8 * float(value.norm())
            assert float((found[key] - value).norm()) <= least, key


@pytest.mark.parametrize("name", OFFLOADERS)
def test_bytes_really_go_to_the_host(name: str) -> None:
    if why_not := RIVALS[name].why_not():
        pytest.skip(why_not)
    torch.cuda.reset_peak_host_memory_stats()
    model = on_cuda(MODELS["llama"])
    for _ in range(2):
        gradients(model, RIVALS[name].run_layers)
    assert (host_bytes(name, torch.device("cuda")) or 0) > 0
