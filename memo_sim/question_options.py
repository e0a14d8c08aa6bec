"""Options that ``memo-sim`` questions share, made from the knobs' declarations.

``answers/named_values.py`` turns their values into a question, as it does the arguments of the Python functions.

Everything heavier than click is imported inside the functions that need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import (
    KNOBS,
    MEMORY_GIB,
    OF_A_LONG_RUN,
    OF_A_MACHINE,
    OF_A_QUESTION,
    POWER_W,
    CountOrAuto,
    Degree,
    DocumentLengths,
    Factor,
    Flag,
    Fraction,
    Knob,
    LayerChoice,
    Load,
    LowRank,
    Numbers,
    OneOf,
    RowwiseKernel,
    Switch,
    Whole,
)
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.views.command_line import Finite, typed

if TYPE_CHECKING:
    from memo_sim.answers.what_if import Outputs
    from memo_sim.contract.cluster import Cluster
    from memo_sim.contract.gpu_kind import GpuKind
    from memo_sim.contract.hardware import Hardware
    from memo_sim.contract.plan import Plan
    from memo_sim.planning.question import Question

EXAMPLE = "tflops=165,memory=24,pcie=4x16"
"""A data sheet, as in ``contract/datasheet.py``, which is too heavy to import for help."""
PRICED_BY = "--price-per-gpu-hour"
IN_A_PLAN = ("model", "seq_len", "system")
"""Parameters that a plan file or a job decides beside the knobs, so that ``--plan`` and ``--from`` exclude them."""
OF_KERNELS = ("attention", "rowwise", "compiled")
"""Parameters that may be given beside ``--plan``: which kernels play it."""
OF_A_SEARCH = ("pareto", "one_more_gib")
"""Options that only a search can answer, so that ``--plan`` excludes them."""
Options = dict[str, Any]
Command = TypeVar("Command", bound=Callable[..., Any])


CLUSTER = click.option(
    "--cluster", help="a800-1x8, a cluster file, or a profile file (memo-sim list clusters); what-if compares A,B."
)
FROM_DATASHEET = click.option(
    "--from-datasheet",
    metavar="KEY=VALUE,...",
    help=f"In place of --cluster: rough figures of a GPU, {EXAMPLE} (memo-sim datasheet --help has every key).",
)
SYSTEM = click.option(
    "--system", default=DEFAULT_SYSTEM, show_default=True, help="A preset of `memo-sim list systems`."
)
OF_THE_MACHINE: tuple[tuple[str, Finite, str], ...] = (
    ("--device-memory-gib", Finite(*MEMORY_GIB), "Instead of the profile's."),
    ("--host-memory-gib", Finite(*MEMORY_GIB), "Of one node, instead of its own."),
    ("--safety-gib", Finite(0, MEMORY_GIB[1]), "Device memory to keep free, beside the reserve [0]."),
    ("--power-w", Finite(*POWER_W), "Power limit of a device in watts, instead of its board's."),
)
"""Options of the cluster's devices: name, kind, help."""
OF_THE_LONG_RUN: tuple[tuple[str, str], ...] = (
    ("--mtbf-hours", "Mean hours between failures of one GPU, with its part of host and network: adds goodput."),
    ("--checkpoint-s", "Seconds that training waits for a checkpoint."),
    ("--checkpoint-gb-s", "Instead of these: GB/s at which the whole job writes a checkpoint."),
    ("--checkpoint-interval-s", "Seconds of training between checkpoints [Daly's optimum]."),
    ("--restart-s", "Seconds from a failure to the first new step."),
    ("--straggler-spread", "Standard deviation of GPUs' speed, as a fraction: 0.02 [the profile's]."),
)
"""Options about failures and slow devices: name, help."""
COMPILED = click.option(
    "--compile/--eager",
    "compiled",
    default=None,
    help="Norms, activations, rotary, residuals, loss and optimizer under torch.compile or as eager torch modules:"
    " --rowwise compiled, --rowwise eager. memo-exec's own kernels, or the system's, unless given.",
)
PRICE = click.option(
    PRICED_BY,
    metavar="PRICE",
    help="Price of a GPU for an hour, in any currency, or one for each kind or cluster: h100=2.5,h200=3.5. The answer"
    " then has prices of a step and of a billion tokens.",
)
JOBS = click.option(
    "--jobs",
    type=click.IntRange(1),
    show_default="one a CPU, at most 4, where there are many layouts",
    help="Processes that share the search; the answer is the same.",
)
METAVARS: dict[type, str] = {
    LowRank: "r=N,...",
    CountOrAuto: "N|auto",
    Numbers: "N,N,...",
    LayerChoice: "all|every-N|first-K|groups-N",
    Load: "balanced|zipf-S",
    DocumentLengths: "mean=TOKENS,max=TOKENS|FILE",
}
"""What help shows for values of knobs that are text."""
ON_COMMAND_LINE = tuple(knob for knob in KNOBS.values() if knob.on_command_line)


