"""Pictures of a step: they are drawn completely and have their texts. People judged their looks."""

import re
import subprocess
import sys

import msgspec
import pytest

from memo_sim.contract.errors import UsageError
from memo_sim.contract.trace import MemoryCurve, Spans, Trace
from memo_sim.contract.units import GIB
from memo_sim.program.ir.instruction import Lane
from memo_sim.views.bars import LANES, Stall
from memo_sim.views.lane_panel import LanePanel, joined
from memo_sim.views.memory_panel import MemoryPanel, peak_of
from memo_sim.views.palette import WAITS
from memo_sim.views.step import Step
from memo_sim.views.timeline import draw_comparison, draw_timeline, time_unit
from tests.refusals import refused


def texts(svg) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def alone(trace: Trace, capacity_bytes: int | None = None) -> list[Step]:
    """Return the step of a plan without pipeline stages."""
    return [Step(name="rank 0", trace=trace, capacity_bytes=capacity_bytes)]


def test_every_lane_has_a_place_and_a_colour() -> None:
    labels = {lane.label for lane in Lane}
    assert labels == set(LANES) == set(WAITS)
    assert len(set(WAITS.values())) == len(labels)


def test_the_same_png_is_written_again(tmp_path, played) -> None:
    draw_timeline(alone(played(), 80 * GIB), tmp_path / "a.png", title="a plan")
    draw_timeline(alone(played(), 80 * GIB), tmp_path / "b.png", title="a plan")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png"]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_texts_name_what_is_shown(tmp_path, played, alpha) -> None:
    trace = played(seq_tokens=1 << 17, alpha=alpha)
    peak = peak_of(trace.device_memory).bytes
    draw_timeline(alone(trace, 2 * peak), tmp_path / "t.svg", title="gpt, alpha")

    found = texts(tmp_path / "t.svg")

    assert "gpt, alpha" in found
    for label in ("forward", "backward", "skeletal", "state", "compute waits for", "offload", "prefetch"):
        assert label in found, label
    assert ("recompute" in found) == (alpha < 1)
    assert f"peak {peak / GIB:.2f} GiB (50 % of capacity)" in found
    assert f"capacity {2 * peak / GIB:.2f} GiB" in found
    assert {"0", "1", "2", "3"} <= set(found)  # the layers
    for lane in ("compute", "waiting", "d2h", "h2d", "tp", "p2p"):
        assert any(re.fullmatch(rf"{lane} [\d.]+ %", text) for text in found), lane


def test_a_long_title_is_written_smaller(tmp_path, played) -> None:
    """It fits into the picture: the font shrinks in proportion to the title's length."""
    sizes = []
    for length in (40, 200, 400):
        title = "m" * length
        draw_timeline(alone(played()), tmp_path / "t.svg", title=title)
        style = re.search(rf'<text style="([^"]*)"[^>]*>{title}<', (tmp_path / "t.svg").read_text())
        assert style is not None
        sizes.append(float(re.search(r"([\d.]+)px", style[1])[1]))
    assert sizes[0] == 12
    assert sizes[1] < sizes[0]
    assert sizes[1] == pytest.approx(2 * sizes[2], rel=0.03)


def test_stalls_are_hatched_and_totalled(tmp_path, played) -> None:
    trace = played(seq_tokens=1 << 16, rates={"d2h": 1e9})
    draw_timeline(alone(trace), tmp_path / "t.svg")

    assert "<pattern" in (tmp_path / "t.svg").read_text()
    assert any(re.fullmatch(r"d2h [\d.]+ m?s", text) for text in texts(tmp_path / "t.svg"))


def test_stalls_are_joined_where_the_lane_hardly_ran_between_them() -> None:
    stalls = [Stall("compute", "tp", at, at + 0.8) for at in (0.0, 1.0, 2.0, 9.0)]
    short = [Stall("compute", "tp", at, at + 0.1) for at in (0.0, 1.0, 2.0)]

    assert [(s.start_s, s.end_s) for s in joined(stalls, 1.0)] == [(0.0, 2.8), (9.0, 9.8)]
    assert joined(stalls, 0.1) == stalls
    assert joined(short, 1.0) == short


def test_only_the_first_of_many_micro_batches_is_shown(tmp_path, played) -> None:
    trace = played(layers=2, global_batch=5)
    draw_timeline(alone(trace), tmp_path / "first.svg")
    draw_timeline(alone(trace), tmp_path / "part.svg", window=(0.001, 0.002))

    assert any("first of 5 micro-batches shown" in text for text in texts(tmp_path / "first.svg"))
    assert any("from 1 ms to 2 ms" in text for text in texts(tmp_path / "part.svg"))


