"""``memo-exec verify``: the answer as text and as a document, its exit codes, and plans that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_exec.commands import verify
from memo_exec.commands.verify import VerifyOptions
from memo_exec.kernels import KERNELS, Call
from memo_exec.machine.program_checks import Check
from memo_exec.verification.play import Play, Played
from memo_exec.verification.verify import plays_of
from memo_sim.contract import codec
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.contract.verdict import Verdict
from tests.cli.commands import Named, check_refused, memo_exec
from tests.exec_cpu.plans import byte_decisions, plan_of, write_plan
from tests.exec_cpu.small import gpt
from tests.refusals import refused


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan that swaps half of 512 tokens and rebuilds the others, for a model of 12 layers on a GPU."""
    large = gpt(layers=12, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn_hidden=1024, max_positions=512)
    chosen = byte_decisions(
        model=large, seq_tokens=512, swapped_tokens=256, dtype="bf16", kernels=Kernels(attention="flash3")
    )
    return write_plan(tmp_path_factory.mktemp("plan") / "plan.json", chosen)


def test_the_answer_begins_with_the_verdict(plan: Path) -> None:
    done = memo_exec("verify", plan)
    assert done.returncode == 0
    answer = done.stdout.splitlines()
    assert answer[0] == "VERIFIED: the plan's gradients and losses are those of keep-everything and of plain autograd."
    assert answer[1] == "The plan: gpt-small, tp1 cp1 dp1, recompute tokenwise, alpha 0.500."
    assert "fp32" in answer[2]
    assert "1 process, 1 step, seed 0" in answer[2]
    shown = {line.split("  ")[0] for line in answer}
    assert {"layers", "dtype", "loss", "gradient norm", "gradient of layer/qkv.weight", "tolerance"} <= shown
    assert "program rank  ok: " in done.stdout
    begun, *others = done.stderr.splitlines()
    assert begun == "verify: playing the plan at a reduced size, then keep-everything, on 1 rank (cpu)"
    assert [line.partition(" s: ")[2] for line in others] == [
        "checking the programs at full size",
        "comparing with keep-everything and plain autograd",
    ]


def test_the_document_reads_back(plan: Path) -> None:
    done = memo_exec("verify", plan, "--json", "--seed", 7, "--layers", 3)
    verdict = codec.decode(done.stdout.encode(), Verdict, where="stdout")
    assert verdict.verified
    assert (verdict.seed, verdict.ranks, verdict.dtype, verdict.references_agree) == (7, 1, "fp32", True)
    assert {"layers": "3", "dtype": "fp32"}.items() <= {each.what: each.here for each in verdict.reductions}.items()
    assert [check.name for check in verdict.checks] == ["program rank", "stages"]
    assert verdict.seconds > 0


def wrong_log_sum_exp(call: Call) -> None:
    KERNELS["attention"](call)
    call["lse"].add_(0.01)


