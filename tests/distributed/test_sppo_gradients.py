"""Compares a sequence in subsequences (SPPO) with the whole sequence: gradients, losses, and bytes copied.

Runs one process first, then 2 and 4 over gloo. Every subsequence attends to the KV cache of the earlier ones. Backward
goes from the last subsequence to the first and accumulates the gradients of the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.commands.run_outcome import Outcome
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.kernels import KERNELS
from memo_sim.contract import codec
from memo_sim.contract.plan import Decisions, Layout, MovedBytes
from memo_sim.memory.place import place
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.ir.work import Copy
from memo_sim.program.layout.multiplex import cut_tasks
from memo_sim.program.layout.partition import partition
from memo_sim.program.lower import lower
from tests.distributed.parity import TOLERANCE, Played, check, compare, play, whole_gradients
from tests.distributed.team import Member, Team
from tests.distributed.training import MODELS, label, reference
from tests.exec_cpu.plans import BYTES, byte_decisions, plan_of, predicted
from tests.exec_cpu.small import decide, gpt

EVEN, ODD = 512, 700
"""Numbers of tokens: four granules, and about five and a half, so that subsequences have unequal lengths."""

POLICIES: dict[str, tuple[str, str, int]] = {
    "keep": ("none", "nothing", 0),
    "full": ("full", "nothing", 0),
    "full, inputs mixed": ("full", "mixed", 0),
    "swap": ("none", "all", 0),
    "swap mixed": ("none", "mixed", 0),
    "swap in a window": ("none", "all", 1),
    "swap mixed in a window": ("none", "mixed", 1),
    "full in a window": ("full", "mixed", 1),
    "selective": ("selective", "nothing", 0),
    "norms": ("norms", "nothing", 0),
    "mlp": ("mlp", "nothing", 0),
    "operators": ("operators", "nothing", 0),
    "tokenwise": ("tokenwise", "nothing", 0),
    "tokenwise mixed": ("tokenwise", "mixed", 0),
    "tokenwise in a window": ("tokenwise", "mixed", 1),
    "tokenwise swap": ("tokenwise", "all", 0),
}
"""Recompute, what is swapped, and the offload window (in passes of a stage). "mixed" swaps half of the first
subsequence, nothing of the second and all of the third."""


def sppo(name: str, layout: Layout, policy: str = "keep", **changes: Any) -> Decisions:
    """Return decisions with two micro-batches per rank, in subsequences."""
    recompute, swaps, window = POLICIES[policy]
    fields: dict[str, Any] = {"seq_tokens": EVEN, "micro_batch": 1, "global_batch": 2 * layout.dp} | changes
    if layout.subsequences > 1:
        fields["offload_window"] = window
    chosen = decide(MODELS[name], layout=layout, recompute=recompute, **fields)
    if swaps == "all":
        return msgspec.structs.replace(chosen, swapped_tokens=chosen.local_tokens)
    if swaps == "nothing" or layout.subsequences == 1:
        return chosen
    granule = chosen.swap_granule
    parts = tuple((n // 2 // granule * granule or n, 0, n)[i % 3] for i, n in enumerate(partition(chosen)))
    return msgspec.structs.replace(chosen, swapped_tokens=sum(parts), subsequence_swapped_tokens=parts)


def text(value: object) -> str | None:
    """Return the name of a layout in a test's id."""
    return f"{label(value)}-n{value.subsequences}" if isinstance(value, Layout) else None


def planned(decisions: Decisions, rank: int) -> MovedBytes:
    """Return the bytes that a rank's program copies."""
    program = rank_program(decisions, MeshCoordinates(decisions.layout, rank))
    works = [i.work for _, i in program.walk() if isinstance(i.work, Copy)]
    sums = {way: sum(work.bytes for work in works if work.direction == way) for way in ("d2h", "h2d")}
    return MovedBytes(**sums)


