"""Checks correctness on this device: the GPU tests, and every memo policy against plain autograd on small models."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.gpu.agreement import reference_of, with_agreement
from benchmarks.gpu.case import FUSED, SEQUENCES, Case, named
from benchmarks.gpu.launcher import ROOT
from benchmarks.gpu.plans import model_of
from benchmarks.gpu.row import Row, Status
from benchmarks.gpu.session import Session
from memo_sim.contract import codec
from memo_sim.contract.knobs import DtypeName, Recompute
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Plan
from memo_sim.program.lower import lower, program_sha256

PRESETS = ("llama-tiny", "gpt-tiny")
LAYERS = 4
REFERENCE = "autograd keep-all"
STEPS = 3
PYTEST_SHARE = 0.4
"""Share of the remaining time that pytest may use."""
LEAST_TESTS_S = 0.1
"""Seconds below which pytest does not start."""
NO_TESTS = 5
"""pytest's exit status if it ran no tests."""


def run(session: Session) -> None:
    """Run both checks and record their results; the time for the comparison with autograd comes first."""
    cases = [case for preset in PRESETS for case in _policies(session, model_of(preset, LAYERS))]
    if session.tests:
        _tests(session, spare_s=session.scale.seconds(cases))
    rows = session.measure(cases)
    for preset in PRESETS:
        model = model_of(preset, LAYERS).name
        _compare(session, [row for row in rows if row.model == model], cases[0].dtype)


def _tests(session: Session, spare_s: float = 0.0) -> None:
    """Run the GPU tests, if there is a GPU and pytest is installed; record the reason if they do not run.

    It leaves out slow tests; one of these is calibration, which is a separate part here. If the time limit ends the
    run, tests that have already failed count as failures. ``spare_s`` seconds of the budget stay unused.
    """
    case = Case(rival="pytest -m gpu", kind="machine", part="checks")
    if session.device != "cuda":
        session.note(case, "not run", "there is no CUDA device, so every test in tests/gpu would be skipped")
        return
    if importlib.util.find_spec("pytest") is None:
        session.note(case, "not installed", "pytest is not installed; the comparison with autograd below still runs")
        return
    # Warnings of this machine's libraries must not fail the tests; they are in the log.
    command = [sys.executable, "-u", "-m", "pytest", "-v", "-m", "gpu and not slow", "-W", "default"]
    command += ["-p", "no:cacheprovider", *pytest_settings(), "tests/gpu"]
    limit_s = min(PYTEST_SHARE * session.budget.left_s, session.budget.left_s - spare_s)
    if limit_s < LEAST_TESTS_S:
        session.note(case, "not run", "not run because the time budget is too small")
        return
    log = session.results.folder / "pytest.log"
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            status, counted = _cut_off(log.read_text())
            session.note(case, status, f"cut off after {limit_s:.0f} s: {counted}")
            return
    last = (log.read_text().strip().splitlines() or [""])[-1]
    session.note(case, _status(done.returncode, last), last)


def _cut_off(text: str) -> tuple[Status, str]:
    """Return status and counts of an incomplete test run, from the output lines of the tests that ended."""
    ended = {word: len(re.findall(rf" {word}(?: |$)", text, re.MULTILINE)) for word in ("PASSED", "FAILED", "ERROR")}
    counted = ", ".join(f"{count} {word.lower()}" for word, count in ended.items())
    return ("error" if ended["FAILED"] or ended["ERROR"] else "not run"), counted


def pytest_settings() -> list[str]:
    """Return pytest options that replace the project's settings if pytest-timeout, which these need, is missing."""
    if importlib.util.find_spec("pytest_timeout") is not None:
        return []
    return ["-c", os.devnull, "--rootdir", str(ROOT), "-o", f"pythonpath={ROOT}", "--import-mode=importlib"]


def _status(returned: int, summary: str) -> Status:
    if returned in (0, NO_TESTS):
        return "ok" if " passed" in summary else "not run"
    return "error"


def _policies(session: Session, model: Model) -> list[Case]:
    """Return the cases: plain autograd, and every policy with every attention kernel.

    If fused row-wise kernels work here, every policy also runs with them and the first attention kernel.
    """
    tokens = session.scale.check_tokens
    fields = {"part": "checks", "steps": STEPS, "warm_ups": 0}
    cases = [session.case(model, tokens, rival=REFERENCE, kind="plain", **fields)]
    attention = [name for name in session.kernels if name != FUSED]
    chosen = [Kernels(attention=name) for name in attention]
    if FUSED in session.kernels:
        chosen.append(Kernels(attention=attention[0], rowwise=FUSED))
    for kernels in chosen:
        for policy, (recompute, swapped) in _chosen(tokens).items():
            plan = _plan(session, model, kernels, recompute, swapped)
            name = f"memo, {policy}, {named(kernels)}"
            cases.append(session.case(model, tokens, rival=name, kind="memo", policy=policy, plan=str(plan), **fields))
    return cases


def _compare(session: Session, rows: list[Row], dtype: DtypeName) -> None:
    """Compare every row with plain autograd; a row that disagrees becomes an error."""
    reference = reference_of(rows, (REFERENCE,))
    for row in rows:
        compared = with_agreement(row, reference, dtype)
        if compared.agrees is False:
            compared = msgspec.structs.replace(compared, status="error")
            session.tell(f"{row.rival}: {compared.message}")
        session.results.replace(row, compared)


def _chosen(tokens: int) -> dict[str, tuple[Recompute, int]]:
    return {
        "keep": ("none", 0),
        "token-wise": ("tokenwise", tokens // 2),
        "full recompute": ("full", 0),
        "full swap": ("none", tokens),
    }


def _plan(session: Session, model: Model, kernels: Kernels, recompute: Recompute, swapped: int) -> Path:
    """Write a plan without a prediction; it uses the caching allocator, so it needs no profile and no placement."""
    decisions = Decisions(
        model=model,
        seq_tokens=session.scale.check_tokens,
        micro_batch=SEQUENCES,
        global_batch=SEQUENCES,
        recompute=recompute,
        swapped_tokens=swapped,
        memory_policy="caching",
        kernels=kernels,
        dtype="bf16" if session.device == "cuda" else "fp32",
    )
    path = (
        session.results.plans / f"check-{model.name}-{kernels.attention}-{kernels.rowwise}-{recompute}-{swapped}.json"
    )
    codec.write(path, Plan(decisions=decisions, program_sha256=program_sha256(lower(decisions))))
    return path
