"""Requests of an eager framework: the fp32 loss, outputs that live longer, and memory that comes back late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from memo_sim.contract.attention_kernels import Libraries
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.memory import eager_framework
from memo_sim.memory.eager_framework import WORKSPACES, eager_buffers, libraries_of, one_work_queue, run_ahead
from memo_sim.memory.replay import replay
from memo_sim.program.analysis.columns import Columns, expand
from memo_sim.program.analysis.liveness import Liveness, live_bytes, liveness, peak
from memo_sim.program.arena.requests import buffer_names, device_buffers, request_columns, requests_of
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower

TOKENS = 1024
"""Tokens of a rank: 2,048 over cp 2."""


@dataclass(frozen=True)
class Lowered:
    program: Program
    columns: Columns
    lives: Liveness

    def at(self, name: str) -> int:
        """Return the number of the first instruction whose id ends with the text."""
        return next(n for n, i in enumerate(self.program.ids()) if i.endswith(name))


def lowered(**knobs: object) -> Lowered:
    layout = Layout(tp=2, sequence_parallel=True, cp=2, zero=1)
    usual = {"model": load_model("gpt-tiny"), "seq_tokens": 2 * TOKENS, "layout": layout, "recompute": "full"}
    decisions = Decisions(**{**usual, **knobs})
    (program,) = lower(decisions)
    columns = expand(program)
    return Lowered(program, columns, liveness(program, columns))


def named(case: Lowered) -> tuple[Liveness, dict[str, int]]:
    lives, names = eager_buffers(case.program, case.columns, case.lives)
    assert len(names) == len(lives.birth) == len(lives.class_of)
    return lives, {name: number for number, name in enumerate(names)}


def test_the_losss_tensors_live_as_in_megatron() -> None:
    case = lowered()
    lives, number = named(case)
    first, loss = case.at("fwd/loss.stats.c0"), case.at("fwd/loss.c0")
    logits, gradient = (number[f"head/{name}"] for name in ("logits", "d_logits"))
    wide, softmax = number[f"logits.fp32[{loss}]"], number[f"softmax.fp32[{loss}]"]
    elements = int(case.lives.bytes[logits]) // 2
    assert lives.bytes[[logits, wide, softmax, gradient]].tolist() == [e * elements for e in (2, 4, 4, 2)]
    assert (lives.birth[wide], lives.death[wide]) == (first, loss)
    assert (lives.birth[softmax], lives.death[softmax]) == (first, loss + 1)
    assert lives.birth[gradient] == loss + 1
    # Bytes per logit: 2 + 4 + 4 forward, 4 + 2 where the gradient is cast.
    mine = np.array([logits, wide, softmax, gradient])

    def alive(instant: int) -> int:
        return int(lives.bytes[mine][(lives.birth[mine] <= instant) & (instant <= lives.death[mine])].sum())

    assert [alive(i) // elements for i in (first - 1, first, loss, loss + 1, loss + 2)] == [2, 10, 10, 6, 2]


def test_with_an_unsharded_vocabulary_the_loss_begins_with_its_own_kernel() -> None:
    case = lowered(layout=Layout(), seq_tokens=TOKENS)
    lives, number = named(case)
    loss = case.at("fwd/loss.c0")
    assert lives.birth[number[f"softmax.fp32[{loss}]"]] == loss


def test_every_chunk_of_the_loss_has_its_own_fp32_tensors() -> None:
    case = lowered(loss_chunk_tokens=256)
    lives, number = named(case)
    whole, numbered = named(lowered())
    wide = [n for name, n in number.items() if name.startswith("logits.fp32")]
    assert len(wide) == TOKENS // 256
    (only,) = [n for name, n in numbered.items() if name.startswith("logits.fp32")]
    assert lives.bytes[wide].sum() == whole.bytes[only]
    assert (np.diff(lives.birth[wide]) > 0).all()


def test_an_fp32_loss_is_not_copied() -> None:
    case = lowered(dtype="fp32")
    lives, number = named(case)
    assert not any("logits.fp32" in name or "softmax" in name for name in number)
    assert lives.birth[number["head/d_logits"]] == case.at("fwd/loss.stats.c0")


def test_a_recomputed_layers_output_lives_as_long_as_its_backward() -> None:
    case = lowered()
    lives, _ = named(case)
    changed = np.flatnonzero(lives.death[: len(case.lives.death)] != case.lives.death)
    families = {case.program.all_families[case.lives.family[b]].name for b in changed}
    assert families == {"layer.bwd/rebuilt_out"}
    instances = case.columns.instance
    for buffer in changed.tolist():
        assert instances[lives.death[buffer]] == instances[lives.birth[buffer]]
        assert lives.death[buffer] + 1 in np.flatnonzero(np.diff(instances)) + 1


def test_without_recompute_there_is_no_such_output() -> None:
    case = lowered(recompute="none")
    lives, _ = named(case)
    assert (lives.death[: len(case.lives.death)] == case.lives.death).all()


def test_requests_have_the_new_lives_and_names() -> None:
    case = lowered()
    lives, names = eager_buffers(case.program, case.columns, case.lives)
    requests = requests_of(case.program, case.columns, lives=lives, names=names)
    loss = case.at("fwd/loss.c0")
    assert f"softmax.fp32[{loss}]" in requests.ids
    assert requests.lower == sorted(requests.lower)
    live = replay(requests).live_peak_bytes
    assert live == peak(live_bytes(lives, device=True)).bytes
    assert live > replay(requests_of(case.program, case.columns)).live_peak_bytes


def test_buffers_of_other_lanes_wait_for_their_streams() -> None:
    case = lowered()
    ahead = run_ahead(case.program, case.columns, case.lives)
    requests = requests_of(case.program, case.columns)
    assert len(requests.ids) == len(device_buffers(case.lives))
    waits: dict[str, set[int]] = {}
    for lane, places in ahead.marked.items():
        for place in places.tolist():
            waits.setdefault(requests.ids[place], set()).add(lane)
    assert waits["layer.fwd/fwd.norm1_full[0]"] == {Lane.TP}
    assert waits["layer.fwd/proj_out[0]"] == {Lane.TP}  # what is scattered
    assert waits["layer.fwd/kv.ring1[0]"] == {Lane.P2P}
    assert not any(name.startswith(("layer.fwd/up", "layer.fwd/qkv", "head/logits")) for name in waits)
    for lane, instants in ahead.work.items():
        assert (case.columns.lane[instants] == lane).all()
        assert (np.diff(instants) > 0).all()


def test_the_device_is_a_launch_queue_behind_and_the_host_waits_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_framework, "LAUNCH_QUEUE", 10)
    monkeypatch.setattr(eager_framework, "KERNELS", 2)
    case = lowered()
    done = run_ahead(case.program, case.columns, case.lives).done
    kernels = case.columns.lane == Lane.COMPUTE
    loss = case.at("fwd/loss.c0")
    assert done[loss + 1] == loss
    assert done[loss] < loss
    for instant in range(len(done)):
        queued = int(kernels[done[instant] + 1 : instant].sum())
        launched = int(kernels[:instant].sum())
        assert queued <= 5
        # Only after the loss does the queue hold less than the host could have launched.
        assert queued == min(5, launched) or (done[instant] == loss and instant > loss)


def test_under_sequence_parallelism_all_streams_share_one_work_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM refuses sequence parallelism unless there is one: collectives take places of kernels."""
    assert one_work_queue(Layout(tp=4, cp=2, sequence_parallel=True))
    assert not any(one_work_queue(layout) for layout in (Layout(tp=4), Layout(cp=2), Layout(ulysses=2, zero=3)))
    monkeypatch.setattr(eager_framework, "LAUNCH_QUEUE", 12)
    monkeypatch.setattr(eager_framework, "KERNELS", 2)
    case = lowered()
    shared, own = (run_ahead(case.program, case.columns, case.lives, one_queue=one).done for one in (True, False))
    assert all(mine >= others for mine, others in zip(shared, own, strict=True))
    kernels = np.where(case.columns.lane == Lane.COMPUTE, 2, np.isin(case.columns.lane, eager_framework.STREAMS))
    loss = case.at("fwd/loss.c0")
    for instant in range(loss):
        queued = int(kernels[shared[instant] + 1 : instant].sum())
        # Of an instruction's two kernels the device may have passed the first.
        assert min(12, int(kernels[:instant].sum())) <= queued <= 13


