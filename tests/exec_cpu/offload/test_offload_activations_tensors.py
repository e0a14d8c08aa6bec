"""Every kind of tensor that autograd may save: its values are restored, it stays on the device, or reading it fails."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from memo_exec import keep_activations, offload_activations
from memo_exec.offload.statistics import Why
from memo_exec.offload.view import View, bytes_of

SIZE = 64


class Save(torch.autograd.Function):
    """Saves tensors in forward, and records in backward what autograd returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = ctx.saved_tensors  # each access unpacks the tensors again
        ctx.seen.extend(found)
        return grad, None, *(None for _ in found)


def round_trip(make: Callable[[], list[Tensor]], **options: Any) -> tuple[list[Tensor], Any]:
    """Save the tensors of ``make`` and drop them; return the tensors that backward sees, and the statistics."""
    context = offload_activations(**({"device": "cpu", "min_offload_size": 1, "debug": True} | options))
    leaf, seen = torch.ones((), requires_grad=True), []
    with context:
        loss = Save.apply(leaf, seen, *make())
    context.synchronize()
    loss.backward()
    return seen, context.statistics


def base(dtype: torch.dtype = torch.float32, *shape: int) -> Tensor:
    shape = shape or (SIZE, SIZE)
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) % 251
    return values.to(dtype)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[5:9],
    "columns": lambda x: x[:, 7:20],
    "one column": lambda x: x[:, 3],
    "every third": lambda x: x[::3, ::3],
    "permuted with gaps": lambda x: x.view(8, 8, 8, 8)[:, :3].permute(3, 1, 0, 2),
    "expanded": lambda x: x[:, :1].expand(SIZE, 500),
    "expanded rows": lambda x: x[None, :1].expand(9, 4, SIZE),
    "overlapping": lambda x: x.view(-1).unfold(0, 16, 3),
    "scalar": lambda x: x[3, 4],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_back(dtype: torch.dtype, view: str) -> None:
    (found,), moved = round_trip(lambda: [VIEWS[view](base(dtype))])
    wanted = VIEWS[view](base(dtype))
    assert moved.offloaded_tensors == moved.restored_tensors == 1
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    as_is = torch.float32 if dtype.itemsize == 1 else dtype  # torch cannot compare float8 tensors
    assert torch.equal(found.to(as_is), wanted.to(as_is))
    if View.of(wanted).gapless:
        assert found.stride() == wanted.stride()


@pytest.mark.parametrize("lazy", [torch.conj, lambda x: x.conj().imag, lambda x: x.t().conj()])
def test_lazy_bits_come_back(lazy: Callable[[Tensor], Tensor]) -> None:
    def make() -> Tensor:
        return lazy(torch.complex(base(), base().t()))

    (found,), moved = round_trip(lambda: [make()])
    assert moved.restored_tensors == 1
    assert (found.is_conj(), found.is_neg()) == (make().is_conj(), make().is_neg())
    assert torch.equal(found.resolve_conj().resolve_neg(), make().resolve_conj().resolve_neg())


@given(st.data())
def test_any_strided_view(data: st.DataObject) -> None:
    """Sizes, strides and offset are arbitrary: dense, with gaps, overlapping and expanded."""
    dims = data.draw(st.integers(0, 4))
    size = tuple(data.draw(st.integers(1, 5)) for _ in range(dims))
    stride = tuple(data.draw(st.integers(0, 30)) for _ in range(dims))
    offset = data.draw(st.integers(0, 50))
    room = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    storage = base(torch.float32, room + data.draw(st.integers(0, 50))).untyped_storage()
    view = View(torch.float32, size, stride, offset * 4)
    wanted = view.over(storage)
    if view.gapless:
        first, end = view.reach(storage.nbytes())
        copy, inside = bytes_of(storage, first, end).clone(), view.after(first)
        assert copy.numel() <= view.own_bytes + 128
    else:
        copy, inside = view.gathered(storage).view(torch.uint8), view.packed()
        assert copy.numel() == view.own_bytes
    assert torch.equal(inside.over(copy.untyped_storage()), wanted)


def test_views_of_one_storage_are_copied_once() -> None:
    def make() -> list[Tensor]:
        x = base()
        return [x, x.t(), x[3:7], x[:, :5], x.view(-1), x.detach()]

    found, moved = round_trip(make)
    assert all(torch.equal(a, b) for a, b in zip(found, make(), strict=True))
    assert moved.offloaded_tensors == moved.restored_tensors == 2  # the whole tensor, and the five columns without gaps
    assert moved.shared_tensors == 4
    assert found[0].data_ptr() == found[1].data_ptr() == found[4].data_ptr()


