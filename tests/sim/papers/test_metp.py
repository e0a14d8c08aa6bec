"""METP's Figures 4 to 7, computed small: the systems compared, and which of the paper's findings are reproduced."""

from __future__ import annotations

import pytest

from memo_sim.contract.figure import Figure
from memo_sim.papers import metp
from memo_sim.papers.figures import figure
from memo_sim.papers.metp import FEWER, GPUS, METP, SETTINGS, TP, Job, Setting, cell, most_that_fits, share, ways
from memo_sim.planning.question import Pins

STAGE = Setting("llama-70b", 5)


def test_models_are_those_of_table_3() -> None:
    found = {setting.name: setting.model for setting in SETTINGS}
    shapes = {name: (m.hidden, m.heads, m.layers) for name, m in found.items()}
    assert shapes == {
        "bert-large": (1024, 16, 24),
        "llama-7b": (4096, 32, 32),
        "llama-70b": (8192, 64, 5),
        "gpt-175b": (12288, 96, 1),
    }
    # A middle stage has no embedding and no head: one token per rank is the smallest possible vocabulary.
    ends = {name: m.vocab * m.hidden / m.total_params for name, m in found.items() if m.layers < 24}
    assert max(ends.values()) < 1e-4


def test_systems_differ_only_in_how_work_is_divided() -> None:
    plans = {system: Job(STAGE, pins).decisions(8192) for system, pins in ways(GPUS).items()}
    apart = {"layout", "keep_norms"}
    first = plans[TP]
    for plan in plans.values():
        assert plan.layout.devices == GPUS
        others = [name for name in plan.__struct_fields__ if name not in apart]
        assert all(getattr(plan, name) == getattr(first, name) for name in others)
    assert (first.recompute, first.swapped_tokens, first.memory_policy) == ("none", 0, "caching")


@pytest.mark.parametrize(("way", "at_64k"), [(METP, 0.65), (FEWER, 0.6)])
def test_memory_falls_below_tensor_parallelisms_as_sequences_grow(way: str, at_64k: float) -> None:
    """Figure 4: near tensor parallelism for LLaMA-7B at 4K, far below at 64K; the ratio falls with the length."""
    by_way = ways(GPUS)
    for setting in SETTINGS[1:3]:
        ratios = [
            Job(setting, by_way[way]).memory(n).device.bytes / Job(setting, by_way[TP]).memory(n).device.bytes
            for n in (4096, 16384, 65536)
        ]
        assert 0.9 < ratios[0] < 1.1
        assert ratios[2] < at_64k
        assert ratios == sorted(ratios, reverse=True)


def test_the_longest_sequence_grows_faster_than_the_devices() -> None:
    """Figure 6: with twice the devices METP fits more than twice the length; tensor parallelism does not."""
    small = Setting("bert-large", 2)
    two, four = (Job(small, Pins(metp=n), n).longest() for n in (2, 4))
    others = [Job(small, Pins(tp=n), n).longest() for n in (2, 4)]
    assert four / two > 2.05
    assert others[1] / others[0] < 2.02
    assert four > 2.38 * others[1]