def matches(team: Team, name: str, chosen: Decisions, *, steps: int = 1, **options: Any) -> list[Played]:
    """Compare the ranks with one process that plays whole sequences, and their copied bytes with their programs."""
    alone = reference(name, chosen.seq_tokens, chosen.global_batch, 2)
    if chosen.layout.devices > 1:
        ranks = check(team, chosen, alone, steps=steps, **options)
    else:
        ranks = [play(Member(0, 1), chosen, steps, options)]
        compare(ranks, alone, steps=steps)
    assert [rank.moved for rank in ranks] == [planned(chosen, i) for i in range(len(ranks))]
    swaps = chosen.recompute == "tokenwise" or chosen.swapped_tokens > 0
    assert all((rank.moved.d2h > 0) == swaps for rank in ranks)
    return ranks


ONE = [("gpt", EVEN, 1), ("gpt", EVEN, 4), ("gpt", ODD, 3), ("llama", EVEN, 2), ("llama", ODD, 3), ("llama", ODD, 5)]


@pytest.mark.parametrize(("name", "tokens", "parts"), ONE)
def test_one_process(team: Team, name: str, tokens: int, parts: int) -> None:
    matches(team, name, sppo(name, Layout(subsequences=parts), seq_tokens=tokens))


SEVERAL = [
    (Layout(tp=2, sequence_parallel=True, subsequences=3), "tokenwise mixed"),
    (Layout(pp=2, subsequences=4), "swap mixed in a window"),
    (Layout(pp=2, subsequences=3, schedule="interleaved", virtual_stages=2), "full"),
    (Layout(pp=2, subsequences=3, schedule="zero-bubble"), "keep"),
    (Layout(tp=2, sequence_parallel=True, pp=2, subsequences=3), "swap"),
]
KEEPS = [
    ("llama", Layout(tp=2, sequence_parallel=True, subsequences=3), "selective"),
    ("llama4", Layout(pp=2, subsequences=3, multiplexed=True), "operators"),
    ("gpt", Layout(cp=2, subsequences=2), "mlp"),
    ("llama", Layout(ulysses=2, subsequences=2), "norms"),
    ("llama4", Layout(pp=2, subsequences=3, schedule="zero-bubble"), "selective"),
    ("gpt", Layout(cp=2, cp_exchange="all_gather", subsequences=2), "operators"),
]


@pytest.mark.parametrize(
    ("name", "layout", "policy"), [*KEEPS[:2], *(pytest.param(*e, marks=pytest.mark.slow) for e in KEEPS[2:])], ids=text
)
def test_recompute_that_keeps_all_tokens(team: Team, name: str, layout: Layout, policy: str) -> None:
    """Micro-batches of two sequences."""
    batch = 2 if layout.multiplexed else 4
    matches(team, name, sppo(name, layout, policy, seq_tokens=1024, micro_batch=2, global_batch=batch), debug=True)


@pytest.mark.parametrize(
    ("layout", "policy"), [SEVERAL[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in SEVERAL[1:])], ids=text
)
def test_several_sequences_a_micro_batch(team: Team, layout: Layout, policy: str) -> None:
    name = "llama4" if layout.pp > 1 else "llama"
    matches(team, name, sppo(name, layout, policy, seq_tokens=ODD + 4, micro_batch=2, global_batch=4))


ULYSSES = [
    ("llama", Layout(ulysses=2, subsequences=3), "tokenwise mixed", {"micro_batch": 2, "global_batch": 4}),
    ("gpt", Layout(ulysses=2, subsequences=2), "keep", {}),
    ("llama", Layout(ulysses=2, subsequences=3), "swap mixed in a window", {}),
    ("llama-normed", Layout(ulysses=4, subsequences=2), "full, inputs mixed", {}),
    ("llama-normed", Layout(tp=2, sequence_parallel=True, ulysses=2, subsequences=2), "tokenwise mixed", {}),
    ("llama-uneven", Layout(ulysses=2, uneven_heads=True, subsequences=3), "tokenwise mixed", {}),
    ("llama4", Layout(ulysses=2, pp=2, subsequences=3), "swap mixed in a window", {}),
    ("llama4", Layout(ulysses=2, pp=2, schedule="zero-bubble", subsequences=3), "keep", {}),
    ("llama", Layout(ulysses=2, dp=2, zero=3, subsequences=2), "tokenwise mixed", {}),
]


