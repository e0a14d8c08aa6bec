"""Text tables, compared with the text that a reader sees."""

from textwrap import dedent
from types import SimpleNamespace

import msgspec
import pytest

from memo_sim.contract.comparison import Comparison, Ratio, StepFigures
from memo_sim.contract.plan import Layout, MovedBytes, PlanRow, Stall, StepInterval
from memo_sim.contract.result import Result
from memo_sim.contract.units import GIB
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.views.accuracy import summarise
from memo_sim.views.comparison_table import comparison_table
from memo_sim.views.fit_table import fit_table
from memo_sim.views.plan_table import interval_ends, layout_label, peak_table, plans_table, stall_table, step_line
from memo_sim.views.text_table import text_table
from memo_sim.views.validation_table import validation_table


def plan(**changed) -> PlanRow:
    row = {
        "status": "ok",
        "system": "memo",
        "mfu": 0.5231,
        "tgs": 1567.25,
        "step_s": 83.6,
        "alpha": 0.125,
        "layout": Layout(tp=4, cp=2, sequence_parallel=True),
        "recompute": "tokenwise",
        "memory_policy": "planned",
        "states": "fp32",
        "micro_batch": 1,
        "peak_device_bytes": 71 * GIB,
        "peak_host_bytes_per_node": 1200 * GIB,
        "stalls": [
            Stall(lane="h2d", waits_for="linear.wgrad", seconds=60.0, count=28),
            Stall(lane="compute", waits_for="d2h", seconds=0.25, count=3),
            Stall(lane="compute", waits_for="all_gather", seconds=1.5, count=128),
        ],
    }
    return PlanRow(**(row | changed))


def infeasible(**changed) -> PlanRow:
    row = {
        "status": "gpu_oom",
        "system": "full-swap",
        "mfu": None,
        "tgs": None,
        "step_s": None,
        "alpha": 1.0,
        "recompute": "none",
        "stalls": [],
        "shortfall_bytes": 5 * GIB,
        "reason": "85.00 GiB at m0/s0/head/fwd/norm",
    }
    return plan(**(row | changed))


def result(*plans: PlanRow) -> Result:
    best = next((p for p in plans if p.status == "ok"), None)
    return Result(
        model="gpt-7b", cluster="a800-1x8", seq_tokens=1 << 20, best=best, plans=list(plans), evaluated=12, pruned=3
    )


def test_plans_without_planned_memory_show_reserved_memory_and_retries() -> None:
    cached = plan(memory_policy="eager", reserved_bytes=77 * GIB, allocation_retries=95)
    lines = plans_table(result(cached, plan())).splitlines()
    assert "device GiB  memory   reserved GiB  retries  host GiB/node" in lines[1]
    assert lines[2].split()[-8:-3] == ["71.0", "eager", "77.0", "95", "1200.0"]
    assert lines[3].split()[-8:-3] == ["71.0", "planned", "-", "-", "1200.0"]
    assert "reserved" not in plans_table(result(plan()))
    limited = plan(memory_policy="eager", reserved_bytes=42 * GIB, allocation_retries=31, allocator_limit_gib=44)
    assert "  eager in 44 GiB          42.0       31  " in plans_table(result(limited))


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        (Layout(), "tp1 cp1 dp1"),
        (Layout(tp=4, cp=2, sequence_parallel=True), "tp4+sp cp2 dp1"),
        (Layout(tp=8, ulysses=2, pp=4, dp=2, zero=1, subsequences=16), "tp8 cp1 ulysses2 pp4 dp2 zero1 n16"),
        (Layout(cp=2, cp_exchange="all_gather", metp=1), "tp1 cp2+ag dp1"),
        (Layout(cp_exchange="all_gather"), "tp1 cp1 dp1"),
        (Layout(cp_exchange="rsa", metp=4), "tp1 cp1+rsa metp4 dp1"),
        (Layout(pp=2, subsequences=4, partition="length", multiplexed=True), "tp1 cp1 pp2 dp1 n4+length+mx"),
        (Layout(pp=2, partition="length", multiplexed=True), "tp1 cp1 pp2 dp1"),
    ],
)
def test_layout_labels(layout, label) -> None:
    assert layout_label(layout) == label


def test_ranked_plans() -> None:
    slower = plan(step_s=90.0, mfu=0.48, tgs=1456.0, outside_calibration=["gemm", "attention"])

    assert plans_table(result(plan(), slower, infeasible())) == dedent(
        """\
        12 plans evaluated, 3 pruned:
            policy  layout          alpha  recompute    step  MFU %     TGS  device GiB  host GiB/node  compute waits for
        1   memo    tp4+sp cp2 dp1  0.125  tokenwise  83.6 s  52.31  1567.2        71.0         1200.0  all_gather 1.5 s
        2*  memo    tp4+sp cp2 dp1  0.125  tokenwise    90 s  48.00  1456.0        71.0         1200.0  all_gather 1.5 s
        device GiB: buffers of the plan on its fullest stage, without the reserve; host GiB: all ranks of a node.
        * curves of the profile read beyond the sizes that were measured: attention, gemm

        does not fit:
        policy     layout          alpha  recompute  short of             by  reason
        full-swap  tp4+sp cp2 dp1  1.000  none       device memory  5.00 GiB  85.00 GiB at m0/s0/head/fwd/norm"""  # noqa: E501
    )