def test_the_longest_fits_and_a_slightly_longer_one_does_not() -> None:
    job = Job(STAGE, Pins(metp=2), 2)
    tokens = job.longest()
    assert job.memory(tokens).fault is None
    longer = tokens + max(1024, int(metp.FINE * tokens // 1024) * 1024)
    assert job.memory(longer).fault is not None
    batch = most_that_fits(lambda sequences: job.memory(8192, sequences))
    assert job.memory(8192, batch).fault is None
    assert job.memory(8192, batch + 1).fault is not None


def test_the_batch_is_the_largest_that_fits_and_rsa_has_none() -> None:
    found = cell(Job(STAGE, ways(GPUS)[TP]), 65536)
    assert found.sequences > 1
    assert 0.3 < (found.mfu or 0) < 0.8
    assert found.note.startswith(f"batch {found.sequences}, ")
    none = cell(Job(STAGE, ways(GPUS)["rsa"]), 32768)
    assert (none.sequences, none.mfu, none.note) == (0, None, "no sequence fits")


def test_overlap_always_pays_and_leaves_less_the_longer_the_sequence() -> None:
    """Figure 7."""
    found = [share(STAGE, tokens) for tokens in (4096, 16384, 65536)]
    assert all(one.overlapped < 1 for one in found)
    assert [one.exchanged for one in found] == sorted((one.exchanged for one in found), reverse=True)
    assert [one.exposed for one in found] == sorted((one.exposed for one in found), reverse=True)
    assert found[-1].exposed < 0.02


def computed(name: str) -> Figure:
    """Return the figure; its last progress report says that all cells are done."""
    told: list[tuple[int, int]] = []
    found = figure(name, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    return found


def test_memory_has_a_line_a_model_and_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metp, "SETTINGS", (Setting("llama-70b", 2),))
    monkeypatch.setattr(metp, "LENGTHS", (4096, 2**20))
    found = computed("metp-4")
    held = {line.name: line.points for line in found.lines}
    assert list(held) == [f"llama-70b {system}" for system in ways(GPUS)]
    first, last = held["llama-70b tp+sp"]
    assert first.y is not None
    assert (last.y, last.note[:30]) == (None, "device memory is short, needs ")
    ours = held["llama-70b metp"]
    assert (ours[1].y or 0) > (ours[0].y or 0) > 0
    assert f"llama-70b, metp over tp+sp: 4k {(ours[0].y or 0) / first.y:.2f}, 1m 0." in found.findings[3]
    assert all(system in line for system, line in zip(list(ways(GPUS))[1:], found.findings, strict=False))


def longest(job: Job) -> int:
    """Stand in for ``Job.longest``: METP fits twice as much as others, three times if it recomputes norms."""
    return 4096 * job.devices * (1 if job.pins.metp is None else 2 if job.pins.keep_norms else 3)


def test_longest_sequences_are_reported_over_that_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metp, "SETTINGS", SETTINGS[:2])
    monkeypatch.setattr(Job, "longest", longest)
    found = computed("metp-6")
    assert [line.name for line in found.lines] == [f"bert-large {system}" for system in ways(GPUS)]
    assert [p.y for p in found.lines[0].points] == [1, 2, 4, 8]
    assert [p.y for p in found.lines[-2].points] == [1, 4, 8, 16]
    assert [p.y for p in found.lines[-1].points] == [1, 6, 12, 24]
    assert found.findings[0].startswith("bert-large on 8: metp fits 64k, 2.00 x tp+sp (32k), ")
    assert found.findings[0].endswith("; 16.0 times the longest on one device (4k).")
    assert found.findings[1].startswith("bert-large on 8: metp recomputing norms fits 96k, 3.00 x tp+sp (32k), ")
    assert "metp" not in found.findings[1].partition(" fits ")[2]
    assert found.findings[2].startswith("llama-7b on 8: metp fits 64k")
    assert "on one device" not in found.findings[2]


def test_times_have_a_line_a_model_and_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SETTINGS", (Setting("llama-70b", 2),)), ("LONG", (2**20,)), ("SHORT", (4096,))):
        monkeypatch.setattr(metp, name, value)
    mfu, overlap = computed("metp-5"), computed("metp-7")
    assert [line.name for line in mfu.lines] == [f"llama-70b {system}" for system in ways(GPUS)]
    assert mfu.lines[0].points[0].y is None
    assert mfu.findings[0] == f"llama-70b: fastest 1m metp; metp at most {100 * mfu.lines[-2].points[0].y:.1f} %."
    comm, beside = overlap.lines
    assert (comm.name, beside.name) == ("llama-70b comm", "llama-70b async")
    left = (beside.points[0].y or 0) - 1 + (comm.points[0].y or 0)
    assert f"of the synchronous step: 4k {100 * left:.1f} %." in overlap.findings[0]
