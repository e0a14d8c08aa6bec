"""Fixture with the processes (ranks) that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.distributed.team import Team


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    with Team(4) as found:
        yield found
