"""Parsing of token counts, durations and prices, and formatting of sizes."""

import pytest

from memo_sim.contract.errors import UsageError
from memo_sim.contract.units import (
    format_bytes,
    format_seconds,
    format_tokens,
    parse_duration,
    parse_prices,
    parse_tokens,
)
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1),
        ("4096", 4096),
        ("64k", 65_536),
        ("64K", 65_536),
        (" 64 k ", 65_536),
        ("1m", 1_048_576),
        ("1.5k", 1536),
        ("1.25m", 1_310_720),
        ("1408k", 1_441_792),
        ("2.0", 2),
        ("007", 7),
        ("1024m", 1_073_741_824),
    ],
)
def test_tokens_are_read(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "0", "0k", "0.0", "-3", "+3", "1e3", "1.5", "0.3k", "k", "64kb", "64ki", "64g", "64kk", "1,000"],
        *["1_000", "nan", "inf", "0x10", "1.", ".5k", "\u0663", "9" * 5000, "1." + "0" * 5000, "1025m", "1073741825"],
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_tokens(text)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("tokens", [1, 1000, 1023, 1024, 1536, 65_536, 1_048_576, 1_310_720, 1_441_792])
def test_shown_tokens_read_back(tokens: int) -> None:
    assert parse_tokens(format_tokens(tokens)) == tokens


def test_shown_tokens_are_short() -> None:
    assert [format_tokens(n) for n in (0, 1000, 65_536, 1_048_576, 1_441_792)] == ["0", "1000", "64k", "1m", "1408k"]


def test_shown_bytes_are_binary() -> None:
    shown = [format_bytes(size) for size in (0, 512, 2**20, 5 * 2**28, 80 * 2**30, -(2**30))]
    assert shown == ["0 B", "0.50 KiB", "1.00 MiB", "1.25 GiB", "80.00 GiB", "-1.00 GiB"]


def test_shown_seconds_choose_a_unit() -> None:
    assert [format_seconds(s) for s in (0, 2.5e-6, 0.0125, 1.5, 4321.6)] == [
        "0 us",
        "2.5 us",
        "12.5 ms",
        "1.5 s",
        "4322 s",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("600", 600), ("600s", 600), ("10m", 600), ("1.5h", 5400), ("2D", 172_800), (" 90 s ", 90), ("0.25s", 0.25)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text, option="--within") == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1s", "1e3", "10min", "1h30m", "nan", "inf", "s", "10001d", "1.s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with refused(UsageError, got=repr(text), hint="--within 10m"):
        parse_duration(text, option="--within")


def test_prices_are_one_for_all_or_one_a_kind() -> None:
    assert parse_prices("2.5", option="--price") == {"": 2.5}
    assert parse_prices("h100=2.5, h200=3", option="--price") == {"h100": 2.5, "h200": 3.0}


@pytest.mark.parametrize("text", ["", "0", "h100=", "=2", "h100=2,h100=3", "h100=-1", "h100=2,", "two", "1e9", "nan"])
def test_what_is_no_price_is_refused(text: str) -> None:
    with refused(UsageError, wanted="KIND=NUMBER", hint="--price 2.5"):
        parse_prices(text, option="--price")


def test_several_lengths_are_a_sweep() -> None:
    with refused(UsageError, got="'64k,128k'", hint="memo-sim sweep MODEL --cluster A --seq-len 64k,128k -o s.jsonl"):
        parse_tokens("64k,128k")
    with refused(UsageError, got="'64k,128k'", hint="--step 64k"):
        parse_tokens("64k,128k", option="--step")
