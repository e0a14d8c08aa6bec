"""The verdict: memory that adds up, hours and prices, the plan in words, and assumptions with their options."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.left_out import left_out
from memo_sim.answers.summary import summary_of
from memo_sim.answers.what_if import Outputs, plan_of, price, what_if
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import DISTURBED
from memo_sim.contract.result import Result
from memo_sim.contract.units import GIB
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.views.summary_text import summary_lines
from tests.sim.planning.test_search import question


@pytest.fixture(scope="module")
def asked():
    return question(32 * 1024, system="full-recompute", global_batch=1)


def test_a_verdict_adds_memory_up_and_counts_hours(asked) -> None:
    result = what_if(asked, price_per_device_hour=2.5).result
    verdict, best = result.summary, result.best
    device = verdict.device_memory
    assert verdict.fits
    assert (device.peak, device.peak_bytes) == ("arena", best.peak_device_bytes)
    assert device.needed_bytes == device.peak_bytes + device.reserve_bytes
    assert device.free_bytes == device.capacity_bytes - device.needed_bytes
    hours = best.step_s * 8 / 3600
    assert verdict.price_per_step == pytest.approx(2.5 * hours)
    assert verdict.device_hours_per_billion_tokens == pytest.approx(hours * 1e9 / (32 * 1024))
    assert verdict.price_per_billion_tokens == pytest.approx(2.5 * verdict.device_hours_per_billion_tokens)
    assert (verdict.step_s, verdict.mfu, verdict.interval) == (best.step_s, best.mfu, best.interval)
    assert codec.decode(codec.encode(result), Result, where="here") == result


def test_without_a_price_there_is_none(asked) -> None:
    verdict = what_if(asked).result.summary
    assert verdict.price_per_step is verdict.price_per_billion_tokens is None
    assert "price" not in "\n".join(summary_lines(verdict))


def test_what_a_search_leaves_out_is_named_with_its_option() -> None:
    def named(system: str, **pins: object) -> dict[str, str]:
        asked = replace(question(32 * 1024, system=system), pins=Pins(**pins))
        return {each.option: each.what for each in left_out(asked)}

    assert named("any")["--system every-layout"] == "ulysses above 1, metp above 1, pp above 1, zero 3"
    assert named("any", cp=2)["--system every-layout"] == "ulysses above 1, pp above 1, zero 3"
    assert "--subsequences auto" in named("every-layout")
    assert "metp" not in str(named("every-layout"))
    assert named("every-layout")["--zero"] == named("any")["--zero"] == "zero 0 and zero 2"
    assert "--zero" not in {**named("every-layout", tp=8), **named("every-layout", zero=1)}
    assert "--system every-layout" not in named("every-layout")
    full = named("any", tp=8)
    assert "--system every-layout" not in full
    assert "--subsequences auto" in full
    megatron = named("megatron-lm")
    assert megatron["--ulysses N"] == "ulysses above 1"
    assert megatron["--system every-layout"] == "plans that megatron-lm does not have"
    knobs = "memo-sim explain PLAN changes each"
    assert named("any")[knobs].startswith("other values of --overlap, --tp-overlap, --cp-exchange, --states")
    assert "--overlap" not in named("any", overlap="both")[knobs].split(", ")[0]


def test_a_length_that_layouts_do_not_divide_says_what_the_nearest_one_gains() -> None:
    asked = question(32 * 1024 + 4, system="full-recompute", global_batch=2)
    small = replace(asked, model=msgspec.structs.replace(asked.model, layers=2), pins=Pins())
    first, *others = what_if(small).result.summary.assumptions
    assert (first.name, first.option) == ("length", "--seq-len 32768")
    assert first.value.startswith("32772 tokens do not divide over ")
    assert "; 32768 tokens (32k: 4 fewer) divide over all, with " in first.value
    assert "length" not in {each.name for each in others}


def test_no_length_is_named_that_the_model_has_no_positions_for() -> None:
    model = msgspec.structs.replace(load_model("gpt-tiny"), max_positions=1024)
    asked = replace(question(1000, system="any", global_batch=8), model=model, pins=Pins(recompute="full"))
    assert "length" not in {each.name for each in what_if(asked).result.summary.assumptions}
    longer = replace(asked, model=msgspec.structs.replace(model, max_positions=4096))
    assert "length" in {each.name for each in what_if(longer).result.summary.assumptions}


def test_assumptions_name_their_options(asked) -> None:
    options = {each.name: each.option for each in what_if(asked).result.summary.assumptions}
    assert options["attention kernel"] == "--attention"
    assert options["batch"].startswith("--global-batch")
    assert {"dtype", "states", "other kernels", "device memory", "reserve"} <= options.keys()


def test_a_limit_of_the_allocator_is_assumed() -> None:
    """The verdict counts the limit in place of the device's memory, so a reader must see it."""
    limited = Pins(tp=8, cp=1, recompute="full", allocator_limit_gib=40)
    asked = replace(question(32 * 1024, system="megatron-lm"), pins=limited)
    found = what_if(asked).result.summary
    assert found.device_memory.capacity_bytes == 40 * 2**30
    (memory,) = [assumption for assumption in found.assumptions if assumption.name == "device memory"]
    assert "limited to 40 GiB" in memory.value
    assert "--allocator-limit-gib" in memory.option


