"""Records the requests of a step to torch's allocator on a CUDA device, from torch's memory history.

This has not run on a GPU yet. The tests read histories that they write themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import StepScalars
from memo_exec.memory.binding import Schedule
from memo_exec.observe.observed import LARGE_BYTES, Observed, RequestLog, Unexplained, compared
from memo_sim.contract.plan import Decisions
from memo_sim.program.arena.requests import buffer_names
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.program import Program
from memo_sim.program.layers.loss import ROLLOUT_NUMBERS


def observe_cuda(decisions: Decisions, program: Program) -> Observed:
    """Play two steps on the CUDA device and return the requests of the second one to torch's allocator.

    The history does not record who made a request. A request counts as the program's if it has the size of one of the
    program's requests, each of which is used once. The others are compared with the largest workspace that the program
    declares for a library.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    with Interpreter(decisions, program, device=device) as interpreter:
        tokens = torch.zeros(decisions.local_tokens, dtype=torch.int64)
        rollout = (torch.zeros(len(tokens), ROLLOUT_NUMBERS),) if decisions.objective == "grpo" else ()
        batch = [(tokens, tokens, *rollout)] * program.micro_batches
        interpreter.run_step(batch, StepScalars())  # libraries allocate the memory that they keep
        torch.cuda.memory._record_memory_history(context=None, clear_history=True)
        try:
            interpreter.run_step(batch, StepScalars())
            entries = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return read_history(entries, interpreter.schedule)


def read_history(entries: list[dict[str, Any]], plan: Schedule) -> Observed:
    """Return the requests in a device's trace of torch's memory history (its actions alloc and free_completed)."""
    lives, names, log = plan.lives, buffer_names(plan.program), RequestLog()
    for buffer in (lives.on_device & (lives.birth < 0)).nonzero()[0].tolist():
        log.open(names[buffer], int(lives.bytes[buffer]), plan.family(buffer).buffer_class.value)
    dynamic = (lives.on_device & (lives.birth >= 0) & (lives.death >= lives.birth)).nonzero()[0].tolist()
    expected = Counter(int(lives.bytes[b]) for b in dynamic if b not in plan.library)
    allowed = max((int(lives.bytes[b]) for b in plan.library), default=0)
    rows: dict[int, int] = {}
    hidden: set[int] = set()
    alive = 0
    unexplained = []
    for number, entry in enumerate(entries):
        if entry["action"] == "alloc":
            size = int(entry["size"])
            ours = expected[size] > 0
            expected[size] -= ours
            kind = BufferClass.TRANSIENT if ours else BufferClass.WORKSPACE
            row = rows[entry["addr"]] = log.open(f"request {number}", size, kind.value)
            if ours:
                continue
            hidden.add(row)
            alive += size
            if (excess := min(size, alive - allowed)) > LARGE_BYTES:
                unexplained.append(Unexplained(f"request {number}", "alloc", size, excess))
        elif entry["action"] == "free_completed" and entry["addr"] in rows:
            row = rows.pop(entry["addr"])
            log.close(row)
            alive -= log.sizes[row] * (row in hidden)
    return compared("torch's memory history", log, plan, unexplained)
