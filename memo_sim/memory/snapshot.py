"""Reads requests from a PyTorch memory snapshot (``torch.cuda.memory._dump_snapshot``).

The snapshot's ``device_traces`` hold one list of events per device. An ``alloc`` opens a life, and the
``free_completed`` of its address closes it; so a buffer whose free waits for another stream is still alive. Sizes are
the requested ones, before PyTorch's rounding. Each alloc or completed free is one instant. The trace is a ring buffer:
what was allocated before its first event lives from the first instant. Devices and their memory pools are separate. The
pool with the largest live sum is read, and a note names the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plain_pickle import load_plain
from memo_sim.contract.requests import Requests
from memo_sim.contract.units import format_bytes
from memo_sim.memory.allocation_class import allocation_class
from memo_sim.memory.source import MOST_BYTES, Source

DEFAULT_POOL = (0, 0)
ALIGNMENT_BYTES = 512
"""PyTorch allocates device memory in multiples of this."""
ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
MOST_FRAMES = 256
"""How many stack frames are searched for a buffer's name."""
MOST_SHOWN = 80
"""How many characters of a wrong value a message shows."""
HINT = "record with torch.cuda.memory._record_memory_history() and no skip_actions"

Pool = tuple[int, int]
Own = dict[str, Any] | None
"""The key ``memo`` of a snapshot written from a placement. Its events hold instants, names and classes."""


@dataclass(eq=False)
class _Space:
    """One pool of one device, filled while its events are read."""

    device: int
    pool: Pool
    own: bool = False
    instant: int = 0
    labels: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    streams: set[Any] = field(default_factory=set)
    origins: list[str] = field(default_factory=list)
    before: int = 0

    def open(self, event: dict[str, Any], size: int, instant: int, *, older: bool = False) -> int:
        """Add a buffer whose life begins at ``instant``, or before the recording (``older``); return its number."""
        self.labels.append(_own_name(event, self.sizes) if self.own else _label(event.get("frames")))
        self.classes.append(_text(event.get("category")))
        self.origins.append(allocation_class(event.get("frames"), older=older))
        self.lower.append(instant)
        self.upper.append(-1)
        self.sizes.append(size)
        self.streams.add(_plain(event.get("stream", 0)))
        return len(self.sizes) - 1

    @property
    def live_peak(self) -> int:
        """The largest live sum, in bytes."""
        changes = sorted(
            [(upper, -size) for upper, size in zip(self.upper, self.sizes, strict=True)]
            + [(lower, size) for lower, size in zip(self.lower, self.sizes, strict=True)]
        )
        live = most = 0
        for _, change in changes:
            live += change
            most = max(most, live)
        return most

    @property
    def title(self) -> str:
        """The name of this pool in notes."""
        return f"device {self.device}" + (f" pool {self.pool}" if self.pool != DEFAULT_POOL else "")


def read_snapshot(raw: bytes, where: str, device: int | None = None) -> Source:
    """Return the requests of one device in a snapshot's pickle; None chooses the one with the largest live sum.

    Raises:
        BadInput: with the place inside the snapshot, when it is not a plain pickle or not a snapshot, has no history,
            or has events that contradict each other.
        UsageError: when the history has no events of ``device``.
    """
    tree = load_plain(raw, where)
    if not (isinstance(tree, dict) and isinstance(tree.get("device_traces"), list)):
        raise BadInput("not a memory snapshot", where=where, wanted="a dictionary with 'device_traces'", hint=HINT)
    own = tree["memo"] if isinstance(tree.get("memo"), dict) else None
    spaces = [s for number, trace in enumerate(tree["device_traces"]) for s in _walk(tree, number, trace, own, where)]
    if not spaces:
        raise BadInput("the snapshot has no history of allocations", where=f"{where}: device_traces", hint=HINT)
    wanted = [s for s in spaces if device in (None, s.device)]
    if not wanted:
        known = ", ".join(str(d) for d in sorted({s.device for s in spaces}))
        raise UsageError("the snapshot has no history of this device", where=where, got=device, wanted=known)
    chosen = max(wanted, key=lambda s: s.live_peak)
    if own is not None:
        return Source(_own_requests(chosen, own, where), "snapshot")
    others = [f"{s.title} ({len(s.sizes)} buffers)" for s in spaces if s is not chosen]
    return Source(_requests(chosen), "snapshot", _notes(chosen, others), origins=chosen.origins)


def _walk(tree: dict[str, Any], device: int, trace: Any, own: Own, where: str) -> list[_Space]:
    """Return the pools that a device's events allocate from, with the end of every life set."""
    spaces: dict[Pool, _Space] = {}
    live: dict[int, tuple[_Space, int]] = {}
    freed: set[int] = set()
    for event, here in _events(trace, f"{where}: device_traces[{device}]"):
        address, size = (_whole(event, key, here) for key in ("addr", "size"))
        if event["action"] == "alloc":
            if address in live:
                raise BadInput("an address is allocated twice", where=here, got=hex(address), hint=HINT)
            space = _space(spaces, device, event.get("pool_id"), here, own=own is not None)
            instant = space.instant if own is None else _whole(event, "time_us", here)
            live[address] = (space, space.open(event, size, instant))
            freed.discard(address)
        elif address in live:
            space, buffer = live.pop(address)
            space.upper[buffer] = space.instant if own is None else _whole(event, "time_us", here)
            freed.add(address)
        else:
            if address in freed:
                raise BadInput("an address is freed twice", where=here, got=hex(address), hint=HINT)
            space = _space(spaces, device, event.get("pool_id"), here, own=own is not None)
            space.upper[space.open({}, size, 0, older=True)] = max(1, space.instant)
            space.before += 1
            freed.add(address)
        space.instant += 1
    if spaces:
        _open_before(tree, device, spaces, set(live) | freed, where)
    for space in spaces.values():
        end = space.instant if own is None else _whole(own, "end", f"{where}: memo")
        space.upper = [end if upper < 0 else upper for upper in space.upper]
    return list(spaces.values())