@pytest.mark.parametrize(
    ("name", "layout", "policy", "changes"),
    [ULYSSES[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in ULYSSES[1:])],
    ids=text,
)
def test_heads_divided_over_ranks(team: Team, name: str, layout: Layout, policy: str, changes: dict[str, Any]) -> None:
    """Ulysses: every rank has its share of each subsequence, and inside attention all of it for some heads."""
    found = matches(team, name, sppo(name, layout, policy, seq_tokens=1024, **changes), debug=True)
    assert len(found) == layout.devices


DIVIDED = [
    ("llama", Layout(cp=2, subsequences=3), "tokenwise mixed", {}),
    ("llama", Layout(cp=2, cp_exchange="all_gather", subsequences=3), "swap mixed in a window", {}),
    ("gpt", Layout(cp=4, subsequences=2), "keep", {"seq_tokens": 1024}),
    ("gpt", Layout(cp=4, cp_exchange="all_gather", subsequences=2), "full, inputs mixed", {"seq_tokens": 1024}),
    ("llama", Layout(cp=4, subsequences=3), "full, inputs mixed", {"seq_tokens": 1136}),
    ("llama", Layout(cp=4, cp_exchange="all_gather", subsequences=3), "keep", {"seq_tokens": 1136}),
    ("llama", Layout(cp=2, subsequences=5), "swap", {"seq_tokens": 2560}),
    ("llama", Layout(cp=2, cp_exchange="all_gather", subsequences=5), "tokenwise swap", {"seq_tokens": 2560}),
    ("llama-normed", Layout(tp=2, sequence_parallel=True, cp=2, subsequences=2), "tokenwise mixed", {}),
    ("llama-uneven", Layout(ulysses=2, cp=2, uneven_heads=True, subsequences=2), "tokenwise mixed", {}),
    ("llama4", Layout(cp=2, pp=2, subsequences=3), "swap mixed in a window", {}),
    ("llama4", Layout(cp=2, pp=2, schedule="zero-bubble", subsequences=3), "keep", {}),
    ("llama4", Layout(cp=2, cp_exchange="all_gather", pp=2, subsequences=3), "tokenwise mixed", {}),
    ("llama", Layout(cp=2, dp=2, zero=3, subsequences=2), "tokenwise mixed", {}),
]
"""A ring or an all-gather of context-parallel ranks; the last subsequence is shorter than the others."""


@pytest.mark.parametrize(
    ("name", "layout", "policy", "changes"),
    [*DIVIDED[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in DIVIDED[2:])],
    ids=text,
)
def test_rows_divided_over_ranks(team: Team, name: str, layout: Layout, policy: str, changes: dict[str, Any]) -> None:
    """Context parallelism: every rank has its share of each subsequence in zigzag order, and of the KV cache."""
    found = matches(team, name, sppo(name, layout, policy, **{"seq_tokens": 1040} | changes))
    assert len(found) == layout.devices