def test_a_difference_has_exit_code_5(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(here: Decisions, **options: Any) -> object:
        return plays_of(here, kernels={**KERNELS, "attention": wrong_log_sum_exp}, **options)

    monkeypatch.setattr(verify, "plays_of", planted)
    done = memo_exec("verify", plan)
    assert done.returncode == 5
    assert done.stdout.startswith("DIFFERS: the gradient of layer/")
    assert "is not that of keep-everything" in done.stdout.splitlines()[0]
    assert "Keep-everything agrees with plain autograd" in done.stdout
    assert " !" in done.stdout


def test_a_faulty_program_at_full_size_has_exit_code_1(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "program_checks", lambda decisions: [Check("program rank", "", ("a lost row",))])
    done = memo_exec("verify", plan, "--layers", 1)
    assert done.returncode == 1
    assert (
        "DIFFERS: the gradients are right, but a program of the plan at full size is faulty: a lost row" in done.stdout
    )


def test_large_programs_are_checked_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = byte_decisions(model=gpt(layers=12, vocab=256), global_batch=16)
    names = []
    monkeypatch.setattr(verify, "program_checks", lambda decisions: [Check("program rank", "")])
    for most in (20_000, 2000, 600, 1):
        monkeypatch.setattr(verify, "MOST_INSTRUCTIONS", most)
        first = verify.full_size_checks(chosen)[0]
        names.append((first.name, first.text.partition(";")[0]))
    assert names[1] == ("checked with", "2 of 16 micro-batches")
    assert names[2] == ("checked with", "2 of 16 micro-batches and 4 of 12 layers")
    assert names[3][0] == "not checked"
    assert names[0][0] == "program rank"


def test_ranks_of_torchrun_have_to_be_those_of_the_reduced_plan(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with refused(CannotRun, what="1 rank", got="2 processes", wanted="1", hint="torchrun --nproc_per_node 1"):
        verify.verify_plan(plan, VerifyOptions())


class TestGpu:
    """What a GPU would play; no kernel runs here."""

    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr(verify, "this_machine", lambda **sharing: None)

    def test_it_plays_the_plans_kernels_in_its_dtype(self, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        played: list[Decisions] = []

        def on_gpu(plays: Sequence[Play]) -> list[list[Played]]:
            played.extend(play.decisions for play in plays)
            raise CannotRun("no GPU after all")

        monkeypatch.setattr("memo_exec.machine.preflight.check", lambda *given: None)
        monkeypatch.setattr(verify, "machine_text", lambda machine: "a GPU")
        monkeypatch.setattr(verify, "_play_on_gpu", on_gpu)
        with refused(CannotRun, what="no GPU after all"):
            verify.verify_plan(plan, VerifyOptions())
        assert [(each.dtype, each.kernels.attention, each.model.head_dim) for each in played] == [
            ("bf16", "flash3", 32)
        ] * 2

    def test_a_kernel_that_it_lacks_is_refused_with_a_way_out(
        self, plan: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lacks(*given: object) -> None:
            raise CannotRun("the plan's attention kernel cannot be used here", got="flash3")

        monkeypatch.setattr("memo_exec.machine.preflight.check", lacks)
        with refused(CannotRun, got="flash3", hint="--device cpu"):
            verify.verify_plan(plan, VerifyOptions())

    def test_several_ranks_need_torchrun_there(self, tmp_path: Path) -> None:
        path = edited(tmp_path, layout=Layout(dp=2), dtype="bf16", kernels=Kernels(attention="flash2"))
        with refused(CannotRun, what="2 ranks", got="1 process", hint="torchrun --nproc_per_node 2"):
            verify.verify_plan(path, VerifyOptions(device="cuda"))


def edited(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.json"
    codec.write(path, plan_of(byte_decisions(**({"memory_policy": "caching"} | changes))))
    return path


@pytest.mark.parametrize(
    ("write", "options", "code", "named"),
    [
        (lambda path: path / "none.json", (), 3, {"what": "no such file"}),
        (lambda path: edited(path, memory_policy="eager"), (), 6, {"got": "eager", "where": "memory_policy"}),
        (edited, ("--device", "cuda"), 6, {"got": "cuda", "where": "--device"}),
        (
            lambda path: edited(path, model=gpt(layers=4, vocab=256), layout=Layout(pp=2)),
            ("--layers", 1),
            2,
            {"where": "--layers", "got": "1", "wanted": "at least 2"},
        ),
        (edited, ("--layers", 0), 2, "--layers"),
        (edited, ("--steps", 11), 2, "--steps"),
        (edited, ("--seed", -1), 2, "--seed"),
    ],
    ids=["no file", "eager", "no GPU", "few layers", "no layers", "many steps", "seed"],
)
def test_what_cannot_be_verified_is_refused(
    tmp_path: Path, write: Callable[[Path], Path], options: tuple[str | int, ...], code: int, named: Named
) -> None:
    check_refused(memo_exec("verify", write(tmp_path), *options), code, named)


def test_a_plan_that_pins_another_program_is_refused(tmp_path: Path) -> None:
    found = plan_of(byte_decisions(memory_policy="caching"))
    path = tmp_path / "plan.json"
    codec.write(path, msgspec.structs.replace(found, program_sha256="0" * 64))
    done = memo_exec("verify", path)
    assert done.returncode == 3
    assert "another program" in done.stderr