def test_each_tensor_of_a_node_is_restored_once() -> None:
    """Autograd unpacks a node's tensors in the order of their saves; unpacked ones are not prefetched again."""
    context = offload_activations(device="cpu", debug=True)
    leaf, seen = torch.ones((), requires_grad=True), []
    with context:
        loss = leaf * 1
        for i in range(6):
            loss = Save.apply(loss, seen, *(base() + i + j / 8 for j in range(4)))
    context.synchronize()
    for _ in range(2):
        seen.clear()
        context.statistics.reset()
        loss.backward(retain_graph=True)
        wanted = [base() + i + j / 8 for i in reversed(range(6)) for j in range(4)]
        assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))
        assert context.statistics.restored_tensors == 24
        assert context.statistics.dropped_prefetches == 0


def test_parts_of_a_packed_tensor_are_copied_once_each() -> None:
    """The copies of q, k and v of one product together have the product's bytes, although each view has gaps."""

    def make() -> list[Tensor]:
        return list(base().split([32, 16, 16], dim=1))

    found, moved = round_trip(make)
    assert all(torch.equal(a, b) for a, b in zip(found, make(), strict=True))
    assert moved.offloaded_bytes == base().nbytes


def test_saving_a_part_does_not_hold_the_whole_storage() -> None:
    """Plain autograd would keep the whole storage for a few columns."""
    refs = []

    def make() -> list[Tensor]:
        x = base()
        refs.append(StorageWeakRef(x.untyped_storage()))
        return [x[:, 7:9]]

    context = offload_activations(device="cpu", min_offload_size=1)
    with context:
        loss = Save.apply(torch.ones((), requires_grad=True), [], *make())
    context.synchronize()
    assert refs[0].expired()
    assert context.statistics.offloaded_bytes == SIZE * 2 * 4
    del loss


def test_nothing_is_held_after_exit() -> None:
    """The graph is still alive, but the originals are freed."""
    refs = []

    def make() -> list[Tensor]:
        tensors = [base() for _ in range(20)]
        refs.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)
        return tensors

    context = offload_activations(device="cpu", max_fwd_stash_size=3)
    with context:
        loss = Save.apply(torch.ones((), requires_grad=True), [], *make())
    assert sum(not ref.expired() for ref in refs) <= 3
    context.synchronize()
    assert all(ref.expired() for ref in refs)
    loss.backward()
    with context:
        loss = Save.apply(torch.ones((), requires_grad=True), [], *make())
    del loss
    gc.collect()
    with context:
        pass
    assert all(ref.expired() for ref in refs)


def test_a_reused_address_is_another_tensor() -> None:
    """Several tensors of one size use the same address in turn; none may be mistaken for an earlier one."""
    context = offload_activations(device="cpu", max_fwd_stash_size=1)
    seen: list[Tensor] = []
    leaf = torch.ones((), requires_grad=True)
    addresses = set()
    with context:
        loss = torch.zeros(())
        for i in range(50):
            x = torch.full((SIZE, SIZE), float(i))
            addresses.add(x.data_ptr())
            loss = loss + Save.apply(leaf, seen, x)
            del x
            context.synchronize()
    assert len(addresses) < 50  # the test needs reused addresses
    assert context.statistics.offloaded_tensors == 50
    loss.backward()
    assert [float(x[0, 0]) for x in seen] == [float(i) for i in reversed(range(50))]


@pytest.mark.parametrize(
    "context", [keep_activations, offload_activations, lambda: offload_activations(device="cpu", fraction=0)]
)
@pytest.mark.parametrize("held", [True, False])
def test_a_write_after_the_save_is_refused(context: Callable[[], Any], held: bool) -> None:
    """Plain autograd has this check, but torch skips it if saved-tensor hooks are set."""
    x = torch.randn(SIZE, SIZE, requires_grad=True) * 1
    with context():
        y = x[1:] * x[1:]
    x.add_(1)
    if not held:
        del x
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_write_between_two_saves_makes_two_copies() -> None:
    context = offload_activations(device="cpu", debug=True)
    seen: list[Tensor] = []
    leaf = torch.ones((), requires_grad=True)
    with context:
        x = base()
        unread = Save.apply(leaf, seen, x)
        x.add_(1)
        loss = Save.apply(leaf, seen, x)
        del x
    loss.backward()
    assert torch.equal(seen[0], base() + 1)
    assert context.statistics.offloaded_tensors == 2
    with pytest.raises(RuntimeError, match="saved at version 0 and is at version 1"):
        unread.backward()