TWO_SEQUENCES, THREE = {"micro_batch": 2, "global_batch": 4}, {"micro_batch": 3, "global_batch": 3}
SEVERAL_DIVIDED = [
    ("llama", Layout(cp=2, subsequences=3), "tokenwise mixed", TWO_SEQUENCES),
    ("llama", Layout(cp=4, cp_exchange="all_gather", subsequences=3), "swap mixed in a window", THREE),
    ("gpt", Layout(cp=4, subsequences=2), "keep", TWO_SEQUENCES | {"seq_tokens": 1024}),
    (
        "gpt",
        Layout(cp=2, cp_exchange="all_gather", subsequences=2),
        "full, inputs mixed",
        TWO_SEQUENCES | {"seq_tokens": 1024},
    ),
    ("llama", Layout(cp=4, subsequences=3), "full, inputs mixed", THREE | {"seq_tokens": 1136}),
    ("llama", Layout(cp=4, cp_exchange="all_gather", subsequences=3), "keep", THREE | {"seq_tokens": 1136}),
    ("llama", Layout(cp=2, cp_exchange="all_gather", subsequences=5), "tokenwise swap", THREE | {"seq_tokens": 2560}),
    ("llama", Layout(cp=2, subsequences=5), "swap", TWO_SEQUENCES | {"seq_tokens": 2560}),
    ("llama-normed", Layout(tp=2, sequence_parallel=True, cp=2, subsequences=2), "tokenwise mixed", TWO_SEQUENCES),
    ("llama-uneven", Layout(ulysses=2, cp=2, uneven_heads=True, subsequences=2), "tokenwise mixed", TWO_SEQUENCES),
    ("llama4", Layout(cp=2, pp=2, subsequences=3), "swap mixed in a window", TWO_SEQUENCES),
    ("llama4", Layout(cp=2, pp=2, schedule="zero-bubble", subsequences=3), "keep", TWO_SEQUENCES),
    ("llama4", Layout(cp=2, cp_exchange="all_gather", pp=2, subsequences=3), "tokenwise mixed", TWO_SEQUENCES),
]
"""Context-parallel ranks divide subsequences of several sequences."""


@pytest.mark.parametrize(
    ("name", "layout", "policy", "changes"),
    [*SEVERAL_DIVIDED[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in SEVERAL_DIVIDED[2:])],
    ids=text,
)
def test_rows_of_several_sequences_divided_over_ranks(
    team: Team, name: str, layout: Layout, policy: str, changes: dict[str, Any]
) -> None:
    matches(team, name, sppo(name, layout, policy, **{"seq_tokens": 1040} | changes), debug=True)


WINDOWS = [
    ("window", Layout(cp=2, subsequences=3), "tokenwise mixed", TWO_SEQUENCES),
    ("window-sinks", Layout(subsequences=5), "swap mixed in a window", TWO_SEQUENCES),
    ("window-sinks", Layout(cp=4, subsequences=3), "full, inputs mixed", {}),
    ("window", Layout(cp=2, cp_exchange="all_gather", subsequences=3), "keep", {}),
    ("window", Layout(cp=4, subsequences=5), "swap", THREE),
    ("window-sinks", Layout(ulysses=2, cp=2, subsequences=2), "tokenwise mixed", TWO_SEQUENCES),
    ("window", Layout(tp=2, sequence_parallel=True, cp=2, subsequences=2), "tokenwise swap", {}),
    ("window", Layout(ulysses=2, subsequences=3), "tokenwise mixed", THREE),
    ("window", Layout(cp=2, subsequences=10), "full", TWO_SEQUENCES),
    ("llama-sinks", Layout(cp=2, subsequences=3), "tokenwise mixed", TWO_SEQUENCES),
    ("llama-sinks", Layout(cp=4, cp_exchange="all_gather", subsequences=2), "full", {}),
]


@pytest.mark.parametrize(
    ("name", "layout", "policy", "changes"),
    [*WINDOWS[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in WINDOWS[2:])],
    ids=text,
)
def test_windows_and_sinks_in_subsequences(
    team: Team, name: str, layout: Layout, policy: str, changes: dict[str, Any]
) -> None:
    """A window's keys come from neighbouring ranks and from the subsequence before."""
    rows = 128 * layout.subsequences * layout.tp
    fields = {"seq_tokens": layout.cp * layout.ulysses * rows} | changes
    matches(team, name, sppo(name, layout, policy, **fields), debug=True)


UNLIKE = [
    ("differing5", Layout(pp=2, pp_layers=(2, 3), subsequences=3), "tokenwise mixed"),
    ("gemma3-4", Layout(pp=2, subsequences=3), "full, inputs mixed"),
    ("differing5", Layout(pp=2, pp_layers=(3, 2), schedule="zero-bubble", subsequences=3), "swap mixed in a window"),
    (
        "differing5",
        Layout(pp=2, pp_layers=(1, 1, 2, 1), schedule="interleaved", virtual_stages=2, subsequences=4),
        "full in a window",
    ),
    ("differing5", Layout(tp=2, sequence_parallel=True, dp=2, zero=3, subsequences=2), "tokenwise in a window"),
    ("gemma3-4", Layout(cp=2, pp=2, subsequences=2), "tokenwise swap"),
]