INTERVAL = StepInterval(
    low_s=81.0, high_s=91.5, level=0.8, rows=30, sources=2, generation="Ampere", framework="megatron"
)


def test_plans_show_the_interval_of_their_step() -> None:
    lines = plans_table(result(plan(interval=INTERVAL), plan())).splitlines()
    assert "  step  80 % interval  MFU %" in lines[1]
    assert "83.6 s   81 to 91.5 s  52.31" in lines[2]
    assert "83.6 s              -  52.31" in lines[3]
    assert "interval" not in plans_table(result(plan()))


def test_a_step_is_told_with_its_interval_and_where_that_comes_from() -> None:
    assert step_line(83.6, INTERVAL) == (
        "Step 83.6 s (80 % interval 81 to 91.5 s, from the errors of 30 published rows of Ampere, megatron class)."
    )
    beyond = msgspec.structs.replace(INTERVAL, allocation_retries=True, beyond=["64 devices (the largest row has 8)"])
    assert step_line(83.6, beyond) == (
        "Step 83.6 s (80 % interval 81 to 91.5 s, from the errors of 30 published rows of Ampere, megatron class with"
        " allocation retries); wider than"
        " where rows were measured: 64 devices (the largest row has 8)."
    )
    assert interval_ends(msgspec.structs.replace(INTERVAL, low_s=0.99, high_s=1.1)) == "990 ms to 1.1 s"


def test_plans_that_do_not_fit_show_no_speed() -> None:
    reason = (
        "stage1: device memory runs out, worst at m0/s0/l3/fwd/qkv: 85.89 GiB (state 46.45 GiB) are needed of 79.25 GiB"
    )
    text = plans_table(result(infeasible(offload_window=1, reason=reason), infeasible(status="host_oom", reason="")))

    assert "1.000 w1" in text
    assert "stage1: device memory runs out, worst at m0/s0/l3/fwd/qkv\n" in text
    for word in ("MFU", "TGS", "step"):
        assert word not in text
    assert "host memory" in text


def test_top_limits_the_rows() -> None:
    text = plans_table(result(*[plan()] * 5, *[infeasible()] * 4), top=3)

    assert text.count("tokenwise") == text.count("full-swap") == 3
    assert "... and 2 more" in text
    assert "... and 1 more" in text


def test_peak_by_class() -> None:
    assert peak_table({"state": 30 * GIB, "skeletal": 60 * GIB, "input": 0}, capacity_bytes=80 * GIB) == dedent(
        """\
        class     at the peak    share
        skeletal    60.00 GiB   66.7 %
        state       30.00 GiB   33.3 %
        total       90.00 GiB  100.0 %
        capacity    80.00 GiB   88.9 %
        short by    10.00 GiB   11.1 %"""
    )


def test_stalls() -> None:
    assert stall_table(plan().stalls, 100.0) == dedent(
        """\
        lane     waits for       time  of step  times
        h2d      linear.wgrad    60 s   60.0 %     28
        compute  all_gather     1.5 s    1.5 %    128
        compute  d2h           250 ms    0.2 %      3"""
    )


def case(name: str, error: float | None, *, fitted: bool = False, status: bool = True, **more) -> CaseReport:
    predicted = {"status": "ok" if status else "host_oom", "mfu": None if error is None else 0.5 * (1 + error)}
    return CaseReport(
        case=name,
        source=more.pop("source", "memo-table5"),
        system=more.pop("system", "memo"),
        predicted=CasePrediction(**(predicted | more)),
        expected=Expectation(status="ok", mfu=0.5),
        error=CaseError(status=status, mfu=error),
        fitted=fitted,
    )


CASES = [
    case("a", 0.01, alpha=0.5, layout=Layout(tp=4)),
    case("b", -0.03),
    case("c", 0.002, fitted=True),
    case("d", None, status=False, source="memo-table4", reason="4.0 GiB short"),
]


def test_accuracy_separates_fitted_from_predicted() -> None:
    predicted, fitted = summarise(CASES)

    assert (predicted.rows, predicted.statuses_right, predicted.statuses) == (3, 2, 3)
    errors = predicted.errors["mfu"]
    assert (errors.count, errors.worst) == (2, "b")
    assert (errors.bias, errors.mean_abs, errors.max_abs) == pytest.approx((-0.01, 0.02, 0.03))
    assert fitted.fitted
    assert fitted.errors["mfu"].mean_abs == pytest.approx(0.002)
    assert [(a.group, a.rows) for a in summarise(CASES, ["x", "y", "x", "y"])] == [("x", 1), ("x", 1), ("y", 2)]
    assert summarise([]) == []


