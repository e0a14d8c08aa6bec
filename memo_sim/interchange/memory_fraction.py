"""The limit of PyTorch's caching allocator, which every framework on PyTorch takes from its environment.

    export PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.578947

is the fraction of a device's memory that the allocator may reserve. memo's limit (``Decisions.allocator_limit_gib``)
counts the reserve too, which is no part of the fraction: the CUDA context and the communicators.

PyTorch 2.10 has the option, 2.9.1 has not (``c10/cuda/CUDAAllocatorConfig.h``, pytorch/pytorch#161035). An earlier
PyTorch refuses it at the start of a job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memo_sim.contract.errors import BadInput
from memo_sim.contract.interchange import IgnoredOption, ReadOption
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import GIB

VARIABLE, FRACTION = "PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction"
SINCE = "PyTorch 2.10"
_DIGITS = 6
_SET = re.compile(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF['\"\]]*\s*[=:]\s*['\"]?([\w:.,\[\]-]+)", re.ASCII)
_BETWEEN = re.compile(r",(?![^\[]*\])")
"""A comma that is in no list: ``roundup_power2_divisions:[256:1,512:2]`` is one setting."""
_CALLED = re.compile(r"set_per_process_memory_fraction\(\s*([\d.]+)", re.ASCII)
_WHY = {
    "expandable_segments": "memo's allocator has segments of fixed size, which fragment more than expandable ones",
}
_OTHER = "memo's allocator has PyTorch's defaults"


def fraction_of(decisions: Decisions, reserve_bytes: int, device_bytes: float) -> float | None:
    """Return the fraction of a device's ``device_bytes`` that says a plan's limit; None without a limit."""
    if not decisions.allocator_limit_gib:
        return None
    room = decisions.allocator_limit_gib * GIB - reserve_bytes
    return round(min(max(room / device_bytes, 0.0), 1.0), _DIGITS)


def limit_gib(fraction: float, reserve_bytes: int, device_bytes: float) -> int:
    """Return the limit that a fraction stands for, in whole GiB with the reserve; 0 where it limits nothing."""
    limit = round((fraction * device_bytes + reserve_bytes) / GIB)
    return limit if 0 < limit * GIB < device_bytes else 0


def lines(fraction: float) -> list[str]:
    """Return the lines of a shell script that set the limit."""
    return [
        f"# The part of a device's memory that PyTorch's allocator may reserve: {SINCE} or later, others refuse it.",
        f"export {VARIABLE}={FRACTION}:{fraction:.{_DIGITS}f}",
    ]


def settings_of(
    files: Sequence[tuple[str, str]],
) -> tuple[float | None, list[ReadOption], list[IgnoredOption]]:
    """Return the fraction that files (names and texts) set, None without one, and what else they say to the allocator.

    Raises:
        BadInput: when the fraction is not between 0 and 1.
    """
    fraction, read, ignored = None, list[ReadOption](), list[IgnoredOption]()
    for file, whole in files:
        text = "\n".join(line for line in whole.splitlines() if not line.lstrip().startswith("#"))
        words = [word for found in _SET.findall(text) for word in _BETWEEN.split(found) if ":" in word]
        words += [f"{FRACTION}:{value}" for value in _CALLED.findall(text)]
        for word in words:
            name, _, value = word.partition(":")
            if name == FRACTION:
                fraction = _number(value, file)
                read.append(ReadOption(key=VARIABLE, value=word, says="allocator_limit_gib, as a part of the device"))
            else:
                why = _WHY.get(name, _OTHER)
                ignored.append(IgnoredOption(key=f"{VARIABLE} {name}", value=value, why=why))
    return fraction, read, ignored


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        wanted = "a number above 0, at most 1"
        raise BadInput("a wrong value", where=f"{where}: {FRACTION}", got=repr(text), wanted=wanted)
    return value
