"""Shows the explanation of a plan as text: what binds, what would help, why rivals lose."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.explanation import Explanation, Rival, Sensitivity
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import counted, format_bytes, format_seconds, format_tokens
from memo_sim.views.plan_table import short_of
from memo_sim.views.stage_numbers import from_one
from memo_sim.views.summary_text import goodput_line
from memo_sim.views.text_table import number, percent, text_table

BUSY = 0.99
"""Compute binds alone when it is busy for at least this fraction of the step."""
FULL = 0.95
"""A memory is called full from this fraction on."""
WORTH_NAMING = 0.0005
"""Smaller gains are called none."""
TIED = 0.005
"""Step times within this fraction count as equal: no prediction is more exact."""
DIGITS = 6
"""Decimals of seconds: smaller differences are rounding."""


def explanation_text(found: Explanation, *, top: int | None = None) -> str:
    """Return the verdict and three tables; ``top`` limits the rivals."""
    where = f"{found.model} on {found.cluster}, {format_tokens(found.seq_tokens)} tokens"
    mfu = f", MFU {percent(found.mfu)}" if found.mfu is not None else ""
    step = f"step {format_seconds(found.step_s)}{mfu}, {found.tgs:.1f} tokens per GPU and second"
    head = [f"{where}: {found.plan}, {step}.", *explanation_verdict(found)]
    blocks = ["\n".join(map(one_line, head)), *_goodput(found), _use_table(found), _sensitivities(found)]
    blocks += _rivals(found, top)
    return from_one("\n\n".join([*blocks, *(["\n".join(map(one_line, found.notes))] if found.notes else [])]))


def _goodput(found: Explanation) -> list[str]:
    """Return what failures leave of the speed, and what one change would make of it."""
    if found.goodput is None:
        return []
    rows = [[each.change, percent(each.goodput)] for each in found.goodput_changes]
    return [f"{goodput_line(found.goodput)}\n{text_table(['with', 'goodput'], rows, 'lr')}"]


def explanation_verdict(found: Explanation) -> list[str]:
    """Return what binds, what would help most, and a rival that is faster; one sentence each."""
    return [*binding(found), *_most(found)]


def binding(found: Explanation) -> list[str]:
    """Return what binds: compute or what it waits for, and the memories that are full."""
    compute, *others = found.uses
    if compute.of_step >= BUSY:
        lines = [f"Compute binds: it is busy {percent(compute.of_step)} of the step."]
    else:
        waits = [(use.compute_waits_s, f"for lane {use.lane}") for use in others if use.compute_waits_s]
        waits.append((compute.compute_waits_s, "for launches, the allocator or other stages"))
        longest_s, cause = max(waits)
        idle_s = sum(seconds for seconds, _ in waits)
        text = f"Compute is busy {percent(compute.of_step)} of the step and waits {format_seconds(idle_s)}"
        lines = [f"{text}, most of it {cause} ({format_seconds(longest_s)})."]
    for room in found.rooms:
        share = room.needed_bytes / room.capacity_bytes if room.capacity_bytes else 0.0
        sizes = f"{format_bytes(room.needed_bytes)} of {format_bytes(room.capacity_bytes)}"
        if share < FULL:
            continue
        if room.memory == "device" and found.decisions.memory_policy != "planned":
            live = f"{format_bytes(room.live_bytes)} are live at the peak"
            lines.append(f"PyTorch's allocator holds {percent(share)} of a device ({sizes}); {live}.")
        else:
            whose = "A device" if room.memory == "device" else "A node's host memory"
            lines.append(f"{whose} is full to {percent(share)} ({sizes}).")
    return lines


def _most(found: Explanation) -> list[str]:
    """Return the largest gain of a resource, and a rival that is faster than the plan."""
    best = found.sensitivities[0] if found.sensitivities else None
    if best is None or best.gain is None or best.gain < WORTH_NAMING:
        lines = ["No single resource would make the step faster."]
    else:
        gain = percent(best.gain, signed=True)
        lines = [f"What would help most: {best.resource} {best.change}, {gain} tokens per GPU and second."]
    rivals = [rival for rival in (*found.pairs, *found.rivals, *found.changed) if rival.slower_s is not None]
    first = min(rivals, key=lambda rival: rival.slower_s or 0.0, default=None)
    if first is not None and first.slower_s is not None and -first.slower_s > TIED * found.step_s:
        lines.append(f"A rival is faster: {first.options or first.plan}, {why(first)}.")
    return lines


def _use_table(found: Explanation) -> str:
    rows: list[list[str | None]] = [
        [
            use.lane,
            format_seconds(use.busy_s),
            percent(use.of_step),
            format_seconds(use.compute_waits_s) if use.compute_waits_s else None,
        ]
        for use in found.uses
    ]
    lanes = text_table(["lane", "busy", "of step", "compute waits for it"], rows, "lrrr")
    planned = found.decisions.memory_policy == "planned"
    held = "planned arena" if planned else "reserved by PyTorch's allocator"
    names = {"device": f"a device: {held} + reserve", "host": "a node's host memory, all its ranks"}
    memories: list[list[str | None]] = [
        [
            names[room.memory],
            format_bytes(room.needed_bytes),
            format_bytes(room.capacity_bytes),
            percent(room.needed_bytes / room.capacity_bytes if room.capacity_bytes else None),
        ]
        for room in found.rooms
    ]
    return f"{lanes}\n\n{text_table(['memory', 'needed', 'there is', 'full to'], memories, 'lrrr')}"


def _sensitivities(found: Explanation) -> str:
    """Return what each resource is worth; a plan that was searched again is named where it differs."""
    rows = [[f"{each.resource} {each.change}", each.decisions, *_outcome(each, found)] for each in found.sensitivities]
    table = text_table(["one resource more", "plan", "step", "TGS", "gain", ""], rows, "llrrrl")
    if found.searched_step_s is not None and found.searched_plan != found.plan:
        faster = found.searched_step_s < found.step_s
        note = f"searched: against {found.searched_plan}, step {format_seconds(found.searched_step_s)}"
        note += ", which is faster than the plan" if faster else ", the best of the search without the change"
        table += f"\n{note}."
    return table


def _outcome(each: Sensitivity, found: Explanation) -> list[str | None]:
    if each.gain is None:
        return [None, None, None, f"does not fit: too little {short_of(each.status)}"]
    gain = percent(each.gain, signed=True) if abs(each.gain) >= WORTH_NAMING else "none"
    other = each.plan if each.decisions == "searched" and each.plan != found.plan else None
    return [format_seconds(each.step_s or 0.0), number(each.tgs), gain, other or ""]


def _rivals(found: Explanation, top: int | None) -> list[str]:
    """Return a table of the rivals, of a result's best plan with one decision changed, and of pairs of changes."""
    changed = f"one decision changed, {found.changes_tried} tried" if found.changes_tried else "one decision changed"
    title = "the ranked plans" if found.rivals_are == "ranked plans" else changed
    blocks = [_rival_table(found.rivals, f"Rivals ({title})", top)]
    if found.rivals_are == "ranked plans" and found.changes_tried:
        blocks.append(_rival_table(found.changed, f"The best plan with {changed}", top))
    if found.pairs:
        tried = counted(found.pairs_tried, "pair")
        blocks.append(_rival_table(found.pairs, f"Faster with two decisions changed ({tried} tried)", top))
    elif found.pairs_tried:
        blocks.append(
            f"Two decisions changed: none of {counted(found.pairs_tried, 'pair')} is faster than the plan and every"
            " single change."
        )
    return blocks


