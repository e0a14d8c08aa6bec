"""The map of addresses over time: it is drawn completely and has its texts. People judged its looks."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree as ET

from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions
from memo_sim.contract.requests import Phase, Requests
from memo_sim.contract.units import MIB
from memo_sim.memory.place import place
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from memo_sim.views.memory_map import draw_memory_map, live_curve
from tests.refusals import refused


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def placed(requests: Requests) -> Placement:
    return place(requests, solver="greedy", time_limit_s=10)


def layered(buffers: int) -> Requests:
    """Two buffers that live all the time, and many short ones."""
    return Requests(
        ids=["weights", "grads", *(f"t{i}" for i in range(buffers))],
        lower=[0, 0, *range(buffers)],
        upper=[buffers + 3, buffers + 3, *(i + 1 + i % 3 for i in range(buffers))],
        size_bytes=[4 * MIB, 4 * MIB, *(MIB * (1 + i % 2) for i in range(buffers))],
        classes=["state", "state", *("transient" if i % 5 else "workspace" for i in range(buffers))],
    )


def test_the_same_png_is_written_again(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw_memory_map(placed(layered(40)), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_texts_name_what_is_shown(tmp_path: Path) -> None:
    (program,) = lower(Decisions(model=load_model("gpt-tiny"), seq_tokens=1024))
    requests = requests_of(program)
    placement = placed(requests)
    draw_memory_map(placement, tmp_path / "m.svg", title="tiny", phases=requests.phases)
    found = texts(tmp_path / "m.svg")
    assert {"tiny", "live", "arena", "instant", *placement.classes} <= set(found)
    assert any("the lower bound: optimal" in text for text in found)
    assert any(text.startswith("address (") for text in found)
    assert {"0", "1"} <= set(found)  # the layers


def test_an_arena_above_its_bound_is_not_called_optimal(tmp_path: Path) -> None:
    high = Placement(
        arena_bytes=3, lower_bound_bytes=2, ids=["a"], lower=[0], upper=[1], size_bytes=[2], offset_bytes=[1]
    )
    draw_memory_map(high, tmp_path / "m.svg")
    found = texts(tmp_path / "m.svg")
    assert not any("optimal" in text for text in found)
    assert any("lower bound 2 B" in text for text in found)


def test_reserved_bytes_are_a_line_or_a_note_when_far_above(tmp_path: Path) -> None:
    placement = placed(layered(20))
    arena_mib = placement.arena_bytes // MIB
    for times_arena, in_legend in ((1, True), (2, True), (3, False)):
        reserved = ([2, 9], [placement.arena_bytes, times_arena * placement.arena_bytes])
        draw_memory_map(placement, tmp_path / "m.svg", reserved=reserved)
        found = texts(tmp_path / "m.svg")
        assert ("caching" in found) is in_legend
        assert f"the caching allocator reserves {times_arena * arena_mib}.00 MiB" in found
    draw_memory_map(placement, tmp_path / "m.svg")
    assert not any("caching" in text for text in texts(tmp_path / "m.svg"))


def test_few_instants_are_whole_numbers_once_each(tmp_path: Path) -> None:
    requests = Requests(ids=["a"], lower=[0], upper=[2], size_bytes=[700 * MIB])
    draw_memory_map(placed(requests), tmp_path / "m.svg")
    found = texts(tmp_path / "m.svg")
    assert [text for text in found if text in ("0", "1", "2")] == ["0", "1", "2"]


def test_names_are_written_where_they_fit(tmp_path: Path) -> None:
    draw_memory_map(placed(layered(20)), tmp_path / "few.svg")
    draw_memory_map(placed(layered(2000)), tmp_path / "many.svg")
    assert "t4" in texts(tmp_path / "few.svg")
    assert not any(re.fullmatch(r"t\d+", text) for text in texts(tmp_path / "many.svg"))


def test_a_constant_bottom_is_cut_off_with_a_note(tmp_path: Path) -> None:
    draw_memory_map(placed(layered(20)), tmp_path / "m.svg")
    assert any(text.startswith("the lowest 8.00 MiB never change") for text in texts(tmp_path / "m.svg"))


def test_the_live_curve_is_the_sum_of_live_buffers() -> None:
    placement = placed(layered(30))
    times, live = live_curve(placement)
    for instant, total in zip(times, live, strict=True):
        rows = zip(placement.lower, placement.upper, placement.size_bytes, strict=True)
        assert total == sum(size for low, up, size in rows if low <= instant < up)
    assert max(live) == placement.lower_bound_bytes


def test_the_picture_of_thousands_of_buffers_is_small(tmp_path: Path) -> None:
    requests = layered(5000)
    phases = [
        Phase(name=f"m0/s0/l{i}/layer.fwd", kind="layer.fwd", lower=10 * i, upper=10 * i + 10) for i in range(500)
    ]
    placement = placed(requests)
    draw_memory_map(placement, tmp_path / "m.svg", phases=phases)
    assert (tmp_path / "m.svg").stat().st_size < 2_000_000


def test_names_with_dollars_are_text(tmp_path: Path) -> None:
    requests = Requests(ids=["$\\frac{"], lower=[0], upper=[5], size_bytes=[MIB])
    draw_memory_map(placed(requests), tmp_path / "m.svg")
    assert "$\\frac{" in texts(tmp_path / "m.svg")


def test_names_of_any_characters_are_drawn_without_warnings(tmp_path: Path) -> None:
    requests = Requests(ids=["a\nb\x1b[31m\x00", "\u5c42"], lower=[0, 0], upper=[5, 5], size_bytes=[MIB, MIB])
    for name in ("m.svg", "m.png"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draw_memory_map(placed(requests), tmp_path / name, title="t\x1b $x$")
    found = [element.text for element in ET.parse(tmp_path / "m.svg").iter() if element.text]
    assert {r"a\nb\x1b[31m\x00", "\u5c42", r"t\x1b $x$"} <= set(found)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with refused(UsageError, where="m.jpg", got="'.jpg'", wanted=".png, .svg, .pdf"):
        draw_memory_map(placed(layered(3)), tmp_path / "m.jpg")
    assert list(tmp_path.iterdir()) == []


def test_importing_the_views_loads_no_library_for_pictures() -> None:
    code = (
        "import memo_sim.views.memory_map, memo_sim.views.torch_snapshot, memo_sim.views.placement_table, sys;"
        "raise SystemExit(bool({'matplotlib', 'numpy', 'torch', 'rich', 'click'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
