"""Native code is loaded from its file without numba, and compiled again where the file is not exactly that code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memo_sim.engine import native
from memo_sim.engine.native import Native, NotKept, Source

pytest.importorskip("numba")

TOTAL = """
FROM_ELSEWHERE = 0

def product(factor, number):
    return factor * number

def total(count, factor, numbers):
    found = FROM_ELSEWHERE
    for at in range(count):
        found += product(factor, numbers[at])
    return found

def corners(table):
    table[0, 0] += 1.0
    if table[-1, -1] > 0:
        return table.shape[0] * 100 + table.shape[1]
    return 0
"""

CALLS = """
import sys
import numpy as np
from memo_sim.engine.native import Native, Source
from total import total
call = Native(Source(total, ("int64", "int64", "int32*"))).bound(3, 2, np.array([1, 2, 4], dtype=np.int32))
print(call(), "numba" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a module of functions, whose code is kept below it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "total.py").write_text(TOTAL)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is compiled from now on."""
    names, compiles = list[str](), native._compiled

    def noted(source: Source) -> bytes:
        names.append(source.function.__name__)
        return compiles(source)

    monkeypatch.setattr(native, "_compiled", noted)
    return names


def functions(folder: Path, **changed: int) -> dict[str, Any]:
    """Return the names of the module; numbers among them are changed as if they came from another module."""
    path = folder / "total.py"
    found: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), found)
    found.update(changed)
    return found


def total(folder: Path, **changed: int) -> int:
    source = Source(functions(folder, **changed)["total"], ("int64", "int64", "int32*"))
    return Native(source).bound(3, 2, np.array([1, 2, 4], dtype=np.int32))()


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix == ".o")


def test_another_process_needs_no_numba(folder: Path) -> None:
    def called() -> list[str]:
        code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{CALLS}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert called() == ["14", "True"]
    assert [path.parent.name for path in kept(folder)] == ["__pycache__"]
    assert called() == ["14", "False"]


def test_arrays_have_their_shapes(folder: Path) -> None:
    function = Native(Source(functions(folder)["corners"], ("float64[:, :]",)))
    for rows, columns in ((2, 3), (3, 2), (1, 1)):
        table = np.zeros((rows, columns))
        table[-1, -1] = 1.0
        assert function.bound(table)() == 100 * rows + columns
        assert table[0, 0] == (2.0 if table.size == 1 else 1.0)


def test_code_that_is_not_whole_is_compiled_again(folder: Path, compiled: list[str]) -> None:
    assert (total(folder), total(folder), len(compiled)) == (14, 14, 1)
    (path,) = kept(folder)
    whole = path.read_bytes()
    changed = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    for number, damaged in enumerate((b"", whole[:40], whole[:-1], whole + b"\0", changed)):
        path.write_bytes(damaged)
        assert (total(folder), total(folder), len(compiled)) == (14, 14, number + 2)
    assert kept(folder) == [path]


def test_code_of_anything_else_is_not_used(folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    total(folder)
    with monkeypatch.context() as other:
        other.setattr(native, "version", lambda name: f"another {name}")
        total(folder)
    assert len(compiled) == 2
    assert total(folder, FROM_ELSEWHERE=5) == 19
    assert len(compiled) == 3
    (folder / "total.py").write_text(TOTAL.replace("factor * number", "factor + number"))
    assert total(folder) == 13
    assert len(compiled) == 4
    name, features = native._processor()
    monkeypatch.setattr(native, "_processor", lambda: (name, f"{features},-avx512fp16"))
    assert total(folder) == 13
    assert len(compiled) == 5
    assert len(kept(folder)) == 2, "each processor has a file of its own"


def test_code_is_kept_for_the_user_where_the_source_is_read_only(folder: Path, compiled: list[str]) -> None:
    (folder / "__pycache__").write_text("no folder")
    assert (total(folder), total(folder), len(compiled)) == (14, 14, 1)
    assert [path.parent for path in kept(folder)] == [folder / "cache" / "memo"]


def test_code_that_others_can_have_written_is_not_used(folder: Path, compiled: list[str]) -> None:
    total(folder)
    (path,) = kept(folder)
    path.chmod(0o664)
    assert (total(folder), total(folder), len(compiled)) == (14, 14, 2)
    assert path.stat().st_mode & 0o777 == 0o644


def test_code_is_compiled_only_where_it_may_be(folder: Path, compiled: list[str]) -> None:
    source = Source(functions(folder)["total"], ("int64", "int64", "int32*"))
    with pytest.raises(NotKept):
        Native(source, compiles=False)
    Native(source)
    Native(source, compiles=False)
    (path,) = kept(folder)
    path.write_bytes(b"")
    with pytest.raises(NotKept):
        Native(source, compiles=False)
    assert len(compiled) == 1


def test_nothing_is_compiled_where_no_folder_can_be_written(folder: Path, compiled: list[str]) -> None:
    (folder / "__pycache__").write_text("no folder")
    (folder / "cache").write_text("no folder")
    with pytest.raises(OSError, match="cache"):
        total(folder)
    assert compiled == []


def test_kept_code_is_not_used_without_numba(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert total(folder) == 14
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'numba'"):
        total(folder)


@pytest.mark.parametrize("found", ["np.empty(count)[0]", "[count][0]", "len(str(count))"])
def test_code_that_needs_the_runtime_of_numba_is_refused(found: str, folder: Path) -> None:
    path = folder / "total.py"
    path.write_text("import numpy as np\n" + TOTAL.replace("found = FROM_ELSEWHERE", f"found = {found}"))
    with pytest.raises(RuntimeError, match="total uses parts of numba's runtime: "):
        total(folder)
    assert kept(folder) == []


def test_an_exception_is_no_result(folder: Path) -> None:
    path = folder / "total.py"
    path.write_text(
        TOTAL.replace("    return found\n", "    if found < 0:\n        raise ValueError\n    return found\n")
    )
    assert total(folder) == 14
    with pytest.raises(RuntimeError, match=r"native code ended with status [1-9]"):
        total(folder, FROM_ELSEWHERE=-100)


def test_other_types_of_arguments_are_refused(folder: Path) -> None:
    known, numbers, table = functions(folder), np.zeros(4, dtype=np.int32), np.zeros((2, 2))
    function = Native(Source(known["total"], ("int64", "int64", "int32*")))
    with pytest.raises(TypeError, match="2 arguments are given, and 3 are wanted"):
        function.bound(1, 2)
    for wrong in (numbers.astype(np.int64), numbers[::2], 3):
        with pytest.raises(TypeError, match=r"is given as an argument of type int32\*"):
            function.bound(1, 2, wrong)
    for wrong in (numbers, 2**63):
        with pytest.raises(TypeError, match="is given as an argument of type int64"):
            function.bound(1, wrong, numbers)
    function = Native(Source(known["corners"], ("float64[:, :]",)))
    for wrong in (table[0], table.T[:1], table.astype(np.int64), 1):
        with pytest.raises(TypeError, match=r"is given as an argument of type float64\[:, :\]"):
            function.bound(wrong)