def cluster_options(command: Command) -> Command:
    """Give ``command`` the options that name a cluster."""
    return CLUSTER(FROM_DATASHEET(command))


def question_options(command: Command, *, several: bool = False) -> Command:
    """Give ``command`` the options of a question beside the model and the sequence: one for each knob.

    ``several``: an option that takes a value takes several, joined by commas.
    """
    knobs = [_option(knob, several=several) for knob in ON_COMMAND_LINE]
    machine = [
        click.option(name, type=Several(kind), metavar="X,...", help=text)
        if several
        else click.option(name, type=kind, help=text)
        for name, kind, text in OF_THE_MACHINE
    ]
    for option in reversed((SYSTEM, *knobs, COMPILED, *machine)):
        command = option(command)
    return command


def long_run_options(command: Command, *, several: bool = False) -> Command:
    """Give ``command`` the options about failures, checkpoints and slow devices; ``several`` as in question_options."""
    for name, text in reversed(OF_THE_LONG_RUN):
        ends = OF_A_LONG_RUN[name.removeprefix("--").replace("-", "_")]
        kind: Any = Several(Finite(*ends)) if several else Finite(*ends)
        command = click.option(name, type=kind, metavar="X,..." if several else None, help=text)(command)
    return command


class Several(click.ParamType):  # type: ignore[type-arg]  # only the newest click has arguments
    """Values of another kind, joined by commas: a list where there are several, else the value alone."""

    def __init__(self, each: Any) -> None:
        self.each = each
        self.name = each.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the values, or fail with the option's name."""
        if not isinstance(value, str):
            return self.each.convert(value, param, ctx)
        found = [self.each.convert(text.strip(), param, ctx) for text in value.split(",")]
        if "" in found:
            self.fail(f"{value!r} has an empty value: no comma at the end.", param, ctx)
        return found if len(found) > 1 else found[0]


def swept_options(command: Command) -> Command:
    """Give ``command`` the same options, of which each that takes a value takes several, joined by commas.

    A knob whose value is a list itself stays as it is.
    """
    return question_options(long_run_options(command, several=True), several=True)


