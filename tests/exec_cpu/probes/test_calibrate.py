"""Calibration makes a valid profile from single operators, and that profile prices every operator of the models."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from memo_exec.commands import calibrate as commands
from memo_exec.commands.calibrate import _operators, calibrate
from memo_exec.interpreter import lanes as lane_module
from memo_exec.interpreter.lanes import HostTimekeeper
from memo_exec.kernels import IN_TRITON, KERNELS
from memo_exec.machine.machine import this_machine
from memo_exec.probes import clocks, copy_rates, in_step, memory, operators, timing
from memo_exec.probes import grid as grids
from memo_exec.probes.copies import Lanes
from memo_exec.probes.copy_rates import Copies
from memo_exec.probes.operators import Bench, operand_sets, operators_of
from memo_exec.probes.order import by_decision, left_out, table_of
from memo_exec.probes.profile import Found, Shared, profile_of
from memo_exec.probes.tables import Timed
from memo_exec.probes.timing import WARM_UPS, Effort, Sample, back_to_back, of_passes, sample_of
from memo_sim.contract import codec
from memo_sim.contract.attention_kernels import PRICED_ONLY
from memo_sim.contract.catalog import load_model
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.arena.library_workspaces import IN_USE
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, Gemm, LinearLoss, Rowwise
from memo_sim.program.lower import lower
from memo_sim.program.operators.workspaces import ATTENTION_KERNELS
from tests.exec_cpu.small import CPU_KERNELS

FEW = replace(
    grids.CPU,
    experts=((4, 32),),
    expert_widths=(64,),
    expert_lengths=(64,),
    widths=(64,),
    lengths=(256,),
    head_dims=(32,),
    heads=(2,),
    attention_lengths=(128, 256),
    copy_bytes=(2**14, 2**18),
    beside_s=0.02,
    copied_bytes=2**20,
    updated_elements=2**16,
    message_bytes=(2**10, 2**14, 2**18, 2**20, 2**22),
    message_s=0.02,
)


@pytest.fixture(autouse=True, scope="module")
def small_cache() -> Iterator[None]:
    """Repeats have to outgrow the cache, which has hundreds of MiB on some machines."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory, "cache_bytes", lambda device: 2**20)
        yield


@pytest.fixture(scope="module")
def profile() -> Hardware:
    found = calibrate(grid=FEW, command="a test")
    assert found is not None
    return found


def test_the_profile_can_be_written_and_read_back(profile: Hardware, tmp_path: Path) -> None:
    codec.write(tmp_path / "here.json", profile)
    assert codec.read(tmp_path / "here.json", Hardware) == profile


def test_the_update_on_the_host_is_measured_with_its_own_source(profile: Hardware) -> None:
    found = profile.host_update_bytes_per_s
    assert found is not None
    assert 1e7 < found.value < 1e13
    assert "AdamW" in profile.sources[found.source].text


def test_every_number_has_a_source(profile: Hardware) -> None:
    assert {source.kind for name, source in profile.sources.items() if name != "link"} == {"measured"}
    assert profile.provenance["torch"] == torch.__version__
    assert {"device", "compute_threads", "created", "seconds", "command", "passes", "dispatch_us", "ranks"} <= set(
        profile.provenance
    )


def test_curves_cover_every_operator_of_the_tiny_models(profile: Hardware) -> None:
    assert {table.gemm_pass for table in profile.gemm} == {"fprop", "dgrad", "wgrad"}
    assert {table.attention_pass for table in profile.attention} == {"forward", "backward"}
    several = {table.gemm_pass: table.rows for table in profile.grouped_gemm}
    assert set(several) == {"fprop", "dgrad", "wgrad"}
    assert [row[:4] for row in several["fprop"]] == [[4, 128, 64, 32], [4, 128, 64, 64]]  # down and up, two tables
    assert {"experts.swiglu", "experts.route", "experts.dispatch"} <= set(profile.rowwise_bytes_per_s)
    for name, parts in product(("gpt-tiny", "llama-tiny"), (1, 2)):
        decisions = Decisions(
            model=load_model(name),
            layout=Layout(subsequences=parts),
            seq_tokens=512,
            swapped_tokens=128,
            subsequence_swapped_tokens=(128, 0) if parts > 1 else (),
            kernels=CPU_KERNELS,
            dtype="fp32",
        )
        works = [i.work for _, i in lower(decisions)[0].walk() if i.lane is Lane.COMPUTE]
        missing = {work.kind for work in works if isinstance(work, Rowwise)} - set(profile.rowwise_bytes_per_s)
        assert not missing


