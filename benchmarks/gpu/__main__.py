"""``python -m benchmarks.gpu``: runs the selected parts in order, within the time budget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

from benchmarks.gpu import checks, longest, side_by_side, suite
from benchmarks.gpu.calls import CALLS, play_call
from benchmarks.gpu.case import Case, Part
from benchmarks.gpu.launcher import Budget, Launcher
from benchmarks.gpu.plans import Plans, cluster_for
from benchmarks.gpu.report import write_report
from benchmarks.gpu.results import VARIABLE, Results, results_folder
from benchmarks.gpu.scale import FULL, QUICK, QUICK_CUDA, Scale
from benchmarks.gpu.session import Session
from benchmarks.gpu.verdict import compared, failed
from memo_exec.machine.machine import host_available_bytes
from memo_sim.contract.errors import CannotRun, MemoError
from memo_sim.contract.units import parse_tokens

PARTS: tuple[Part, ...] = ("checks", "calibrate", "suite", "rivals", "longest")
SHARES: dict[Part, float] = {"checks": 0.15, "calibrate": 0.6, "suite": 0.5, "rivals": 0.8, "longest": 1.0}
"""Share of the remaining time that each part may use."""
LEAST_S: dict[str, dict[Part, float]] = {
    "cuda": {"checks": 60.0, "calibrate": 180.0, "suite": 60.0, "rivals": 90.0, "longest": 30.0},
    "cpu": {"checks": 15.0, "calibrate": 10.0, "suite": 10.0, "rivals": 15.0, "longest": 5.0},
}
"""By device, the seconds in which a part can compare something; a part gets at least these while time is left."""
BUDGET_S = 540.0
WITH_PLANS = ("suite", "rivals", "longest")


def main() -> int:
    """Parse the options, run, and return the exit status of the process."""
    options = _options()
    try:
        return _run(options)
    except MemoError as error:
        _tell(f"benchmarks.gpu: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _tell("interrupted; all rows measured so far are saved")
        return 130


TEXT = (
    "Run and measure memo on this machine's GPU: tests on the GPU (checks), a profile (calibrate), training steps"
    " beside their predictions (suite), the same steps in other frameworks (rivals), and the longest sequence that"
    " trains (longest). Without --only all parts run in this order, until the time limit."
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=TEXT)
    parser.add_argument(
        "--budget-s",
        type=float,
        default=BUDGET_S,
        help="time limit of the whole run, in seconds (default: %(default)s)",
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="run only this part (repeat for several)")
    parser.add_argument("--profile", help="profile file or cluster name to use instead of the profile calibrated here")
    parser.add_argument("--lengths", help="sequence lengths of suite and rivals, in this order, such as 128k,64k")
    parser.add_argument("--quick", action="store_true", help="use tiny shapes that run on any machine")
    parser.add_argument("--without-tests", action="store_true", help="leave the GPU tests out of the checks")
    parser.add_argument(
        "--call",
        type=int,
        choices=sorted(CALLS),
        help="run all stages of one call of ten minutes on a GPU machine and pack the results (reports/gpu.md); "
        "with --quick tiny shapes on any machine",
    )
    parser.epilog = (
        f"Results go to the folder in the environment variable {VARIABLE}. "
        "Exit codes: 0 success, 1 a check failed or a part compared nothing, 6 no GPU."
    )
    return parser.parse_args()


def _run(options: argparse.Namespace) -> int:
    if options.call is not None:
        return play_call(options.call, results_folder(), _tell, quick=options.quick)
    lengths = tuple(parse_tokens(text) for text in options.lengths.split(",")) if options.lengths else None
    parts = [part for part in PARTS if not options.only or part in options.only]
    results = Results(results_folder())
    budget = Budget(options.budget_s)
    launcher = Launcher(results.folder / "tries", budget)
    here = launcher.one(Case(rival="machine", kind="machine", part="checks"))
    if here.status != "ok":
        raise CannotRun("the process that describes this machine failed", got=here.message)
    if here.message != "cuda" and not options.quick:
        raise CannotRun(
            "a GPU is needed",
            got=here.device,
            wanted="a CUDA device",
            hint="use --quick to test the script on tiny shapes without a GPU",
        )
    launcher.device, launcher.versions = here.device, here.versions
    session = Session(
        results,
        launcher,
        budget,
        _scale(here.message, lengths, quick=options.quick),
        device=here.message,
        kernels=here.backend.split(","),
        tell=_tell,
        tests=not options.without_tests,
    )
    results.forget(parts, lengths)
    try:
        for part in parts:
            _part(session, part, options.profile, last=part == parts[-1])
    finally:
        write_report(results, " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]), _tell, quick=options.quick)
    empty = [part for part in parts if not compared(results.of(part))]
    for part in empty:
        _tell(f"{part}: nothing was compared")
    return int(bool(empty) or any(failed(row) for row in results.rows))


def _scale(device: str, lengths: tuple[int, ...] | None, *, quick: bool) -> Scale:
    scale = (QUICK_CUDA if device == "cuda" else QUICK) if quick else FULL
    return replace(scale, suite_lengths=lengths, rival_lengths=lengths) if lengths else scale


def _part(session: Session, part: Part, profile: str | None, *, last: bool) -> None:
    """Run one part with its share of the remaining time."""
    whole = session.budget
    seconds = max(SHARES[part] * whole.left_s, LEAST_S[session.device][part])
    share = Budget(whole.left_s if last else min(whole.left_s, seconds))
    session.budget = session.launcher.budget = share
    _tell(f"-- {part}, at most {share.left_s:.0f} s")
    if part in WITH_PLANS and session.plans is None:
        try:
            cluster = profile or cluster_for(session.launcher.device, session.results.profile)
            free_bytes = host_available_bytes() - session.launcher.lower_bound_bytes
            session.plans = Plans(session.results.plans, cluster, session.kernels, free_bytes)
        except CannotRun as error:
            session.without_plans = str(error)
            _tell(f"cannot make plans for memo's systems: {error}")
    RUNNERS[part](session)
    session.budget = session.launcher.budget = whole


def _calibrate(session: Session) -> None:
    case = Case(
        rival="calibration",
        kind="calibrate",
        part="calibrate",
        output=str(session.results.profile),
        quick=session.scale.quick,
    )
    session.measure([case])


RUNNERS: dict[Part, Callable[[Session], None]] = {
    "checks": checks.run,
    "calibrate": _calibrate,
    "suite": suite.run,
    "rivals": side_by_side.run,
    "longest": longest.run,
}


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