def _rival_table(rivals: Sequence[Rival], title: str, top: int | None) -> str:
    shown = rivals[:top]
    if not shown:
        return f"{title}: none."
    options = any(rival.options for rival in shown)
    rows = [
        [
            *([rival.options] if options else []),
            rival.plan,
            None if rival.step_s is None else format_seconds(rival.step_s),
            format_bytes(rival.peak_device_bytes),
            why(rival),
        ]
        for rival in shown
    ]
    headers = [*(["options"] if options else []), "plan", "step", "live on a device", "against the plan"]
    table = text_table(headers, rows, "l" * options + "lrrl")
    more = f"\n... and {counted(len(rivals) - len(shown), 'more', '')}" if len(rivals) > len(shown) else ""
    return f"{title}, the fastest first:\n{table}{more}"


def why(rival: Rival) -> str:
    """Return why a rival loses: ``0.41 s slower: 0.3 s more compute, 0.1 s more waits for all_gather``."""
    if rival.slower_s is None:
        short = f"short by {format_bytes(rival.shortfall_bytes)} of " if rival.shortfall_bytes else "too little "
        return f"does not fit: {short}{short_of(rival.status)}"
    changed = f"{format_seconds(abs(rival.slower_s))} {'slower' if rival.slower_s > 0 else 'faster'}"
    if not round(rival.slower_s, DIGITS):
        return "equally fast"
    parts = _parts(rival)
    return f"{changed}: {', '.join(parts)}" if parts else changed


def _parts(rival: Rival) -> Sequence[str]:
    least = abs(rival.slower_s or 0.0) / 100
    found = []
    for seconds, noun in ((rival.compute_s or 0.0, "compute"), (rival.waits_s or 0.0, "waits")):
        if abs(seconds) > least:
            whose = f" for {rival.waits_for}" if noun == "waits" and seconds > 0 and rival.waits_for else ""
            found.append(f"{format_seconds(abs(seconds))} {'more' if seconds > 0 else 'less'} {noun}{whose}")
    return found