def _events(trace: Any, here: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the allocs and completed frees of a trace, each with its place in the file."""
    if not isinstance(trace, list):
        raise BadInput("not a list of events", where=here, got=type(trace).__name__, hint=HINT)
    for index, event in enumerate(trace):
        if not isinstance(event, dict) or "action" not in event:
            raise BadInput("not an event", where=f"{here}[{index}]", wanted="a dictionary with 'action'")
        if event["action"] in ("alloc", "free_completed"):
            yield event, f"{here}[{index}]"


def _space(spaces: dict[Pool, _Space], device: int, pool_id: Any, here: str, *, own: bool = False) -> _Space:
    pool = DEFAULT_POOL if pool_id is None else pool_id
    match pool:
        case [int(owner), int(number)]:
            return spaces.setdefault((owner, number), _Space(device, (owner, number), own))
        case _:
            raise BadInput("not a memory pool", where=f"{here}.pool_id", got=_plain(pool), wanted="two whole numbers")


def _open_before(tree: dict[str, Any], device: int, spaces: dict[Pool, _Space], seen: set[int], where: str) -> None:
    """Add the blocks in use at the end that have no event: they live all the time."""
    segments = tree.get("segments", [])
    for index, segment in enumerate(segments if isinstance(segments, list) else []):
        here = f"{where}: segments[{index}]"
        if not (isinstance(segment, dict) and isinstance(segment.get("blocks"), list)):
            raise BadInput("not a segment", where=here, wanted="a dictionary with 'blocks'")
        if segment.get("device", 0) != device:
            continue
        address = _whole(segment, "address", here)
        for number, block in enumerate(segment["blocks"]):
            at = f"{here}.blocks[{number}]"
            if not isinstance(block, dict):
                raise BadInput("not a block", where=at, wanted="a dictionary")
            if block.get("state") in ACTIVE and address not in seen:
                space = _space(spaces, device, segment.get("segment_pool_id"), here)
                space.open(
                    block, _whole(block, "requested_size" if "requested_size" in block else "size", at), 0, older=True
                )
                space.before += 1
            address += _whole(block, "size", at)


def _requests(space: _Space) -> Requests:
    names = [f"b{number}{' ' if label else ''}{label}" for number, label in enumerate(space.labels)]
    return Requests(
        name=space.title,
        ids=names,
        lower=space.lower,
        upper=space.upper,
        size_bytes=space.sizes,
        classes=space.classes if any(space.classes) else [],
        alignment_bytes=ALIGNMENT_BYTES,
    )


def _own_requests(space: _Space, own: dict[str, Any], where: str) -> Requests:
    """Return the requests of a snapshot that was written from a placement."""
    try:
        return Requests(
            name=_text(own.get("name")),
            program_sha256=_text(own.get("program_sha256")),
            ids=space.labels,
            lower=space.lower,
            upper=space.upper,
            size_bytes=space.sizes,
            classes=space.classes if any(space.classes) else [],
            alignment_bytes=max(1, _whole(own, "alignment_bytes", f"{where}: memo")),
        )
    except ValueError as error:
        raise BadInput("events contradict each other", where=where, got=str(error)) from None


def _notes(space: _Space, others: list[str]) -> list[str]:
    notes = [f"{space.title} of the snapshot, largest live sum {format_bytes(space.live_peak)}"]
    if others:
        notes.append(f"left out: {', '.join(others)}")
    if space.before:
        notes.append(f"{space.before} buffers are older than the recorded history: they live from its first instant")
    if len(space.streams) > 1:
        notes.append(f"{len(space.streams)} streams share the arena; PyTorch keeps their free blocks separate")
    return notes


def _own_name(event: dict[str, Any], known: list[int]) -> str:
    """Return the name of a buffer in a snapshot written from a placement: the name of its only frame."""
    match event.get("frames"):
        case [{"name": str(name)}]:
            return name
        case _:
            return f"b{len(known)}"


def _label(frames: Any) -> str:
    """Return ``file:line:function`` of the innermost Python frame, preferably outside of torch."""
    if not isinstance(frames, list):
        return ""
    innermost = None
    for frame in frames[:MOST_FRAMES]:
        if isinstance(frame, dict) and _text(frame.get("filename")).endswith(".py"):
            innermost = innermost or frame
            if "/torch/" not in frame["filename"]:
                innermost = frame
                break
    if innermost is None:
        return ""
    file = innermost["filename"].rpartition("/")[2]
    return f"{file}:{_plain(innermost.get('line', 0))}:{_text(innermost.get('name'))}"


def _whole(event: dict[str, Any], key: str, here: str) -> int:
    value = event.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_BYTES:
        raise BadInput("not a whole number", where=f"{here}.{key}", got=_plain(value), wanted=f"0 to {MOST_BYTES - 1}")
    return value


def _text(value: Any) -> str:
    """Return ``value`` if it is text, else an empty text."""
    return value if isinstance(value, str) else ""


def _plain(value: Any) -> str:
    """Return a short text of a value; a container only by its type, because it may contain itself many times."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__}"
    return repr(value)[:MOST_SHOWN]
