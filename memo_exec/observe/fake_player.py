"""Plays a program with fake tensors and records its memory requests, even if the step does not fit this machine.

Fake tensors have shapes and lives but no memory. The recorder sees tensors that operators return. It does not see
scratch inside a kernel, which is listed as not observed, with the size that the program declares. The buffer store
allocates the program's buffers as on a device. So the new information is what kernels allocate in addition.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo_exec.distributed.groups import communicates
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import own_program
from memo_exec.interpreter.prepared import view_of
from memo_exec.kernels import IN_TRITON, KERNELS, Call, Context, Kernel
from memo_exec.memory.binding import Bound, Schedule, schedule
from memo_exec.memory.slab import HostSlab
from memo_exec.memory.store import CachingStore
from memo_exec.observe.observed import LARGE_BYTES, NOT_OBSERVED, Observed, RequestLog, Unexplained, compared
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions
from memo_sim.program.arena.requests import buffer_names
from memo_sim.program.ir.instruction import BufferClass, Instruction, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention, LinearLoss
from memo_sim.program.operators.workspaces import on_cpu


@dataclass(frozen=True, slots=True)
class _Event:
    """The birth (``size`` bytes) or the death (``size`` None) of a tensor that a kernel allocates itself."""

    tensor: int
    size: int | None
    operator: str


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the birth and the death of every storage that operators allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[_Event] = []
        self._known: dict[int, Any] = {}
        self._count = 0

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Do not record these tensors, which existed before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.dtype_out:
            # torch 2.11 decomposes the call on fake tensors and reads the dtype as a factor (pytorch#163880). The
            # result of the call is ``out``.
            return (kwargs or {})["out"]
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), str(func))
        return found

    def _note(self, storage: torch.UntypedStorage, operator: str) -> None:
        key = storage._cdata
        if key in self._known:
            return
        number = self._count
        self._count += 1
        self.events.append(_Event(number, storage.nbytes(), operator))

        def ended(_: object) -> None:
            del self._known[key]
            self.events.append(_Event(number, None, operator))

        self._known[key] = weakref.ref(storage, ended)


def _most_alive(events: list[_Event]) -> int:
    sizes: dict[int, int] = {}
    alive = most = 0
    for event in events:
        if event.size is None:
            alive -= sizes.pop(event.tensor)
        else:
            sizes[event.tensor] = event.size
            alive += event.size
            most = max(most, alive)
    return most


def observe_fake(decisions: Decisions, program: Program, *, kernels: Mapping[str, Kernel] = KERNELS) -> Observed:
    """Play ``program`` with fake tensors and return the memory requests on its device.

    Equal instructions make the same requests. So each distinct instruction is played once and its requests repeated.

    Raises:
        CannotRun: when the model has experts and the plan's kernels are those of a CPU, which read how many rows an
            expert has.
    """
    cuda = not on_cpu(decisions.kernels.attention)
    if not cuda and decisions.model.mixture is not None:
        raise CannotRun(
            "the requests of experts on a CPU depend on the router, so they cannot be recorded without data",
            got=decisions.model.name,
            wanted="a model without experts, or a plan with a GPU's kernels",
        )
    built = cuda and torch.version.cuda is not None
    own = own_program(program, decisions, MeshCoordinates(decisions.layout))
    with FakeTensorMode(), torch.inference_mode(), _LooksLikeCuda() if cuda and not built else nullcontext():
        device = torch.device("cuda" if built else "cpu")
        return _FakePlayer(decisions, schedule(own), kernels, device).play()


class _LooksLikeCuda(TorchFunctionMode):
    """Makes ``is_cuda`` true, so that kernels take their CUDA path in a build of torch without CUDA.

    Such a build cannot slice fake tensors on a CUDA device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return func(*args, **(kwargs or {}))


