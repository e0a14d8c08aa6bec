"""What an eager framework asks of the allocator: the loss in fp32, outputs held, and memory that comes back late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.memory import eager
from memo_sim.memory.eager import eager_buffers, run_ahead
from memo_sim.memory.replay import replay
from memo_sim.program.columns import Columns, expand
from memo_sim.program.instruction import Lane
from memo_sim.program.liveness import Liveness, live_bytes, liveness, peak
from memo_sim.program.lower import lower
from memo_sim.program.program import Program
from memo_sim.program.requests import device_buffers, requests_of

TOKENS = 1024
"""Of a rank: 2,048 over cp 2."""


@dataclass(frozen=True)
class Lowered:
    program: Program
    columns: Columns
    lives: Liveness

    def at(self, name: str) -> int:
        """Return the number of the first instruction whose id ends so."""
        return next(n for n, i in enumerate(self.program.ids()) if i.endswith(name))


def lowered(**knobs: object) -> Lowered:
    layout = Layout(tp=2, sequence_parallel=True, cp=2, zero=1)
    decisions = Decisions(
        model=load_model("gpt-tiny"), **{"seq_tokens": 2 * TOKENS, "layout": layout, "recompute": "full", **knobs}
    )
    (program,) = lower(decisions)
    columns = expand(program)
    return Lowered(program, columns, liveness(program, columns))


def named(case: Lowered) -> tuple[Liveness, dict[str, int]]:
    lives, names = eager_buffers(case.program, case.columns, case.lives)
    assert len(names) == len(lives.birth) == len(lives.class_of)
    return lives, {name: number for number, name in enumerate(names)}


def test_the_losss_tensors_live_as_megatron_has_them() -> None:
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
    # Bytes a logit: 2 + 4 + 4 forward, 4 + 2 where the gradient is cast.
    mine = np.array([logits, wide, softmax, gradient])

    def alive(instant: int) -> int:
        return int(lives.bytes[mine][(lives.birth[mine] <= instant) & (instant <= lives.death[mine])].sum())

    assert [alive(i) // elements for i in (first - 1, first, loss, loss + 1, loss + 2)] == [2, 10, 10, 6, 2]


def test_without_a_divided_vocabulary_the_loss_begins_with_its_own_kernel() -> None:
    case = lowered(layout=Layout(), seq_tokens=TOKENS)
    lives, number = named(case)
    loss = case.at("fwd/loss.c0")
    assert lives.birth[number[f"softmax.fp32[{loss}]"]] == loss


def test_every_chunk_of_the_loss_has_its_own_fp32_tensors() -> None:
    case = lowered(loss_chunk_tokens=256)
    lives, number = named(case)
    whole, _ = named(lowered())
    wide = [n for name, n in number.items() if name.startswith("logits.fp32")]
    assert len(wide) == TOKENS // 256
    assert lives.bytes[wide].sum() == whole.bytes[-1]
    assert (np.diff(lives.birth[wide]) > 0).all()


def test_an_fp32_loss_is_not_copied() -> None:
    case = lowered(dtype="fp32")
    lives, number = named(case)
    assert len(lives.birth) == len(case.lives.birth)
    assert lives.birth[number["head/d_logits"]] == case.at("fwd/loss.stats.c0")


def test_a_rebuilt_layers_output_lives_as_long_as_its_backward() -> None:
    case = lowered()
    lives, _ = named(case)
    changed = np.flatnonzero(lives.death[: len(case.lives.death)] != case.lives.death)
    families = {case.program.all_families[case.lives.family[b]].name for b in changed}
    assert families == {"layer.bwd/rebuilt_out"}
    instances = case.columns.instance
    for buffer in changed.tolist():
        assert instances[lives.death[buffer]] == instances[lives.birth[buffer]]
        assert lives.death[buffer] + 1 in np.flatnonzero(np.diff(instances)) + 1


def test_what_is_kept_has_no_rebuilt_output() -> None:
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
    waits = {requests.ids[place]: set(streams) for place, streams in ahead.streams.items()}
    assert waits["layer.fwd/fwd.norm1_full[0]"] == {Lane.COLLECTIVE}
    assert waits["layer.fwd/proj_out[0]"] == {Lane.COLLECTIVE}  # what is scattered
    assert waits["layer.fwd/kv.ring1[0]"] == {Lane.P2P}
    assert not any(name.startswith(("layer.fwd/up", "layer.fwd/qkv", "head/logits")) for name in waits)
    for lane, instants in ahead.work.items():
        assert (case.columns.lane[instants] == lane).all()
        assert instants == sorted(instants)


def test_the_device_is_a_launch_queue_behind_and_the_host_waits_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "LAUNCH_QUEUE", 10)
    monkeypatch.setattr(eager, "KERNELS", 2)
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
        # Only behind the loss is the queue emptier than the host could fill it.
        assert queued == min(5, launched) or (done[instant] == loss and instant > loss)


def test_a_short_program_is_launched_whole_before_its_loss() -> None:
    case = lowered()
    done = run_ahead(case.program, case.columns, case.lives).done
    loss = case.at("fwd/loss.c0")
    assert set(done[: loss + 1]) == {-1}