def test_what_does_not_fit_has_a_shortfall_ways_out_and_no_speed(asked) -> None:
    small = replace(asked, pins=replace(asked.pins, recompute="none"), seq_tokens=1 << 20)
    verdict = what_if(small, price_per_device_hour=1).result.summary
    device = verdict.device_memory
    assert not verdict.fits
    assert device.needed_bytes - device.capacity_bytes == verdict.shortfall_bytes > 0
    assert (device.free_bytes, device.peak) == (0, "live")
    assert verdict.step_s is verdict.mfu is verdict.price_per_step is None
    first, *others = summary_lines(verdict)
    assert first.startswith("DOES NOT FIT: ")
    assert "  leave --recompute, --tp, --cp to the search" in others
    assert not any("Step" in line for line in others)


def test_the_peak_on_pytorchs_allocator_is_that_of_all_stages() -> None:
    """The last stage has most live bytes; the allocator reserves most on the first."""
    asked = question(16 * 1024, system="megatron-lm")
    answer = what_if(replace(asked, pins=Pins(tp=4, cp=1, pp=2, recompute="full")))
    result, device = answer.result, answer.result.summary.device_memory
    peaks = [max(map(sum, zip(*t.device_memory.bytes_by_class.values(), strict=True))) for t in answer.best.traces()]
    assert peaks[1] > peaks[0]
    assert device.stage == 0
    assert device.live_bytes == result.best.peak_device_bytes == max(peaks)
    assert any(line.startswith("Device memory peaks at stage1: ") for line in result.why)
    assert (device.peak, device.peak_bytes) == ("reserved", result.best.reserved_bytes)
    assert device.live_bytes <= device.peak_bytes
    assert device.stages == 2
    assert "reserved by PyTorch's allocator" in summary_lines(result.summary)[0]


def test_a_limit_of_the_allocator_is_in_the_plan_in_words() -> None:
    asked = question(16 * 1024, system="full-recompute", memory_policy="caching", allocator_limit_gib=60)
    verdict = what_if(asked).result.summary
    assert verdict.plan.endswith("; PyTorch's allocator limited to 60 GiB of the device")


def test_a_plan_that_is_only_priced_has_a_verdict(asked) -> None:
    answer = what_if(asked)
    plan, _ = plan_of(answer.best, answer.arena, asked, created="", command="")
    again = price(plan, replace(asked, pins=Pins()), price_per_device_hour=4)
    assert again.result.summary.step_s == answer.result.summary.step_s
    assert again.result.summary.price_per_step == pytest.approx(4 * again.result.summary.step_s * 8 / 3600)


def test_a_profile_of_a_busy_machine_is_among_the_assumptions(asked) -> None:
    busy = msgspec.structs.replace(asked.hardware, provenance={DISTURBED: "the load was 9.0 on 2 cores"})
    (line,) = (
        each for each in what_if(replace(asked, hardware=busy)).result.summary.assumptions if each.name == "profile"
    )
    assert "was measured on a busy machine (the load was 9.0 on 2 cores)" in line.value
    assert all(each.name != "profile" for each in what_if(asked).result.summary.assumptions)


def test_an_extrapolation_is_among_the_assumptions(asked) -> None:
    cluster, hardware = load_cluster("h100-1x8")
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=4)
    swaps = Pins(tp=1, cp=2, dp=4, recompute="none", alpha=1.0)
    far = Question(
        model=model, cluster=cluster, hardware=hardware, seq_tokens=64 * 1024, system="any", global_batch=4, pins=swaps
    )
    for each in (asked, far):
        result = what_if(each).result
        told = [assumption.value for assumption in result.summary.assumptions if assumption.name == "extrapolated"]
        assert bool(told) == bool(result.best.outside_calibration)
        assert all(name in told[0] for name in result.best.outside_calibration)
    assert told


def test_memory_that_the_allocators_model_cannot_tell_is_said(asked) -> None:
    found = what_if(asked).result.summary
    scarce = msgspec.structs.replace(found.device_memory, peak="reserved", free_bytes=3 * 2**20)
    assert "--safety-gib" in summary_lines(msgspec.structs.replace(found, device_memory=scarce))[0]
    exact = msgspec.structs.replace(scarce, peak="arena")
    assert "--safety-gib" not in summary_lines(msgspec.structs.replace(found, device_memory=exact))[0]


def _host_memory(summary) -> str | None:
    return next((each.value for each in summary.assumptions if each.name == "host memory"), None)


def test_host_memory_that_the_plan_needs_is_assumed_with_its_source(asked) -> None:
    assert _host_memory(what_if(asked).result.summary) is None
    model, pins = msgspec.structs.replace(asked.model, layers=4), Pins(recompute="none", alpha=1.0)
    swapping = replace(asked, model=model, pins=pins, system="any")
    words = what_if(replace(swapping, pins=Pins(recompute="tokenwise", alpha=1.0))).result.summary.plan
    assert "all activations are swapped" in words
    assert "rest" not in words
    assert _host_memory(what_if(swapping).result.summary) == "1862.65 GiB a node, from the profile"
    part, hardware = load_cluster("a800-1x4")
    told = _host_memory(what_if(replace(swapping, cluster=part)).result.summary)
    assert told == "1862.65 GiB a node, from the profile; all of a node of 8 GPUs, of which others may use a part"
    given, hardware = with_memory(part, hardware, device_bytes=None, host_bytes=200 * GIB)
    answer = what_if(replace(swapping, cluster=given))
    assert _host_memory(answer.result.summary) == "200.00 GiB a node, as given"
    prediction = answer.best_simulation.prediction
    less = msgspec.structs.replace(prediction, step_s=1.02 * prediction.step_s, peak_host_bytes_per_node=GIB)
    far = msgspec.structs.replace(less, step_s=1.1 * prediction.step_s)
    for rivals, said in (([less, far], True), ([far], False)):
        text = _host_memory(
            summary_of(replace(swapping, cluster=given), answer.best_simulation, prediction, rivals=rivals)
        )
        assert (text.count("of it buy 2.0 %: --host-memory-gib 1 takes ") == 1) == said


def test_fused_operators_that_are_priced_as_torchs_are_named() -> None:
    tiny = msgspec.structs.replace(load_model("llama-tiny"), qk_norm=True)
    asked = Question(tiny, *load_cluster("h100-1x1"), seq_tokens=8192, system="any", pins=Pins(rowwise="triton"))
    for model, said in ((tiny, True), (load_model("llama-tiny"), False)):
        summary = what_if(replace(asked, model=model)).result.summary
        kernels = next(each.value for each in summary.assumptions if each.name == "other kernels")
        assert kernels.endswith("(qk_norm: priced as torch operators until measured)") == said
    free = replace(asked, pins=Pins())
    assert "--compile" in {one.option for one in left_out(free)}
    assert "--compile" not in {one.option for each in (asked, replace(free, system="memo")) for one in left_out(each)}


def test_a_timeline_with_the_name_of_the_plans_trace_is_refused(tmp_path) -> None:
    for name in ("trace", "placement"):
        outputs = Outputs(plan=tmp_path / "pp.json", timeline=tmp_path / f"pp.{name}.json")
        with pytest.raises(UsageError, match=f"pp.json writes this file itself: the plan's {name}"):
            outputs.check()
    Outputs(plan=tmp_path / "pp.json", timeline=tmp_path / "pp.perfetto.json").check()
