"""The frameworks by their names."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.interchange import accelerate, deepspeed, megatron_bridge, megatron_lm, torchtitan, trl, verl
from memo_sim.interchange.framework import Framework, Source

FRAMEWORKS: dict[str, Framework] = {
    f.name: f
    for f in (
        megatron_lm.FRAMEWORK,
        megatron_bridge.FRAMEWORK,
        torchtitan.FRAMEWORK,
        deepspeed.FRAMEWORK,
        accelerate.FRAMEWORK,
        trl.FRAMEWORK,
    )
}


READ_ONLY: dict[str, Framework] = {verl.FRAMEWORK.name: verl.FRAMEWORK}
"""Frameworks whose jobs are read, and not written."""
_ALL = FRAMEWORKS | READ_ONLY


def framework_titled(title: str) -> Framework:
    """Return the framework with a title, as ``ImportedJob`` has it."""
    return next(one for one in _ALL.values() if one.title == title)


def find_framework(name: str) -> Framework:
    """Return the framework called ``name``.

    Raises:
        UsageError: when there is none.
    """
    if name not in _ALL:
        raise UsageError("unknown framework", got=repr(name), wanted=", ".join(_ALL), hint=did_you_mean(name, _ALL))
    return _ALL[name]


def framework_of(sources: Sequence[Source]) -> Framework:
    """Return the framework whose files these are.

    Raises:
        BadInput: when no framework knows one of them, or they are of several.
    """
    if any(verl.reads(source) for source in sources):  # other words of its commands are those of other frameworks
        return verl.FRAMEWORK
    left = dict[str, Framework]()
    for source in sources:
        know = {name: framework for name, framework in FRAMEWORKS.items() if framework.reads(source)}
        if not know and len(sources) > 1:
            continue  # a script that starts another one of the files
        if not know:
            raise BadInput(
                "no framework's file that memo knows",
                where=source.name,
                wanted="a script, configuration or recipe of " + ", ".join(f.title for f in _ALL.values()),
                hint="say which with --framework",
            )
        both = {name: framework for name, framework in left.items() if name in know} if left else know
        if not both:
            got, hint = f"{', '.join(left)}, then {', '.join(know)}", "import them one by one, or --framework"
            raise BadInput("the files are of several frameworks", where=source.name, got=got, hint=hint)
        left = both
    if not left:
        names = ", ".join(source.name for source in sources)
        raise BadInput("no framework's files that memo knows", where=names, hint="say which with --framework")
    return next(iter(left.values()))
