"""Every failure a user can cause, with the exit code a script can rely on.

    1  MemoError        a bug (anything unexpected)
    2  UsageError       a wrong option or argument
    3  BadInput         a wrong file
    4  Infeasible       no plan fits, or the given one does not
    5  OutOfTolerance   measured and predicted differ by more than was allowed
    6  CannotRun        this machine cannot run the plan

A message says what is wrong, where, what was got, what was wanted, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable


class MemoError(Exception):
    """Base of all errors; ``str()`` is the message to show, ``exit_code`` the process's status."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        wanted: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.got = got
        self.wanted = wanted
        self.hint = hint
        super().__init__(self.message())

    def message(self) -> str:
        """Return the whole message: what, then one indented line each for where, got, wanted and next."""
        lines = [self.what]
        for label, value in (("where", self.where), ("got", self.got), ("wanted", self.wanted), ("next", self.hint)):
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)


class UsageError(MemoError):
    """A command-line option or argument that cannot be used."""

    exit_code = 2


class BadInput(MemoError):
    """A file that cannot be read, decoded or believed."""

    exit_code = 3


class Infeasible(MemoError):
    """A question whose answer is that nothing fits."""

    exit_code = 4


class OutOfTolerance(MemoError):
    """Measured and predicted values that differ by more than the tolerance that was asked for."""

    exit_code = 5


class CannotRun(MemoError):
    """A plan that this machine cannot execute (missing kernels, devices or memory)."""

    exit_code = 6


class RankLost(CannotRun):
    """What a rank fails with whose partner has failed before it."""


def did_you_mean(got: str, known: Iterable[str]) -> str | None:
    """Return ``did you mean 'alpha'?`` for the known name nearest to ``got``, None when none is near."""
    from difflib import get_close_matches

    near = get_close_matches(got, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else None


EXTRAS = {
    "simpy": "sim",
    "mip": "sim",
    "matplotlib": "sim",
    "ortools": "cp-sat",
    "torch": "exec",
    "safetensors": "exec",
}
"""The extra that brings each package which not every installation needs."""


def missing_package(error: Exception) -> CannotRun | None:
    """Return what to say when ``error`` is the absence of an optional package, or None when it is something else."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name not in EXTRAS:
        return None
    return CannotRun(
        "a package that this command needs is not installed", got=name, hint=f"install memo[{EXTRAS[name]}]"
    )
