"""The stretch of layers that repeats, and the shorter model that stands for all."""

from __future__ import annotations

import pytest

from memo_sim.contract.layer_shape import LayerShape
from memo_sim.program.layout.repeated_layers import repeated_layers


def shapes(kinds: str) -> list[LayerShape]:
    return [LayerShape(ffn_hidden=64 * (1 + "abc".index(kind))) for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "fewer", "stretch", "window", "times"),
    [
        ("a" * 12, "a" * 6, (0, 6), 2, 3),
        ("a" * 13, "a" * 7, (0, 7), 2, 3),
        ("bbb" + "a" * 12, "bbb" + "a" * 6, (3, 9), 2, 3),
        ("ab" * 6, "ab" * 3, (0, 6), 2, 3),
        ("aab" * 6, "aab" * 4, (0, 12), 6, 1),
        ("aab" * 8 + "aa", "aab" * 4 + "aa", (0, 14), 6, 2),
        ("c" + "ab" * 6 + "c", "c" + "ab" * 3 + "c", (1, 7), 2, 3),
    ],
)
def test_windows_are_left_out(kinds: str, fewer: str, stretch: tuple[int, int], window: int, times: int) -> None:
    found = repeated_layers(shapes(kinds), windows=1, beside=4)
    assert found.shapes == tuple(shapes(fewer))
    assert ((found.first, found.end), found.window, found.times) == (stretch, window, times)
    assert len(kinds) == len(fewer) + window * times


@pytest.mark.parametrize("kinds", ["a", "a" * 7, "abcabcb", "abbcacbabc"])
def test_all_layers_stay_where_too_few_repeat(kinds: str) -> None:
    found = repeated_layers(shapes(kinds), windows=1, beside=4)
    assert (found.shapes, found.times) == (tuple(shapes(kinds)), 0)
