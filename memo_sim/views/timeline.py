"""Draws a step: lanes over time with memory below them; or a predicted and a measured step on one time axis.

The file's suffix decides the format (``.png``, ``.svg``, ``.pdf``). If a step has several micro-batches and no pipeline
stages, the picture shows only the first one, because they are alike; ``window`` selects another part of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memo_sim.contract.errors import UsageError
from memo_sim.contract.trace import MemoryCurve, Trace
from memo_sim.contract.units import format_percent, format_seconds
from memo_sim.views.bars import busy_share, first_micro_batch, lanes_of, played_s
from memo_sim.views.lane_panel import LanePanel, panel_height, wait_labels
from memo_sim.views.memory_panel import MemoryPanel, peak_of
from memo_sim.views.palette import CLASSES, OTHER, PHASES, QUIET_TEXT, phase_colour, phase_label, wait_colour
from memo_sim.views.pictures import DPI, drawn, write_picture
from memo_sim.views.pipeline_panel import PipelinePanel
from memo_sim.views.step import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, LEFT_IN, RIGHT_IN = 14.0, 1.3, 1.75
TOP_IN, BOTTOM_IN, GAP_IN = 0.72, 0.5, 0.16
EDGE_IN = 0.1
LANE_IN = 0.52
"""Height of the compute lane's row."""
STAGE_IN = 0.3
"""Height of a pipeline stage's row."""
DEVICE_IN, HOST_IN = 2.0, 0.9

Window = tuple[float, float]


def draw_timeline(steps: Sequence[Step], path: str | Path, *, title: str = "", window: Window | None = None) -> None:
    """Draw a step into ``path``: its lanes, its stalls and its memory by class.

    Of several pipeline stages, all compute lanes are drawn, with the lanes of the stage that computes longest and the
    memory of the fullest one. ``title`` names the plan; ``window`` is (from, to) in seconds.

    Raises:
        UsageError: when the window is empty, the file's format is unknown, or the file cannot be written.
        ModuleNotFoundError: when matplotlib is not installed.
    """
    traces = [step.trace for step in steps]
    several = len(steps) > 1
    shown, note = _window(traces, window, whole=several)
    picture = _Picture(shown)
    pace = max(steps, key=lambda step: busy_share(step.trace))
    fullest = max(steps, key=lambda step: peak_of(step.trace.device_memory).bytes)
    if several:
        picture.add_pipeline(steps)
    of = f"{pace.name}, which computes longest" if several else ""
    lanes = [lane for lane in lanes_of([pace.trace]) if not (several and lane == "compute")]
    picture.add_lanes(pace.trace, lanes, heading=of)
    picture.add_memory(fullest, heading=f"{fullest.name}, the fullest" if several else "")
    step_s = max(trace.step_s for trace in traces)
    about = f"{traces[0].origin} step {format_seconds(step_s)}, compute busy {format_percent(busy_share(pace.trace))}"
    about += "; percentages are of the step"
    picture.write(path, drawn(title) or f"{traces[0].origin} step", f"{about} · {note}" if note else about)


def draw_comparison(
    predicted: Trace,
    measured: Trace,
    path: str | Path,
    *,
    title: str = "",
    capacity_bytes: int | None = None,
    window: Window | None = None,
) -> None:
    """Draw two traces of one program above each other on one time axis; both start at 0.

    Raises:
        UsageError, ModuleNotFoundError: as in ``draw_timeline``.
    """
    traces = [predicted, measured]
    shown, note = _window(traces, window)
    picture = _Picture(shown)
    lanes = lanes_of(traces)
    for trace in traces:
        picture.add_lanes(trace, lanes, heading=trace.origin)
    for trace in traces:
        step = Step(name=trace.origin, trace=trace, capacity_bytes=capacity_bytes)
        picture.add_memory(step, label=f"{trace.origin} ", host=False)
    picture.share_memory_scale()
    times = f"predicted {format_seconds(predicted.step_s)}, measured {format_seconds(measured.step_s)}"
    ratio = f" (predicted / measured {predicted.step_s / measured.step_s:.3f})" if measured.step_s else ""
    picture.write(path, drawn(title) or "predicted and measured step", " · ".join(filter(None, [times + ratio, note])))


