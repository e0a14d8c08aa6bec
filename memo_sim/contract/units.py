"""Units as types, and parsing and formatting of token counts (``64k``), bytes (``1.5 GiB``) and seconds.

Names carry the unit (``_bytes``, ``_s``, ``_tokens``). Memory is shown in GiB (2**30), rates in GB/s (1e9).
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from memo_sim.contract.errors import UsageError

KIB = 1024
MIB = 2**20
GIB = 2**30
GB = 10**9

MOST_BYTES = 2**62
"""Four exbibytes. Any larger number in a file is a typo, and would overflow the 64-bit numbers of libraries."""
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
MOST_TOKENS = 2**30
"""Longest plausible sequence; anything longer is a typo, and a program in chunks would grow with it."""
SequenceTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
MOST_LAYERS = 1_024
"""The deepest transformer published has 1,000 layers (DeepNet, arXiv 2203.00555); a search takes longer with each."""
Layers = Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
MOST_WIDTH = 2**24
Width = Annotated[int, msgspec.Meta(ge=1, le=MOST_WIDTH)]
"""Heads or features of a layer, rows of a vocabulary. Far above any model, and small enough that no size overflows."""
MOST_EXPERTS = 1_024
"""Experts of a layer: more than any published model has (DeepSeek-V3: 256, Llama 4 Maverick: 128)."""
Degree = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""A number of devices, nodes or sequences."""
LAYER_CHOICE = r"all|first-[1-9][0-9]{0,3}|(every|groups)-([2-9]|[1-9][0-9]{1,3})"
LayerChoice = Annotated[str, msgspec.Meta(pattern=f"^({LAYER_CHOICE})$")]
"""Which layers of a stage: all, every N-th, the first K, or all of them in groups of N."""
EXPERT_LOAD = r"balanced|zipf-[0-4](\.[0-9]{1,2})?|measured(-[0-9]{1,7}){2,1024}"
ExpertLoad = Annotated[str, msgspec.Meta(pattern=f"^({EXPERT_LOAD})$")]
"""How rows spread over experts: evenly, by Zipf's law with an exponent, or as measured (``expert_load.py``)."""
MOST_DEVICES = 2**17
"""Devices of a cluster: as many as the largest that are built have, and few enough to try every way to divide them."""
PerNode = Annotated[int, msgspec.Meta(ge=1, le=1_024)]
"""Devices, or network cards, of a node: what one switch fabric joins (576 devices in the largest, NVIDIA's NVL576)."""
ZeroLevel = Annotated[int, msgspec.Meta(ge=0, le=3)]
ZeroRanks = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
ExpertTp = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e60)]
"""The bound is far above any time that ``Rate`` allows, and small enough for whole nanoseconds."""
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
Rate = Annotated[float, msgspec.Meta(ge=1e-30, le=1e30)]
"""A rate, or a ratio. The bounds keep quotients finite."""
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]

DURATION_FROM = 2
"""A duration is shown in a unit of which it has at least so many."""
SHORT_DIGITS = 3
"""Significant digits of a duration. With more digits, trailing zeros are kept, so that columns line up."""

MOST_DURATION_S = 10_000 * 86_400.0
"""Longest plausible duration; anything longer is a typo."""

_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*([smhd]?)", re.IGNORECASE | re.ASCII)
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PRICE = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)
_TOKENS = re.compile(r"(\d{1,18})(?:\.(\d{1,18}))?\s*([km]?)", re.IGNORECASE | re.ASCII)
_NUMBERS = re.compile(r"[0-9]{1,4}(,[0-9]{1,4})*")
_LAYER_CHOICE = re.compile(LAYER_CHOICE)
_EXPERT_LOAD = re.compile(EXPERT_LOAD)
_SCALE = {"": 1, "k": KIB, "m": KIB * KIB}

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "uint8": 1, "e4m3": 1, "e5m2": 1}


def parse_tokens(text: str, *, option: str = "--seq-len", least: int = 1) -> int:
    """Return the number of tokens that ``text`` names: ``4096``, ``64k`` = 65,536, ``1m`` = 1,048,576.

    ``option`` is the command-line option that the message names.

    Raises:
        UsageError: when ``text`` is not a whole number of tokens, less than ``least``, or more than 2**30.
    """
    if match := _TOKENS.fullmatch(text.strip()):
        whole, decimals, suffix = match.groups(default="")
        one = int("1" + "0" * len(decimals))
        tokens, rest = divmod(int(whole + decimals) * _SCALE[suffix.lower()], one)
        if least <= tokens <= MOST_TOKENS and not rest:
            return tokens
    raise UsageError(
        "not a number of tokens",
        got=repr(text),
        wanted=f"a whole number from {least} to 1024m, for example 65536 or 64k",
        hint=f"several lengths: memo-sim sweep MODEL --cluster A {option} {text} -o s.jsonl"
        if "," in text and option == "--seq-len"
        else f"{option} 64k",
    )


