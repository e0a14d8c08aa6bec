"""Sentences that explain an answer: the bottleneck, recompute, alpha, memory, and what would help."""

from __future__ import annotations

import dataclasses
import re

import msgspec
import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.hardware import DISTURBED
from memo_sim.contract.plan import Decisions, Layout, Prediction, Stall
from memo_sim.contract.units import GIB, format_bytes
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import play
from memo_sim.program.arena.library_workspaces import RESULTS
from memo_sim.reasons.runner_up import Closeness, allocator_decides, closer_than_the_interval, runner_up
from tests.sim.planning.test_search import question
from tests.sim.toy_machine import decide


def why(asked: Question) -> str:
    return "\n".join(what_if(asked).result.why)


def test_the_memory_that_limits_alpha_is_named() -> None:
    text = why(question(320 * 1024, system="memo"))
    assert re.search(
        r"Recompute is \d+\.\d % of compute time: host memory limits alpha; .* does not fit \(short by", text
    )
    assert re.search(
        r"MEMO's linear program gives .*; the next higher alpha does not fit \(short by [\d.]+ GiB of host memory\)\.",
        text,
    )


def test_copies_that_limit_alpha_are_named() -> None:
    text = why(question(128 * 1024, system="memo"))
    assert "with a higher alpha, compute would wait longer for copies" in text
    assert "alpha does not fit" not in text


@pytest.mark.parametrize(
    ("seq_tokens", "said"),
    [
        (
            256,
            r"on the device\.\nNorms, .* 16 row blocks of 8k tokens, .*; recompute by token does not fit \(short",
        ),
        (1024, r"Recompute is \d+\.\d % of compute time: swapping instead does not fit on this layout \(short by"),
    ],
)
def test_rowwise_and_full_recompute_say_that_swapping_does_not_fit(seq_tokens: int, said: str) -> None:
    """Beyond the length at which a layer's three tensors fit on the device and the host, full recompute is left."""
    asked = dataclasses.replace(question(seq_tokens * 1024), global_batch=1)
    cluster, hardware = with_memory(asked.cluster, asked.hardware, device_bytes=None, host_bytes=64 * GIB)
    assert re.search(said, why(dataclasses.replace(asked, cluster=cluster, hardware=hardware)))


def test_a_partial_swap_recomputes_nothing_and_says_so() -> None:
    text = why(question(128 * 1024))
    assert "the rest is kept, and nothing is recomputed" in text
    assert "Recompute is" not in text


def test_the_peak_is_reported_with_the_reserve_and_the_capacity() -> None:
    answer = what_if(question(128 * 1024, system="full-recompute"))
    assert answer.best is not None
    memory = answer.best.memory
    libraries = f"including {format_bytes(memory.reserve[RESULTS])} for {RESULTS}"
    have = format_bytes(memory.device_capacity_bytes)
    wanted = f"plus {format_bytes(memory.reserve_bytes)} reserve ({libraries}), of {have}."
    assert any(line.startswith("Device memory peaks") and line.endswith(wanted) for line in answer.result.why)


def test_the_share_of_recompute() -> None:
    asked = question(64 * 1024)
    shares = [
        play(asked, decide(policy, layers=6, layout=Layout(tp=2))).recompute_share
        for policy in (("none", 0.0), ("tokenwise", 1.0), ("tokenwise", 0.5), ("full", 0.0))
    ]
    assert shares[0] == shares[1] == 0 < shares[2] < shares[3] < 0.5


def test_a_wait_after_the_last_kernel_is_named() -> None:
    asked = dataclasses.replace(question(32 * 1024, system="full-recompute"), states="host")
    result = what_if(asked).result
    assert result.best is not None
    line = next(line for line in result.why if line.startswith("Compute is busy"))
    assert re.search(r"mostly for adamw\.decay on the host [\d.]+ m?s", line)
    longest = max((s for s in result.best.stalls if s.lane == "compute"), key=lambda s: s.seconds)
    assert longest.waits_for == "adamw.decay on the host"


def test_only_options_that_are_still_open_are_named() -> None:
    asked = dataclasses.replace(question(1024, system="full-swap"), states="bf16")
    small: dict[str, int | None] = {"device_bytes": GIB, "host_bytes": None}
    cluster, hardware = with_memory(asked.cluster, asked.hardware, **small)
    text = why(dataclasses.replace(asked, cluster=cluster, hardware=hardware))
    wanted = "What would help: leave --tp, --cp to the search; more devices (memo-sim gpus finds how many)."
    assert wanted in text  # --states host and --zero 3 help, but are not enough
    assert "more host memory" in why(question(1024 * 1024, system="full-swap"))


