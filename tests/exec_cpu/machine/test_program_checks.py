"""The independent checkers of programs run before a debug run and in ``doctor PLAN``; both find planted faults."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from memo_exec.cli import cli
from memo_exec.commands.doctor import plan_report
from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.machine import program_checks
from memo_sim.contract import codec
from memo_sim.contract.errors import MemoError
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, PointToPoint
from memo_sim.program.lower import lower
from tests.exec_cpu.plans import byte_decisions, plan_of, write_plan
from tests.exec_cpu.small import gpt

LAYOUTS = {
    "one rank": Layout(),
    "stages": Layout(pp=2),
    "ring": Layout(cp=2),
    "ring of stages": Layout(cp=2, pp=2),
    "metp": Layout(metp=2),
    "tp": Layout(tp=2, sequence_parallel=True, zero=1),
}


def decisions_of(layout: Layout) -> Decisions:
    return byte_decisions(model=gpt(vocab=256, layers=4), layout=layout, swapped_tokens=0, memory_policy="caching")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_programs_of_every_layout_pass(layout: Layout) -> None:
    checks = program_checks.program_checks(decisions_of(layout))
    assert [check.faults for check in checks] == [()] * len(checks)
    names = [f"program {program.stage}" for program in lower(decisions_of(layout))]
    assert [check.name for check in checks] == [*names, "stages", *(["ring"] if layout.ring > 1 else [])]


def test_programs_of_ranks_with_uneven_heads_pass() -> None:
    model = gpt(vocab=256, heads=5, kv_heads=5, max_positions=768)
    layout = Layout(ulysses=3, uneven_heads=True, cp=2)
    checks = program_checks.program_checks(
        msgspec.structs.replace(decisions_of(layout), model=model, seq_tokens=768, micro_batch=1)
    )
    assert [check.faults for check in checks] == [()] * len(checks)
    assert [check.name for check in checks] == ["program rank", "stages", "ring", "uneven heads"]


def test_programs_of_ranks_that_exchange_chunks_pass() -> None:
    layout = Layout(tp=4, sequence_parallel=True, tp_overlap="chunked")
    checks = program_checks.program_checks(decisions_of(layout))
    assert [check.faults for check in checks] == [()] * len(checks)
    assert [(check.name, check.what.rpartition(" of ")[2]) for check in checks[::2]] == [
        ("program rank", "4 ranks"),
        ("chunks", "4 ranks match"),
    ]


def changed(program: Program, change: Callable[[Instruction], Instruction]) -> Program:
    templates = [replace(t, instructions=tuple(change(i) for i in t.instructions)) for t in program.templates]
    return replace(program, templates=tuple(templates))


def out_of_its_buffer(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    def change(instruction: Instruction) -> Instruction:
        if instruction.op != "linear":
            return instruction
        first, *others = instruction.operands
        return msgspec.structs.replace(
            instruction, operands=(msgspec.structs.replace(first, first=first.first + 1), *others)
        )

    return (changed(programs[0], change), *programs[1:])


def another_size(kind: type[Any]) -> Callable[[tuple[Program, ...]], tuple[Program, ...]]:
    def plant(programs: tuple[Program, ...]) -> tuple[Program, ...]:
        def change(instruction: Instruction) -> Instruction:
            if not isinstance(instruction.work, kind):
                return instruction
            work: Any = instruction.work
            return msgspec.structs.replace(instruction, work=replace(work, bytes=work.bytes + 4))

        return (changed(programs[0], change), *programs[1:])

    return plant


FAULTS = {
    "a read outside its buffer": (Layout(), out_of_its_buffer, "program", "beyond its buffer"),
    "a send of another size": (Layout(pp=2), another_size(PointToPoint), "stages", "is received"),
    "a collective of another size": (Layout(pp=2, tp=2), another_size(Collective), "program", "is priced for"),
}


@pytest.fixture(params=FAULTS.values(), ids=list(FAULTS))
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, str, str]:
    """A plan whose lowering has a fault, the name of the check that finds it, and what that says."""
    layout, plant, name, says = request.param
    monkeypatch.setattr(program_checks, "lower", lambda decisions, **options: plant(lower(decisions, **options)))
    path = tmp_path / "plan.json"
    codec.write(path, plan_of(decisions_of(layout)))
    return path, name, says


def test_doctor_finds_a_planted_fault(planted: tuple[Path, str, str]) -> None:
    path, name, says = planted
    done = CliRunner().invoke(cli, ["doctor", str(path)])
    assert done.exit_code == 1
    wrong = [line for line in done.output.splitlines() if "  faulty: " in line]
    assert any(line.startswith(name) and says in line for line in wrong)
    assert done.output.startswith("hash")


def test_a_debug_run_refuses_a_planted_fault(planted: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = planted

    def too_late(*arguments: object, **options: object) -> None:
        raise AssertionError("the interpreter was made")

    monkeypatch.setattr("memo_exec.commands.run.Interpreter", too_late)
    monkeypatch.setattr("memo_exec.commands.run.preflight.check_ranks", lambda decisions, launch: None)
    with pytest.raises(MemoError, match="program is faulty") as caught:
        run(path, RunOptions(steps=1, debug=True))
    assert caught.value.exit_code == 1
    assert str(caught.value.where).startswith(f"{path}: program") or "stages" in str(caught.value.where)


def test_doctor_has_a_line_for_each_check_of_a_sound_plan(tmp_path: Path) -> None:
    text, code = plan_report(write_plan(tmp_path / "plan.json"))
    assert code == 0
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert set(lines) == {"hash", "program rank", "stages", "placement"}
    assert all("  ok: " in line for line in lines.values())
    assert "arena of" in lines["placement"]


def test_doctor_counts_stages_from_one(tmp_path: Path) -> None:
    decisions = byte_decisions(layout=Layout(pp=2), memory_policy="caching", global_batch=2)
    text, code = plan_report(write_plan(tmp_path / "plan.json", decisions))
    assert code == 0
    assert {"program stage 1", "program stage 2"} <= {line.split("  ")[0] for line in text.splitlines()}


def test_doctor_says_which_stage_the_placement_file_is_of(tmp_path: Path) -> None:
    whole = msgspec.structs.replace(decisions_of(Layout(pp=2)), memory_policy="planned")
    path = write_plan(tmp_path / "plan.json", whole)
    text, code = plan_report(path)
    assert code == 0
    lines = [line.split("ok: ")[1] for line in text.splitlines() if line.startswith("placement")]
    placement = codec.read(path.with_name("plan.placement.json"), Placement)
    assert lines[0].startswith(f"stage 1 (in the file): {len(placement.ids)} buffers in an arena of ")
    assert lines[1].startswith("stage 2 (made from it): ")


def test_doctor_goes_on_after_a_check_that_fails(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json")
    path.with_name("plan.placement.json").unlink()
    text, code = plan_report(path)
    assert code == 3
    assert [line.split()[0] for line in text.splitlines()] == ["hash", "program", "stages", "placement"]
    assert "refused: " in text.splitlines()[-1]
    codec.write(path, msgspec.structs.replace(plan_of(byte_decisions()), decisions=byte_decisions(seq_tokens=512)))
    text, code = plan_report(path)
    assert code == 3
    assert "another program" in text.splitlines()[0]