def test_allocation_retries_are_shown_where_they_are_predicted() -> None:
    lines = validation_table(Validation(cases=[case("a", 0.1, allocation_retries=5.9375), case("b", 0.1)])).splitlines()
    assert lines[0].split()[-3:] == ["retries", "expected", "error"]
    assert lines[1].split()[-3:] == ["5.9", "-", "-"]
    assert lines[2].split()[-3:] == ["-", "-", "-"]
    assert "retries" not in validation_table(Validation(cases=CASES))


def test_validation() -> None:
    text = validation_table(Validation(cases=CASES), seq_tokens=[131072, 65536, 65536, 131072])

    cases, by_source, by_length, everything = (text.split("\n\n")[i] for i in (0, 2, 3, 4))
    assert cases == dedent(
        """\
        case  system          status         expected  layout       alpha      MFU  expected   error
        a     memo            ok             ok        tp4 cp1 dp1  0.500  50.50 %   50.00 %  +1.0 %
        b     memo            ok             ok        -                -  48.50 %   50.00 %  -3.0 %
        c     memo    fitted  ok             ok        -                -  50.10 %   50.00 %  +0.2 %
        d     memo            host memory !  ok        -                -        -   50.00 %       -"""
    )
    assert "d: 4.0 GiB short" in text
    assert by_source.splitlines()[1].split()[:6] == ["memo-table5", "predicted", "2", "2/2", "MFU", "2"]
    assert [line.split()[0] for line in by_length.splitlines()[1:]] == ["64k", "64k", "128k"]
    assert everything == dedent(
        """\
             rows          status right  quantity  n     bias  mean |error|  max |error|  worst case
        all  predicted  3           2/3  MFU       2  -1.00 %        2.00 %       3.00 %  b
        all  fitted     1           1/1  MFU       1  +0.20 %        0.20 %       0.20 %  c"""
    )


def test_a_fit_shows_errors_fitted_unfitted_and_left_out() -> None:
    fitted, unfitted, held = (Validation(cases=[case("a", e)]) for e in (0.001, -0.2, 0.004))
    constant = SimpleNamespace(name="copy-rate", unit="GB/s")
    values = {"value": 10.3, "unfitted_value": 12.0, "left_out": {196608: (10.4, held)}}
    fit = SimpleNamespace(constant=constant, fitted=fitted, unfitted=unfitted, **values)

    assert fit_table(fit) == dedent(
        """\
        fitted copy-rate: 10.300 GB/s

        with                         GB/s  quantity  n      bias  mean |error|  max |error|  status right
        fitted                     10.300  MFU       1   +0.10 %        0.10 %       0.10 %           1/1
        unfitted                   12.000  MFU       1  -20.00 %       20.00 %      20.00 %           1/1
        192k, left out of the fit  10.400  MFU       1   +0.40 %        0.40 %       0.40 %           1/1"""
    )


def figures(step_s: float, moved: int) -> StepFigures:
    return StepFigures(
        step_s=step_s,
        peak_device_bytes=GIB,
        moved_bytes=MovedBytes(d2h=moved, h2d=moved),
        lanes={"compute": 0.9 * step_s, "d2h": 0.1 * step_s},
        ops={"linear": 0.6 * step_s, "attention": 0.3 * step_s},
    )


def test_comparison() -> None:
    predicted, measured = figures(0.9, 10 * 2**20), figures(1.0, 10 * 2**20)
    ratio = Ratio(
        step_s=0.9,
        peak_device_bytes=1.0,
        moved_bytes={"d2h": 1.0},
        lanes={"compute": 0.9, "d2h": 0.9},
        ops={"linear": 0.9, "attention": 0.9},
    )
    document = Comparison(
        program_sha256="0" * 64, machine="cpu", predicted=predicted, measured=measured, ratio=ratio, steps_measured=5
    )

    assert comparison_table(document, top=1) == dedent(
        """\
        measured on cpu, median of 5 steps

                            predicted   measured  ratio
        step                   900 ms        1 s  0.900
        peak device memory   1.00 GiB   1.00 GiB  1.000
        moved d2h           10.00 MiB  10.00 MiB  1.000
        moved h2d           10.00 MiB  10.00 MiB      -

        busy by lane  predicted  measured  ratio  of measured
        compute          810 ms    900 ms  0.900       90.0 %
        d2h               90 ms    100 ms  0.900       10.0 %

        busy by kind  predicted  measured  ratio  of measured
        linear           540 ms    600 ms  0.900       66.7 %
        ... and 1 more"""
    )


def test_a_run_without_prediction_shows_only_measurements() -> None:
    document = Comparison(program_sha256="0" * 64, machine="cpu", predicted=None, measured=figures(1.0, 0), ratio=None)

    text = comparison_table(document)

    assert "measured on cpu, 1 step\n" in text
    assert "linear                -    600 ms      -       66.7 %" in text


def test_columns_fit_their_widest_cell() -> None:
    assert text_table(["name", "n"], [["x", None], ["longer", "10"]], "lr") == "name     n\nx        -\nlonger  10"
    assert text_table(["a", "b"], []) == "a  b"
