"""Writes a placement as a PyTorch memory snapshot, which https://pytorch.org/memory_viz opens.

``memory/snapshot`` reads such a file back. The arena is one segment. Every buffer is an ``alloc`` event at its planned
address and, unless it lives to the end, a ``free_requested`` and a ``free_completed``. At each instant, frees come
before allocs. Empty buffers are left out: PyTorch has no such blocks, and the viewer identifies blocks by address.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from memo_sim.contract.placement import Placement

BASE_ADDRESS = 0x7F00_0000_0000
"""Start of the arena: a typical device address that the viewer's floating-point numbers represent exactly."""
PROTOCOL = 4
"""The newest pickle protocol that the viewer reads."""
DEVICE, STREAM, POOL = 0, 0, (0, 0)
NO_CLASS = "unknown"


def torch_snapshot(placement: Placement) -> bytes:
    """Return the pickle of ``placement`` as ``torch.cuda.memory._dump_snapshot`` would write it.

    ``time_us`` of the entries holds instants. The additional key ``memo`` holds what the format has no field for.
    """
    end = max(placement.upper, default=0)
    order = [i for i in range(len(placement.ids)) if placement.size_bytes[i]]
    tree = {
        "segments": [_segment(placement, [i for i in order if placement.upper[i] == end])] if order else [],
        "device_traces": [_trace(placement, order, end)] if order else [[]],
        "allocator_settings": {},
        "external_annotations": [],
        "memo": {
            "name": placement.name,
            "program_sha256": placement.program_sha256,
            "alignment_bytes": placement.alignment_bytes,
            "end": end,
        },
    }
    raw = io.BytesIO()
    pickle.Pickler(raw, PROTOCOL).dump(tree)
    return raw.getvalue()


def _trace(placement: Placement, order: list[int], end: int) -> list[dict[str, Any]]:
    """Return the arena's allocation, then every alloc and free in time order."""
    # The viewer needs a category on every event as soon as one event has a category.
    category = {"category": NO_CLASS} if placement.classes else {}
    arena = _entry("segment_alloc", 0, placement.arena_bytes, min(placement.lower), [_frame("arena", "", 0)])
    events = [(placement.upper[i], 0, i) for i in order if placement.upper[i] < end]
    events += [(placement.lower[i], 1, i) for i in order]
    frames = {i: _frames(placement, i) for i in order}
    trace = [arena | category]
    for instant, born, i in sorted(events):
        shared = (placement.offset_bytes[i], placement.size_bytes[i], instant, frames[i])
        if born:
            category = {"category": placement.classes[i]} if placement.classes else {}
            trace.append(_entry("alloc", *shared) | category)
        else:
            trace += [_entry("free_requested", *shared), _entry("free_completed", *shared)]
    return trace


def _segment(placement: Placement, alive: list[int]) -> dict[str, Any]:
    """Return the arena at the end of the step: the buffers alive then, and the gaps between them."""
    blocks: list[dict[str, Any]] = []
    top = 0
    unit = placement.alignment_bytes
    for i in sorted(alive, key=lambda i: placement.offset_bytes[i]):
        offset, size = placement.offset_bytes[i], placement.size_bytes[i]
        blocks += _gap(top, offset)
        top = offset + -(-size // unit) * unit
        blocks.append(_block(offset, top - offset, size, "active_allocated", _frames(placement, i)))
    blocks += _gap(top, placement.arena_bytes)
    return {
        "device": DEVICE,
        "address": BASE_ADDRESS,
        "total_size": placement.arena_bytes,
        "stream": STREAM,
        "segment_type": "large",
        "segment_pool_id": POOL,
        "is_expandable": False,
        "allocated_size": sum(b["size"] for b in blocks if b["state"] != "inactive"),
        "active_size": sum(b["size"] for b in blocks if b["state"] != "inactive"),
        "requested_size": sum(placement.size_bytes[i] for i in alive),
        "frames": [_frame("arena", "", 0)],
        "blocks": blocks,
    }


def _gap(start: int, end: int) -> list[dict[str, Any]]:
    return [_block(start, end - start, 0, "inactive", [])] if end > start else []


def _block(offset: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": BASE_ADDRESS + offset,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def _entry(action: str, offset: int, size: int, instant: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": BASE_ADDRESS + offset,
        "size": size,
        "stream": STREAM,
        "pool_id": POOL,
        "time_us": instant,
        "frames": frames,
    }


def _frames(placement: Placement, i: int) -> list[dict[str, Any]]:
    """Return a buffer's only frame: its name as function, its class as file, its birth as line."""
    kind = placement.classes[i] if placement.classes else NO_CLASS
    return [_frame(placement.ids[i], kind, placement.lower[i])]


def _frame(name: str, kind: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": kind or "placement", "line": line}