def test_groups_of_zero_are_explained_and_left_out_where_memory_is_short() -> None:
    pins = Pins(dp=8, zero=2, zero_ranks=4)
    asked = dataclasses.replace(question(1024, system="full-recompute"), pins=pins, global_batch=8)
    line = next(line for line in what_if(asked).result.why if line.startswith("ZeRO 2"))
    assert re.match(
        r"ZeRO 2 over groups of 4 ranks: a rank holds a shard of gradients; per step it gathers [\d.]+ GiB,"
        r" reduce-scatters [\d.]+ GiB and all-reduces [\d.]+ GiB between groups; compute waits",
        line,
    )
    small: dict[str, int | None] = {"device_bytes": 36 * GIB, "host_bytes": None}
    cluster, hardware = with_memory(asked.cluster, asked.hardware, **small)
    text = why(dataclasses.replace(asked, cluster=cluster, hardware=hardware))
    assert re.search(r"What would help: .*--zero-ranks 8", text)


def test_exchanges_in_chunks_and_an_early_stop_without_effect_are_explained() -> None:
    pins = Pins(tp=2, dp=4, tp_overlap="chunked", recompute="none", alpha=0)
    asked = dataclasses.replace(question(1024, system="any"), pins=pins, global_batch=4)
    sharded = dataclasses.replace(pins, sharding="fsdp2", memory_policy="eager", zero=1, tp_overlap="none")
    text = why(dataclasses.replace(asked, pins=sharded))
    assert "ZeRO 2 and 3 are not used here, so nothing is as torch's FSDP2 has it (--sharding fsdp2)." in text
    assert re.search(
        r"tp are cut into 2 chunks, .* \(--tp-overlap chunked\); compute waits [\d.]+ \w+ for them\.", why(asked)
    )
    assert "chunks" not in why(dataclasses.replace(asked, pins=dataclasses.replace(pins, tp_overlap="none")))
    blocks = Pins(dp=8, recompute="full", mlp_chunk_tokens=512)
    text = why(dataclasses.replace(question(1024, system="fsdp"), pins=blocks, global_batch=8))
    assert "without its second matrix product, whatever --early-stop says" in text


def test_the_allocators_reserve_and_cost_are_reported() -> None:
    text = why(question(128 * 1024, system="full-recompute", memory_policy="eager", allocator_limit_gib=0))
    assert re.search(
        r"Memory is not planned: an eager framework reserves 7\d\.\d\d GiB, \d+\.\d % above the peak; "
        r"[\d.]+ allocation retries per micro-batch; compute waits for its calls for \d+\.\d % of the step\.",
        text,
    )
    cached = why(question(128 * 1024, system="full-recompute", memory_policy="caching"))
    assert re.search(r"the caching allocator reserves .* above the peak; no allocation retries\.", cached)
    assert "Planned arena" not in cached
    assert "not planned" not in why(question(128 * 1024, system="full-recompute"))


def test_waiting_for_the_allocator_does_not_count_as_compute() -> None:
    text = why(question(128 * 1024, system="full-recompute", memory_policy="eager"))
    busy = re.search(r"Compute is busy ([\d.]+) % of the step; it waits [\d.]+ s in total, mostly for allocator", text)
    stopped = re.search(r"compute waits for its calls for ([\d.]+) % of the step", text)
    assert busy is not None
    assert stopped is not None
    assert float(busy[1]) + float(stopped[1]) < 100


def test_a_planned_arena_is_named_where_it_would_help() -> None:
    asked = question(576 * 1024, system="full-recompute", memory_policy="eager")
    assert re.search(r"What would help: .*--memory-policy planned", why(asked))
    short = question(2048 * 1024, system="full-recompute")
    assert "--memory-policy" not in why(short)


def test_a_profile_of_a_busy_machine_is_reported() -> None:
    asked = question(32 * 1024, system="full-recompute")
    busy = msgspec.structs.replace(asked.hardware, provenance={DISTURBED: "the load was 9.0 on 2 cores"})
    text = why(dataclasses.replace(asked, hardware=busy))
    assert "was measured on a busy machine (the load was 9.0 on 2 cores)" in text
    assert "busy machine" not in why(asked)


