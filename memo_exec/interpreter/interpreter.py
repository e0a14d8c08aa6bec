"""Plays one rank's program on a device, one training step per call.

    interpreter = Interpreter(decisions, program, device="cpu")
    record = interpreter.run_step([(ids, labels)], StepScalars(lr=1e-3, loss_scale=1 / targets))

Each lane is a thread that plays its instructions in program order. On the CPU an instruction has ended when its kernel
returns. On CUDA the thread issues the instruction on the lane's stream, and events order and time it. Lanes wait for
each other only where the program's derived edges say so. Kernels run in inference mode, so autograd saves no tensor
that the program does not declare.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor

from memo_exec.distributed.groups import Groups, communicates, missing_groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import own_program
from memo_exec.distributed.world import answered
from memo_exec.interpreter.lanes import HostTimekeeper, LaneStopped, Progress, Timekeeper, lane_threads
from memo_exec.interpreter.prepared import Prepared, held_of, view_of
from memo_exec.interpreter.race_checks import Probe
from memo_exec.interpreter.record import StepRecord
from memo_exec.interpreter.streams import StreamTimekeeper, make_deterministic
from memo_exec.kernels import KERNELS, Call, Context, Kernel, StepScalars
from memo_exec.kernels.attention import BACKENDS
from memo_exec.kernels.call import Ends
from memo_exec.kernels.documents import check_documents, check_room, own_ends
from memo_exec.kernels.experts import check_device
from memo_exec.memory.arena import ArenaStore
from memo_exec.memory.binding import Bound, LateFree, Touch, Wait, late_frees, schedule
from memo_exec.memory.replaying import BelowTorch
from memo_exec.memory.slab import HostSlab
from memo_exec.memory.store import CachingStore, Count
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, MovedBytes
from memo_sim.program.analysis.edges import Edges
from memo_sim.program.ir.instruction import Lane, Mode
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.fp8 import delayed
from memo_sim.program.operators.fp8_operands import SCALES

STUCK_S = 10.0
"""How long the other lanes may continue after one lane has failed. They may wait for a rank that never answers."""


class Interpreter:
    """One rank's program with its buffers allocated, ready to play steps.

    Args:
        decisions: the plan's decisions, from which ``program`` was lowered.
        program: the program of this rank's pipeline stage.
        device: where the device buffers live and the kernels run.
        placement: a checked placement, which puts the device buffers in one arena. Without one, torch's allocator
            provides each buffer.
        debug: check which values instructions read, poison dead rows and outputs, compare checksums of copied rows, and
            check the order of instructions that touch the same bytes.
        allocator: the library that torch uses already as its allocator. With an arena it lends kernel libraries their
            slots; without one it replays the requests of a step.
        rank: this process's rank in the layout.
        groups: the process groups in which this rank communicates (``make_groups``).
        sharing: how many processes share this host's cores.
        kernels: the kernel of each operator; tests replace it.
        edges: the edges to respect instead of the derived ones; only tests give them.

    Raises:
        CannotRun: when a process group or a kernel is missing, or the attention kernel does not run on ``device``.
    """

    def __init__(
        self,
        decisions: Decisions,
        program: Program,
        *,
        device: torch.device | str = "cpu",
        placement: Placement | None = None,
        debug: bool = False,
        allocator: ctypes.CDLL | None = None,
        rank: int = 0,
        groups: Groups | None = None,
        sharing: int = 1,
        kernels: Mapping[str, Kernel] = KERNELS,
        edges: Edges | None = None,
    ) -> None:
        self.decisions = decisions
        self.program = program
        self.device = torch.device(device)
        groups = groups or {}
        _refuse(decisions, program, self.device, kernels, groups)
        self._kernels = kernels
        self.mesh = MeshCoordinates(decisions.layout, rank)
        self.schedule = schedule(own_program(program, decisions, self.mesh), placement=placement, edges=edges)
        if self.device.type == "cuda" and decisions.deterministic:
            make_deterministic()
        self.context = Context(decisions, self.device, rank=rank, groups=groups, debug=debug)
        store = CachingStore if placement is None else ArenaStore
        self.store = store(self.schedule, self.device, poison=debug)
        pinned = self.device.type == "cuda"
        self.slab = HostSlab(program, self.schedule.columns, self.schedule.slab, pinned=pinned)
        if delayed(decisions):
            self.buffer(SCALES).fill_(1.0)  # until a step has seen values
        self.probe = Probe(self.schedule, self.store, decisions, program) if debug else None
        self._timekeeper: Timekeeper = (
            StreamTimekeeper(self.schedule.lanes, self.device) if pinned else HostTimekeeper()
        )
        self._parts: dict[tuple[int, int, int, str | None], Tensor] = {}
        self.below = self._below(allocator)
        self._freed_late = late_frees(self.schedule) if self._replays else {}
        self._prepared = self._prepare_all()
        self._counts: list[Count] = []
        self._kept: dict[int, Tensor] = {}
        self._threads = lane_threads(self.schedule.lanes, self.device, sharing)
        self._quantised = not decisions.fp8_params
        self._stuck = False
        self._moved = {Lane.D2H: 0, Lane.H2D: 0}
        self._lock = threading.Lock()

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """The kernel of every operator; others may be set between two steps."""
        return self._kernels

    @kernels.setter
    def kernels(self, kernels: Mapping[str, Kernel]) -> None:
        self._kernels = kernels
        self._prepared = self._prepare_all()

    def buffer(self, family: str, index: int = 0) -> Tensor:
        """Return a buffer that lives across steps, such as (``params.layer``, 3), on the device or in the host slab.

        Parameters are flat.

        Raises:
            KeyError: when the program has no such buffer.
        """
        number = self.program.family_bases[family] + index
        if (host := self.slab.views.get(number)) is not None:
            return host
        return self.store.view(number, 0, self.schedule.family(number).tokens)

    def run_step(
        self, batch: Sequence[tuple[Tensor, ...]], scalars: StepScalars, documents: Sequence[Ends] = ()
    ) -> StepRecord:
        """Play the program once and return what it measured.

        ``batch`` has (ids, shifted labels) of every micro-batch; the loss ignores the label -100. With a policy's
        objective it has (tokens, 3) numbers of the rollout besides (``memo_exec/kernels/policy.py``). ``documents`` has
        the ends of packed documents of every micro-batch, for a plan that packs them; the plan's drawn ones if empty.

        Raises:
            UsageError: when a sequence has more documents than the plan has room for.
            ValueError: when the batch has another shape than the program's, or a kernel moved or resized an operand
                that it writes (in debug mode: any operand).
        """
        self._load(batch)
        self._load_documents(documents)
        self._quantise_masters()
        self.context.scalars = scalars
        self.store.begin_step()
        self._counts = []  # the record of the last step has the old ones
        self._kept.clear()
        self._moved = dict.fromkeys(self._moved, 0)
        if self.below:
            self.below.begin_step()
        progress = Progress(self.schedule.lanes)
        if self.probe:
            self.probe.begin_step()
        self._timekeeper.begin_step(self.program.instruction_count)
        futures = [
            self._threads[lane].submit(self._play, lane, every, progress) for lane, every in self._prepared.items()
        ]
        self._wait(futures)
        if progress.failure is not None:
            raise progress.failure
        record = self._record()
        self._kept.clear()  # all lanes have ended
        if self.below:
            self.below.end_step()
        return record

    def _wait(self, futures: list[Future[None]]) -> None:
        """Wait for all lanes. After a failure, wait at most ``STUCK_S`` for lanes that wait for other ranks."""
        playing = wait(futures, return_when=FIRST_EXCEPTION).not_done
        self._stuck = bool(wait(playing, STUCK_S if self.context.groups else None).not_done)

    def close(self) -> None:
        """Stop the threads and the allocator's replay, and unpin the slab."""
        if self.below:
            self.below.close()
        for thread in self._threads.values():
            thread.shutdown(wait=not self._stuck)
        if not self._stuck:
            self.slab.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None and self.device.type == "cuda" and self.context.groups:
            return  # unpinning would block on a kernel that waits for another rank; the process can exit without it
        try:
            self.close()
        except RuntimeError:
            if error[0] is None:
                raise
            # The device has failed, as the first error says, so it cannot be waited for.

    def weights_changed(self) -> None:
        """Call this when master weights were written between two steps: FP8 copies are made of them before the next.

        Nothing is needed before the first step.
        """
        self._quantised = not self.decisions.fp8_params

    def _quantise_masters(self) -> None:
        """Make what is kept in FP8 alone of master weights, by the instructions that end a step."""
        if self._quantised:
            return
        with torch.inference_mode():
            for prepared in sorted(
                (each for every in self._prepared.values() for each in every), key=lambda each: each.bound.number
            ):
                if prepared.bound.instruction.phase is Phase.OPTIMIZER and _makes_copies(prepared.call):
                    prepared.kernel(prepared.call)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._quantised = True

    def _load(self, batch: Sequence[tuple[Tensor, ...]]) -> None:
        tokens = self.decisions.local_tokens
        policy = self.decisions.objective == "grpo"
        inputs = {"input.ids": 1, "input.labels": 1} | ({"input.rollout": 3} if policy else {})
        if len(batch) != self.program.micro_batches:
            raise ValueError(f"{len(batch)} micro-batches given, the program plays {self.program.micro_batches}")
        for i, given in enumerate(batch):
            if len(given) != len(inputs):
                raise ValueError(f"micro-batch {i} has {len(given)} inputs, wanted {', '.join(inputs)}")
            for (name, numbers), values in zip(inputs.items(), given, strict=True):
                if values.numel() != numbers * tokens:
                    raise ValueError(
                        f"{name} of micro-batch {i} has {values.numel()} numbers, wanted {numbers * tokens}"
                    )
                if name in self.program.family_bases:  # only the first stage has ids and only the last one labels
                    buffer = self.buffer(name, i)
                    buffer.copy_(values.reshape(buffer.shape))
        for name in ("loss", "grad_norm"):
            self.buffer(name).zero_()

    def _load_documents(self, documents: Sequence[Ends]) -> None:
        """Keep the ends of documents on the host, and write those of this rank's rows of attention to the device."""
        decisions = self.decisions
        if decisions.documents is None:
            return
        if documents and len(documents) != self.program.micro_batches:
            raise ValueError(f"documents of {len(documents)} micro-batches, not of {self.program.micro_batches}")
        if documents:
            self.context.bring(documents)
        for i in range(self.program.micro_batches):
            ends = self.context.ends(i)
            if len(ends) != decisions.micro_batch or any(each[-1] != decisions.seq_tokens for each in ends):
                raise ValueError(f"documents of micro-batch {i} do not fill its sequences")
            check_room(decisions, ends)
            every = own_ends(self.context, i)
            target = self.buffer("input.documents", i)
            target.fill_(every[-1])  # documents beyond the last one are empty
            target[: len(every)] = torch.tensor(every, dtype=target.dtype)

    def _play(self, lane: Lane, every: list[Prepared], progress: Progress) -> None:
        """Play one lane's instructions; any error stops the other lanes."""
        try:
            with torch.inference_mode(), self._timekeeper.playing(lane):
                for prepared in every:
                    self._play_one(lane, prepared, progress)
        except LaneStopped:
            pass
        except BaseException as error:  # the first one is raised again in run_step
            progress.fail(error)
            raise

    def _play_one(self, lane: Lane, prepared: Prepared, progress: Progress) -> None:
        timekeeper, number = self._timekeeper, prepared.bound.number
        for other, producer in prepared.bound.waits:
            progress.wait(other, producer)
            timekeeper.order(lane, other, producer)
        for late in prepared.freed_late:
            self._free(late, progress)
        self._counts.extend(prepared.born)
        for buffer in prepared.births:
            self.store.birth(buffer)
        call = prepared.begin(self.store) if prepared.moves else prepared.call
        if self.probe:
            self.probe.before(prepared.bound, call)
        held = prepared.held
        if held is None:
            held = held_of(call.tensors, prepared.guarded)
        timekeeper.start(lane, number)
        if prepared.plain:
            prepared.kernel(call)
        else:
            with self._lent(prepared), self._talking(prepared):
                prepared.kernel(call)
        timekeeper.end(lane, number)
        if held:
            prepared.check(held)
        if prepared.copies:
            self._moved[lane] += call["target"].nbytes
        if self.probe:
            self.probe.after(prepared.bound, call)
        if prepared.moves:
            prepared.end()  # drops the references to buffers that die here before another lane asks for memory
        for buffer, others in prepared.deaths:
            self._release(lane, buffer, others, progress)
        self._counts.extend(prepared.died)
        progress.finish(lane, number, awaited=prepared.bound.awaited)

    def _release(self, lane: Lane, buffer: int, others: tuple[Wait, ...], progress: Progress) -> None:
        """Release a buffer once the other lanes that touch it have ended their last uses."""
        for other, last in others:
            progress.wait(other, last)
        if others and not self.store.has_address(buffer) and buffer not in self.schedule.library:
            self._keep(buffer, [lane, *(other for other, _ in others)])
        self.store.death(buffer)

    @property
    def _replays(self) -> bool:
        """Whether the allocator below torch serves buffers, and not only libraries' results."""
        return self.below is not None and not isinstance(self.store, ArenaStore)

    def _keep(self, buffer: int, lanes: list[Lane]) -> None:
        """Keep the memory of a buffer that several lanes use from being reused until they have ended their uses.

        torch's own allocator does it when asked. The allocator below torch does not, so the compute lane frees the
        buffer later (``late_frees``).
        """
        whole = self.store.view(buffer, 0, self.schedule.family(buffer).tokens)
        if self._replays:
            self._kept[buffer] = whole
        else:
            self._timekeeper.release(whole, lanes)

    def _free(self, late: LateFree, progress: Progress) -> None:
        """Free a kept buffer in the compute lane's thread, once the compute lane waits for the buffer's last uses."""
        for other, last in late.uses:
            progress.wait(other, last)
            self._timekeeper.order(Lane.COMPUTE, other, last)
        del self._kept[late.buffer]

    def _prepare_all(self) -> dict[Lane, list[Prepared]]:
        return {lane: [self._prepare(bound) for bound in bounds] for lane, bounds in self.schedule.lanes.items()}

    def _prepare(self, bound: Bound) -> Prepared:
        """Return what the steps of an instruction have in common: its kernel, and operands with a constant address."""
        fixed, moving = {}, []
        for touch in bound.touches:
            if (host := self.slab.views.get(touch.buffer)) is not None:
                fixed[touch.role] = host[touch.first : touch.first + touch.tokens]
            elif self.store.has_address(touch.buffer):
                fixed[touch.role] = self._view(touch)
            elif touch.buffer not in self.schedule.library:
                moving.append(touch)
        call = Call(
            bound.instruction,
            self.context,
            fixed,
            bound.subsequence,
            bound.offset,
            micro_batch=bound.micro_batch,
            layer=bound.layer,
        )
        guarded = [t.role for t in bound.touches if self.probe or t.mode is not Mode.READ]
        return Prepared(
            bound,
            self._kernels[bound.instruction.op],
            call,
            moving,
            self.store,
            guarded=guarded,
            slot=self._slot(bound),
            talks=communicates(bound.instruction.work),
            freed_late=self._freed_late.get(bound.number, ()),
        )

    def _view(self, touch: Touch) -> Tensor:
        """Return an operand with one address; operands of the same rows of the same memory are one tensor."""
        whole = self.store.view(touch.buffer, 0, self.schedule.family(touch.buffer).tokens)
        key = id(whole), touch.first, touch.tokens, None if touch.part is None else touch.part.name
        if key not in self._parts:
            self._parts[key] = view_of(self.store, touch)
        return self._parts[key]

    def _below(self, allocator: ctypes.CDLL | None) -> BelowTorch | None:
        """Return what serves the compute lane's allocations, or None when torch's own allocator does."""
        if allocator is None:
            return None
        stream = 0
        if isinstance(self._timekeeper, StreamTimekeeper):
            stream = self._timekeeper.streams[Lane.COMPUTE].cuda_stream
        return BelowTorch(allocator, stream, lends=isinstance(self.store, ArenaStore))

    def _slot(self, bound: Bound) -> Tensor | None:
        """Return the slot that the program declares for what the instruction's library allocates itself."""
        if self.below is not None and isinstance(self.store, ArenaStore):
            for touch in bound.touches:
                if (slot := self.store.slots.get(touch.buffer)) is not None:
                    return slot
        return None

    def _lent(self, prepared: Prepared) -> AbstractContextManager[None]:
        """Return a context in which a library allocates its results in the slot that the program declares."""
        if self.below is None or prepared.slot is None:
            return nullcontext()
        return self.below.lending(prepared.slot)

    def _talking(self, prepared: Prepared) -> AbstractContextManager[None]:
        """Return a context that reports a failed communication as the failure of another rank."""
        return answered(self.mesh.rank, self.decisions.layout.devices) if prepared.talks else nullcontext()

    def _record(self) -> StepRecord:
        start_s, end_s = self._timekeeper.times()
        if self.probe:
            self.probe.end_step(start_s, end_s)
        return StepRecord(
            loss=float(self.buffer("loss")),
            grad_norm=float(self.buffer("grad_norm")) ** 0.5,
            start_s=start_s,
            end_s=end_s,
            step_s=float(end_s.max(initial=0.0)),
            peak_host_bytes=self.slab.bytes,
            moved=MovedBytes(d2h=self._moved[Lane.D2H], h2d=self._moved[Lane.H2D]),
            schedule=self.schedule,
            counts=self._counts,
            store=self.store,
        )


