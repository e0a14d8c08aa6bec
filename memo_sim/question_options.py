"""Options that ``memo-sim`` questions share, made from the knobs' declarations, and the question they make.

Everything heavier than click is imported inside the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import (
    CHOSEN,
    KNOBS,
    PINNED,
    CountOrAuto,
    Degree,
    Flag,
    Fraction,
    Knob,
    LayerChoice,
    Length,
    Numbers,
    OneOf,
    Pins,
    Switch,
    Whole,
)
from memo_sim.views.command_line import Finite, typed

if TYPE_CHECKING:
    from memo_sim.answers.what_if import Outputs
    from memo_sim.contract.plan import Plan
    from memo_sim.planning.question import Question

GIB = 2**30
MEMORY_GIB = (0.001, 100_000)
"""Least and most GiB that an option may name; anything else is a typo."""
POWER_W = (1, 10_000)
"""Least and most watts that the option may name; a profile knows fewer."""
IN_A_PLAN = ("model", "seq_len", "system")
"""Parameters that a plan file decides beside the knobs, so that ``--plan`` excludes them."""
OF_A_SEARCH = ("pareto", "one_more_gib")
"""Options that only a search can answer, so that ``--plan`` excludes them."""
Options = dict[str, Any]
Command = TypeVar("Command", bound=Callable[..., Any])


SYSTEM = click.option("--system", default="any", show_default=True, help="A preset of `memo-sim list systems`.")
MEMORY = (
    click.option("--device-memory-gib", type=Finite(*MEMORY_GIB), help="Instead of the profile's."),
    click.option("--host-memory-gib", type=Finite(*MEMORY_GIB), help="Of one node, instead of its own."),
)
POWER = click.option(
    "--power-w", type=Finite(*POWER_W), help="Power limit of a device in watts, instead of its board's."
)
ON_COMMAND_LINE = tuple(knob for knob in KNOBS.values() if knob.on_command_line)


def question_options(command: Command) -> Command:
    """Give ``command`` the options of a question beside the model and the sequence: one for each knob."""
    for option in reversed((SYSTEM, *map(_option, ON_COMMAND_LINE), *MEMORY, POWER)):
        command = option(command)
    return command


def _option(knob: Knob) -> Callable[[Command], Command]:
    """Return the option of a knob; its value is stored under the knob's name."""
    names, attributes = knob.option, Options(help=knob.help, default=knob.default, show_default=True)
    match knob.kind:
        case Degree():
            attributes["type"] = click.IntRange(1)
        case Whole(least, most):
            attributes["type"] = click.IntRange(least, most)
        case Fraction():
            attributes["type"] = Finite(0, 1)
        case OneOf(words):
            attributes["type"] = click.Choice(words)
        case CountOrAuto():
            attributes["metavar"] = "N|auto"
        case Numbers():
            attributes["metavar"] = "N,N,..."
        case LayerChoice():
            attributes["metavar"] = "all|every-N|first-K|groups-N"
        case Switch():
            names += f"/--no-{knob.option.removeprefix('--')}"
        case Flag():
            attributes |= {"is_flag": True, "show_default": False}
    return click.option(names, knob.name, **attributes)


def asked(options: Options) -> tuple[Outputs, Plan | None, Question]:
    """Return the files that the answer is written to, and what ``question_of`` returns.

    Raises:
        UsageError: when a file cannot be written, or would replace what the question is read from; as ``question_of``.
        BadInput: as ``question_of``.
    """
    from memo_sim.answers.what_if import Outputs
    from memo_sim.contract.catalog import profile_path

    plan, picture, timeline = (Path(options[n]) if options[n] else None for n in ("output", "plot", "trace_path"))
    read = tuple(Path(options[n]) for n in ("model", "cluster", "plan_path", "job_path") if options.get(n))
    outputs = Outputs(plan=plan, picture=picture, timeline=timeline, read=read)
    outputs.check()
    given, question = question_of(options)
    replace(outputs, read=(profile_path(options["cluster"], question.cluster),)).check()
    return outputs, given, question