def test_copies_and_slowdown_are_plausible(profile: Hardware) -> None:
    assert profile.compute_slowdown["copy"].value >= 1
    for rates in (profile.d2h, profile.h2d):
        assert all(1e8 < rate < 1e12 for rate in rates.alone.y)
        assert 1e8 < rates.duplex.value < 1e12
    assert 0 < profile.launch_floor_s.value < 1e-3


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    calibrate(grid=replace(FEW, beside_s=0.01, budget_s=0.0), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {seen[-1][1]}
    first = [done for done, _ in seen][: copy_rates.measurements(FEW)]
    assert first == list(range(1, len(first) + 1))  # also during the copies, which take longest


def test_a_busy_machine_is_reported_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(os, "getloadavg", lambda: (100.0 + (os.cpu_count() or 1), 0.0, 0.0))
    found = calibrate(grid=replace(FEW, beside_s=0.01, budget_s=0.0), note=told.append)
    assert found is not None
    begins, _, warning = told  # the second says what there was no time for
    assert "the load is 1" in begins
    assert "calibrate" in warning
    assert found.provenance["disturbed"] in warning
    assert found.provenance["load_before"].endswith(f"on {os.cpu_count()} cores")
    assert float(found.provenance["middle_spread"].rstrip("%")) >= 0


def test_every_operator_of_the_program_occurs_once() -> None:
    decisions = next(grids.decisions(FEW, "torch-flash-cpu"))
    operators = operators_of([decisions, decisions])
    assert len({operator.key for operator in operators}) == len(operators)
    works = {i.work for _, i in lower(decisions)[0].walk() if i.lane is Lane.COMPUTE and i.op in KERNELS}
    # The operators also include those of templates without instances.
    assert {operator.instruction.work for operator in operators} >= works


def test_every_operator_can_be_timed_by_itself() -> None:
    bench = Bench(torch.device("cpu"), cache_bytes=2**20)
    for operator in operators_of(grids.decisions(FEW, "torch-flash-cpu")):
        assert bench.seconds(operator, Effort(repeats=1, seconds=0.0)).seconds > 0


def test_long_operators_are_left_out() -> None:
    few = replace(FEW, most_flops=1e6, most_bytes=1e5)
    assert not any(few.wanted(o) and isinstance(o.instruction.work, Attention) for o in operators_of([_middle()]))
    assert all(
        o.instruction.work.flops <= 1e6
        for o in operators_of([_middle()])
        if few.wanted(o) and isinstance(o.instruction.work, Gemm)
    )


def _middle() -> Decisions:
    return grids.middle(FEW, "torch-flash-cpu")


def test_a_sample_is_the_median_without_outliers() -> None:
    assert sample_of([1.0, 1.1, 0.9, 1.0, 50.0]).seconds == 1.0
    assert sample_of([1.0, 1.1, 0.9, 1.0, 50.0]).spread == pytest.approx(0.05)


def test_a_pass_slowed_by_other_load_does_not_count() -> None:
    sample = of_passes([Sample(1.0, 0.1), Sample(1.1, 0.1), Sample(4.0, 0.1)])
    assert sample.seconds == 1.1
    assert sample.spread == pytest.approx(1.5 / 1.1)


def test_without_time_one_point_of_every_table_is_measured() -> None:
    few, told = replace(FEW, copy_bytes=(2**14, 2**15, 2**16), beside_s=0.02, lengths=(128, 256, 512)), list[str]()
    short = calibrate(grid=few, budget_s=0.001, note=told.append)
    assert short is not None
    assert short.provenance["passes"] == "1"
    assert {table.gemm_pass for table in short.gemm} == {"fprop", "dgrad", "wgrad"}
    missing = short.provenance["not measured: operators"]
    assert re.fullmatch(r"[\d,]+ of [\d,]+ points, for want of time; most of them: .*", missing)
    assert f"not measured: {missing}" in told
    assert all(len(curve.x) == 1 for curve in short.rowwise_bytes_per_s.values())
    assert [rates.alone.x for rates in (short.d2h, short.h2d)] == [[2**14, 2**16]] * 2


def test_with_time_every_operator_is_measured_three_times(profile: Hardware) -> None:
    assert profile.provenance["passes"] == "3"
    assert "not measured: operators" not in profile.provenance


def test_the_ends_of_a_table_come_first_then_the_middles() -> None:
    grid = replace(FEW, widths=(64, 128), lengths=(128, 256, 512, 1024))
    operators = _operators(grid, ["torch-flash-cpu"])
    ordered = by_decision(operators)
    assert sorted(map(id, ordered)) == sorted(map(id, operators))
    copies = [o.instruction.work.moved_bytes for o in ordered if table_of(o)[1] == "copy"]  # type: ignore[union-attr]
    assert copies[:2] == [max(copies), min(copies)]
    assert sorted(copies).index(copies[2]) == (len(copies) - 1) // 2
    tables = [table_of(operator) for operator in ordered]
    assert len(set(tables[: len(set(tables))])) == len(set(tables))  # all have one point before one has two
    assert left_out(ordered, range(len(ordered))) == ""
    assert left_out(ordered, range(len(ordered) - 1)).startswith(f"1 of {len(ordered)} points")


def test_other_programs_memory_is_not_in_a_cpus_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = replace(this_machine(), device="cpu", device_free_bytes=2**20)
    monkeypatch.setattr(memory, "resident_bytes", lambda: 2**28)
    assert commands._reserve(busy) == {commands.PROCESS: 2**28}
    assert commands._reserve(replace(busy, device="cuda")) == {IN_USE: busy.device_memory_bytes - 2**20}


def test_resident_bytes_are_those_that_the_system_reports(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmPeak:\t  9 kB\nVmRSS:\t  300 kB\n")
    assert memory.resident_bytes(tmp_path / "status") == 300 * 1024
    assert memory.resident_bytes(tmp_path / "none") == 0


def test_operators_find_their_cores_cache_full_of_other_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for index, (level, size) in enumerate([(1, "32K"), (1, "48K"), (2, "2048K"), (3, "60M"), (4, "?")]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "level").write_text(f"{level}\n")
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(memory, "CPU_CACHES", tmp_path)
    assert memory.core_cache_bytes() == 2**21
    bench = Bench(torch.device("cpu"), 2**20)
    other = bench._beside()
    assert other is not None
    assert other.nbytes == 2**21 * torch.get_num_threads()
    assert bench._beside() is other
    monkeypatch.setattr(memory, "CPU_CACHES", tmp_path / "none")
    assert memory.core_cache_bytes() == memory.CORE_CACHE_BYTES


def test_the_dispatch_does_not_contain_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of 2 ms in a step, which take 1.5 ms or 9 s alone."""
    monkeypatch.setattr(in_step, "LAYERS", 1)
    monkeypatch.setattr(in_step, "STEPS", 3)
    slow = dict.fromkeys(KERNELS, lambda call: time.sleep(2e-3))
    decisions = next(grids.decisions(FEW, "torch-flash-cpu"))
    found = in_step.measure(decisions, lambda operator: Sample(1.5e-3, 0.0), slow)
    assert 0 < found.between.seconds < 1e-3
    assert found.longer_s >= 0.5e-3
    assert found.seconds == found.between.seconds + found.longer_s
    assert in_step.measure(decisions, lambda operator: Sample(9.0, 0.0), slow).longer_s == 0


def test_what_kernels_take_longer_in_a_step_counts_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone every operator takes what it takes in the step, but one takes 1 ms less."""
    monkeypatch.setattr(in_step, "LAYERS", 2)
    monkeypatch.setattr(in_step, "STEPS", 3)
    monkeypatch.setattr(
        HostTimekeeper, "times", lambda clock: (np.zeros(len(clock._starts)), np.ones(len(clock._ends)))
    )
    decisions = next(grids.decisions(FEW, "torch-flash-cpu"))
    shorter = {"gelu": 0.999}
    found = in_step.measure(decisions, lambda operator: Sample(shorter.get(operator.instruction.op, 1.0), 0.0))
    model = msgspec.structs.replace(decisions.model, layers=2)
    (program,) = lower(msgspec.structs.replace(decisions, model=model, swapped_tokens=0))
    played = [each.op for _, each in program.walk() if each.lane is Lane.COMPUTE]
    assert found.longer_s == pytest.approx(1e-3 * played.count("gelu") / len(played))


def test_a_small_operators_repeats_have_operands_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeat finds operands that no earlier one has touched, up to the bytes that pass through the cache."""
    bench = Bench(torch.device("cpu"), 2**20)
    made: list[int] = []
    tensors = bench._tensors
    monkeypatch.setattr(bench, "_tensors", lambda operator: made.append(operator.bytes) or tensors(operator))
    operator = min(operators_of(grids.decisions(FEW, "torch-flash-cpu")), key=lambda each: each.bytes)
    bench.seconds(operator, Effort(repeats=2, seconds=0.0, most=5))
    assert len(made) == WARM_UPS + 5
    made.clear()
    monkeypatch.setattr(operators, "COLD_BYTES", 30 * operator.bytes)
    bench.seconds(operator, Effort(repeats=2, seconds=0.0, most=50))
    assert len(made) == 30


def test_operand_sets_of_a_cpu_have_a_bound_together() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert operand_sets(cpu, 12, 2**26, 2**28) == 4
    assert operand_sets(cpu, 12, 2**28, 2**28) == 2
    assert operand_sets(cpu, 3, 2**10, 2**28) == 3
    assert operand_sets(gpu, 12, 2**28, 2**28) == 12


def test_the_gpus_grid_fits_its_budget() -> None:
    """Two passes fit into 240 s, with every attention kernel, at half of an H100's published rates."""
    kernels = [name for name in ATTENTION_KERNELS if name not in (*PRICED_ONLY, "torch-flash-cpu")]
    effort, filler_s, host_s, compile_s = Effort(), 2e-3, 2e-3, 0.7
    total = 0.0
    operators = _operators(grids.CUDA, kernels, ("torch", "triton"), ("linear-triton",))
    own = [o for o in operators if o.rowwise == "triton" or isinstance(o.instruction.work, LinearLoss)]
    every_width = {
        "rotary",
        "rotary.bwd",
        "qk_norm",
        "attention.merge",
    }  # compiled for eight heads at once, whatever the number of heads
    widths = [0 if o.instruction.op in every_width else o.decisions.model.hidden for o in own]
    compiled = {(o.instruction.op, width, o.key[2]) for o, width in zip(own, widths, strict=True)}
    inside = {"linear_loss.statistics", "linear_loss.gradient"}
    assert {op for op, _, _ in compiled} == {*IN_TRITON, *inside}
    for operator in operators:
        work = operator.instruction.work
        rate, amount = (1.3e12, work.moved_bytes) if isinstance(work, Rowwise) else (2.5e14, work.flops)  # type: ignore[union-attr]
        call_s = 1e-5 + amount / rate
        warm_ups = 1 if call_s > effort.patience_s / 2 else timing.WARM_UPS
        repeat_s = filler_s + call_s
        fewest = 1 if repeat_s > effort.patience_s else effort.repeats
        total += warm_ups * call_s + max(fewest * repeat_s, effort.seconds) + host_s
        assert operator.bytes * 3 < 40e9  # two sets of operands and a copy fit
    assert len(compiled) * compile_s + 2 * total < grids.CUDA.budget_s


def test_two_sizes_of_blocks_make_a_line() -> None:
    asked, per_gib = memory._line(Sample(2e-3, 0.1), Sample(9e-3, 0.2), (2**26, 2**29))
    assert asked.seconds == pytest.approx(1e-3)
    assert asked.seconds + per_gib.seconds * 2**29 / 2**30 == pytest.approx(9e-3)
    flat, nothing = memory._line(Sample(2e-3, 0.1), Sample(1e-3, 0.2), (2**26, 2**29))
    assert (flat.seconds, nothing.seconds) == (2e-3, 0.0)


def test_back_to_back_calls_run_until_stopped() -> None:
    seen: list[int] = []
    durations = back_to_back(seen.append, torch.device("cpu"), lambda: len(seen) >= 3)
    assert seen == [0, 1, 2]
    assert len(durations) == 3


class Clock:
    """A fake of CUDA's events; the device has finished everything before an event once the host waits for it."""

    def __init__(self) -> None:
        self.recorded: list[Clock.Event] = []

    class Event:
        def __init__(self, clock: "Clock") -> None:
            self.clock, self.at_ms, self.waited = clock, -1.0, False

        def record(self) -> None:
            self.at_ms = 1.0 + len(self.clock.recorded) ** 2
            self.clock.recorded.append(self)

        def synchronize(self) -> None:
            assert self.at_ms >= 0
            self.waited = True

        def elapsed_time(self, other: "Clock.Event") -> float:
            assert other.waited  # the time is unknown until the device has reached the event
            return other.at_ms - self.at_ms


def test_on_cuda_each_call_lies_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = Clock(), list[str]()
    monkeypatch.setattr(timing, "_event", lambda: Clock.Event(clock))
    monkeypatch.setattr(timing, "FILLER", 8)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("settle"))
    found = timing._on_cuda(
        lambda i: order.append(f"call {i}"),
        torch.device("cpu"),
        Effort(repeats=2, seconds=0.0),
        lambda i: order.append(f"prepare {i}"),
    )
    assert order == ["settle", "prepare 0", "call 0", "prepare 1", "call 1"]
    assert found == [pytest.approx(1e-3), pytest.approx(5e-3)]  # milliseconds between events 0, 1 and 2, 3


def test_on_cuda_the_next_call_is_issued_before_the_last_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(), list[int]()

    def call(i: int) -> None:
        calls.append(i)
        assert not clock.recorded[-1].waited

    monkeypatch.setattr(timing, "_event", lambda: Clock.Event(clock))
    device = cast("torch.device", SimpleNamespace(type="cuda"))
    found = back_to_back(call, device, lambda: len(calls) >= 3)
    assert calls == [0, 1, 2]
    assert found == [pytest.approx(ms / 1e3) for ms in (1.0, 3.0, 5.0)]


@pytest.mark.parametrize(("sharing", "threads"), [(1, 8), (2, 3), (4, 1)])
def test_operators_get_the_threads_that_a_run_of_as_many_ranks_has(
    monkeypatch: pytest.MonkeyPatch, sharing: int, threads: int
) -> None:
    monkeypatch.setattr(lane_module, "available_cores", lambda: 9)
    with Lanes(torch.device("cpu"), grids.middle(FEW, "torch-flash-cpu"), 2**20, sharing=sharing) as lanes:
        assert lanes.inside(Lane.COMPUTE, torch.get_num_threads) == threads
        assert lanes.inside(Lane.D2H, torch.get_num_threads) == 1


def test_a_failing_lane_does_not_block_the_others() -> None:
    def fails(i: int) -> None:
        raise ValueError(f"call {i}")

    with Lanes(torch.device("cpu"), grids.middle(FEW, "torch-flash-cpu"), 2**20) as lanes:
        copier = lanes.copier(Lane.D2H, 2**14)
        with pytest.raises(ValueError, match="call 0"):
            lanes.together(0.01, {Lane.D2H: copier, Lane.COMPUTE: fails})


SMI = "580.82.07, P0, 1980, 1980, 2619, 512.33, 700.00\n580.82.07, P0, 1755, 1980, 2619, 698.10, 700.00\n580.82"


def test_clocks_are_summarised_without_an_incomplete_line() -> None:
    assert clocks.summary(SMI) == {
        "driver": "580.82.07",
        "power_state": "P0",
        "sm_clock_mhz": "1867.5 (1755 to 1980), maximum 1980",
        "memory_clock_mhz": "2619 (2619 to 2619)",
        "power_w": "605.215 (512.33 to 698.1), limit 700.00",
    }
    assert clocks.summary(SMI.replace("512.33", "[N/A]"))["power_w"] == "698.10, limit 700.00"
    assert clocks.summary("") == {"clocks": "unknown: nvidia-smi printed nothing"}


def test_clocks_are_read_during_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{SMI}'\nprintf '%s\\n' \"$@\" > {tmp_path}/asked\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    with clocks.watched(torch.device("cuda")) as notes:
        while not (asked := tmp_path / "asked").exists() or f"{clocks.PERIOD_MS}" not in asked.read_text():
            time.sleep(0.01)
        assert notes == {}
    assert notes["driver"] == "580.82.07"
    options = asked.read_text().split()
    assert "--id=GPU-1-2-3" in options
    assert f"--loop-ms={clocks.PERIOD_MS}" in options


def test_without_nvidia_smi_the_clocks_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with clocks.watched(torch.device("cuda")) as notes:
        pass
    assert notes == {"clocks": "unknown: nvidia-smi is not installed"}
    with clocks.watched(torch.device("cpu")) as nothing:
        pass
    assert nothing == {}


def found_on(profile: Hardware, name: str) -> Found:
    """Return made-up measurements of a GPU, with the copies of ``profile``."""
    timed = [Timed.of(Gemm(64, 32, 16, "fprop", "bf16"), Sample(1.0, 0.1), 0.0)]
    timed += [Timed(Rowwise("copy", 10, 600, 400), 1.0, 0.0)]
    machine = replace(this_machine(), device="cuda", name=name)
    copies = Copies({Lane.D2H: profile.d2h, Lane.H2D: profile.h2d}, profile.compute_slowdown["copy"], 1e9)
    sample = Sample(1e-3, 0.1)
    blocks = memory.Allocation(sample, sample, sample, sample)
    return Found(machine, timed, copies, sample, blocks, sample, sample, {"context": 1})


def test_the_peak_of_a_known_device_comes_from_its_data_sheet(profile: Hardware) -> None:
    found = profile_of(found_on(profile, "NVIDIA H200"), None, None)
    assert found.peak_flops["bf16"].value == 989e12
    assert found.sources["datasheet"].kind == "datasheet"
    assert found.host_alloc_bytes_per_s is not None
    assert found.name == "nvidia-h200"
    assert found.communicator_bytes is None


@pytest.mark.parametrize(("taken", "wanted"), [({4: 9, 2: 5}, ([2.0, 4.0], [5.0, 9.0])), ({2: 0, 4: 0}, None)])
def test_a_communicators_memory_depends_on_its_ranks(
    profile: Hardware, taken: dict[int, int], wanted: tuple[list[float], list[float]] | None
) -> None:
    curve = profile_of(found_on(profile, "a GPU"), Shared(4, [], {}, taken), None).communicator_bytes
    assert (curve and (curve.x, curve.y)) == wanted


# The whole loop as a user runs it: calibrate, plan, run, compare; for three sizes and three policies.

SIZES = {
    "gpt 128 wide": ({"family": "gpt", "hidden": 128, "layers": 4}, 2048),
    "llama 256 wide": ({"family": "llama", "hidden": 256, "layers": 3}, 1024),
    "gpt 512 wide": ({"family": "gpt", "hidden": 512, "layers": 2}, 1024),
}
POLICIES = {
    "keep": ["--recompute", "none", "--alpha", "0"],
    "alpha 0.5": ["--recompute", "tokenwise", "--alpha", "0.5"],
    "full recompute": ["--recompute", "full"],
}


def shell(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("here") / "here.json"
    shell("memo_exec", "calibrate", "-o", str(path))
    return path


def model_file(path: Path, shape: dict[str, Any]) -> Path:
    gpt, heads = shape["family"] == "gpt", shape["hidden"] // 32
    fields = {"schema": "memo.model/1", "name": path.stem, "heads": heads, "head_dim": 32, "vocab": 256}
    fields |= {"kv_heads": heads if gpt else heads // 2, "ffn_hidden": (4 if gpt else 3) * shape["hidden"]}
    fields |= {"tied_embeddings": gpt, "qkv_bias": gpt, "linear_bias": gpt, "max_positions": 8192 if gpt else 0}
    path.write_text(json.dumps(fields | shape | {"activation": "gelu" if gpt else "silu"}))
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", SIZES)
def test_the_step_is_predicted_before_the_run(here: Path, tmp_path: Path, size: str, policy: str) -> None:
    shape, tokens = SIZES[size]
    model, plan = model_file(tmp_path / "model.json", shape), tmp_path / "plan.json"
    question = [str(model), "--cluster", str(here), "--seq-len", str(tokens), "-o", str(plan)]
    shell("memo_sim", "what-if", *question, *POLICIES[policy])
    best = None
    for _ in range(3):  # other load on the machine can slow a whole run
        document = json.loads(shell("memo_exec", "run", str(plan), "--steps", "8", "--json"))
        assert document["ratio"]["peak_device_bytes"] == 1.0
        assert document["predicted"]["moved_bytes"] == document["measured"]["moved_bytes"]
        best = min((document["ratio"]["step_s"], best or 1e9), key=lambda ratio: abs(ratio - 1))
        if abs(best - 1) <= 0.1:
            break
    assert best == pytest.approx(1.0, abs=0.2)


def test_products_and_attention_in_another_dtype_are_measured_beside(profile: Hardware) -> None:
    found = calibrate(grid=replace(FEW, beside_s=0.01, copy_bytes=(2**14,), budget_s=0.0), dtypes=("bf16", "fp32"))
    assert found is not None
    assert {table.dtype for table in profile.gemm} == {"fp32"}
    assert {table.dtype for table in found.gemm} == {"fp32", "bf16"} == set(found.peak_flops)
    assert {table.dtype for table in found.attention} == {"fp32", "bf16"}
    assert set(found.rowwise_bytes_per_s) == set(profile.rowwise_bytes_per_s)  # by bytes, of any dtype