@dataclass
class _Panel:
    """One panel of the picture: its content, height and heading."""

    kind: str
    height_in: float
    content: LanePanel | MemoryPanel | PipelinePanel
    heading: str = ""
    waits: dict[str, str] = field(default_factory=dict)

    @property
    def gap_in(self) -> float:
        """Space above the panel, including its heading."""
        return 0.3 if self.heading else GAP_IN


class _Picture:
    """Panels stacked over one time axis, each with a legend on its right."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.unit, self.unit_s = time_unit(window[1] - window[0])
        self.pixels = (WIDTH_IN - LEFT_IN - RIGHT_IN) * DPI
        self.panels: list[_Panel] = []
        self.one_memory_scale = False

    def add_lanes(self, trace: Trace, lanes: list[str], heading: str = "") -> None:
        """Add a row for each lane of ``trace``."""
        content = LanePanel(trace, lanes, self.window, self.unit_s, self.pixels)
        height = LANE_IN * panel_height(lanes, stalls=bool(trace.waits))
        self.panels.append(_Panel("lanes", height, content, heading, wait_labels(trace, self.window)))

    def add_pipeline(self, steps: Sequence[Step]) -> None:
        """Add a row for the compute lane of each pipeline stage."""
        content = PipelinePanel(steps, self.window, self.unit_s, self.pixels)
        self.panels.append(_Panel("lanes", STAGE_IN * content.height, content))

    def add_memory(self, step: Step, label: str = "", heading: str = "", *, host: bool = True) -> None:
        """Add the device's memory curve, and the host's when the step uses host memory."""
        trace = step.trace

        def panel(curve: MemoryCurve, name: str, of: Step | None) -> MemoryPanel:
            limits = (of.capacity_bytes, of.reserve_bytes, of.held_bytes, of.held_as) if of else ()
            return MemoryPanel(curve, self.window, played_s(trace), self.unit_s, self.pixels, label + name, *limits)

        if trace.device_memory.time_s:
            device = panel(trace.device_memory, "device memory", step)
            self.panels.append(_Panel("memory", DEVICE_IN, device, heading))
        if host and trace.host_memory.time_s and peak_of(trace.host_memory).bytes:
            self.panels.append(_Panel("memory", HOST_IN, panel(trace.host_memory, "host, one rank", None)))

    def share_memory_scale(self) -> None:
        """Give all memory curves the same vertical scale."""
        self.one_memory_scale = True

    def write(self, path: str | Path, title: str, subtitle: str) -> None:
        """Draw all panels and write the picture atomically."""
        write_picture(lambda: self._figure(title, subtitle), path, hatch_linewidth=0.7)

    def _figure(self, title: str, subtitle: str) -> Figure:
        from matplotlib.figure import Figure

        height = TOP_IN + BOTTOM_IN + sum(p.height_in + p.gap_in for p in self.panels) - GAP_IN
        figure = Figure(figsize=(WIDTH_IN, height), facecolor="white")
        heading = figure.text(LEFT_IN / WIDTH_IN, 1 - 0.16 / height, title, fontsize=12, weight="bold", va="top")
        room = WIDTH_IN - LEFT_IN - EDGE_IN
        if (width := heading.get_window_extent().width / figure.dpi) > room:
            heading.set_fontsize(12 * room / width)
        figure.text(LEFT_IN / WIDTH_IN, 1 - 0.42 / height, subtitle, fontsize=9, color=QUIET_TEXT, va="top")
        top = height - TOP_IN + GAP_IN
        axes: list[Axes] = []
        for panel in self.panels:
            top -= panel.gap_in
            box = (LEFT_IN, top - panel.height_in, WIDTH_IN - LEFT_IN - RIGHT_IN, panel.height_in)
            ax = figure.add_axes(
                (box[0] / WIDTH_IN, box[1] / height, box[2] / WIDTH_IN, box[3] / height),
                sharex=axes[0] if axes else None,
            )
            names = panel.content.draw(ax)
            if panel.heading:
                ax.set_title(panel.heading, loc="left", fontsize=8.5, pad=2, weight="bold")
            _legends(ax, panel, names, WIDTH_IN - LEFT_IN - RIGHT_IN)
            ax.tick_params(labelsize=8, labelbottom=panel is self.panels[-1])
            ax.yaxis.label.set_fontsize(8)
            axes.append(ax)
            top -= panel.height_in
        memory = [ax for ax, panel in zip(axes, self.panels, strict=True) if panel.kind == "memory"]
        if self.one_memory_scale and memory:
            highest = max(ax.get_ylim()[1] for ax in memory)
            for ax in memory:
                ax.set_ylim(0, highest)
        axes[-1].set_xlim(self.window[0] / self.unit_s, self.window[1] / self.unit_s)
        axes[-1].set_xlabel(f"time from the step's start ({self.unit})", fontsize=8)
        return figure


def _legends(ax: Any, panel: _Panel, names: Sequence[str], width_in: float) -> None:
    """Put a panel's legends on its right: phases and waits, or buffer classes."""
    from matplotlib.patches import Patch

    def box(handles: list[Any], title: str, y: float, loc: str) -> Any:
        return ax.legend(
            handles=handles,
            title=title,
            loc=loc,
            bbox_to_anchor=(1 + 0.08 / width_in, y),
            borderaxespad=0,
            frameon=False,
            fontsize=7.5,
            title_fontsize=7.5,
            alignment="left",
            handlelength=1.3,
            labelspacing=0.25,
        )

    if panel.kind == "memory":
        handles = [Patch(color=CLASSES.get(n, OTHER), label=drawn(n)) for n in reversed(names)]
        box(handles, "", 1.0, "upper left")
        return
    order = [p for p in PHASES if p in names] + [p for p in names if p not in PHASES]
    labels = {drawn(phase_label(p)): phase_colour(p) for p in order}
    box([Patch(color=colour, label=label) for label, colour in labels.items()], "", 1.0, "upper left")
    if panel.waits:
        ax.add_artist(ax.get_legend())
        waits = [
            Patch(facecolor="white", edgecolor=wait_colour(lane), hatch="//////", linewidth=0, label=label)
            for lane, label in panel.waits.items()
        ]
        box(waits, "compute waits for", 0.0, "lower left")


def _window(traces: list[Trace], window: Window | None, *, whole: bool = False) -> tuple[Window, str]:
    """Return the part of the step to show, and a note when it is not the whole step; ``whole``: all that was played."""
    if window is not None:
        if not 0 <= window[0] < window[1]:
            raise UsageError("an empty time window", got=window, wanted="0 <= from < to, in seconds")
        return window, f"from {format_seconds(window[0])} to {format_seconds(window[1])}"
    count = max(t.micro_batches for t in traces)
    firsts = [first for trace in traces if (first := first_micro_batch(trace)) is not None]
    if firsts and not whole:
        shown = (min(f[0] for f in firsts), max(f[1] for f in firsts))
        return shown, f"first of {count} micro-batches shown"
    end = max(played_s(t) for t in traces)
    played = min(t.micro_batches_played for t in traces)
    note = f"{played} of {count} micro-batches played, which the others repeat" if played < count else ""
    return (0.0, end if end > 0 else 1e-6), note


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a readable unit for a time axis of this length, and the seconds in that unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 1.5 * scale:
            return unit, scale
    return "µs", 1e-6