def parse_duration(text: str, *, option: str) -> float:
    """Return the seconds that ``text`` names: ``600``, ``600s``, ``10m``, ``1.5h``, ``2d``.

    ``option`` is the command-line option that the message names.

    Raises:
        UsageError: when ``text`` is not a duration of more than 0 s and at most ``MOST_DURATION_S``.
    """
    if match := _DURATION.fullmatch(text.strip()):
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
        if 0 < seconds <= MOST_DURATION_S:
            return seconds
    raise UsageError(
        "not a duration",
        got=repr(text),
        wanted="a number of seconds, minutes, hours or days, above 0 and at most 10000d: 600s, 10m, 2h, 1d",
        hint=f"{option} 10m",
    )


def parse_prices(text: str, *, option: str) -> dict[str, float]:
    """Return prices by name from ``2.5``, whose name is empty, or from ``h100=2.5,h200=3.5``.

    ``option`` is the command-line option that the message names.

    Raises:
        UsageError: when ``text`` is neither, or names something twice.
    """
    prices: dict[str, float] = {}
    for pair in text.split(","):
        name, equals, number = pair.strip().rpartition("=")
        if not _PRICE.fullmatch(number) or bool(equals) != bool(name) or name in prices or not float(number):
            raise UsageError(
                "no price",
                got=repr(pair),
                wanted="one number above 0, or KIND=NUMBER pairs joined by commas",
                hint=f"{option} 2.5, or {option} h100=2.5,h200=3.5",
            )
        prices[name] = float(number)
    return prices


def parse_numbers(text: str, *, option: str) -> tuple[int, ...]:
    """Return the numbers of ``text``, which are joined by commas: ``7,8,8,7``.

    ``option`` is the command-line option that the message names.

    Raises:
        UsageError: when one of them is not a whole number from 1 to 9999.
    """
    if _NUMBERS.fullmatch(text) and (numbers := tuple(map(int, text.split(",")))) and min(numbers) > 0:
        return numbers
    raise UsageError(
        "not a list of numbers",
        got=repr(text),
        wanted="whole numbers from 1 to 9999, joined by commas",
        hint=f"{option} 7,8,8,7",
    )


def parse_expert_load(text: str, *, option: str) -> str:
    """Return ``text`` if it says how rows spread over experts: ``balanced``, ``zipf-0.5`` or ``measured-1500-500``.

    ``option`` is the command-line option that the message names.

    Raises:
        UsageError: when it does not.
    """
    wanted = "balanced, zipf-S with S below 5 and at most two decimals, or a file of memo-exec run --expert-load"
    return _matching(_EXPERT_LOAD, text, "a load of experts", wanted=wanted, hint=f"{option} zipf-0.5")


def parse_layer_choice(text: str, *, option: str) -> str:
    """Return ``text`` if it says which layers of a stage: ``all``, ``every-2``, ``first-8`` or ``groups-2``.

    ``option`` is the command-line option that the message names.

    Raises:
        UsageError: when it does not.
    """
    wanted = "all, every-N (N from 2), first-K (K from 1) or groups-N (N from 2), up to 9999"
    return _matching(_LAYER_CHOICE, text, "a choice of layers", wanted=wanted, hint=f"{option} every-2")


def _matching(pattern: re.Pattern[str], text: str, what: str, *, wanted: str, hint: str) -> str:
    if not pattern.fullmatch(text):
        raise UsageError(f"not {what}", got=repr(text), wanted=wanted, hint=hint)
    return text


def format_tokens(tokens: int) -> str:
    """Return ``tokens`` in short form (``64k``, ``1m``) when that is exact, else in digits."""
    for suffix in ("m", "k"):
        if tokens and tokens % _SCALE[suffix] == 0:
            return f"{tokens // _SCALE[suffix]}{suffix}"
    return str(tokens)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return ``1 layout`` or ``2 layouts``; ``plural`` is the ending of the noun's plural."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def format_bytes(size_bytes: float) -> str:
    """Return a size in GiB; below 0.1 GiB in MiB or KiB, below 0.1 KiB in bytes."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= 0.1 * scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_percent(fraction: float, digits: int = 1, *, signed: bool = False) -> str:
    """Return a fraction in percent with ``digits`` decimals (``53.6 %``), optionally with its sign."""
    return f"{100 * fraction:{'+' if signed else ''}.{digits}f} %"


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Return a duration with at least ``digits`` significant digits, in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale or unit == "us":
            value = seconds / scale
            if digits <= SHORT_DIGITS and abs(seconds) < 1000:  # more would be 1e+03
                return f"{value:.{digits}g} {unit}"
            return f"{value:.{max(0, digits - len(str(int(abs(value)))))}f} {unit}"
    raise AssertionError


def format_duration(seconds: float) -> str:
    """Return a duration in days, hours, minutes or seconds: in the largest unit of which it has at least two."""
    for unit, scale in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= DURATION_FROM * scale:
            return f"{seconds / scale:,.{0 if seconds >= 100 * scale else 1}f} {unit}"
    return format_seconds(seconds)
