"""What an eager framework asks of PyTorch's allocator for the work of a program: Megatron-LM, say, on autograd.

The program's own requests are those of an executor that orders its lanes by events and works on the loss in blocks of
rows. A framework that leaves memory to autograd and ``torch.distributed`` differs in what is documented of it:

    loss        logits are copied to fp32 whole, and their softmax, fp32 too, is kept for backward (Megatron-LM,
                core/tensor_parallel/cross_entropy.py): bytes a logit, bf16: 2 + 4 + 4 forward, 4 + 2 backward
    checkpoint  a rebuilt layer's output lives as long as its backward (torch.utils.checkpoint and Megatron-LM's own
                hold it to call backward on it)
    streams     a collective's tensors are marked with ``record_stream`` (c10d before PyTorch 2.8): their memory comes
                back when the device, not the host, has passed the collective (pytorch/pytorch#76861, #147168). The host
                runs ahead until the launch queue is full, and waits for the loss (Megatron-LM looks for a NaN in it)

So with kernels of milliseconds each layer in flight holds its own gathered and scattered tensors, and memory runs full
with half of it alive:

    host    | l0 | l1 | l2 | l3 | ...           l0's collectives are not passed: l1, l2, l3 ask for fresh memory
    device  | l0              | l1 ...

Not modelled: other temporaries that Python frames hold, TransformerEngine's own stream for every second ring step, and
optimizer states that are made in the first step only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memo_sim.memory.replay import RunAhead
from memo_sim.program.columns import Columns, Ints
from memo_sim.program.instruction import BufferClass, Lane, Mode
from memo_sim.program.liveness import Liveness
from memo_sim.program.program import Program
from memo_sim.program.requests import buffer_names, device_buffers

LAUNCH_QUEUE = 1024
"""Kernels that a stream takes before a launch has to wait: about 1,000 (forums.developer.nvidia.com, topic 68937)."""

KERNELS = 2
"""Kernels that autograd launches for an instruction: of a GPT layer forward, rebuilt and backward 74 for 39, counted by
dispatching one (tests/exec_cpu/test_eager_kernels.py)."""

FP32_BYTES = 4

LOSS, STATISTICS = "cross_entropy", "cross_entropy.stats"
"""Kernels of the loss: what writes the gradient, and what comes before it where the vocabulary is divided."""


STREAMS = (Lane.D2H, Lane.H2D, Lane.COLLECTIVE, Lane.P2P)
"""Lanes that are streams beside the one that tensors are allocated on."""


@dataclass(frozen=True)
class _Loss:
    """One call of the loss: its first and last instruction, the numbers of its buffers, the logits it covers."""

    first: int
    last: int
    logits: int
    gradient: int
    elements: int
    dtype: str


def eager_buffers(program: Program, columns: Columns, lives: Liveness) -> tuple[Liveness, list[str]]:
    """Return the buffers as the framework has them, and their names by number.

    ``lives`` are the program's, with the sizes to count; the loss's fp32 tensors are numbered after them.
    """
    birth, death = lives.birth.copy(), lives.death.copy()
    held = _never_read(program, columns, lives)
    death[held] = np.searchsorted(columns.instance, columns.instance[birth[held]], side="right") - 1
    names = buffer_names(program)
    added: list[tuple[int, int, int, int]] = []
    for loss in _losses(program, columns):
        # Softmax becomes the gradient in place; it is cast to the logits' dtype when the loss is done.
        if loss.dtype == "fp32":
            birth[loss.gradient] = min(birth[loss.gradient], loss.first)
            continue
        birth[loss.gradient] += birth[loss.gradient] == loss.last
        size = FP32_BYTES * loss.elements
        added += [(loss.first, loss.last, size, loss.logits), (loss.first, loss.last + 1, size, loss.logits)]
        names += [f"logits.fp32[{loss.last}]", f"softmax.fp32[{loss.last}]"]
    return _with(replace(lives, birth=birth, death=death), added), names


def run_ahead(program: Program, columns: Columns, lives: Liveness) -> RunAhead:
    """Return how far the host is ahead of the device, and which buffers wait for it (numbers as in the requests).

    Kernels are taken to last longer than their launch: the queue is full from its first kernels on.
    """
    queued = LAUNCH_QUEUE // KERNELS
    kernels = np.flatnonzero(columns.lane == Lane.COMPUTE)
    launched = np.searchsorted(kernels, np.arange(len(columns.lane)))
    done = np.where(launched > queued, kernels[np.maximum(launched - queued - 1, 0)], -1)
    for last in _looks_at_loss(program, columns):
        done[last + 1 :] = np.maximum(done[last + 1 :], last)
    order = {number: place for place, number in enumerate(device_buffers(lives))}
    streams: dict[int, list[int]] = {}
    for lane in STREAMS:
        used = np.unique(columns.operand_buffer[columns.lane[columns.operand_instruction] == lane])
        for number in used.tolist():
            if number in order:
                streams.setdefault(order[number], []).append(int(lane))
    work = {int(lane): np.flatnonzero(columns.lane == lane).tolist() for lane in STREAMS}
    return RunAhead(streams=streams, work=work, done=done.tolist())


def _never_read(program: Program, columns: Columns, lives: Liveness) -> Ints:
    """Return the buffers that an instance writes and nothing reads: a rebuilt layer's output."""
    read = np.zeros(len(lives.birth), dtype=np.bool_)
    read[columns.operand_buffer[(columns.operand_mode & Mode.READ) > 0]] = True
    transient = np.array([f.buffer_class is BufferClass.TRANSIENT for f in program.all_families], dtype=np.bool_)
    return np.flatnonzero(~read & transient[lives.family] & (lives.birth >= 0) & (lives.death >= lives.birth))


def _losses(program: Program, columns: Columns) -> Iterator[_Loss]:
    """Yield the calls of the loss in program order."""
    for base, instance in zip(_starts(program, columns), program.instances, strict=True):
        template, first = program.templates[instance.template], None
        for at, instruction in enumerate(template.instructions, start=base):
            if instruction.op == STATISTICS:
                first = at
            elif instruction.op == LOSS:
                operands = int(np.searchsorted(columns.operand_instruction, at))
                numbers = {
                    o.role: int(columns.operand_buffer[operands + i]) for i, o in enumerate(instruction.operands)
                }
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


def _looks_at_loss(program: Program, columns: Columns) -> Iterator[int]:
    """Yield the last instruction of each micro-batch's loss, after which the host looks at it."""
    last = {int(columns.instance[loss.last]): loss.last for loss in _losses(program, columns)}
    yield from last.values()


def _starts(program: Program, columns: Columns) -> list[int]:
    """Return the first instruction of every instance."""
    starts: list[int] = np.searchsorted(columns.instance, np.arange(len(program.instances))).tolist()
    return starts


def _with(lives: Liveness, added: list[tuple[int, int, int, int]]) -> Liveness:
    """Return ``lives`` and further buffers: birth, death, bytes, and the number of one of the same family."""
    if not added:
        return lives
    birth, death, size, like = np.array(added, dtype=np.int64).T
    return replace(
        lives,
        birth=np.concatenate([lives.birth, birth]),
        death=np.concatenate([lives.death, death]),
        bytes=np.concatenate([lives.bytes, size]),
        family=np.concatenate([lives.family, lives.family[like]]),
        on_device=np.concatenate([lives.on_device, lives.on_device[like]]),
        class_of=np.concatenate([lives.class_of, lives.class_of[like]]),
    )
