"""The measuring process: it reads cases, runs each one, and appends its row as one line of JSON.

    python -m benchmarks.gpu.child cases.json rows.jsonl

After a case that fails or runs out of memory, the state of the process is undefined. So it exits with the status
``SPOILED``, and its parent starts another process for the remaining cases.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.gpu import huggingface
from benchmarks.gpu.case import FUSED, Case
from benchmarks.gpu.rivals import RIVALS
from benchmarks.gpu.row import Row, row_of
from memo_sim.contract.errors import CannotRun, MemoError

SPOILED = 75


def main(cases_path: str, rows_path: str) -> int:
    """Run the cases of one file; return the exit status of the process."""
    _die_first()
    for case in msgspec.json.decode(Path(cases_path).read_bytes(), type=list[Case]):
        row = play(case)
        with Path(rows_path).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        if row.status in ("oom", "error"):
            return SPOILED
    return 0


def play(case: Case) -> Row:
    """Run one case and return its row; errors become rows too."""
    import torch

    from memo_exec.machine.machine import this_machine, versions

    # Free the memory of the previous case first, because this case reads how much memory is free.
    gc.collect()
    torch.cuda.empty_cache()
    try:
        row = _measure(case)
    except torch.OutOfMemoryError as error:
        row = row_of(case, "oom", _first_line(error))
    except CannotRun as error:
        row = row_of(case, "oom" if "memory" in error.what else "error", str(error))
    except MemoError as error:
        row = row_of(case, "error", str(error))
    except Exception as error:  # any error of a rival becomes its row, so that the others still run
        text = f"{type(error).__name__}: {_first_line(error)}"
        row = row_of(case, "oom" if _is_memory(error) else "error", text)
    return msgspec.structs.replace(
        row,
        device=this_machine().name,
        versions=versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _measure(case: Case) -> Row:
    if case.kind == "machine":
        return _machine(case)
    if case.kind == "calibrate":
        return _calibrate(case)
    if case.kind == "memo":
        from benchmarks.gpu import memo_run

        return memo_run.measure(case)
    assert case.model is not None
    absent = huggingface.why_not(case.model) if case.kind == "hugging face" else RIVALS[case.rival].why_not()
    if absent:
        return row_of(case, "not installed", absent)
    from benchmarks.gpu import plain_run

    return plain_run.measure(case)


def _machine(case: Case) -> Row:
    """Return a row that describes this machine.

    The parent must not touch the device itself, because its context would take memory from every measurement.
    """
    from memo_exec.machine.attention_kernels import attention_kernels
    from memo_exec.machine.machine import this_machine
    from memo_exec.machine.rowwise_kernels import tried_rowwise_kernels

    machine = this_machine()
    found = attention_kernels(machine) | {FUSED: tried_rowwise_kernels(machine)[FUSED]}
    kernels = [name for name, why_not in found.items() if not why_not]
    return msgspec.structs.replace(row_of(case, "ok", machine.device), backend=",".join(kernels))


def _calibrate(case: Case) -> Row:
    """Calibrate this machine and write the profile to ``case.output``; a quick case measures only a few shapes."""
    from memo_exec.commands.calibrate import calibrate
    from memo_exec.machine.machine import this_machine
    from memo_exec.probes import grid as grids
    from memo_sim.contract import codec

    few = replace(
        grids.CPU if this_machine().device == "cpu" else grids.CUDA,
        widths=(64,),
        lengths=(256,),
        head_dims=(32,),
        heads=(2,),
        attention_lengths=(128, 512),
        copy_bytes=(2**14, 2**18),
        beside_s=0.05,
    )
    profile = calibrate(command="python -m benchmarks.gpu", grid=few if case.quick else None)
    assert profile is not None  # with a single rank, calibrate always returns a profile
    codec.write(Path(case.output), profile)
    return row_of(case, "ok", f"{profile.provenance['seconds']} s, {case.output}")


def _is_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out; pinned memory and library handles raise RuntimeErrors."""
    text = str(error).lower()
    return "out of memory" in text or "alloc_failed" in text or isinstance(error, MemoryError)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:400]


def _die_first() -> None:
    """Make the kernel kill this process before its parent if the host runs out of memory."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:  # this system has no such file, so only the parent watches the memory
        return


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
