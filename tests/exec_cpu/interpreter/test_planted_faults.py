"""The table of planted faults: the detectors that a cell names find the fault in every lowering with a place for it.

The cells (``tests/planted_faults.py``) were written before the detectors were run. The fast comparison of gradients is
that of ``memo-exec verify``, which some cells ask too.
"""

from functools import cache
from typing import Any

import pytest
import torch

from memo_exec.verification.verify import verify
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_stages
from memo_sim.program.verify.values import check_values
from tests.exec_cpu.small import batch, decide, gpt, gradients, play, scalars
from tests.planted_faults import (
    KERNEL_FAULTS,
    KERNEL_TABLE,
    ONE_PROCESS,
    PROGRAM_FAULTS,
    PROGRAM_TABLE,
    RANKS_TABLE,
    SEVERAL_RANKS,
)

TOKENWISE: dict[str, Any] = {"recompute": "tokenwise", "swapped_tokens": 128}
LOWERINGS: dict[str, dict[str, Any]] = {
    "keep": {},
    "full": {"recompute": "full"},
    "inputs": {"recompute": "full", "swapped_tokens": 256},
    "tokenwise": TOKENWISE,
    "swap": {"swapped_tokens": 256},
    "selective": {"recompute": "selective"},
    "subseq": {
        "layout": Layout(subsequences=2),
        "seq_tokens": 384,
        "recompute": "tokenwise",
        "swapped_tokens": 256,
        "subsequence_swapped_tokens": (128, 128),
    },
    "chunked": {"recompute": "full", "seq_tokens": 320, "attention_chunk_tokens": 128},
    "tp": {
        "layout": Layout(tp=2, sequence_parallel=True),
        "seq_tokens": 512,
        "recompute": "tokenwise",
        "swapped_tokens": 256,
    },
    "ulysses": {"layout": Layout(ulysses=2), "seq_tokens": 512, **TOKENWISE},
    "ring": {"layout": Layout(cp=2), "seq_tokens": 512, **TOKENWISE},
    "pp": {"layout": Layout(pp=2), **TOKENWISE},
    "zero3": {"layout": Layout(dp=2, zero=3), "global_batch": 4, **TOKENWISE},
    "metp": {"layout": Layout(metp=2), "seq_tokens": 512, "keep_norms": True, **TOKENWISE},
}
"""Four layers and two micro-batches; the names are the columns of the table."""

REPRESENTATIVE = frozenset(
    (fault, "tokenwise")
    for fault in (
        "a prefetch is left out",
        "an offload is one row late",
        "a prefetch comes from another layer's host rows",
        "rounding buffers are reused one layer early throughout",
        "the rebuild of a layer is left out",
        "a weight gradient is added twice",
        "attention's backward reads another layer's log-sum-exp",
        "the kernels of rebuilt products do nothing",
        "norms write their rows one row late",
    )
)
"""The cells that the default run looks at; the others are slow."""


@cache
def lowered(column: str) -> tuple[Decisions, tuple[Program, ...]]:
    fields: dict[str, Any] = {"seq_tokens": 256, "micro_batch": 1, "global_batch": 2}
    decisions = decide(gpt(layers=4, max_positions=1024), **(fields | LOWERINGS[column]))
    return decisions, tuple(lower(decisions))


def cells(table: str, columns: tuple[str, ...]) -> dict[tuple[str, str], str]:
    """Return the cell of every fault and column."""
    found = {}
    for row in table.strip("\n").splitlines()[1:]:
        fault, *row_cells = row.rsplit(maxsplit=len(columns))
        found |= {(fault, column): cell for column, cell in zip(columns, row_cells, strict=True)}
    return found


PROGRAM_CELLS = cells(PROGRAM_TABLE, ONE_PROCESS) | cells(RANKS_TABLE, SEVERAL_RANKS)
KERNEL_CELLS = cells(KERNEL_TABLE, ONE_PROCESS)


def cases(table: dict[tuple[str, str], str], *, ranks: bool = False) -> list[Any]:
    """Return (fault, column) of the cells where the lowering has a place for the fault."""
    chosen = [key for key, cell in table.items() if cell != "-" and (ranks or key[1] in ONE_PROCESS)]
    slow = pytest.mark.slow
    return [pytest.param(*key, id=" | ".join(key), marks=() if key in REPRESENTATIVE else slow) for key in chosen]


def planted(fault: str, column: str) -> Program:
    """Return the column's program with the fault in its first stage."""
    program = PROGRAM_FAULTS[fault](lowered(column)[1][0])
    assert program is not None
    return program


@pytest.mark.slow
@pytest.mark.parametrize("table", [PROGRAM_CELLS, KERNEL_CELLS], ids=["programs", "kernels"])
def test_the_table_has_every_place_of_a_fault(table: dict[tuple[str, str], str]) -> None:
    places = {}
    for fault, column in table:
        program = lowered(column)[1][0]
        if table is PROGRAM_CELLS:
            places[fault, column] = PROGRAM_FAULTS[fault](program) is not None
        else:
            places[fault, column] = KERNEL_FAULTS[fault].applies(program)
    assert {key: cell != "-" for key, cell in table.items()} == places
    assert {fault for fault, _ in table} == set(PROGRAM_FAULTS if table is PROGRAM_CELLS else KERNEL_FAULTS)