def _makes_copies(call: Call) -> bool:
    """Return whether an instruction of the optimizer quantises master weights, or gathers what ranks have quantised."""
    op = call.instruction.op
    return op in ("params.largest", "fp8.max_reduce", "params.quantize") or (
        op == "params.all_gather" and "largest" in call.tensors
    )


def _refuse(
    decisions: Decisions, program: Program, device: torch.device, kernels: Mapping[str, Kernel], groups: Groups
) -> None:
    """Refuse a program that this interpreter cannot play.

    Raises:
        CannotRun: when a process group or a kernel is missing, the attention kernel is for another device, or the
            device has no product of such experts.
    """
    layout = decisions.layout
    if missing_groups(program, layout, groups):
        raise CannotRun(
            "the layout needs several ranks, but this process runs alone",
            where="decisions.layout",
            got="1 process",
            wanted=f"{layout.devices} processes",
            hint=f"torchrun --nproc_per_node {layout.devices} -m memo_exec run PLAN",
        )
    missing = sorted({i.op for t in program.templates for i in t.instructions} - set(kernels))
    if missing:
        raise CannotRun("some operators of the program have no kernel", got=", ".join(missing))
    check_device(decisions, device)
    check_documents(decisions)
    kernel = decisions.kernels.attention
    fitting = [name for name in BACKENDS if (name == "torch-flash-cpu") == (device.type == "cpu")]
    if kernel not in fitting:
        raise CannotRun(
            f"attention kernel {kernel} does not run on {device.type}",
            where="decisions.kernels.attention",
            got=kernel,
            wanted=" or ".join(fitting),
            hint="make the plan for this machine's profile",
        )
