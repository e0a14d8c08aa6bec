"""Tests the import contracts: they hold, each of them can break, and start-up loads no module that it does not need."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]

# For each contract, one import that it forbids: the file in which a test plants it, and the statement.
VIOLATIONS = {
    "Floors of memo_sim:": ("memo_sim/contract/planted.py", "import memo_sim.program"),
    "Floors of memo_sim.program": ("memo_sim/program/layout/planted.py", "import memo_sim.program.ir"),
    "Floors of memo_exec": ("memo_exec/memory/planted.py", "import memo_exec.kernels"),
    "memo_sim works without torch": ("memo_sim/views/planted.py", "import torch"),
    "memo_exec sees of memo_sim only": ("memo_exec/machine/planted.py", "import memo_sim.engine"),
    "simpy stays in": ("memo_sim/costs/planted.py", "import simpy"),
    "mip stays in": ("memo_sim/planning/planted.py", "import mip"),
    "click stays in": ("memo_sim/views/planted.py", "import click"),
}


def run_python(code: str, cwd: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def copy_with(planted: dict[str, str], tree: Path) -> Path:
    """Copy both packages and the contracts into ``tree`` and add the planted files."""
    for name in ("memo_sim", "memo_exec"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("data", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    for file, text in planted.items():
        (tree / file).write_text(text)
    return tree


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    return run_python(
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))", tree, tree
    )


def loaded_by(code: str, cwd: Path) -> set[str]:
    """Run ``code``, which may end in SystemExit, in a new Python process and return the modules that it has loaded."""
    report = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "import json\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = run_python(report, cwd, ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_contract_can_break(contract: str, tmp_path: Path) -> None:
    file, line = VIOLATIONS[contract]

    done = lint_imports(copy_with({file: f"{line}\n"}, tmp_path))

    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert done.returncode == 1
    assert len(broken) == 1, done.stdout
    assert broken[0].startswith(contract)


def test_a_new_room_must_be_given_a_floor(tmp_path: Path) -> None:
    strays = ("memo_sim", "memo_sim.program", "memo_exec")
    done = lint_imports(copy_with({f"{room.replace('.', '/')}/stray.py": "" for room in strays}, tmp_path))

    assert done.returncode == 1
    assert [room for room in strays if f"- {room}.stray" not in done.stdout] == []


def test_mip_is_imported_by_one_module() -> None:
    graph = grimp.build_graph("memo_sim", include_external_packages=True, cache_dir=None)
    importers = graph.find_modules_that_directly_import("mip") if "mip" in graph.modules else set()
    assert len(importers) <= 1, importers


def test_importing_memo_sim_loads_nothing_else(tmp_path: Path) -> None:
    added = loaded_by("import memo_sim", tmp_path) - loaded_by("pass", tmp_path)
    assert added == {"memo_sim"}


def test_help_of_memo_sim_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = {"matplotlib", "memo_exec", "mip", "msgspec", "numpy", "rich", "simpy", "torch"}
    loaded = loaded_by("from memo_sim.cli import main; sys.argv = ['memo-sim', '--help']; main()", tmp_path)
    assert "memo_sim.cli" in loaded
    assert not loaded & heavy