def test_a_short_program_is_launched_whole_before_its_loss() -> None:
    case = lowered()
    done = run_ahead(case.program, case.columns, case.lives).done
    loss = case.at("fwd/loss.c0")
    assert set(done[: loss + 1]) == {-1}


def test_under_zero_3_the_host_waits_for_the_gather_before_the_last() -> None:
    case = lowered(layout=Layout(dp=2, zero=3), global_batch=2)
    done = run_ahead(case.program, case.columns, case.lives).done
    gathers = [n for n, i in enumerate(case.program.ids()) if "gather" in i and "params" in i]
    assert len(gathers) > 4
    assert done[gathers[1]] == -1
    loss = case.at("fwd/loss.c0")
    for passed, asked in zip(gathers, gathers[2:], strict=False):
        assert done[asked] == max(passed, loss if asked > loss else -1)


def eager_2025(**knobs: object) -> tuple[Lowered, Liveness, dict[str, int]]:
    case = lowered(**{"recompute": "none", **knobs})
    lives, names = eager_buffers(case.program, case.columns, case.lives, libraries="2025", workspace_bytes=3 * 2**20)
    return case, lives, {name: number for number, name in enumerate(names)}


def test_later_libraries_write_the_losss_gradient_over_the_logits() -> None:
    case, lives, number = eager_2025()
    logits, gradient = (number[f"head/{name}"] for name in ("logits", "d_logits"))
    assert lives.bytes[gradient] == 0
    assert lives.bytes[logits] == case.lives.bytes[logits]
    assert lives.death[logits] == case.lives.death[gradient] > case.lives.death[logits]
    assert not any("fp32" in name for name in number)


def test_later_libraries_keep_one_tensor_for_every_shape_of_a_weight() -> None:
    """gpt-tiny over tp 2: the four matrix products of a layer, and the classifier."""
    _, lives, number = eager_2025()
    model = load_model("gpt-tiny")
    h, f = model.hidden, model.ffn_hidden
    shapes = {(3 * h // 2, h), (h, h // 2), (f // 2, h), (h, f // 2), (-(-model.vocab // 2), h)}
    kept = {name: n for name, n in number.items() if name.startswith("wgrad.dummy")}
    assert set(kept) == {f"wgrad.dummy[{m}x{n}]" for m, n in shapes}
    assert lives.bytes[list(kept.values())].sum() == sum(2 * m * n for m, n in shapes)
    assert {(lives.birth[n], lives.death[n]) for n in kept.values()} == {(-1, lives.instructions)}


@pytest.mark.parametrize("libraries", ["2024", "2025"])
def test_an_embeddings_gradient_is_a_dense_table_until_it_is_added(libraries: Libraries) -> None:
    case = lowered(micro_batch=1, global_batch=2)
    lives, names = eager_buffers(case.program, case.columns, case.lives, libraries=libraries)
    model = load_model("gpt-tiny")
    dense = [n for n, name in enumerate(names) if name.startswith("embed.dense")]
    at = [n for n, i in enumerate(case.program.ids()) if i.endswith("embed/bwd/scatter")]
    assert lives.birth[dense].tolist() == lives.death[dense].tolist() == at
    assert len(at) == 2
    assert lives.bytes[dense].tolist() == [2 * -(-model.vocab // 2) * model.hidden] * 2


def test_workspaces_come_from_the_allocator() -> None:
    _, lives, number = eager_2025()
    assert lives.bytes[number[WORKSPACES]] == 3 * 2**20
    assert lives.birth[number[WORKSPACES]] == -1


def test_a_step_of_megatron_in_bytes() -> None:
    """Llama of one layer over tp 2 with sequence parallelism, dp 2, 2025: every tensor named in the modules' code.

    Parameters 2 + 4 bytes and 12 over dp. Kept: layer input, two norm outputs and the residual stream (token shards),
    packed Q K V, attention's output, both products of the MLP, log-sum-exp and the norms' statistics. At the peak,
    the classifier's input gradient: logits (in place their gradient), the final norm's input shard, its gathered output
    and that output's gradient.
    """
    h, f, heads, kv, vocab, tokens, tp, dp = 512, 1536, 8, 4, 8192, 1024, 2, 2
    model = Model(
        name="one",
        family="llama",
        layers=1,
        hidden=h,
        heads=heads,
        kv_heads=kv,
        head_dim=h // heads,
        ffn_hidden=f,
        vocab=vocab,
        activation="silu",
        tied_embeddings=False,
        qkv_bias=False,
        linear_bias=False,
    )
    case, lives, number = eager_2025(
        model=model,
        seq_tokens=tokens,
        global_batch=dp,
        layout=Layout(tp=tp, sequence_parallel=True, dp=dp, zero=1),
    )
    wide = (h + 2 * kv * h // heads) // tp
    matrices = wide * h + h * h // tp + 3 * f // tp * h
    table = vocab // tp * h
    states = (2 + 4 + 12 / dp) * (matrices + 2 * h + 2 * table + h)
    shard = 2 * tokens // tp * h
    kept = 4 * shard + 2 * tokens * (wide + h // tp + 3 * f // tp) + 4 * (tokens * heads // tp + 2 * tokens // tp)
    dummies = 2 * (matrices + table)
    assert lives.bytes[[n for name, n in number.items() if name.startswith("wgrad.dummy")]].sum() == dummies
    head = 2 * tokens * vocab // tp + shard + 2 * 2 * tokens * h + 4 * tokens // tp
    small = lives.bytes[[n for name, n in number.items() if name in ("loss", "grad_norm") or "input." in name]].sum()
    curves = live_bytes(lives, device=True)
    at = case.at("classifier.dgrad.c0")
    found = sum(int(curve[at]) for curve in curves.values())
    extra = sum(
        int(lives.bytes[n])
        for name, n in number.items()
        if ("loss_stats" in name or "scratch" in name) and lives.birth[n] <= at <= lives.death[n]
    )
    assert found == int(states + kept + dummies + head + small + extra) + 3 * 2**20
    assert extra < 0.01 * found


def test_only_megatron_is_known_with_later_libraries() -> None:
    _, hardware = load_cluster("b200-1x8")
    assert hardware.eager_libraries == "2026"
    found = {
        zero: libraries_of(
            Decisions(model=load_model("gpt-tiny"), seq_tokens=512, layout=Layout(dp=2, zero=zero)), hardware
        )
        for zero in range(4)
    }
    assert found == {0: "2026", 1: "2026", 2: "2024", 3: "2024"}


def test_the_classifiers_gathered_input_stays_allocated() -> None:
    """Megatron-LM's global memory buffer: one for forward and backward of all micro-batches, never freed."""
    case = lowered(global_batch=2)
    lives, number = named(case)
    gathered = [n for name, n in number.items() if name.startswith("head/fwd.final_")]
    assert len(gathered) == 4
    kept = number["classifier.gathered"]
    assert (lives.birth[kept], lives.death[kept]) == (-1, lives.instructions)
    assert lives.bytes[kept] == 2 * TOKENS * load_model("gpt-tiny").hidden == max(case.lives.bytes[gathered])
    assert not lives.bytes[gathered].any()


def test_where_ranks_hold_all_tokens_nothing_is_gathered_for_the_classifier() -> None:
    _, number = named(lowered(layout=Layout(tp=2)))
    assert "classifier.gathered" not in number


def test_names_are_made_when_they_are_asked_for() -> None:
    case = lowered()
    lives, names = eager_buffers(case.program, case.columns, case.lives)
    every = list(names)
    assert len(every) == len(names) == len(lives.birth)
    assert [names[number] for number in range(len(names))] == every
    assert every[: len(case.lives.birth)] == buffer_names(case.program)
    assert list(names.with_added(["more"])) == [*every, "more"]
    requests = requests_of(case.program, case.columns, lives=lives, names=names)
    columns = request_columns(lives, names)
    assert [columns.ids[place] for place in range(len(columns.ids))] == requests.ids
    assert columns.lower.tolist() == requests.lower
    assert columns.upper.tolist() == requests.upper
    assert columns.size_bytes.tolist() == requests.size_bytes
