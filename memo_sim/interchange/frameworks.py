"""The frameworks by their names."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.interchange import megatron_bridge, megatron_lm
from memo_sim.interchange.framework import Framework, Source

FRAMEWORKS: dict[str, Framework] = {f.name: f for f in (megatron_lm.FRAMEWORK, megatron_bridge.FRAMEWORK)}


def find_framework(name: str) -> Framework:
    """Return the framework called ``name``.

    Raises:
        UsageError: when there is none.
    """
    if name not in FRAMEWORKS:
        wanted = ", ".join(FRAMEWORKS)
        raise UsageError("unknown framework", got=repr(name), wanted=wanted, hint=did_you_mean(name, FRAMEWORKS))
    return FRAMEWORKS[name]


def framework_of(sources: Sequence[Source]) -> Framework:
    """Return the framework whose files these are.

    Raises:
        BadInput: when no framework knows one of them, or they are of several.
    """
    found = dict[str, Framework]()
    for source in sources:
        of = next((f for f in FRAMEWORKS.values() if f.reads(source)), None)
        if of is None and len(sources) > 1:
            continue  # a script that starts another one of the files
        if of is None:
            raise BadInput(
                "no framework's file that memo knows",
                where=source.name,
                wanted="a script, configuration or recipe of " + ", ".join(f.title for f in FRAMEWORKS.values()),
                hint="say which with --framework",
            )
        found[of.name] = of
    if len(found) != 1:
        what = "the files are of several frameworks" if found else "no framework's files that memo knows"
        got, names = ", ".join(found) or None, ", ".join(source.name for source in sources)
        raise BadInput(what, where=names, got=got, hint="import them one by one, or say which with --framework")
    return next(iter(found.values()))