def _option(knob: Knob, *, several: bool) -> Callable[[Command], Command]:
    """Return the option of a knob; its value is stored under the knob's name.

    ``several``: values joined by commas, unless a value has commas itself.
    """
    names, attributes = knob.option, Options(help=knob.help, default=knob.default, show_default=True)
    if knob.unless_given:
        attributes |= {"default": None, "show_default": knob.unless_given}
    match knob.kind:
        case Degree():
            attributes["type"] = click.IntRange(1)
        case Whole(least, most):
            attributes["type"] = click.IntRange(least, most)
        case Fraction() | Factor():
            top = knob.kind.most if isinstance(knob.kind, Factor) else 1
            attributes["type"] = Finite(0, top, min_open=isinstance(knob.kind, Factor))
        case OneOf(words):
            attributes["type"] = click.Choice(words)
        case CountOrAuto() | Numbers() | LayerChoice() | Load() | DocumentLengths() | LowRank():
            attributes["metavar"] = METAVARS[type(knob.kind)]
        case Switch():
            names += f"/--no-{knob.option.removeprefix('--')}"
        case Flag():
            attributes |= {"is_flag": True, "show_default": False}
    if several and not isinstance(knob.kind, Numbers | DocumentLengths | LowRank | Switch | Flag):
        attributes["type"] = Several(attributes.get("type", click.STRING))
        shown = "|".join(knob.kind.words) if isinstance(knob.kind, OneOf) else attributes.get("metavar", "N")
        attributes["metavar"] = f"{shown},..."
    return click.option(names, knob.name, **attributes)


def asked(options: Options, *, fill: bool = True) -> tuple[Outputs, Plan | None, Question]:
    """Return the files that the answer is written to, the plan that is to be priced (None: searched), and the question.

    ``fill`` as in ``question_of``.

    Raises:
        UsageError: when a file cannot be written, or would replace what the question is read from; as ``question_of``.
        BadInput: as ``question_of``.
    """
    from memo_sim.answers.what_if import Outputs
    from memo_sim.contract.catalog import model_file, profile_path
    from memo_sim.contract.interchange import is_command

    plan, picture, timeline, report = (
        Path(options[n]) if options.get(n) else None for n in ("output", "plot", "trace_path", "report")
    )
    read = tuple(Path(options[n]) for n in ("cluster", "plan_path") if options.get(n))
    read += (Path(model_file(options["model"])),) if options.get("model") else ()
    read += tuple(Path(name) for name in options.get("job_paths", ()) if not is_command(name))
    full = bool(options.get("full_trace"))
    if full and timeline is None:
        raise UsageError("--full-trace is about the file of --trace", hint="add --trace FILE")
    outputs = Outputs(plan=plan, picture=picture, timeline=timeline, report=report, full_timeline=full, read=read)
    outputs = replace(outputs, pareto_picture=bool(options.get("pareto")))
    outputs.check()
    given, question = question_of(options, fill=fill)
    if options["cluster"] is not None:
        replace(outputs, read=(profile_path(options["cluster"], question.cluster),)).check()
    return outputs, given, question


def question_of(options: Options, *, fill: bool = True) -> tuple[Plan | None, Question]:
    """Return the question, and the plan that is to be priced in place of a search (None where it is searched).

    Without ``--global-batch`` the batch is the smallest that keeps every device busy; without ``fill``, one micro-batch
    (``planning/default_batch.py``).

    Raises:
        UsageError: when the options contradict each other, or name what there is not.
        BadInput: when a file cannot be read.
    """
    from memo_sim.answers import named_values
    from memo_sim.contract.codec import read
    from memo_sim.contract.plan import Plan

    job_paths, given_values = options.get("job_paths", ()), options.get("given", ())
    plan = read(options["plan_path"], Plan) if options["plan_path"] else None
    if given_values and not job_paths:
        raise UsageError("--set is about the files of --from", got=given_values[0], hint="leave it out, or name them")
    if plan is not None and job_paths:
        raise UsageError("both say which plan to price", got="--plan and --from", wanted="one of them")
    if plan is None and not job_paths:
        if not (options["model"] and options["seq_len"]):
            hint = f"memo-sim {click.get_current_context().info_name} --help"
            raise UsageError("a question needs MODEL and --seq-len, --plan or --from", hint=hint)
        return None, named_values.question_of(values_of(options), fill=fill)
    option = "--from" if job_paths else "--plan"
    decided = (*IN_A_PLAN, "compiled", *(knob.name for knob in ON_COMMAND_LINE))
    beside = OF_KERNELS if plan is not None else ()
    if given := typed(*(name for name in decided if name not in beside)):
        hint = "leave those out; --attention and --rowwise may stay" if beside else "leave those out"
        raise UsageError(f"{option} brings its own knobs", got=", ".join(given), hint=hint)
    if given := typed(*OF_A_SEARCH, "jobs"):
        hint = f"leave it out, or ask with MODEL and --seq-len in place of {option}"
        raise UsageError(f"{option} is priced alone, nothing is searched", got=", ".join(given), hint=hint)
    values = {name: options[name] for name in (*OF_A_MACHINE, *OF_A_LONG_RUN) if name in options}
    if plan is not None:
        values |= {"attention": options["attention"], "rowwise": _rowwise(options)}
        return plan, named_values.question_about(plan, values)
    from memo_sim.answers.import_job import parse_given, question_of_files

    return question_of_files(job_paths, parse_given(given_values), values)


