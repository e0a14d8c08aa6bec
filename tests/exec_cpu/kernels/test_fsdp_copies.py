"""FSDP's copies in the program are those that torch's own FSDP makes, in the same order; counted with fake ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo_sim.contract.knobs import ReduceDtype, Sharding
from memo_sim.contract.plan import Layout
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.lower import lower
from tests.sim.small_programs import LLAMA, decide

RANKS, LAYERS = 4, LLAMA.layers
ELEMENTS = 2 * 16 * 32
"""Parameters of a block."""

OPERATORS = {
    "c10d::_allgather_base_": "gather",
    "fsdp::split_with_sizes_copy": "copy_out",
    "aten::mm": "product",
    "fsdp::chunk_cat": "flatten",
    "aten::cat": "flatten",
    "c10d::_reduce_scatter_base_": "scatter",
    "aten::zeros_like": "zero",
    "aten::zero_": "zero",
}
"""What torch's operators are called here."""


class Block(nn.Module):
    """Two products; a unit of FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Calls(TorchDispatchMode):
    """Lists FSDP's operators with the bytes that each reads and writes, and the first of several products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if (name := OPERATORS.get(func._schema.name)) is not None:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            written = [] if name != "flatten" or (kwargs or {}).get("out") is not None else [results]
            self.found.append((name, sum(t.numel() * t.element_size() for t in given + written)))
        return results

    @property
    def order(self) -> list[str]:
        """The names without repetitions."""
        return [name for name, _ in groupby(name for name, _ in self.found)]


@pytest.fixture
def ranks() -> Iterator[None]:
    """Four ranks, of which this process is one and the others do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def fsdp1(model: nn.Module, reduced: torch.dtype) -> nn.Module:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    wrap = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=wrap, mixed_precision=precision, device_id=torch.device("cpu"), use_orig_params=True
    )


def fsdp2(model: nn.Module, reduced: torch.dtype) -> nn.Module:
    mesh, policy = init_device_mesh("cpu", (RANKS,)), MixedPrecisionPolicy(torch.bfloat16, reduced)
    for block in model.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def played(sharding: Sharding, reduced: ReduceDtype) -> list[tuple[str, int]]:
    """Return the operators of the program's layers, with bytes for units of ``ELEMENTS`` parameters."""
    layout = Layout(dp=RANKS, zero=3)
    plan = decide(LLAMA, layout, memory_policy="eager", sharding=sharding, reduce_dtype=reduced, global_batch=RANKS)
    (program,) = lower(plan)
    names = {"params.all_gather": "gather", "params.copy_out": "copy_out", "grads.flatten": "flatten"}
    names |= {"grads.reduce_scatter": "scatter", "linear": "product", "linear.wgrad": "product"}
    found = []
    for place, each in program.walk():
        work, name = each.work, names.get(each.op)
        if each.op == "zero" and "/l" in place and isinstance(work, Rowwise) and work.moved_bytes:
            name = "zero" if not place.startswith("step") else None
        if name is not None and place.split("/")[2].startswith("l"):
            size = work.moved_bytes * ELEMENTS // work.rows if isinstance(work, Rowwise) else 0
            found.append((name, size))
    return found


@pytest.mark.parametrize(("reduced", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize(("sharding", "shard"), [("fsdp1", fsdp1), ("fsdp2", fsdp2)])
@pytest.mark.usefixtures("ranks")
def test_units_are_copied_as_often_and_by_as_many_bytes_as_torch_does(
    sharding: Sharding,
    shard: Callable[[nn.Module, torch.dtype], nn.Module],
    reduced: ReduceDtype,
    dtype: torch.dtype,
) -> None:
    model = shard(nn.Sequential(*[Block() for _ in range(LAYERS)]), dtype)
    with Calls() as calls:
        model(torch.randn(8, 16)).sum().backward()
    program = played(sharding, reduced)
    for name in ("copy_out", "flatten", "scatter", "zero"):
        torchs = [size for found, size in calls.found if found == name]
        ours = [size for found, size in program if found == name]
        assert len(torchs) == len(ours), name
        if name in ("copy_out", "flatten"):
            assert torchs == ours, name


@pytest.mark.usefixtures("ranks")
def test_backward_gathers_one_unit_ahead_as_fsdp2_does() -> None:
    """Of a layer in between: copied out, the next one gathered, its products, gradients copied in and reduced."""
    model = fsdp2(nn.Sequential(*[Block() for _ in range(LAYERS)]), torch.float32)
    with Calls() as calls:
        model(torch.randn(8, 16)).sum().backward()
    layer = ["copy_out", "gather", "product", "flatten", "scatter"]
    names = [name for name, _ in groupby(name for name, _ in played("fsdp2", "fp32"))]
    for order in (calls.order, names):
        assert order[-2 * len(layer) + 1 - len(layer) : -len(layer) + 1] == 2 * layer
        assert order[-len(layer) + 1 :] == ["copy_out", "product", "flatten", "scatter"]  # the first layer: none ahead