@pytest.mark.parametrize(
    ("name", "layout", "policy"),
    [*UNLIKE[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in UNLIKE[2:])],
    ids=text,
)
def test_layers_that_differ_in_subsequences(team: Team, name: str, layout: Layout, policy: str) -> None:
    layout = msgspec.structs.replace(layout, partition="length")
    rows = 128 * layout.subsequences * layout.tp * layout.cp
    matches(team, name, sppo(name, layout, policy, seq_tokens=rows), debug=True)


QUICK = {("gpt", "full, inputs mixed"), ("gpt", "swap"), ("gpt", "tokenwise mixed"), ("llama", "full")}
QUICK |= {("llama", "swap mixed"), ("llama", "tokenwise"), ("llama", "tokenwise mixed")}
QUICK |= {("gpt", "swap mixed in a window"), ("llama", "tokenwise in a window")}
CASES = [(name, policy) for name in ("gpt", "llama") for policy in POLICIES if policy != "keep"]


@pytest.mark.parametrize(
    ("name", "policy"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_what_happens_to_activations_changes_no_bit(team: Team, name: str, policy: str) -> None:
    layout = Layout(subsequences=3)
    (found,) = matches(team, name, sppo(name, layout, policy, seq_tokens=ODD), debug=True)
    kept = play(Member(0, 1), sppo(name, layout, seq_tokens=ODD), 1, {})
    wanted, gradients = whole_gradients([kept]), whole_gradients([found])
    assert found.losses == kept.losses
    assert [name for name, gradient in wanted.items() if not gradients[name].equal(gradient)] == []


@pytest.mark.parametrize("op", ["attention.merge", "grad.accumulate", "qkv.join"])
def test_the_comparison_finds_an_operator_that_is_left_out(op: str) -> None:
    chosen = sppo("llama", Layout(subsequences=4))
    found = whole_gradients([play(Member(0, 1), chosen, 1, {"kernels": {**KERNELS, op: lambda call: None}})])
    wanted = whole_gradients([reference("llama", EVEN, 2, 2)])
    errors = {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items()}
    assert not max(errors.values()) <= 1000 * TOLERANCE


TWO = {
    "gpt4": [
        Layout(tp=2, subsequences=4),
        Layout(pp=2, schedule="gpipe", subsequences=4),
        Layout(dp=2, zero=1, subsequences=2),
    ],
    "llama4": [
        Layout(tp=2, sequence_parallel=True, subsequences=2),
        Layout(pp=2, schedule="1f1b", subsequences=4),
        Layout(dp=2, subsequences=2),
    ],
}


@pytest.mark.parametrize(("name", "layout"), [(name, each) for name in TWO for each in TWO[name]], ids=text)
def test_two_processes(team: Team, name: str, layout: Layout) -> None:
    matches(team, name, sppo(name, layout, "tokenwise mixed"), steps=2)


FOUR = [
    Layout(pp=4, schedule="gpipe", subsequences=3),
    Layout(pp=4, schedule="1f1b", subsequences=3),
    Layout(tp=2, sequence_parallel=True, pp=2, subsequences=3),
]


@pytest.mark.parametrize(("name", "layout"), list(zip(["gpt4", "llama4", "gpt4"], FOUR, strict=True)), ids=text)
def test_four_processes(team: Team, name: str, layout: Layout) -> None:
    matches(team, name, sppo(name, layout, "tokenwise mixed", seq_tokens=ODD))


def test_idle_stages_play_rows_of_others(team: Team) -> None:
    """Multiplexed (SPPO 6.2), with token shards and an offload window; ``test_multiplexed.py`` has more cases."""
    layout = Layout(tp=2, sequence_parallel=True, pp=2, subsequences=3, multiplexed=True)
    chosen = sppo("llama4", layout, "swap in a window", seq_tokens=2 * EVEN, global_batch=1)
    assert cut_tasks(chosen)
    matches(team, "llama4", chosen)


SLOW = [
    *(layout for layouts in TWO.values() for layout in layouts),
    *FOUR,
    Layout(pp=2, schedule="interleaved", virtual_stages=2, subsequences=2),
    Layout(pp=2, schedule="zero-bubble", subsequences=4),
    Layout(pp=2, schedule="1f1b", overlap_p2p=False, subsequences=2),
    Layout(dp=2, zero=2, subsequences=2),
    Layout(dp=2, zero=3, subsequences=2),
    Layout(tp=2, dp=2, zero=1, subsequences=2),
    Layout(dp=2, pp=2, subsequences=2),
    Layout(tp=2, pp=2, schedule="zero-bubble", subsequences=2),
]


COMBINED = [
    (("gpt4", "llama4")[(i + j) % 2], layout, policy)
    for i, layout in enumerate(SLOW)
    for j, policy in enumerate(POLICIES)
]


@pytest.mark.parametrize(("name", "layout", "policy"), COMBINED, ids=text)
@pytest.mark.slow
def test_every_combination(team: Team, name: str, layout: Layout, policy: str) -> None:
    tokens = ODD if layout.subsequences == 3 else EVEN
    matches(team, name, sppo(name, layout, policy, seq_tokens=tokens))


@pytest.mark.parametrize("changes", [{"loss_chunk_tokens": 100}, {"states": "host"}, {"partition": "length"}], ids=str)
def test_knobs_beside(team: Team, changes: dict[str, Any]) -> None:
    layout = Layout(subsequences=3, partition=changes.pop("partition", "flops"))
    matches(team, "llama", sppo("llama", layout, "tokenwise mixed", seq_tokens=ODD, **changes), steps=2)


def test_no_race_on_any_stage(team: Team) -> None:
    chosen = sppo("llama4", Layout(pp=2, subsequences=3), "tokenwise mixed", seq_tokens=ODD)
    matches(team, "llama4", chosen, debug=True)


RUNS = {
    "whole": Layout(),
    "one": Layout(subsequences=2),
    "pp2": Layout(pp=2, subsequences=2),
    "pp2-multiplexed": Layout(pp=2, subsequences=2, multiplexed=True),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plans of the same training, each with the arena of its largest stage and its predicted copies."""
    folder = tmp_path_factory.mktemp("plans")
    for name, layout in RUNS.items():
        model = gpt(vocab=BYTES, layers=4, max_positions=1024)
        chosen = byte_decisions(model=model, seq_tokens=1024, swapped_tokens=1024, layout=layout, global_batch=1)
        arenas = [place(requests_of(each), solver="greedy") for each in lower(chosen)]
        arena = max(arenas, key=lambda each: each.arena_bytes)
        prediction = predicted(peak_device_bytes=arena.arena_bytes, moved_bytes=planned(chosen, 0))
        codec.write(folder / f"{name}.json", plan_of(chosen, prediction, placement=arena))
        codec.write(folder / f"{name}.placement.json", arena)
    return folder


def train(member: Member, plan: Path) -> Outcome:
    """Run a plan as ``memo-exec run`` does."""
    del member
    outcome = run(plan, RunOptions(steps=3))
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("name", [name for name in RUNS if name != "whole"])
def test_memo_exec_runs_it_as_predicted(team: Team, plans: Path, name: str) -> None:
    whole = train(Member(0, 1), plans / "whole.json").comparison
    found = team.play(train, RUNS[name].devices, plans / f"{name}.json", meets=False)
    for outcome in found:
        assert outcome.comparison.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    comparison = found[0].comparison
    peaks = comparison.peak_device_bytes_by_rank or [comparison.measured.peak_device_bytes]
    assert comparison.predicted is not None
    assert comparison.predicted.peak_device_bytes in peaks  # the plan pins the arena of one of the stages
    assert max(peaks) < whole.measured.peak_device_bytes
    assert comparison.ratio is not None
    assert comparison.ratio.moved_bytes == {"d2h": 1.0, "h2d": 1.0}
