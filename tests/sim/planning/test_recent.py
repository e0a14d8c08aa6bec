"""What a search lowers is kept as far as a size allows, and the last of it always."""

from __future__ import annotations

from memo_sim.planning.recent import Recent


def test_what_was_used_last_is_kept() -> None:
    made: list[str] = []

    def of(cache: Recent[str, str], key: str) -> str:
        def make() -> str:
            made.append(key)
            return key

        return cache.of(key, make)

    cache: Recent[str, str] = Recent(4, len)
    assert [of(cache, key) for key in ("aa", "bb", "aa", "cc", "aa")] == ["aa", "bb", "aa", "cc", "aa"]
    assert made == ["aa", "bb", "cc"]
    assert of(cache, "bb") == "bb"  # it went for cc
    assert made[-1] == "bb"
    assert of(cache, "longer") == of(cache, "longer") == "longer"
    assert made.count("longer") == 1