def question_of(options: Options) -> tuple[Plan | None, Question]:
    """Return the question, and the plan that is to be priced in place of a search (None where it is searched).

    Raises:
        UsageError: when the options contradict each other, or name what there is not.
        BadInput: when a file cannot be read.
    """
    from memo_sim.contract.boards import with_power
    from memo_sim.contract.catalog import load_cluster, load_model
    from memo_sim.contract.codec import read
    from memo_sim.contract.plan import Plan
    from memo_sim.contract.units import parse_tokens
    from memo_sim.planning.question import Question, with_memory

    job_path = options.get("job_path")
    plan = read(options["plan_path"], Plan) if options["plan_path"] else None
    if plan is not None and job_path:
        raise UsageError("both say which plan to price", got="--plan and --from", wanted="one of them")
    option = "--from" if job_path else "--plan"
    if plan is None and not job_path and not (options["model"] and options["seq_len"]):
        raise UsageError("a question needs MODEL and --seq-len, --plan or --from", hint="memo-sim what-if --help")
    decided = (*IN_A_PLAN, *(knob.name for knob in ON_COMMAND_LINE))
    if (plan is not None or job_path) and (given := typed(*decided)):
        raise UsageError(f"{option} brings its own knobs", got=", ".join(given), hint="leave those out")
    if (plan is not None or job_path) and (given := typed(*OF_A_SEARCH)):
        hint = f"leave it out, or ask with MODEL and --seq-len in place of {option}"
        raise UsageError(f"{option} is priced alone, nothing is searched", got=", ".join(given), hint=hint)
    cluster, hardware = with_memory(
        *load_cluster(options["cluster"]),
        device_bytes=gib(options["device_memory_gib"]),
        host_bytes=gib(options["host_memory_gib"]),
    )
    if options["power_w"] is not None:
        hardware = with_power(hardware, options["power_w"])
    values = {knob.name: _value(knob, options[knob.name]) for knob in ON_COMMAND_LINE}
    system = options["system"]
    if job_path:
        from memo_sim.answers.import_job import plan_of_files

        plan, system = plan_of_files([job_path], {}, None, (cluster, hardware))
    if plan is not None:
        values |= {"attention": plan.decisions.kernels.attention, "libraries": plan.decisions.libraries}
    return plan, Question(
        model=plan.decisions.model if plan else load_model(options["model"]),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=plan.decisions.seq_tokens if plan else parse_tokens(options["seq_len"]),
        system=system,
        pins=Pins(**{knob.name: values[knob.name] for knob in PINNED if knob.on_command_line}),
        **{knob.name: values[knob.name] for knob in CHOSEN},
    )


def _value(knob: Knob, given: Any) -> Any:
    """Return the knob's value of what click read: lengths and counts arrive as text."""
    from memo_sim.contract.units import parse_layer_choice, parse_numbers, parse_tokens

    match knob.kind:
        case Length() if given is not None:
            return parse_tokens(given, option=knob.option, least=0)
        case CountOrAuto(most) if given is not None:
            return _count_or_auto(knob, given, most)
        case Numbers() if given is not None:
            return parse_numbers(given, option=knob.option)
        case LayerChoice() if given is not None:
            return parse_layer_choice(given, option=knob.option)
        case _:
            return given


def _count_or_auto(knob: Knob, text: str, most: int) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if text.isascii() and text.isdigit() and 0 < int(text) <= most:
        return int(text)
    raise UsageError(
        f"not a number of {knob.name}",
        got=repr(text),
        wanted=f"a whole number from 1 to {most}, or auto",
        hint=f"{knob.option} 32",
    )


def gib(value: float | None) -> int | None:
    """Return bytes."""
    return None if value is None else int(value * GIB)
