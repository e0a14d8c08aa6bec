"""Checks keyword arguments of public functions as a command checks its options: a refusal has the nearest name.

The names are checked when the function is called, so that the function keeps its signature and its types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from memo_sim.contract.errors import UsageError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")


def with_names_checked(*, others: Iterable[str] = ()) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the function raises ``UsageError`` where Python would raise ``TypeError`` about arguments.

    ``others`` are names that the function takes as ``**``.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        by_name = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        known = [*by_name, *others]
        needed = ", ".join(name for name, parameter in by_name.items() if parameter.default is parameter.empty)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if unknown := [name for name in kwargs if name not in known]:
                hint = did_you_mean(unknown[0], known) or f"help({function.__name__}) lists the names"
                raise UsageError(f"{function.__name__} has no argument of this name", got=repr(unknown[0]), hint=hint)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise UsageError(f"{function.__name__}: {error}", wanted=needed) from None
            return function(*args, **kwargs)

        return checked

    return decorate