def test_a_storage_emptied_outside_autograd_is_restored_from_the_host() -> None:
    """FSDP frees parameters by resizing their storage, so a tensor that is still alive may have no bytes."""
    context = offload_activations(device="cpu", debug=True)
    seen: list[Tensor] = []
    x = base()
    with context:
        loss = Save.apply(torch.ones((), requires_grad=True), seen, x)
    context.synchronize()
    x.untyped_storage().resize_(0)
    loss.backward()
    assert torch.equal(seen[0], base())


KEPT: dict[str, tuple[Why, Callable[[], Tensor]]] = {
    "empty": (Why.SMALL, lambda: torch.empty(0, 5)),
    "parameter": (Why.PARAMETER, lambda: nn.Parameter(base())),
    "view of a parameter": (Why.PARAMETER, lambda: nn.Parameter(base()).t()),
    "buffer": (Why.PARAMETER, lambda: nn.Buffer(base())),
    "meta": (Why.KIND, lambda: torch.empty(9, 9, device="meta")),
    "sparse": (Why.KIND, lambda: base().to_sparse()),
    "csr": (Why.KIND, lambda: torch.eye(9).to_sparse_csr()),
    "subclass": (Why.KIND, lambda: base().as_subclass(type("Mine", (Tensor,), {}))),
    "fake": (Why.KIND, lambda: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(base())),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", KEPT)
def test_tensors_that_stay_on_the_device(kind: str) -> None:
    why, make = KEPT[kind]
    (found,), moved = round_trip(lambda: [make()])
    assert moved.offloaded_tensors == 0
    assert why in moved.kept_bytes
    assert found.shape == make().shape
    assert found.layout == make().layout


def test_tensors_of_another_device_stay() -> None:
    """Tensors of a device other than the context's stay; the test works with and without CUDA."""
    (found,), moved = round_trip(lambda: [base()], device="cuda", use_pin_memory=False)
    assert torch.equal(found, base())
    assert moved.kept_bytes[Why.DEVICE] == base().nbytes
    assert moved.offloaded_bytes == 0


def test_a_wrapper_subclass_is_offloaded_inside() -> None:
    (found,), moved = round_trip(lambda: [TwoTensor(base(), base().t().contiguous())])
    assert isinstance(found, TwoTensor)
    assert torch.equal(found.a, base())
    assert torch.equal(found.b, base().t())
    assert moved.offloaded_tensors == moved.restored_tensors == 2


def test_vmap_passes_through() -> None:
    """Torch itself refuses hooks under ``torch.func.grad``, but allows them in autograd of a vmapped function."""
    context = offload_activations(device="cpu", min_offload_size=1, debug=True)
    x = (base() / 100).requires_grad_()
    with context:
        loss = torch.func.vmap(lambda row: ((row * 1).sin() * row).sum())(x).sum()
    loss.backward()
    assert torch.allclose(x.grad, x.cos() * x + x.sin())
    assert context.statistics.restored_bytes > 0


def test_distributed_tensors(tmp_path: Path) -> None:
    """With ``DTensor`` and FSDP2, local tensors are offloaded; sharded parameters and their gathered copies stay."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        weight = distribute_tensor(torch.randn(SIZE, SIZE), mesh, [Shard(0)]).requires_grad_()
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()) for _ in range(3)))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        x = distribute_tensor(torch.randn(SIZE, SIZE), mesh, [Shard(0)])

        def gradients(context: Any) -> list[Tensor]:
            with context:
                loss = ((x * 1.5) @ weight).tanh().square().sum().full_tensor() + layers(x.to_local() * 1).sum()
            loss.backward()
            leaves = [weight, *layers.parameters()]
            found = [leaf.grad.full_tensor().clone() for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            return found

        wanted = gradients(nullcontext())
        context = offload_activations(device="cpu", debug=True)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(context), wanted, strict=True))
        assert context.statistics.restored_bytes >= 2 * 7 * base().nbytes
        assert (
            context.statistics.kept_bytes[Why.PARAMETER] == 2 * 2 * base().nbytes
        )  # the first needs no input gradient
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model(backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(SIZE, SIZE)

    def gradients(context: Any) -> list[Tensor]:
        model.zero_grad()
        with context:
            loss = compiled(x).square().sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = gradients(keep_activations())
    context = offload_activations(device="cpu", debug=True, model=model)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(context), wanted, strict=True))
    assert context.statistics.restored_bytes > 0