def test_all_stages_are_in_one_picture(tmp_path, played) -> None:
    first, last = (played(layers=2, global_batch=3, slower=slower) for slower in (1.0, 1.5))
    peak = peak_of(last.device_memory).bytes
    steps = [
        Step(name="stage 1 · rank 0", trace=first),
        Step(
            name="stage 2 · rank 4",
            trace=last,
            capacity_bytes=2 * peak,
            reserve_bytes=peak // 4,
            held_bytes=3 * peak // 2,
            held_as="planned arena",
        ),
    ]
    draw_timeline([steps[0], steps[1]], tmp_path / "t.svg", title="two stages")

    found = texts(tmp_path / "t.svg")

    assert sum(text.startswith(("stage 1  ", "stage 2  ")) for text in found) == 2
    assert {"0", "1", "2"} <= set(found)  # the micro-batches
    assert any(text.endswith(", which computes longest") for text in found)
    assert any(text.endswith(", the fullest") for text in found)
    assert any("micro-batches" in text for text in found) is False  # all of them are shown
    draw_timeline([steps[1]], tmp_path / "one.svg")
    one = texts(tmp_path / "one.svg")
    size = f"{3 * peak / 2 / GIB:.2f} GiB"
    assert f"peak {peak / GIB:.2f} GiB live, planned arena {size} (75 % of capacity)" in one
    assert f"capacity {2 * peak / GIB:.2f} GiB, of which reserve {peak / 4 / GIB:.2f} GiB" in one


def test_short_work_is_as_high_as_the_time_that_it_fills(played) -> None:
    """1 ms of every 220 ms is no solid bar."""
    from matplotlib.figure import Figure

    count = 1000
    starts = [0.22 * i for i in range(count)]
    spans = Spans(
        ids=[f"m0/s0/l{i % 4}/fwd/hop" for i in range(count)],
        ops=["send_recv"] * count,
        lanes=["p2p"] * count,
        start_s=starts,
        end_s=[start + 0.001 for start in starts],
    )
    trace = msgspec.structs.replace(played(), spans=spans, waits=[], step_s=220.0)
    ax = Figure().add_subplot()

    LanePanel(trace, ["p2p"], (0.0, 220.0), 1.0, 1000).draw(ax)

    heights = [path.get_path().get_extents().height for path in ax.patches]
    assert 0 < max(heights) < 0.1  # of 0.62
    assert [text.get_text() for text in ax.get_yticklabels()] == ["p2p 0.5 %"]


def test_predicted_and_measured_share_an_axis(tmp_path, played) -> None:
    measured = played(slower=1.25, origin="measured")
    draw_comparison(played(), measured, tmp_path / "c.svg", title="both", capacity_bytes=20 * GIB)

    found = texts(tmp_path / "c.svg")

    assert {"both", "predicted", "measured"} <= set(found)
    assert any("predicted / measured 0.800" in text for text in found)


@pytest.mark.parametrize(
    ("name", "window", "fields"),
    [
        ("t.jpg", None, {"where": "t.jpg", "got": "'.jpg'", "wanted": ".png, .svg, .pdf"}),
        ("t", None, {"where": "t", "got": "''", "wanted": ".png, .svg, .pdf"}),
        ("t.png", (2.0, 1.0), {"got": "(2.0, 1.0)", "wanted": "0 <= from < to"}),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, played, name, window, fields) -> None:
    with refused(UsageError, **fields):
        draw_timeline(alone(played()), tmp_path / name, window=window)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_without_memory_and_waits_is_drawn(tmp_path, played) -> None:
    nothing = MemoryCurve(time_s=[], bytes_by_class={})
    trace = played(layers=2)
    bare = Trace(
        origin="measured",
        program_sha256=trace.program_sha256,
        step_s=trace.step_s,
        spans=trace.spans,
        device_memory=nothing,
        host_memory=nothing,
    )

    draw_timeline(alone(bare, GIB), tmp_path / "t.svg")

    assert "measured step" in texts(tmp_path / "t.svg")


def test_no_peak_is_lost_between_pixels() -> None:
    times = [i / 100_000 for i in range(100_000)]
    live = [100 if i == 54_321 else 10 for i in range(100_000)]
    curve = MemoryCurve(time_s=times, bytes_by_class={"state": [5] * 100_000, "workspace": live})
    panel = MemoryPanel(curve, (0.0, 1.0), 1.0, 1.0, 500, "device memory")

    edges, heights = panel._steps(["state", "workspace"])

    assert heights.sum(axis=0).max() == 105
    assert len(edges) == heights.shape[1] + 1 == 501
    assert peak_of(curve).bytes == 105
    assert peak_of(curve).at_s == times[54_321]
    assert peak_of(curve, (0.6, 1.0)).bytes == 15


def test_axes_have_readable_units() -> None:
    assert [time_unit(s)[0] for s in (600, 2, 0.4, 0.002, 1e-4)] == ["s", "s", "ms", "ms", "µs"]


def test_the_picture_of_a_long_step_is_small(tmp_path, played) -> None:
    trace = played(layers=32, seq_tokens=1 << 20)
    draw_timeline(alone(trace, 80 * GIB), tmp_path / "t.svg")

    assert (tmp_path / "t.svg").stat().st_size < 2_000_000


def test_importing_a_view_loads_no_library_for_pictures() -> None:
    code = (
        "import memo_sim.views.timeline, memo_sim.views.chrome_trace, memo_sim.views.validation_report, sys;"
        "raise SystemExit(bool({'matplotlib', 'numpy', 'torch', 'rich', 'click'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
