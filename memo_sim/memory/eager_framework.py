"""Changes a program's memory requests into those of an eager framework, such as Megatron-LM on autograd.

A program's own requests are those of an executor that orders its lanes by events and computes the loss in blocks of
rows. A framework that leaves memory to autograd and ``torch.distributed`` differs in these documented ways:

    checkpoint  a recomputed layer's output lives as long as its backward (torch.utils.checkpoint and Megatron-LM's own
                checkpoint hold it to call backward on it)
    embedding   the weight gradient is a dense table of its own before it is added to the fp32 gradient (torch)
    classifier  its input is gathered into one buffer that is never freed (Megatron-LM, GlobalMemoryBuffer ``mpu``)
    states      have Megatron-LM's order and sizes; moments are allocated after the first step (``initial_states``;
                both generations have that order)
    workspaces  the libraries' part of a profile's reserve comes from the allocator (torch.empty, cuBLAS's handles)

Other differences depend on the year of the libraries (``Hardware.eager_libraries``): up to 2024, and from 2025 on, when
PyTorch and Transformer Engine have version 2.8 or later. What is known of 2025 is Megatron-LM 0.14's; so other
frameworks, with ZeRO 2 and 3, count as 2024 at the latest:

    2024        loss: all logits are copied to fp32, and their fp32 softmax is kept for backward (Megatron-LM,
                core/tensor_parallel/cross_entropy.py). Bytes per bf16 logit: 2 + 4 + 4 forward, 4 + 2 backward
                streams: a collective's tensors are marked with ``record_stream`` (c10d before PyTorch 2.8). Their
                memory comes back when the device, not the host, has passed the collective (pytorch/pytorch#76861,
                #147168). The host runs ahead until the launch queue is full, which streams share under sequence
                parallelism (``one_work_queue``). It waits for the loss (Megatron-LM checks it for NaN) and for p2p
                sends and receives between stages (it synchronises after each)
    2025        loss: Transformer Engine's fused loss writes the gradient over the logits: 2 bytes per logit
                gradients: the matrix product sums a weight gradient in fp32, and autograd gets a dummy tensor of the
                weight's shape and dtype; one for every shape, never freed (Transformer Engine 2.8, ``get_dummy_wgrad``)

So with 2024's libraries and kernels of milliseconds, each layer in flight holds its own gathered and scattered tensors.
Memory is full while only half of it is live:

    host    | l0 | l1 | l2 | l3 | ...           the device has not passed l0's collectives: l1, l2, l3 need new memory
    device  | l0              | l1 ...

FSDP2 has ZeRO 3 without ``record_stream``: its streams wait for each other's events (pytorch/torchtitan, docs/fsdp.md).
A plan says so with ``Decisions.streams``, in any year. ``huggingface.py`` has what Hugging Face's modules keep.

A plan that names its loss (``Decisions.loss``) has the buffers of that loss in its program, and they stay as they are.

Not modelled: other temporaries that Python frames hold; Transformer Engine's own stream for every second ring step; and
that the classifier's buffer is first allocated in the first step's head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memo_sim.contract.attention_kernels import Libraries
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.memory.replay import RunAhead
from memo_sim.program.analysis.columns import Columns, Ints, distinct
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.arena.requests import BufferNames, device_buffers
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, BufferClass, Instruction, Lane, Mode, Template
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Gemm

LAUNCH_QUEUE = 1024
"""Kernels in a work queue before a launch has to wait: about 1,000 (forums.developer.nvidia.com, topic 68937; there
each of three streams has a queue of its own)."""

KERNELS = 2
"""Kernels that autograd launches per instruction. A GPT layer's forward, recompute and backward need 74 kernels for 39
instructions (counted in tests/exec_cpu/kernels/test_eager_kernels.py)."""

GATHERS_AHEAD = 2
"""ZeRO 3 gathers of parameters that may be in flight before the host waits for the oldest (DeepSpeed,
partitioned_param_coordinator.py, ``__max_ongoing_fetch_events``; FSDP's ``limit_all_gathers`` is the same)."""

FP32_BYTES = 4

WORKSPACES = "library_workspaces"
"""The item of a profile's reserve that libraries take from PyTorch's allocator."""

LOSS, STATISTICS = "cross_entropy", "cross_entropy.stats"
"""Operators of the loss: the one that writes the gradient, and the one before it where the vocabulary is sharded.

Every other operator of a loss begins with the first name and a dot."""

EMBEDDING = "embed.bwd"
"""The operator that adds the rows' gradients to the embedding's gradient."""

GATHERED = frozenset({"head/fwd.final_full", "head/fwd.final_again"})
"""Buffer families of the classifier's gathered input: one buffer for all micro-batches, forward and backward."""

STREAMS = (Lane.D2H, Lane.H2D, Lane.P2P, *COLLECTIVE_LANES.values())
"""Lanes with streams other than the one that tensors are allocated on."""


@dataclass(frozen=True)
class _Loss:
    """One call of the loss: its first and last instruction, its buffer numbers, and its number of logits."""

    first: int
    last: int
    logits: int
    gradient: int
    elements: int
    dtype: str


@dataclass(frozen=True)
class Added:
    """A buffer that the program does not have; ``like`` is the number of a buffer of the same class."""

    name: str
    birth: int
    death: int
    bytes: int
    like: int


def libraries_of(decisions: Decisions, hardware: Hardware) -> Libraries:
    """Return the year of the libraries that a plan's framework is assumed to use."""
    year = hardware.eager_libraries
    return year if decisions.layout.zero <= 1 else min(year, "2024")


def fused_loss(libraries: Libraries) -> bool:
    """Return whether libraries of this year write the loss's gradient over the logits."""
    return libraries >= "2025"


def records_streams(decisions: Decisions, libraries: Libraries) -> bool:
    """Return whether tensors of other streams are marked with ``record_stream``: as the plan says, or by the year."""
    if decisions.streams == "auto":
        return libraries < "2025" and decisions.sharding != "fsdp2"
    return decisions.streams == "recorded"


def eager_buffers(
    program: Program,
    columns: Columns,
    lives: Liveness,
    *,
    libraries: Libraries = "2024",
    workspace_bytes: int = 0,
    own_loss: bool = True,
    holds_outputs: bool = True,
) -> tuple[Liveness, BufferNames]:
    """Return the framework's buffers, and their names by number.

    ``lives`` are the program's buffers with their sizes; added buffers get the numbers after them. The libraries hold
    ``workspace_bytes`` for the whole step. ``own_loss``: whether the loss is that of the libraries, not the program's.
    ``holds_outputs``: whether a recomputed layer's output lives until the end of its backward.
    """
    birth, death, sizes = lives.birth.copy(), lives.death.copy(), lives.bytes.copy()
    held = _never_read(program, columns, lives) if holds_outputs else np.empty(0, dtype=np.int64)
    death[held] = columns.starts[np.searchsorted(columns.starts, birth[held], side="right")] - 1
    added: list[Added] = []
    for loss in _losses(program, columns) if own_loss else ():
        if fused_loss(libraries):
            death[loss.logits] = max(death[loss.logits], death[loss.gradient])
            sizes[loss.gradient] = 0
        elif loss.dtype == "fp32":
            # Softmax becomes the gradient in place.
            birth[loss.gradient] = min(birth[loss.gradient], loss.first)
        else:
            # Softmax becomes the gradient in place; it is cast to the logits' dtype when the loss is done.
            if loss.first <= birth[loss.gradient] <= loss.last:
                birth[loss.gradient] = loss.last + 1
            added += _wide(loss)
    added += _dense_embedding(program, columns)
    added += _gathered(program, lives)
    sizes[_of_families(program, lives, GATHERED)] = 0
    state = _a_state(program, lives)
    if fused_loss(libraries):
        added += [
            Added(f"wgrad.dummy[{m}x{n}]", -1, lives.instructions, size, state)
            for (m, n), size in sorted(_weight_gradients(program).items())
        ]
    if workspace_bytes:
        added.append(Added(WORKSPACES, -1, lives.instructions, workspace_bytes, state))
    names = BufferNames(program, [new.name for new in added])
    return with_added(replace(lives, birth=birth, death=death, bytes=sizes), added), names


def one_work_queue(layout: Layout) -> bool:
    """Return whether all streams of an eager framework share one work queue of the device.

    ``CUDA_DEVICE_MAX_CONNECTIONS`` is the number of work queues, and Megatron-LM and its forks refuse sequence
    parallelism unless it is 1 (arguments.py).
    """
    return layout.tp > 1 and layout.sequence_parallel


def run_ahead(program: Program, columns: Columns, lives: Liveness, *, one_queue: bool = False) -> RunAhead:
    """Return how far the host is ahead of the device, and which buffers wait for it (numbered as in the requests).

    Assumes that a kernel lasts longer than its launch, so the queue is always full. The host waits for the device at
    the loss and at p2p sends and receives between stages (Megatron-LM's p2p_communication synchronises after them).
    ``one_queue``: the kernels and copies of other streams, one an instruction, take places in the queue too.
    """
    kernels = np.where(columns.lane == Lane.COMPUTE, KERNELS, np.isin(columns.lane, STREAMS) if one_queue else 0)
    launching = np.flatnonzero(kernels).astype(np.int64)
    launched = np.cumsum(kernels)
    passed_by = np.searchsorted(launched[launching], launched - kernels - LAUNCH_QUEUE, side="right")
    done = np.where(passed_by > 0, launching[np.maximum(passed_by - 1, 0)], -1)
    waited = np.full(len(done) + 1, -1, dtype=np.int64)
    for each in (np.flatnonzero(np.isin(columns.lane, (Lane.SEND, Lane.RECV))), _looks_at_loss(program, columns)):
        waited[each + 1] = each
    gathers = _gathers(program, columns)
    passed, asked = gathers[: max(0, len(gathers) - GATHERS_AHEAD)], gathers[GATHERS_AHEAD:]
    waited[asked] = np.maximum(waited[asked], passed)
    done = np.maximum(done, np.maximum.accumulate(waited[:-1]))
    requested = device_buffers(lives)
    place = np.full(len(lives.birth), -1, dtype=np.int64)
    place[requested] = np.arange(len(requested))
    lane_of, marked, work = columns.lane[columns.operand_instruction], dict[int, Ints](), dict[int, Ints]()
    for lane in STREAMS:
        places = place[distinct(columns.operand_buffer[lane_of == lane])]
        if (places >= 0).any():
            marked[int(lane)] = np.sort(places[places >= 0])
            work[int(lane)] = np.flatnonzero(columns.lane == lane)
    return RunAhead(marked=marked, work=work, done=done)


def _never_read(program: Program, columns: Columns, lives: Liveness) -> Ints:
    """Return the buffers that are written and never read: the outputs of recomputed layers."""
    read = np.zeros(len(lives.birth), dtype=np.bool_)
    read[columns.operand_buffer[(columns.operand_mode & Mode.READ) > 0]] = True
    transient = np.array([f.buffer_class is BufferClass.TRANSIENT for f in program.all_families], dtype=np.bool_)
    return np.flatnonzero(~read & transient[lives.family] & (lives.birth >= 0) & (lives.death >= lives.birth))


def _numbered(program: Program, columns: Columns) -> Iterator[tuple[int, Instruction, dict[str, int]]]:
    """Yield the instructions of loss and embedding, each with its number and its buffer numbers by operand role."""
    chosen = [
        [(place, each) for place, each in enumerate(template.instructions) if each.op in (LOSS, STATISTICS, EMBEDDING)]
        for template in program.templates
    ]
    for base, instance in zip(starts_of(program, columns), program.instances, strict=True):
        for place, instruction in chosen[instance.template]:
            first = int(np.searchsorted(columns.operand_instruction, base + place))
            numbers = columns.operand_buffer[first : first + len(instruction.operands)].tolist()
            yield base + place, instruction, {o.role: n for o, n in zip(instruction.operands, numbers, strict=True)}


def _losses(program: Program, columns: Columns) -> Iterator[_Loss]:
    """Yield the calls of the loss in program order."""
    first: int | None = None
    for at, instruction, numbers in _numbered(program, columns):
        if instruction.op == STATISTICS:
            first = at
        elif instruction.op == LOSS:
            tokens = next(o.tokens for o in instruction.operands if o.role == "logits")
            family = program.all_families[columns.buffer_family[numbers["logits"]]]
            yield _Loss(
                first=at if first is None else first,
                last=at,
                logits=numbers["logits"],
                gradient=numbers["grad"],
                elements=tokens * family.features,
                dtype=family.dtype,
            )
            first = None


def _wide(loss: _Loss) -> list[Added]:
    """Return the fp32 logits and their softmax."""
    size = FP32_BYTES * loss.elements
    return [
        Added(f"logits.fp32[{loss.last}]", loss.first, loss.last, size, loss.logits),
        Added(f"softmax.fp32[{loss.last}]", loss.first, loss.last + 1, size, loss.logits),
    ]


def _dense_embedding(program: Program, columns: Columns) -> Iterator[Added]:
    """Yield the embedding's dense gradient of each micro-batch, in the dtype of the rows."""
    for at, instruction, numbers in _numbered(program, columns):
        if instruction.op == EMBEDDING:
            elements = next(o.tokens for o in instruction.operands if o.role == "grad_weight")
            dtype = program.all_families[columns.buffer_family[numbers["grad"]]].dtype
            yield Added(f"embed.dense[{at}]", at, at, elements * DTYPE_BYTES[dtype], numbers["grad"])


def _gathered(program: Program, lives: Liveness) -> list[Added]:
    """Return the buffer for the classifier's gathered input; it has the size of the largest one."""
    mine = _of_families(program, lives, GATHERED)
    if not len(mine):
        return []
    largest = int(mine[np.argmax(lives.bytes[mine])])
    return [Added("classifier.gathered", -1, lives.instructions, int(lives.bytes[largest]), largest)]


def _of_families(program: Program, lives: Liveness, names: frozenset[str]) -> Ints:
    """Return the program's buffers of the named families."""
    named = np.array([f.name in names for f in program.all_families], dtype=np.bool_)
    found: Ints = np.flatnonzero(named[lives.family])
    return found


def _weight_gradients(program: Program) -> dict[tuple[int, int], int]:
    """Return the bytes of a weight gradient in its product's dtype, by shape."""
    works = (i.work for t in program.templates for i in t.instructions)
    return {
        (w.m, w.n): w.m * w.n * DTYPE_BYTES[w.dtype] for w in works if isinstance(w, Gemm) and w.gemm_pass == "wgrad"
    }


def _a_state(program: Program, lives: Liveness) -> int:
    """Return the number of some state buffer on the device."""
    state = np.array([f.buffer_class is BufferClass.STATE for f in program.all_families], dtype=np.bool_)
    return int(np.flatnonzero(state[lives.family] & lives.on_device)[0])


def _gathers(program: Program, columns: Columns) -> Ints:
    """Return the instructions that gather parameters, in program order."""
    gathered = np.array([f.buffer_class is BufferClass.GATHERED for f in program.all_families], dtype=np.bool_)
    writes = gathered[columns.buffer_family[columns.operand_buffer]] & ((columns.operand_mode & Mode.WRITE) > 0)
    writers = columns.operand_instruction[writes & (columns.lane[columns.operand_instruction] != Lane.COMPUTE)]
    return distinct(writers)


def _looks_at_loss(program: Program, columns: Columns) -> Ints:
    """Return the last instruction of each micro-batch's loss, after which the host reads the loss."""
    last = np.array([_last_of_loss(template) for template in program.templates])[program.template_of]
    found: Ints = (columns.starts[:-1] + last)[last >= 0]
    return found


def _last_of_loss(template: Template) -> int:
    """Return the place of a template's last instruction of a loss; -1 where it has none."""
    return max((place for place, each in enumerate(template.instructions) if _belongs_to_loss(each)), default=-1)


def _belongs_to_loss(instruction: Instruction) -> bool:
    return instruction.op.partition(".")[0] == LOSS


def starts_of(program: Program, columns: Columns) -> list[int]:
    """Return the first instruction of every instance."""
    starts: list[int] = columns.starts[:-1].tolist()
    return starts


def with_added(lives: Liveness, added: list[Added]) -> Liveness:
    """Return ``lives`` and the added buffers."""
    if not added:
        return lives
    like = np.array([new.like for new in added], dtype=np.int64)

    def column(before: Ints, values: list[int]) -> Ints:
        return np.concatenate([before, np.array(values, dtype=np.int64)])

    return replace(
        lives,
        birth=column(lives.birth, [new.birth for new in added]),
        death=column(lives.death, [new.death for new in added]),
        bytes=column(lives.bytes, [new.bytes for new in added]),
        family=np.concatenate([lives.family, lives.family[like]]),
        on_device=np.concatenate([lives.on_device, lives.on_device[like]]),
        class_of=np.concatenate([lives.class_of, lives.class_of[like]]),
    )