def test_plans_closer_than_the_interval_are_counted() -> None:
    def said(plans: int, others: int = 0) -> list[str]:
        return closer_than_the_interval(
            Closeness(margin=0.1, level=0.8, pairs=90, sources=6, plans=plans, others=others)
        )

    known = "In 80 % of 90 pairs of plans in 6 sources the ratio of the two measured steps was within 10.0 % of the"
    close = "within 10.0 % of the best, too close to tell apart; measured, one of them may be faster."
    first = f"1 other evaluated plan is {close}"
    assert said(1) == [f"{first} {known} predicted one."]
    assert said(2)[0].startswith("2 other evaluated plans are within 10.0 % of the best, too close to tell apart; ")
    assert said(0, 1)[0].startswith("1 plan with another kind of memory, or with and without allocation retries, may")
    assert [line.split(" ")[0] for line in said(3, 2)] == ["3", "2"]
    assert said(0) == closer_than_the_interval(None) == []


def test_a_runner_up_loses_time_to_waiting_or_to_compute() -> None:
    played, policy = decide(("full", 0.0)), Policy("full", 0.0)

    def evaluated(step_s: float, **waits: float) -> Evaluated:
        stalls = [Stall(lane="compute", waits_for=name, seconds=s, count=1) for name, s in waits.items()]
        busy = {"compute": step_s - sum(waits.values())}
        return Evaluated(policy, played, Prediction(status="ok", step_s=step_s, lanes=busy, stalls=stalls))

    best = evaluated(10.0, all_gather=3.0, allocator=1.0)
    waiting, computing = evaluated(15.0, all_gather=3.5, allocator=3.5), evaluated(15.0, all_gather=4.0)
    said = [runner_up(SearchResult(ranked=[best, e], evaluated=2, pruned=0))[0] for e in (waiting, computing)]
    assert said[0].endswith("5 s (50.0 %) slower: 3 s more waiting, mostly for allocator.")
    assert said[1].endswith("5 s (50.0 %) slower: 5 s more compute.")


@pytest.mark.parametrize("policy", ["caching", "eager"])
def test_a_rival_that_only_the_allocator_slows_is_named(policy: str) -> None:
    decisions = msgspec.structs.replace(decide(("full", 0.0)), memory_policy=policy)

    def evaluated(step_s: float, waits_s: float) -> Evaluated:
        stalls = [Stall(lane="compute", waits_for="allocator", seconds=waits_s, count=1)] if waits_s else []
        prediction = Prediction(status="ok", step_s=step_s, stalls=stalls, allocation_retries=4 * bool(waits_s))
        return Evaluated(Policy("full", 0.0), decisions, prediction)

    def said(*rivals: Evaluated, best: Evaluated, without_s: float = 8.5) -> str:
        ranked, asked = [best, *rivals], []

        def predict(decisions: Decisions) -> Prediction:
            asked.append(decisions.memory_policy)
            return Prediction(status="ok", step_s=without_s)

        text = " ".join(allocator_decides(SearchResult(ranked=ranked, evaluated=1, pruned=0), predict))
        assert set(asked) <= {"caching"}
        assert len(asked) <= 3
        return text

    best = evaluated(10.0, 0.0)
    assert said(evaluated(12.0, 1.5), evaluated(13.0, 0.0), best=best, without_s=10.5) == ""
    rival = evaluated(12.0, 3.5)
    text = said(rival, evaluated(13.0, 0.0), best=best)
    assert text.startswith(
        "The allocator decides: full recompute on tp1 cp1 dp1 takes 12 s with 4 allocation retries; without them"
    )
    assert ("(--memory-policy caching)" in text) == (policy == "eager")
    assert text.endswith("it would take 8.5 s and beat the best plan.")
    # The best plan has no retries either then.
    waits = said(rival, best=evaluated(10.0, 1.0))
    assert waits.endswith("beat the best plan, which would take 9 s.") == (policy == "caching")
    if policy == "eager":
        assert waits == ""  # both take 8.5 s
        assert said(rival, best=best, without_s=11.0) == ""


def test_a_limit_of_the_allocator_is_explained() -> None:
    text = why(question(128 * 1024, system="full-recompute", memory_policy="eager"))
    found = re.search(
        r"PyTorch's allocator is limited to \d+ GiB of the device \(torch\.cuda\.set_per_process_memory_fraction\): "
        r"each retry releases the whole cache; without the limit there are \d+ allocation retries instead of \d+, and "
        r"the step is [\d.]+ m?s longer\.",
        text,
    )
    pinned = why(question(128 * 1024, system="full-recompute", memory_policy="eager", allocator_limit_gib=0))
    assert "is limited to" not in pinned
    assert found is not None
