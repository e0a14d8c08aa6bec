"""The frameworks by their names."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.interchange import accelerate, deepspeed, megatron_bridge, megatron_lm, torchtitan, trl
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
    left = dict[str, Framework]()
    for source in sources:
        _refuse_verl(source)
        know = {name: framework for name, framework in FRAMEWORKS.items() if framework.reads(source)}
        if not know and len(sources) > 1:
            continue  # a script that starts another one of the files
        if not know:
            raise BadInput(
                "no framework's file that memo knows",
                where=source.name,
                wanted="a script, configuration or recipe of " + ", ".join(f.title for f in FRAMEWORKS.values()),
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


def _refuse_verl(source: Source) -> None:
    """Refuse a job of verl by name: its actor's step has a command, its rollouts and its other models have none.

    Raises:
        BadInput: when the file starts or configures verl.
    """
    if not any(word in source.text for word in ("verl.trainer", "actor_rollout_ref")):
        return
    raise BadInput(
        "memo does not read verl's jobs",
        where=source.name,
        wanted="a script, configuration or recipe of " + ", ".join(f.title for f in FRAMEWORKS.values()),
        hint="price the actor's step: memo-sim what-if MODEL --objective grpo --seq-len TOKENS (of prompt and response)"
        " --zero 3 --ulysses N --recompute full",
    )
