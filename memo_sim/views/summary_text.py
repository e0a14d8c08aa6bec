"""Shows the verdict of an answer as lines of text: whether it fits, how fast it is, the plan, and what is assumed.

Every memory figure says what it includes.
"""

from __future__ import annotations

from collections.abc import Iterable

from memo_sim.contract.goodput import Goodput
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.plan import StepInterval
from memo_sim.contract.summary import NOT_READ, DeviceMemory, Summary
from memo_sim.contract.units import format_bytes, format_duration, format_percent, format_seconds
from memo_sim.views.plan_table import interval_label

PEAKS = {
    "arena": "planned arena",
    "reserved": "reserved by PyTorch's allocator",
    "live": "live bytes",
}
"""What the peak's bytes are."""
BARELY = 0.01
"""Free memory below this fraction of a device may be an error of the allocator's model: 0.6 % on SimuMax's runs."""


def summary_lines(summary: Summary) -> list[str]:
    """Return the lines of the verdict, and an indented line for each assumption."""
    lines = verdict_lines(summary)
    if summary.ways_out:
        lines += ["Ways out:", *(f"  {one_line(way)}" for way in summary.ways_out)]
    if summary.assumptions:
        width = max(len(each.name) for each in summary.assumptions)
        lines.append("Assumed:")
        for each in summary.assumptions:
            option = f" ({each.option})" if each.option else ""
            lines.append(f"  {each.name.ljust(width)}  {one_line(each.value)}{option}")
    if summary.left_out:
        lines.append(f"Not tried: {'; '.join(f'{one_line(each.what)} ({each.option})' for each in summary.left_out)}.")
    return lines


def not_read_lines(summaries: Iterable[Summary | None]) -> list[str]:
    """Return the line about ignored fields of the models' files, for tables of many answers; empty where none are."""
    found = [each.value for summary in summaries if summary for each in summary.assumptions if each.name == NOT_READ]
    return [one_line(f"Not read {'; '.join(dict.fromkeys(found))}.")] if found else []


def verdict_lines(summary: Summary) -> list[str]:
    """Return whether the plan fits and by how much, how fast it is or why it does not fit, and the plan in words."""
    speed = _speed(summary) if summary.fits else [f"Why: {one_line(summary.reason)}."]
    return [_memory(summary), *speed, f"Plan: {one_line(summary.plan)}."]


def _memory(summary: Summary) -> str:
    device, host = summary.device_memory, summary.host_memory
    has = device_text(device)
    where = f" (stage {device.stage + 1} of {device.stages}, the fullest)" if device.stages > 1 else ""
    of_host = f"{format_bytes(host.needed_bytes)} of {format_bytes(host.capacity_bytes)}"
    on_host = f"host memory: {of_host} a node, for all its ranks"
    if summary.fits:
        if device.peak == "reserved" and device.allocation_retries:
            where += ", which PyTorch's cache fills (--safety-gib 1 keeps more free)"
        elif device.peak == "reserved" and device.free_bytes < BARELY * device.capacity_bytes:
            where += ", less than the model of PyTorch's allocator can tell (--safety-gib 1 keeps more free)"
        return f"FITS with {format_bytes(device.free_bytes)} free on a device{where}: {has}; {on_host}."
    if summary.status == "host_oom":
        short = f"{format_bytes(summary.shortfall_bytes)} of host memory a node are missing"
        return f"DOES NOT FIT: {short}; {on_host}; a device{where}: {has}."
    if (also := host.needed_bytes - host.capacity_bytes) > 0:
        on_host += f", where {format_bytes(also)} are missing as well"
    return f"DOES NOT FIT: {format_bytes(summary.shortfall_bytes)} are missing on a device{where}: {has}; {on_host}."


def device_text(device: DeviceMemory) -> str:
    """Return what a device needs of what it has, and what adds up to that.

    An allocator that runs out needs what it has reserved by then, which is no sum of live bytes.
    """
    peak, reserve = format_bytes(device.peak_bytes), format_bytes(device.reserve_bytes)
    needed = f"{format_bytes(device.needed_bytes)} of {format_bytes(device.capacity_bytes)}"
    if device.peak_bytes + device.reserve_bytes == device.needed_bytes:
        return f"{PEAKS[device.peak]} {peak}{_cached(device)} + reserve {reserve} = {needed}"
    return f"{needed} are needed at the worst instant, with the reserve of {reserve}; at most {peak} are live"


def _cached(device: DeviceMemory) -> str:
    """Return how much of what an allocator reserves is live, and what its retries cost; else an empty text."""
    if device.peak != "reserved":
        return ""
    text = f"{format_bytes(device.live_bytes)} live, its cache the rest"
    if device.allocation_retries:
        many = device.allocation_retries > 1
        retries = f"{device.allocation_retries} allocation {'retries' if many else 'retry'}"
        text += f"; {retries} a step cost {format_seconds(device.allocator_wait_s)}"
    return f" ({text})"


def _speed(summary: Summary) -> list[str]:
    if summary.step_s is None or summary.mfu is None or summary.tokens_per_device_s is None:
        return []
    sure = f" (no interval: {one_line(summary.no_interval)})" if summary.no_interval else " (no interval is known)"
    if summary.interval:
        sure = f" ({interval_label(summary.interval)}{_wide(summary.interval)})"
    hours = summary.device_hours_per_billion_tokens or 0.0
    parts = [
        f"Step {format_seconds(summary.step_s)}{sure}",
        f"MFU {format_percent(summary.mfu)}",
        f"{summary.tokens_per_device_s:.0f} tokens per GPU and second",
        f"{_three_digits(hours)} GPU-hours per billion tokens",
    ]
    if summary.price_per_billion_tokens is not None and summary.price_per_step is not None:
        at = f"at {summary.price_per_device_hour:g} a GPU-hour"
        billion, step = _three_digits(summary.price_per_billion_tokens), _three_digits(summary.price_per_step)
        parts.append(f"price {billion} per billion tokens, {step} a step ({at})")
    return [", ".join(parts) + ".", *([goodput_line(summary.goodput)] if summary.goodput else [])]


def goodput_line(goodput: Goodput) -> str:
    """Return what failures leave of a plan's speed, and where the rest of the time goes."""
    fails = f"the job fails every {format_duration(goodput.job_mtbf_s)}"
    if goodput.days_per_trillion_tokens is None:
        return f"Goodput 0 %: {fails}, sooner than it trains, saves and restarts."
    parts = [
        f"{goodput.tokens_per_device_s:.0f} effective tokens per GPU and second",
        f"{_three_digits(goodput.days_per_trillion_tokens)} days for a trillion tokens",
    ]
    if goodput.price_per_billion_tokens is not None:
        parts.append(f"price {_three_digits(goodput.price_per_billion_tokens)} per billion tokens")
    shares = {"checkpoints take": goodput.checkpoints, "lost steps": goodput.lost, "restarts": goodput.restarts}
    listed = ", ".join(f"{name} {format_percent(share)}" for name, share in shares.items())
    return f"Goodput {format_percent(goodput.goodput)}: {', '.join(parts)}; {fails}: {listed}."


def _wide(interval: StepInterval) -> str:
    """Return why an interval is wider than those of the published rows; empty where it is not."""
    reasons = ["PyTorch's allocator retries allocations"] if interval.allocation_retries else []
    if interval.beyond:
        reasons.append(f"no published row has {' or '.join(each.partition(' (')[0] for each in interval.beyond)}")
    return f"; wider than usual: {', and '.join(map(one_line, reasons))}" if reasons else ""


def _three_digits(value: float) -> str:
    """Return a number with three significant digits at least, never with an exponent that hides its size."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
