"""Tests that a wheel has everything that the packages need: profiles, clusters, presets, case files and texts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("memo_sim", "memo_exec")


def run(*arguments: str | Path, cwd: Path, path: Path | None = None) -> str:
    env = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_files(package: str) -> list[Path]:
    files = (path for path in (ROOT / package).rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return sorted(path.relative_to(ROOT) for path in files)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the sources and install it, without dependencies, into an empty folder."""
    tree, wheels, target = (tmp_path_factory.mktemp(name) for name in ("tree", "wheels", "target"))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "hardware_profiles", tree / "hardware_profiles")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check")
    run("-m", "pip", "wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, tree, cwd=tree)
    (wheel,) = wheels.glob("memo-*.whl")
    run("-m", "pip", "install", *offline, "--target", target, wheel, cwd=tree)
    return target


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_has_every_file_of_the_sources(installed: Path, package: str) -> None:
    files = source_files(package)
    assert Path(package, "py.typed") in files
    missing = [str(file) for file in files if not (installed / file).is_file()]
    assert missing == []
    changed = [str(file) for file in files if (installed / file).read_bytes() != (ROOT / file).read_bytes()]
    assert changed == []


def test_hardware_profiles_are_found_in_a_wheel_and_in_a_checkout(installed: Path, tmp_path: Path) -> None:
    code = "from memo_sim.contract import catalog; print(catalog.HARDWARE_PROFILES, *catalog.list_hardware())"
    names = sorted(path.stem for path in (ROOT / "hardware_profiles").glob("*.json"))
    assert run("-c", code, cwd=tmp_path, path=installed).split() == [
        str(installed / "memo_sim/hardware_profiles"),
        *names,
    ]
    assert run("-c", code, cwd=tmp_path, path=ROOT).split() == [str(ROOT / "hardware_profiles"), *names]


def test_a_profile_that_is_dropped_into_the_folder_is_found_by_name(installed: Path, tmp_path: Path) -> None:
    dropped = installed / "memo_sim/hardware_profiles/x99-oam-1gb.json"
    dropped.write_bytes((ROOT / "hardware_profiles/a800-sxm4-80gb.json").read_bytes())
    code = "from memo_sim.contract.catalog import load_cluster; print(load_cluster('x99-1x8')[0].hardware)"
    try:
        assert run("-c", code, cwd=tmp_path, path=installed).split() == ["x99-oam-1gb"]
    finally:
        dropped.unlink()


def test_packages_are_found_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    code = "import memo_exec, memo_sim; print(memo_exec.__file__, memo_sim.__file__, memo_sim.__version__, sep='\\n')"
    *files, version = run("-c", code, cwd=tmp_path, path=installed).splitlines()
    assert [Path(file).parents[1] for file in files] == [installed, installed]
    assert (installed / f"memo-{version}.dist-info/licenses/LICENSE").is_file()


def test_wheel_installs_both_commands(installed: Path) -> None:
    (entry_points,) = installed.glob("memo-*.dist-info/entry_points.txt")
    lines = entry_points.read_text().splitlines()
    assert {"memo-sim = memo_sim.cli:main", "memo-exec = memo_exec.cli:main"} <= set(lines)
