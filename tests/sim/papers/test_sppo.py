"""SPPO's figures, computed small: the systems of Table 4, their speed-ups, and the gain of each technique."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.units import GIB, KIB
from memo_sim.papers import sppo
from memo_sim.papers.figures import figure
from memo_sim.papers.sppo import DEEPSPEED, JOBS, MEGATRON, SPPO, UNPLANNED, Job, cell

SMALL = Job("gpt-7b", 1, {16: 4}, (2, 4), (8, 1), 8, "nothing")


def test_configurations_are_those_of_table_4() -> None:
    for job in JOBS:
        for thousands, parts in job.parts.items():
            ours, theirs = job.question(SPPO, thousands), job.question(MEGATRON, thousands)
            assert (ours.pins.tp, ours.pins.pp, ours.pins.subsequences) == (*job.sppo, parts)
            assert job.sppo[0] * job.sppo[1] == job.megatron[0] * job.megatron[1] == ours.cluster.devices
            assert theirs.pins.recompute == "full"
            assert ours.global_batch == theirs.global_batch == 1
            network = ours.cluster.network
            assert network is not None
            assert network.nics_per_node * network.nic_bytes_per_s.value == pytest.approx(4 * 25e9, rel=0.07)
    by_model = {job.model: job.question(DEEPSPEED, 512).global_batch for job in JOBS if job.ulysses}
    assert by_model == {"gpt-7b": 1, "gpt-65b": 2}


def test_every_system_has_its_cells_and_their_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sppo, "JOBS", (SMALL,))
    told: list[tuple[int, int]] = []
    found = figure("sppo-10", progress=lambda done, total: told.append((done, total)))
    names = [f"gpt-7b {name}" for name in (SPPO, MEGATRON, DEEPSPEED, UNPLANNED)]
    assert [line.name for line in found.lines] == names
    ours, theirs = ({p.x: p.y or 0.0 for p in line.points} for line in found.lines[:2])
    assert f"16k {ours[16384] / theirs[16384]:.2f}" in found.findings[0]
    assert found.findings[0].endswith("(SPPO reports nothing).")
    assert "n4, sequence-aware offload" in found.lines[0].points[0].note
    assert "tp8+sp cp1 dp1, full recompute" in found.lines[1].points[0].note
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    (unplanned,) = found.lines[3].points
    # The same kernels, launched by a host: never faster than with planned memory.
    assert 0.5 * ours[16384] < (unplanned.y or 0) <= ours[16384]


def test_with_unplanned_memory_shorter_lengths_are_tried_until_one_fits() -> None:
    cells = sppo._unplanned(replace(SMALL, parts={8: 4, 16: 4, 2048: 4}))
    assert list(cells) == [2048, 16]
    assert cells[2048].tgs is None
    assert " of device memory short; " in cells[2048].note
    assert cells[16].tgs


def test_a_cell_that_does_not_fit_has_no_throughput() -> None:
    one = cell(SMALL, MEGATRON, 1024)
    assert one.tgs is None
    assert " of device memory short; " in one.note
    assert sppo._ratio(1024, one, one) == "1m sppo and the other does not fit"


def test_each_technique_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sppo, "JOBS", (SMALL,))
    monkeypatch.setattr(sppo, "BREAKDOWN", ((SMALL, 16),))
    found = figure("sppo-11")
    keep, full, lagging, aware, multiplexed = (line.points[0] for line in found.lines)
    labels = ["keep", "full swap", "full swap, copies span passes"]
    labels += ["sequence-aware offload", "sequence-aware offload, multiplexed"]
    assert [line.label for line in found.lines] == labels
    assert "alpha 0.00" in keep.note
    assert "alpha 1.00" in full.note
    # Keep is fastest where it fits; offloading only what compute hides costs less than a full swap.
    assert (keep.y or 0) >= (aware.y or 0) >= (full.y or 0) > 0
    # Where compute does not hide the copies, copies over several passes make it wait less, for more memory.
    assert (keep.y or 0) >= (lagging.y or 0) > 1.01 * (full.y or 0)
    assert re.search(r"copies span at most [248] passes", lagging.note)
    assert "copies span" not in full.note
    # Inside a node, rows reach idle stages before the pipeline does. A part of the gain goes into calls of collectives:
    # rows of a stage and rows of a helper are gathered one after the other.
    assert (multiplexed.y or 0) > 1.02 * (aware.y or 0)
    assert "n4+mx" in multiplexed.note


def test_long_sequences_have_16k_tokens_per_subsequence(monkeypatch: pytest.MonkeyPatch) -> None:
    for job in sppo.LONG:
        assert all(thousands == 16 * parts for thousands, parts in job.parts.items())
    monkeypatch.setattr(sppo, "LONG", (SMALL,))
    (line,) = figure("sppo-1").lines
    assert line.points[0].note.startswith("8 GPUs, ")
    assert "MFU" in line.points[0].note


def test_short_subsequences_slow_kernels_and_long_ones_make_a_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sppo, "NUMBERS", (8, 16, 32, 64, 256))
    found = figure("sppo-7")
    forward, bubble, both = ([p.y or 0.0 for p in line.points] for line in found.lines)
    assert [p.x for p in found.lines[0].points] == [16384, 8192, 4096, 2048, 512]
    assert forward[0] == pytest.approx(forward[1], rel=0.01)  # compute-bound: more tokens do not help
    assert forward[1] < forward[2] < forward[3] < forward[4]
    assert bubble == sorted(bubble, reverse=True)
    assert bubble[0] / forward[0] == pytest.approx(3 / 8)
    assert both == pytest.approx([f + b for f, b in zip(forward, bubble, strict=True)])
    # The paper's range of good lengths, 2K to 16K tokens.
    assert 2048 <= found.lines[2].points[both.index(min(both))].x <= 16384
    assert "4k tokens each" in found.findings[0]


def test_lengths_grow_as_far_as_each_system_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def up_to(thousands_per_gpu: int) -> Callable[[Job, int], str | None]:
        return lambda job, tokens: "a layout" if tokens <= thousands_per_gpu * 8 * job.nodes * KIB else None

    monkeypatch.setattr(sppo, "_sppo_layout", up_to(40))
    monkeypatch.setattr(sppo, "_megatron_layout", up_to(26))
    monkeypatch.setattr(sppo, "_searched_layout", up_to(1000))
    monkeypatch.setattr(sppo, "_fpdt_layout", up_to(0))
    told: list[tuple[int, int]] = []
    found = figure("sppo-12", progress=lambda done, total: told.append((done, total)))
    lines = {line.label: line.points for line in found.lines}
    assert list(lines) == [SPPO, MEGATRON, sppo.TUNED, DEEPSPEED]
    assert [(p.x, p.y) for p in lines[SPPO]] == [(32, 1024 * KIB), (64, 2560 * KIB), (128, 5120 * KIB)]
    assert lines[SPPO][0].note == "a layout"
    assert lines[MEGATRON][0].y == 512 * KIB
    assert (lines[sppo.TUNED][0].y, lines[sppo.TUNED][0].note) == (8192 * KIB, "a layout; longer ones not tried")
    assert (lines[DEEPSPEED][0].y, lines[DEEPSPEED][0].note) == (None, "no length fits")
    assert "32, 40, 40K tokens per GPU" in found.findings[0]
    assert "fits 512k" in found.findings[1]
    assert found.step_tokens == sppo.STEP_TOKENS
    assert told[-1] == (12, 12)


def test_long_sequences_of_sppo_fit_until_device_memory_is_full() -> None:
    assert sppo._sppo_layout(SMALL, 64 * KIB) == "tp2+sp cp1 pp4 dp1 n4"
    assert sppo._sppo_layout(SMALL, 1024 * KIB) is None


def test_fpdt_has_as_many_ranks_a_sequence_as_heads() -> None:
    job = Job("gpt-7b", 8, {64: 4}, (8, 8), (32, 2), None, "")
    assert sppo._fpdt_layout(job, 64 * KIB) == "tp1 cp1 ulysses32 dp2 zero3"
    assert sppo._megatron_layout(job, 64 * KIB) == "tp32+sp cp1 pp2 dp1"
    assert sppo._megatron_layout(job, 8192 * KIB) is None


def test_a_plan_without_play_fits_where_the_played_one_does() -> None:
    for thousands in (16, 1024):
        played = cell(SMALL, MEGATRON, thousands)
        assert (played.tgs is not None) == (sppo._megatron_layout(SMALL, thousands * KIB) is not None)


def test_table_2_counts_states_and_kept_activations() -> None:
    """18 bytes a parameter, and 32 bytes for each token, layer and hidden unit beside the statistics."""
    for name in sppo.PRINTED:
        model = load_model(name)
        row = sppo.footprint(name, 64 * KIB)
        assert row.state_bytes == pytest.approx(18 * model.total_params, rel=1e-6)
        units = 32 * model.layers * model.hidden * 64 * KIB
        assert units < row.activation_bytes < 1.002 * units
        assert row.by_bytes == -(-(row.state_bytes + row.activation_bytes) // (80 * GIB))
        assert row.by_plan >= row.by_bytes


def test_the_fewest_gpus_of_table_2_have_a_plan_and_fewer_nodes_have_none() -> None:
    row = sppo.footprint("gpt-7b", 256 * KIB)
    assert row.by_plan > 8
    nodes = row.by_plan // 8
    assert sppo._kept("gpt-7b", 256 * KIB, nodes) == (row.by_plan, row.how)
    for fewer in range(-(-row.by_bytes // 8), nodes):
        assert sppo._kept("gpt-7b", 256 * KIB, fewer) is None


def test_table_2_has_print_beside_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sppo, "PRINTED", {"gpt-7b": (120, 1000, 512)})
    monkeypatch.setattr(sppo, "footprint", lambda name: sppo.Footprint(60 * 10**9, 1100 * GIB, 16, 24, "tp8"))
    found = figure("sppo-table2")
    assert [line.name.split(")")[-1].strip() for line in found.lines][:2] == ["computed", "printed"]
    assert found.lines[3].points[0].y == 1000
    assert [line.points[0].y for line in found.lines[4:]] == [16, 24, 512]
    assert found.lines[5].points[0].note == "tp8"
    counts = "16 GPUs by bytes, 24 by a plan (SPPO: 512 and more)."
    assert found.findings == [f"gpt-7b: states -50.0 %, activations +10.0 % against print; {counts}"]
