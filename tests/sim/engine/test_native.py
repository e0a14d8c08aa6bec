"""Native code is loaded from its file without numba, and compiled again where the file is not exactly that code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memo_sim.engine import native
from memo_sim.engine.native import Native, Source

pytest.importorskip("numba")

TOTAL = """
def total(count, factor, numbers):
    found = 0
    for at in range(count):
        found += factor * numbers[at]
    return found
"""

CALLS = """
import sys
import numpy as np
from memo_sim.engine.native import Native, Source
total = Native(Source({module!r}, "total", ("int64", "int64", "int32*")))
print(total.bound(3, 2, np.array([1, 2, 4], dtype=np.int32))(), "numba" in sys.modules)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """A function in a module of its own, whose code is kept below ``tmp_path``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    module = f"total_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(TOTAL)
    yield Source(module, "total", ("int64", "int64", "int32*"))
    sys.modules.pop(module, None)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is compiled from now on."""
    names, compiles = list[str](), native._compiled

    def noted(source: Source) -> bytes:
        names.append(source.name)
        return compiles(source)

    monkeypatch.setattr(native, "_compiled", noted)
    return names


def total(source: Source) -> int:
    return Native(source).bound(3, 2, np.array([1, 2, 4], dtype=np.int32))()


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix == ".o")


def test_another_process_needs_no_numba(source: Source, tmp_path: Path) -> None:
    def called() -> list[str]:
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + CALLS.format(module=source.module)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert called() == ["14", "True"]
    assert [path.parent.name for path in kept(tmp_path)] == ["__pycache__"]
    assert called() == ["14", "False"]


def test_code_that_is_not_whole_is_compiled_again(source: Source, tmp_path: Path, compiled: list[str]) -> None:
    assert (total(source), total(source), len(compiled)) == (14, 14, 1)
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    changed = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    for number, damaged in enumerate((b"", whole[:40], whole[:-1], whole + b"\0", changed)):
        path.write_bytes(damaged)
        assert (total(source), total(source), len(compiled)) == (14, 14, number + 2)
    assert kept(tmp_path) == [path]


def test_code_of_anything_else_is_not_used(
    source: Source, tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    total(source)
    with monkeypatch.context() as other:
        other.setattr(native, "version", lambda name: f"another {name}")
        total(source)
    assert len(compiled) == 2
    name, features = native._processor()
    with monkeypatch.context() as other:
        other.setattr(native, "_processor", lambda: (name, features + ",-avx512fp16"))
        total(source)
    assert len(compiled) == 3
    assert len(kept(tmp_path)) == 2, "processors have files of their own"
    source.path.write_text(TOTAL.replace("found = 0", "found = 10"))
    sys.modules.pop(source.module)
    assert total(source) == 24
    assert len(compiled) == 4


def test_code_is_kept_for_the_user_where_the_source_is_read_only(
    source: Source, tmp_path: Path, compiled: list[str]
) -> None:
    (tmp_path / "__pycache__").write_text("no folder")
    assert (total(source), total(source), len(compiled)) == (14, 14, 1)
    assert [path.parent for path in kept(tmp_path)] == [tmp_path / "cache" / "memo"]


def test_nothing_is_compiled_where_no_folder_can_be_written(
    source: Source, tmp_path: Path, compiled: list[str]
) -> None:
    (tmp_path / "__pycache__").write_text("no folder")
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(OSError, match="cache"):
        total(source)
    assert compiled == []


def test_kept_code_is_not_used_without_numba(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert total(source) == 14
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'numba'"):
        total(source)


def test_code_that_needs_the_runtime_of_numba_is_refused(source: Source, tmp_path: Path) -> None:
    source.path.write_text("import numpy as np\n" + TOTAL.replace("found = 0", "found = np.empty(count)[0]"))
    with pytest.raises(RuntimeError, match=r"total calls functions that only numba's runtime has: .*NRT"):
        total(source)
    assert kept(tmp_path) == []


def test_other_types_of_arguments_are_refused(source: Source) -> None:
    function, numbers = Native(source), np.zeros(4, dtype=np.int32)
    with pytest.raises(TypeError, match="2 arguments are given, and 3 are wanted"):
        function.bound(1, 2)
    with pytest.raises(TypeError, match=r"an array of int64 is given as an argument of type int32\*"):
        function.bound(1, 2, numbers.astype(np.int64))
    with pytest.raises(TypeError, match=r"an array of int32 is given as an argument of type int32\*"):
        function.bound(1, 2, numbers[::2])
    with pytest.raises(TypeError, match=r"a number is given as an argument of type int32\*"):
        function.bound(1, 2, 3)
    with pytest.raises(TypeError, match="an array of int32 is given as an argument of type int64"):
        function.bound(1, numbers, numbers)
