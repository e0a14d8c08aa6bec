"""Checks the arguments of public functions as a command checks its options: a refusal has the nearest name.

They are checked when the function is called, so that the function keeps its signature and its types. Checked are names,
and the types of values that can be told from their annotation: text, numbers, paths, words and classes.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

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
        needed = ", ".join(
            name for name, parameter in by_name.items() if parameter.default is parameter.empty and name != "self"
        )
        hints = cache(lambda: get_type_hints(function))  # the names in annotations are known when it is called

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if unknown := [name for name in kwargs if name not in known]:
                hint = did_you_mean(unknown[0], known) or f"help({function.__name__}) lists the names"
                raise UsageError(f"{function.__name__} has no argument of this name", got=repr(unknown[0]), hint=hint)
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise UsageError(f"{function.__name__}: {error}", wanted=needed) from None
            for name, parameter in by_name.items():
                given = bound.get(name, ()) if parameter.kind is parameter.VAR_POSITIONAL else (bound.get(name),)
                for value in given if name in bound else ():
                    _check(name, value, hints().get(name, object))
            return function(*args, **kwargs)

        return checked

    return decorate


def _check(name: str, value: object, hint: Any) -> None:
    if not _fits(value, hint):
        near = did_you_mean(value, _words(hint)) if isinstance(value, str) else None
        what = f"not a value of {repr(name) if name == 'of' else name}"
        raise UsageError(what, got=repr(value), wanted=_said(hint), hint=near)


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value has the type of an annotation; True where that cannot be told."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin in (os.PathLike, Mapping):
        return isinstance(value, origin)
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(_fits(each, *get_args(hint)) for each in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _words(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    return [word for each in get_args(hint) for word in _words(each)]


def _said(hint: Any) -> str:
    """Return an annotation as a user reads it: ``int or None``."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_said(each) for each in get_args(hint)))
    if words := _words(hint):
        return ", ".join(words)
    if get_origin(hint) is os.PathLike:
        return "a path"
    if get_origin(hint) is Sequence:
        return "a list of them"
    if get_origin(hint) is Mapping:
        return "a mapping"
    return {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "None"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )
