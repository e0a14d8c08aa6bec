"""Host buffers in the slab: no two that live at the same time share a byte, and the slab has the minimum size."""

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_exec.memory.slab import HostSlab, in_memory, lay_out
from memo_sim.contract.errors import CannotRun
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.arena.first_fit import ALIGNMENT_BYTES, FirstFit
from memo_sim.program.lower import lower
from tests.exec_cpu.small import decide, gpt, llama
from tests.refusals import refused

POLICIES: list[dict[str, Any]] = [
    {"swapped_tokens": 256},
    {"recompute": "tokenwise", "swapped_tokens": 128},
    {"recompute": "tokenwise", "swapped_tokens": 128, "states": "host"},
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", [gpt(layers=6), llama(layers=5)])
def test_layout_of_programs(policy: dict[str, Any], model: Any) -> None:
    (program,) = lower(decide(model, global_batch=6, **policy))
    columns = expand(program)
    lives = liveness(program, columns)
    layout = lay_out(program, columns, lives)

    used = np.flatnonzero(~lives.on_device & (lives.death >= lives.birth))
    assert (layout.offsets[used] >= 0).all()
    assert (layout.offsets[used] % ALIGNMENT_BYTES == 0).all()
    assert layout.bytes == peak(live_bytes(lives, device=False)).bytes
    for i, one in enumerate(used):
        for two in used[:i]:
            together = lives.birth[one] <= lives.death[two] and lives.birth[two] <= lives.death[one]
            apart = (
                layout.offsets[one] + lives.bytes[one] <= layout.offsets[two]
                or layout.offsets[two] + lives.bytes[two] <= layout.offsets[one]
            )
            assert apart or not together


def test_reuse_of_bytes_adds_an_edge() -> None:
    """The second micro-batch's offload reuses bytes of the first one, and an edge orders it after their prefetch."""
    (program,) = lower(decide(gpt(), global_batch=4, swapped_tokens=256))
    columns = expand(program)
    layout = lay_out(program, columns, liveness(program, columns))
    names = program.ids()

    def edges(of: Any) -> set[tuple[str, str]]:
        found = derive_edges(of)
        return {(names[p], names[c]) for p, c in zip(found.producer.tolist(), found.consumer.tolist(), strict=True)}

    added = edges(in_memory(program, columns, layout)) - edges(columns)
    assert {(p.split("/")[-2], c.split("/")[-2]) for p, c in added} == {("pre", "off")}
    assert all(p.startswith("m0/") and c.startswith("m1/") for p, c in added)


class Runtime:
    """A fake CUDA runtime that records the calls it gets."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.asked: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802 (the runtime's name)
        self.asked.append(("register", *arguments))
        return self.status

    def cudaHostUnregister(self, *arguments: int) -> int:  # noqa: N802
        self.asked.append(("unregister", *arguments))
        return 0


def slab(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, **policy: Any) -> HostSlab:
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: runtime.asked.append(("synchronize",)))
    (program,) = lower(decide(gpt(layers=4), global_batch=4, **policy))
    columns = expand(program)
    return HostSlab(program, columns, lay_out(program, columns, liveness(program, columns)), pinned=True)


def test_the_slab_is_registered_once_at_its_exact_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is not rounded to a power of two and its pages hold nothing else; copies end before it is unpinned."""
    runtime = Runtime()
    found = slab(monkeypatch, runtime, swapped_tokens=256)
    first = found.memory.data_ptr()
    assert found.bytes == found.memory.numel() > 0
    assert found.bytes & (found.bytes - 1)
    assert first % mmap.PAGESIZE == 0
    assert runtime.asked == [("register", first, found.bytes, 0)]
    assert all(first <= view.data_ptr() < first + found.bytes for view in found.views.values())
    assert not found.memory.any()
    found.close()
    found.close()
    assert runtime.asked[1:] == [("synchronize",), ("unregister", first)]


def test_nothing_is_registered_where_nothing_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    slab(monkeypatch, runtime, recompute="full").close()
    assert runtime.asked == []


def test_a_slab_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(CannotRun, got="CUDA error 2"):
        slab(monkeypatch, Runtime(status=2), swapped_tokens=256)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=60))
def test_holes_never_overlap(actions: list[tuple[bool, int]]) -> None:
    _take_and_give(FirstFit(), actions)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=60), st.sampled_from([128, 256, 512]))
def test_no_range_crosses_two_pieces(actions: list[tuple[bool, int]], piece: int) -> None:
    for offset, size in _take_and_give(FirstFit(piece), actions).items():
        assert size > piece or offset // piece == (offset + size - 1) // piece


def test_no_buffer_of_a_slab_crosses_two_pinned_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may refuse a copy from host memory that was pinned by two calls."""
    decisions = decide(llama(layers=4), recompute="tokenwise", swapped_tokens=256)
    (program,) = lower(decisions)
    columns = expand(program)
    lives = liveness(program, columns)
    piece = -(-3 * int(lives.bytes[~lives.on_device].max()) // 128) * 64
    whole = lay_out(program, columns, lives)
    monkeypatch.setattr("memo_exec.memory.slab.PIECE_BYTES", piece)
    found = lay_out(program, columns, lives)
    placed = np.flatnonzero(found.offsets >= 0)
    firsts, lasts = found.offsets[placed] // piece, (found.offsets[placed] + lives.bytes[placed] - 1) // piece
    assert (firsts == lasts).all()
    assert (whole.offsets // piece != (whole.offsets + lives.bytes - 1) // piece)[placed].any()


def _take_and_give(holes: FirstFit, actions: list[tuple[bool, int]]) -> dict[int, int]:
    """Return every range that was taken, by its offset, the last of those at one offset."""
    every: dict[int, int] = {}
    taken: dict[int, int] = {}
    for take, size in actions:
        if take or not taken:
            offset = holes.take(size)
            assert offset is not None
            end = offset + size
            assert all(end <= o or o + s <= offset for o, s in taken.items())
            assert end <= holes.top
            taken[offset] = every[offset] = size
        else:
            offset = sorted(taken)[size % len(taken)]
            holes.give(offset, taken.pop(offset))
    for offset, size in list(taken.items()):
        holes.give(offset, size)
    assert sum(length for _, length in holes.free) == holes.top
    return every