class _FakePlayer:
    """Plays all lanes' instructions in program order, one after the other."""

    def __init__(
        self, decisions: Decisions, plan: Schedule, kernels: Mapping[str, Kernel], device: torch.device
    ) -> None:
        self.kernels = kernels
        self.schedule = plan
        self.names = buffer_names(plan.program)
        self.context = Context(decisions, device)
        self.store = CachingStore(plan, device, reuse=False)
        self.slab = HostSlab(plan.program, plan.columns, plan.slab, pinned=False)
        self.watch = _Watch()
        cells = [self.context.cell(lane, 0) for lane in (Lane.COMPUTE, Lane.HOST)]
        self._constants = [self.context.inverse_frequencies, *cells]
        if self.context.merging is not None:
            self._constants.append(self.context.merging)
        self.log = RequestLog()
        self.unexplained: list[Unexplained] = []
        self._rows: dict[int, int] = {}
        self._played: dict[Instruction, tuple[list[_Event], int]] = {}
        self._workspaces: dict[str, tuple[int, int]] = {}

    def play(self) -> Observed:
        """Play the whole step and return its requests."""
        lives = self.schedule.lives
        for buffer in (lives.on_device & (lives.birth < 0)).nonzero()[0].tolist():
            self._open(buffer)
        bounds = sorted((b for lane in self.schedule.lanes.values() for b in lane), key=lambda b: b.number)
        for bound, name in zip(bounds, self.schedule.program.ids(), strict=True):
            for buffer in bound.births:
                self.store.birth(buffer)
                if buffer not in self.schedule.library:
                    self._open(buffer)
            self._kernel(bound, name)
            for buffer, _ in bound.deaths:
                self.store.death(buffer)
                if buffer not in self.schedule.library:
                    self.log.close(self._rows.pop(buffer))
        return compared("fake tensors", self.log, self.schedule, self.unexplained, self._workspaces)

    def _open(self, buffer: int) -> None:
        """Record the bytes that the store really holds for a buffer."""
        family = self.schedule.family(buffer)
        held = self.store.view(buffer, 0, family.tokens).untyped_storage().nbytes()
        self._rows[buffer] = self.log.open(self.names[buffer], held, family.buffer_class.value)

    def _kernel(self, bound: Bound, name: str) -> None:
        """Record the memory that a kernel requests besides its operands; play it if no equal one was played."""
        instruction = bound.instruction
        if instruction.lane is Lane.HOST or communicates(instruction.work):
            return  # it uses host memory, or memory that its library keeps for all calls
        if instruction not in self._played:
            events = self._events(bound)
            self._played[instruction] = events, _most_alive(events)
        declared = sum(
            self.schedule.family(touch.buffer).bytes for touch in bound.touches if touch.buffer in self.schedule.library
        )
        events, returned = self._played[instruction]
        unseen = None
        if declared > returned:  # this scratch lives at the same time as the returned tensors
            unseen = self.log.open(f"{name}: scratch", declared - returned, NOT_OBSERVED)
        rows: dict[int, int] = {}
        alive = 0
        for event in events:
            if event.size is None:
                row = rows.pop(event.tensor)
                self.log.close(row)
                alive -= self.log.sizes[row]
                continue
            label = f"{name}: {event.operator} {event.tensor}"
            rows[event.tensor] = self.log.open(label, event.size, BufferClass.WORKSPACE.value)
            alive += event.size
            excess = min(event.size, alive - declared)
            if excess > LARGE_BYTES:
                self.unexplained.append(Unexplained(name, event.operator, event.size, excess))
        if declared:
            before = self._workspaces.get(instruction.op, (0, 0))
            self._workspaces[instruction.op] = max(before[0], declared), max(before[1], returned)
        if unseen is not None:
            self.log.close(unseen)

    def _in_triton(self, instruction: Instruction) -> bool:
        """Return whether Triton plays an instruction of this plan."""
        decisions, work = self.context.decisions, instruction.work
        if isinstance(work, LinearLoss):
            return work.kernel == "triton"
        if instruction.op == "cross_entropy.fused":
            return not on_cpu(decisions.kernels.attention) and decisions.layout.tp == 1
        return instruction.op in IN_TRITON and decisions.kernels.rowwise == "triton"

    def _events(self, bound: Bound) -> list[_Event]:
        """Play a kernel and return the births and deaths of the tensors that it allocates."""
        work = bound.instruction.work
        if isinstance(work, Attention) and not work.kernel.startswith("torch-"):
            return []  # the low-level calls of libraries do not support fake tensors
        if self._in_triton(bound.instruction):
            return []  # Triton does not support them either; what its kernels need besides is the declared scratch
        tensors = {}
        for touch in bound.touches:
            if (host := self.slab.views.get(touch.buffer)) is not None:
                tensors[touch.role] = host[touch.first : touch.first + touch.tokens]
            elif touch.buffer not in self.schedule.library:
                tensors[touch.role] = view_of(self.store, touch)
        events: list[_Event] = []
        self.watch.events = events
        self.watch.ignore(*self._constants, *tensors.values())
        with self.watch:
            call = Call(bound.instruction, self.context, tensors, bound.subsequence, bound.offset, bound.micro_batch)
            self.kernels[bound.instruction.op](call)
        return events
