"""The printed answer: the verdict first, details only where they are asked for."""

from __future__ import annotations

import msgspec

from memo_sim.contract.longest import Longest, Tried
from memo_sim.contract.result import MoreMemory
from memo_sim.contract.summary import Assumption, DeviceMemory, HostMemory, LeftOut, Summary
from memo_sim.contract.units import GIB
from memo_sim.views.answer_text import answer_text, longest_text, thinned
from memo_sim.views.stage_numbers import from_one
from memo_sim.views.summary_text import not_read_lines, summary_lines
from tests.views.test_tables import INTERVAL, infeasible, plan, result

SUMMARY = Summary(
    fits=True,
    status="ok",
    devices=8,
    tokens_per_step=1 << 20,
    step_s=83.6,
    interval=INTERVAL,
    mfu=0.5231,
    tokens_per_device_s=1567.25,
    device_hours_per_billion_tokens=177.2,
    price_per_device_hour=2.5,
    price_per_step=0.4644,
    price_per_billion_tokens=443.1,
    device_memory=DeviceMemory(
        peak="arena",
        peak_bytes=71 * GIB,
        live_bytes=70 * GIB,
        reserve_bytes=4 * GIB,
        needed_bytes=75 * GIB,
        capacity_bytes=80 * GIB,
        free_bytes=5 * GIB,
    ),
    host_memory=HostMemory(needed_bytes=1200 * GIB, capacity_bytes=1800 * GIB),
    plan="tp4+sp cp2 dp1 on 8 GPUs; keep",
    assumptions=[Assumption(name="dtype", value="bf16", option="--dtype"), Assumption(name="reserve", value="4 GiB")],
    left_out=[LeftOut(what="Ulysses", option="--system every-layout"), LeftOut(what="METP", option="--system metp")],
)
VERDICT = """\
FITS with 5.00 GiB free on a device: planned arena 71.00 GiB + reserve 4.00 GiB = 75.00 GiB of 80.00 GiB; \
host memory: 1200.00 GiB of 1800.00 GiB a node, for all its ranks.
Step 83.6 s (80 % interval 81 to 91.5 s), MFU 52.3 %, 1567 tokens per GPU and second, 177 GPU-hours per billion \
tokens, price 443 per billion tokens, 0.464 a step (at 2.5 a GPU-hour).
Plan: tp4+sp cp2 dp1 on 8 GPUs; keep.
Assumed:
  dtype    bf16 (--dtype)
  reserve  4 GiB
Not tried: Ulysses (--system every-layout); METP (--system metp)."""


def test_the_verdict_says_what_each_memory_figure_includes() -> None:
    assert "\n".join(summary_lines(SUMMARY)) == VERDICT
    stages = msgspec.structs.replace(SUMMARY.device_memory, stage=1, stages=4, peak="reserved")
    (first, *_) = summary_lines(msgspec.structs.replace(SUMMARY, device_memory=stages))
    reserved = "reserved by PyTorch's allocator 71.00 GiB (70.00 GiB live, its cache the rest) + reserve 4.00 GiB"
    assert f"on a device (stage 2 of 4, the fullest): {reserved}" in first
    retries = msgspec.structs.replace(stages, allocation_retries=3, allocator_wait_s=1.5)
    (first, *_) = summary_lines(msgspec.structs.replace(SUMMARY, device_memory=retries))
    assert "free on a device (stage 2 of 4, the fullest), which PyTorch's cache fills (--safety-gib 1" in first
    assert "(70.00 GiB live, its cache the rest; 3 allocation retries a step cost 1.5 s)" in first


def test_the_verdict_says_why_an_interval_is_wide_or_missing() -> None:
    beyond = ["2m tokens (the longest row has 1280k)", "128 devices (the largest row has 64)"]
    wide = msgspec.structs.replace(INTERVAL, beyond=beyond)
    speed = summary_lines(msgspec.structs.replace(SUMMARY, interval=wide))[1]
    assert "(80 % interval 81 to 91.5 s; wider than usual: no published row has 2m tokens or 128 devices)" in speed
    retries = msgspec.structs.replace(INTERVAL, allocation_retries=True)
    speed = summary_lines(msgspec.structs.replace(SUMMARY, interval=retries))[1]
    assert "; wider than usual: PyTorch's allocator retries allocations)" in speed
    none = msgspec.structs.replace(SUMMARY, interval=None, no_interval="the profile is rough")
    assert "Step 83.6 s (no interval: the profile is rough), MFU" in summary_lines(none)[1]


def test_ignored_fields_of_a_model_are_listed_once_below_a_table() -> None:
    ignored = Assumption(name="not read", value="of the model's file: quantization_config")
    summary = msgspec.structs.replace(SUMMARY, assumptions=[ignored])
    assert not_read_lines([summary, None, summary]) == ["Not read of the model's file: quantization_config."]
    assert not_read_lines([SUMMARY, None]) == []


def test_stages_are_counted_from_one() -> None:
    reason = "stage0: device memory runs out, worst at m0/s0/l3/fwd/qkv"
    assert from_one(f"{reason}; pipeline bubble (stage 1); (stage 2 of 4)") == (
        "stage 1: device memory runs out, worst at m0/s0/l3/fwd/qkv; pipeline bubble (stage 2); (stage 2 of 4)"
    )
    assert from_one("program stage1  ok, beside plan.trace.stage1.json") == (
        "program stage 2  ok, beside plan.trace.stage1.json"
    )


