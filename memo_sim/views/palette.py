"""Colours of the pictures by phase, lane and buffer class, and the labels of their legends.

Phases differ in hue and lightness, so that readers without colour vision can tell them apart. Bars outside of layers
are grey or violet. A wait has the dark colour of the lane that is waited for.
"""

from __future__ import annotations

PHASES = {
    "embed": ("embed, head", "#8a63b8"),
    "head": ("embed, head", "#8a63b8"),
    "fwd": ("forward", "#3b76b5"),
    "rec": ("recompute", "#f0a030"),
    "bwd": ("backward", "#3f9b6b"),
    "wgt": ("weight gradients", "#a9bf45"),
    "off": ("offload", "#7fb8d6"),
    "pre": ("prefetch", "#e58fa6"),
    "pp": ("transfers between stages", "#6f5aa8"),
    "helper": ("transfers of helper stages", "#b06fb0"),
    "gather": ("gather parameters", "#c58a4a"),
    "regather": ("gather parameters", "#c58a4a"),
    "zero": ("zero gradients", "#b8b8b8"),
    "reduce": ("reduce gradients", "#8c8c8c"),
    "opt": ("optimizer", "#5c5c5c"),
}
"""Legend label and colour by the phase in an instruction's id."""

WAITS = {
    "compute": "#303030",
    "d2h": "#1b6f94",
    "h2d": "#b03060",
    "tp": "#8c4a00",
    "ulysses": "#a0402f",
    "cp": "#6b4c9a",
    "metp": "#9c6b1e",
    "replica": "#b8860b",
    "shard": "#c08552",
    "replicate": "#7f6b00",
    "ends": "#8f8f2f",
    "ep": "#a8326f",
    "expert_replica": "#94703a",
    "expert_shard": "#7d5a6e",
    "expert_replicate": "#6e6a4f",
    "p2p": "#5a3b8c",
    "send": "#2f7f6f",
    "recv": "#c71585",
    "pp": "#4a6fa5",
    "tied": "#a05c7b",
    "host": "#556b2f",
}
"""Colour by the lane that is waited for."""

BUBBLE = "pipeline bubble"
"""A wait for other pipeline stages, and its colour."""
BUBBLE_COLOUR = "#7d8590"

CLASSES = {
    "state": "#9aa5b1",
    "input": "#c7ccd1",
    "gathered": "#6f7f8f",
    "kv_cache": "#7b6fb0",
    "pipeline": "#4d7f8f",
    "skeletal": "#4f93c8",
    "transient": "#f2b75f",
    "workspace": "#d9603b",
    "exchange": "#76b38a",
}
"""Colour by buffer class, from the bottom of the memory curve to its top."""

OTHER = "#c0a0a0"
CAPACITY = "#c00000"
TEXT = "#202020"
QUIET_TEXT = "#606060"


def phase_colour(phase: str) -> str:
    """Return the colour of a phase."""
    return PHASES.get(phase, (phase, OTHER))[1]


def wait_colour(lane: str) -> str:
    """Return the colour of waits for ``lane``, or for other pipeline stages (``BUBBLE``)."""
    return BUBBLE_COLOUR if lane == BUBBLE else WAITS.get(lane, QUIET_TEXT)


def phase_label(phase: str) -> str:
    """Return the legend label of a phase."""
    return PHASES.get(phase, (phase, OTHER))[0]


def lighter(colour: str, share: float) -> str:
    """Return ``colour`` mixed with ``share`` of white, to distinguish neighbouring layers."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * share):02x}" for p in parts)


def ordered_classes(names: set[str]) -> list[str]:
    """Return buffer classes from the bottom of the memory curve to its top."""
    return [name for name in CLASSES if name in names] + sorted(names.difference(CLASSES))