@pytest.mark.parametrize(
    "column",
    [pytest.param(c, marks=() if c == "tokenwise" else pytest.mark.slow) for c in (*ONE_PROCESS, *SEVERAL_RANKS)],
)
def test_the_checker_finds_nothing_without_a_fault(column: str) -> None:
    decisions, programs = lowered(column)
    assert [fault for program in programs for fault in check(program, decisions)] == []


def check(program: Program, decisions: Decisions) -> list[str]:
    """Return what the checkers of one program find."""
    columns = expand(program)
    faults = [*check_program(program, columns), *check_edges(columns, derive_edges(columns))]
    return faults + check_values(program, columns, decisions)


@pytest.mark.parametrize(("fault", "column"), cases(PROGRAM_CELLS, ranks=True))
def test_the_checker(fault: str, column: str) -> None:
    decisions, programs = lowered(column)
    program = planted(fault, column)
    faults = check(program, decisions) or check_stages((program, *programs[1:]))
    assert bool(faults) == ("c" in PROGRAM_CELLS[fault, column])


def found_by_debug(decisions: Decisions, program: Program, **options: Any) -> bool:
    """Return whether a debug run ends with an error."""
    try:
        results(decisions, program, debug=True, **options)
    except Exception:  # whichever it is, the fault is not silent
        return True
    return False


def results(decisions: Decisions, program: Program, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients of the second of two steps with the same batches."""
    with play(decisions, program=program, **options) as interpreter:
        batches = batch(decisions)
        for _ in range(2):
            record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        return record.loss, gradients(interpreter)


@cache
def wanted(column: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the results of keeping everything."""
    decisions = lowered(column)[0]
    kept = decide(
        decisions.model, **{name: getattr(decisions, name) for name in ("seq_tokens", "micro_batch", "global_batch")}
    )
    return results(kept, lower(kept)[0])


def found_by_comparison(column: str, program: Program, **options: Any) -> bool:
    """Return whether gradients or loss differ from those of keeping everything, or the run ends with an error."""
    loss, kept = wanted(column)
    try:
        other_loss, found = results(lowered(column)[0], program, **options)
    except Exception:  # the fault is not silent
        return True
    equal = abs(other_loss / loss - 1) <= 1e-5
    for name, gradient in kept.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        equal = equal and bool(error <= 1e-4)
    return not equal


@pytest.mark.parametrize(("fault", "column"), cases(PROGRAM_CELLS))
def test_debug_mode(fault: str, column: str) -> None:
    found = found_by_debug(lowered(column)[0], planted(fault, column))
    assert found == ("d" in PROGRAM_CELLS[fault, column])


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "column"), cases(PROGRAM_CELLS))
def test_the_comparison_of_gradients(fault: str, column: str) -> None:
    found = found_by_comparison(column, planted(fault, column))
    assert found == ("v" in PROGRAM_CELLS[fault, column])


@pytest.mark.parametrize(("fault", "column"), cases(KERNEL_CELLS))
def test_kernels_in_debug_mode(fault: str, column: str) -> None:
    decisions, programs = lowered(column)
    found = found_by_debug(decisions, programs[0], kernels=KERNEL_FAULTS[fault].kernels())
    assert found == ("d" in KERNEL_CELLS[fault, column])


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "column"), cases(KERNEL_CELLS))
def test_the_comparison_of_kernels(fault: str, column: str) -> None:
    found = found_by_comparison(column, lowered(column)[1][0], kernels=KERNEL_FAULTS[fault].kernels())
    assert found == ("v" in KERNEL_CELLS[fault, column])


@pytest.mark.slow
def test_a_sound_program_is_found_by_nobody() -> None:
    decisions, programs = lowered("tokenwise")
    assert not found_by_debug(decisions, programs[0])
    assert not found_by_comparison("tokenwise", programs[0])


VERIFIED = [key for key, cell in KERNEL_CELLS.items() if key[1] == "tokenwise" or cell == "v"]
"""Cells in which ``memo-exec verify`` itself is asked: one lowering, and faults that nothing else finds."""


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "column"), VERIFIED, ids=[" | ".join(key) for key in VERIFIED])
def test_verify(fault: str, column: str) -> None:
    """The comparison of this table is that of ``memo-exec verify``, which also compares with autograd."""
    verdict = verify(lowered(column)[0], steps=2, layers=4, kernels=KERNEL_FAULTS[fault].kernels())
    assert not verdict.verified


def test_silent_faults_are_found_without_the_comparison() -> None:
    """A program fault that changes gradients is found before the step, or at the instruction that it misleads."""
    for key, cell in PROGRAM_CELLS.items():
        assert cell in ("-", "=") or "c" in cell or "d" in cell, key
