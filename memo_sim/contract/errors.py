"""The error hierarchy: every failure that a user can cause, with an exit code that scripts can rely on.

    1  MemoError        a bug (anything unexpected)
    2  UsageError       a wrong option or argument
    3  BadInput         a wrong file
        4  Infeasible       no plan fits, or the given plan does not fit
        5  OutOfTolerance   measured and predicted values differ by more than the tolerance
    6  CannotRun        this machine cannot run the plan

A message says what is wrong, where, what was given, what is allowed, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable

from memo_sim.contract.plain_text import one_line, shortened


class MemoError(Exception):
    """Base of all errors; ``str()`` is the message for the user, ``exit_code`` is the process's exit status."""

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

    def __str__(self) -> str:
        """Return the message. Unpickled, in another process, the parts are whole and the arguments are not."""
        return self.message()

    def message(self) -> str:
        """Return the whole message: what is wrong, then one indented line each for where, got, wanted and next.

        They hold names and values from files, so each stays on its line (``plain_text.one_line``).
        """
        lines = [shortened(one_line(self.what))]
        for label, value in (("where", self.where), ("got", self.got), ("wanted", self.wanted), ("next", self.hint)):
            if value is not None:
                lines.append(f"  {label}: {shortened(one_line(str(value)))}")
        return "\n".join(lines)


class UsageError(MemoError):
    """A command-line option or argument that cannot be used."""

    exit_code = 2


class BadInput(MemoError):
    """A file that cannot be read, cannot be decoded, or holds wrong values."""

    exit_code = 3


class Infeasible(MemoError):
    """Nothing fits: no plan is feasible, or the given plan is not."""

    exit_code = 4


class OutOfTolerance(MemoError):
    """Measured and predicted values differ by more than the requested tolerance."""

    exit_code = 5


class CannotRun(MemoError):
    """A plan that this machine cannot execute (missing kernels, devices or memory)."""

    exit_code = 6


class RankLost(CannotRun):
    """The error of a rank whose communication partner failed first."""


def did_you_mean(got: str, known: Iterable[str]) -> str | None:
    """Return ``did you mean 'alpha'?`` with the known name nearest to ``got``, or None when no name is near."""
    from difflib import get_close_matches

    near = get_close_matches(got, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else None


EXTRAS = {
    "simpy": "sim",
    "mip": "sim",
    "matplotlib": "sim",
    "yaml": "sim",
    "jinja2": "sim",
    "ortools": "cp-sat",
    "distributed": "dask",
    "torch": "exec",
    "safetensors": "exec",
    "greenlet": "tokenwise",
    "transformers": "tokenwise",
}
"""Optional packages, and the extra of ``memo`` that installs each."""


def missing_package(error: Exception) -> CannotRun | None:
    """Return the error to show when ``error`` is a missing optional package, else None."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name not in EXTRAS:
        return None
    return CannotRun(
        "a package that this command needs is not installed",
        got=name,
        hint=f"in memo's source folder: pip install '.[{EXTRAS[name]}]'",
    )


_NO_MEMORY = ("failed to map segment", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
"""What the loader of libraries and torch say when there is no memory; Python itself raises MemoryError."""


def shortage(error: Exception) -> CannotRun | None:
    """Return the error to show when the system refused memory or a thread, else None."""
    text = str(error)
    if text.startswith("can't start new thread"):
        return CannotRun(
            "the system refused a thread", got=text, hint="raise the limit of memory (ulimit -v) or of processes (-u)"
        )
    loaded = isinstance(error, OSError | ImportError | RuntimeError)
    if loaded and "out of memory" in text:  # torch.OutOfMemoryError is a RuntimeError
        return CannotRun(
            "the device has no memory left",
            got=text.splitlines()[0],
            hint="end other processes on the device, or ask for a shorter sequence",
        )
    if isinstance(error, MemoryError) or (loaded and any(sign in text for sign in _NO_MEMORY)):
        return CannotRun(
            "the system refused memory",
            got=(text or "MemoryError").splitlines()[0],
            hint="raise the limit of memory (ulimit -v, the container's), or ask for a shorter sequence",
        )
    return None
