"""Compare the fields of a refusal: what an error names. Its sentences may be reworded without touching a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memo_sim.contract.errors import MemoError

Expected = str | tuple[str, ...] | None
"""Text that the field holds, several such texts, or None for a field that is left out."""


def check_fields(error: BaseException | None, kind: type[MemoError], **fields: Expected) -> None:
    """Assert the class of ``error`` and what its fields (what, where, got, wanted, hint) hold."""
    assert isinstance(error, kind), repr(error)
    for name, expected in fields.items():
        found = getattr(error, name)
        if expected is None:
            assert found is None, f"{name}: {found}"
            continue
        for text in (expected,) if isinstance(expected, str) else expected:
            assert text in str(found), f"{name} {found!r} does not hold {text!r}\n{error}"


@contextmanager
def refused(kind: type[MemoError], **fields: Expected) -> Iterator[pytest.ExceptionInfo[MemoError]]:
    """Expect an error of ``kind`` whose fields hold what is given."""
    with pytest.raises(kind) as caught:
        yield caught
    check_fields(caught.value, kind, **fields)
