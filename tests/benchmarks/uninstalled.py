"""Makes a package appear uninstalled for one test."""

import sys

import pytest


class Without:
    """An import finder that reports one package as missing."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def uninstall(package: str, monkeypatch: pytest.MonkeyPatch, *, users: tuple[str, ...] = ()) -> None:
    """Make ``package`` appear missing, and import every module whose name begins with one of ``users`` again.

    An import also sets an attribute of the parent package; that attribute is restored at the end.
    """
    chosen = [name for name in sys.modules if name.partition(".")[0] == package or name.startswith(users)]
    for name in sorted(chosen, reverse=True):
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.delattr(sys.modules[parent], child, raising=False)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(package), *sys.meta_path])
