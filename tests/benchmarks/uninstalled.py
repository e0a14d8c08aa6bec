"""A process in which a package is not installed, for one test."""

import sys

import pytest


class Without:
    """An import system that does not find a package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def uninstall(package: str, monkeypatch: pytest.MonkeyPatch, *, users: tuple[str, ...] = ()) -> None:
    """Let ``package`` be missing, and every module whose name begins with one of ``users`` be imported anew.

    An import sets the module as its parent's attribute, so that is put back at the end, too.
    """
    chosen = [name for name in sys.modules if name.partition(".")[0] == package or name.startswith(users)]
    for name in sorted(chosen, reverse=True):
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.delattr(sys.modules[parent], child, raising=False)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(package), *sys.meta_path])