def test_memory_of_an_allocator_that_runs_out_is_not_shown_as_a_sum() -> None:
    """It needs 90 GiB there, and at another instant 71 GiB are live: 71 and 4 do not make 90."""
    short = msgspec.structs.replace(
        SUMMARY.device_memory, peak="live", peak_bytes=71 * GIB, needed_bytes=90 * GIB, free_bytes=0
    )
    summary = msgspec.structs.replace(
        SUMMARY, fits=False, status="gpu_oom", shortfall_bytes=10 * GIB, device_memory=short
    )
    first, *_ = summary_lines(summary)
    assert "+ reserve" not in first
    assert "90.00 GiB of 80.00 GiB are needed at the worst instant, with the reserve of 4.00 GiB" in first
    assert "at most 71.00 GiB are live" in first


def test_details_are_shown_only_where_they_are_asked_for() -> None:
    answer = msgspec.structs.replace(result(plan()), summary=SUMMARY, why=["Because."])
    short = answer_text(answer)
    assert short.startswith(f"gpt-7b on a800-1x8, 1m tokens\n{VERDICT}\n\nMore: --why (reasons), --top 3 ")
    assert len(short.splitlines()) == len(VERDICT.splitlines()) + 3
    assert answer_text(answer, why=True).count("Because.") == 1
    assert "12 plans evaluated, 3 pruned:\n" in answer_text(answer, top=3)
    assert answer_text(answer, searched=False).endswith("\n\nMore: --why (reasons).")
    bought = msgspec.structs.replace(
        answer, more_memory=[MoreMemory(space="host", added_bytes=GIB, best=None, text="A GiB helps.")]
    )
    assert "\n\nA GiB helps.\n\nMore: " in answer_text(bought)


def test_what_does_not_fit_is_told_with_ways_out_and_without_speed() -> None:
    device = msgspec.structs.replace(
        SUMMARY.device_memory, peak="live", peak_bytes=86 * GIB, needed_bytes=90 * GIB, free_bytes=0
    )
    short = msgspec.structs.replace(
        SUMMARY,
        fits=False,
        status="gpu_oom",
        device_memory=device,
        shortfall_bytes=10 * GIB,
        reason="device memory runs out",
        ways_out=["more devices", "--states host"],
    )
    text = answer_text(msgspec.structs.replace(result(infeasible()), summary=short))
    assert "\nDOES NOT FIT: 10.00 GiB are missing on a device: live bytes 86.00 GiB + reserve 4.00 GiB = 90.00" in text
    assert "\nWhy: device memory runs out.\n" in text
    assert "\nWays out:\n  more devices\n  --states host\n" in text
    assert "Step" not in text
    host = msgspec.structs.replace(short, status="host_oom")
    assert summary_lines(host)[0].startswith("DOES NOT FIT: 10.00 GiB of host memory a node are missing; host memory: ")


def test_near_duplicates_of_a_front_are_left_out() -> None:
    near = plan(step_s=84.0, peak_device_bytes=int(70.9 * GIB))
    less = plan(step_s=84.0, peak_device_bytes=60 * GIB)
    no_host = plan(step_s=84.0, peak_host_bytes_per_node=0)
    assert thinned([plan(), near, less, no_host]) == ([plan(), less, no_host], 0.01)
    whole = msgspec.structs.replace(
        result(plan()), summary=SUMMARY, front=[plan(), near, less, no_host], front_is_whole=True
    )
    assert "(1 plan left out: a listed one is as good within 1.0 % of time and 5 % of memory):\n" in answer_text(whole)


def test_at_most_twelve_plans_of_a_front_are_listed() -> None:
    front = [plan(step_s=80.0 + 0.5 * n, peak_device_bytes=(70 - n) * GIB) for n in range(60)]
    listed, slower = thinned(front)
    assert len(listed) <= 12
    assert slower > 0.01
    assert (listed[0], listed[-1]) == (front[0], front[-1])


def test_the_longest_sequence_comes_before_the_lengths_that_were_tried() -> None:
    document = Longest(
        model="gpt-7b",
        cluster="a800-1x8",
        system="every-layout",
        step_tokens=1 << 16,
        seq_tokens=1 << 20,
        best=plan(),
        bound="device memory",
        tried=[Tried(seq_tokens=1 << 20, fits=True, step_s=83.6)],
        why=["1088k tokens do not fit.", "The search evaluated 1 multiple."],
        summary=SUMMARY,
    )
    short, whole = longest_text(document), longest_text(document, why=True)
    assert short.startswith("gpt-7b on a800-1x8: 1m tokens at most (limited by device memory)\nFITS with ")
    other = longest_text(msgspec.structs.replace(document, system="any"))
    assert other.startswith("gpt-7b on a800-1x8, system any: 1m tokens at most")
    assert "\n1088k tokens do not fit.\n\nMore: --why" in short
    assert "evaluated" not in short
    assert "a plan's step" in whole
    assert "The search evaluated 1 multiple." in whole