def question_on(options: Options, cluster: Cluster, hardware: Hardware, *, fill: bool = True) -> Question:
    """Return the question that the options ask about a cluster; ``fill`` as in ``question_of``.

    Raises:
        UsageError: when the options contradict each other, or name what there is not.
        BadInput: when a file cannot be read.
    """
    from memo_sim.answers import named_values

    return named_values.question_on(values_of(options), cluster, hardware, fill=fill)


def values_of(options: Options) -> Options:
    """Return the options' values by the names of Python's arguments; None: not given.

    Raises:
        UsageError: when one knob is given by two names.
    """
    values = {name: options[name] for name in (*OF_A_QUESTION, *OF_A_LONG_RUN) if name in options}
    return values | {knob.argument: options[knob.name] for knob in ON_COMMAND_LINE} | {"rowwise": _rowwise(options)}


def _rowwise(options: Options) -> RowwiseKernel | None:
    """Return the row-wise kernels that are given by their name or by ``--compile`` and ``--eager``.

    Raises:
        UsageError: when both are given.
    """
    compiled: bool | None = options["compiled"]
    if compiled is None:
        named: RowwiseKernel | None = options["rowwise"]
        return named
    if options["rowwise"] is not None:
        got = f"{'--compile' if compiled else '--eager'}, --rowwise {options['rowwise']}"
        raise UsageError("two names for the same knob", got=got, hint="leave one of them out")
    return "compiled" if compiled else "eager"


def prices_of(options: Options, names: Sequence[str]) -> list[float | None]:
    """Return the price of a device for an hour for each cluster or kind of GPU in ``names``; None where none is given.

    A price is given for all, for a kind (``h100``) or for a cluster or kind by its whole name.

    Raises:
        UsageError: when the text is no price, or a price is of none of them.
    """
    from memo_sim.answers import named_values
    from memo_sim.contract.units import parse_prices

    text = options["price_per_gpu_hour"]
    return named_values.prices_of(None if text is None else parse_prices(text, option=PRICED_BY), names)


def gpu_kinds(options: Options) -> list[GpuKind]:
    """Return the kinds of GPU that ``--cluster`` lists or ``--from-datasheet`` describes; the shipped ones by default.

    Raises:
        UsageError: when what is given names no kind, or one twice.
        BadInput: when a file cannot be read.
    """
    from memo_sim.contract.gpu_kind import load_gpu_kinds

    named = options["cluster"]
    return load_gpu_kinds(None if named is None else names_in(named), options["from_datasheet"])


def names_in(text: str, *, where: str = "--cluster") -> list[str]:
    """Return the names that a list joined by commas has; a file whose name has commas, or a data sheet, is one name.

    ``where`` is the option or argument that has the list.

    Raises:
        UsageError: when a name is empty.
    """
    from memo_sim.contract.datasheet import is_datasheet

    if is_datasheet(text) or os.path.isfile(text):
        return [text]
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError("an empty name in a list", where=where, got=repr(text), hint="no comma at the end: A,B")
    return names
