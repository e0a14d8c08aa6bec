"""What both command lines share: kinds of options, progress on standard error, and how a failure ends the process.

click is imported here and in the ``cli`` modules alone.
"""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol, TypeVar

import click
from click.core import ParameterSource

from memo_sim.contract.errors import MemoError, missing_package, shortage
from memo_sim.contract.output import ERR, abandon, system_failure, while_read
from memo_sim.contract.plain_text import encodable, json_text, one_line, printable
from memo_sim.contract.progress import Progress

T = TypeVar("T")

PROGRESS_S = 10.0
"""Between lines of progress, where standard error is no terminal."""

SIGNALLED = 128
"""A process that a signal ended exits with this and the signal's number."""

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Commands(click.Group):
    """A group of commands that ends with 141 when its output is no longer read; click itself would exit with 1.

    A command refuses an empty value, and an option that is given twice and takes one value, of which click itself would
    take the last one.
    """

    make_context = while_read()(click.Group.make_context)
    invoke = while_read()(click.Group.invoke)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command and its arguments, none of which is empty; its options are each given once at most."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, click.Group) and not ctx.resilient_parsing:
            _check_given(click.Context(command, ctx, name, **command.context_settings), rest)
        return name, command, rest


def _check_given(context: click.Context, arguments: list[str]) -> None:
    """Refuse an option that takes one value and is given more than once, and an option or argument given as "".

    An empty value is often a variable of the shell that is not set; an option that names a file would be ignored.

    Raises:
        click.UsageError: naming the option or argument.
    """
    values, _, given = context.command.make_parser(context).parse_args(list(arguments))
    for one in dict.fromkeys(given):
        hint = f"'{'/'.join([*one.opts, *one.secondary_opts])}'" if isinstance(one, click.Option) else None
        single = isinstance(one, click.Option) and not (one.multiple or one.count or one.is_eager)
        if single and given.count(one) > 1:
            told = f"given {given.count(one)} times, but it takes one value."
            raise click.BadParameter(told, context, one, hint)
        value = values[one.name]
        if not value if isinstance(value, str) else isinstance(value, list | tuple) and "" in value:
            raise click.BadParameter("the value is empty.", context, one, hint)


class Finite(click.FloatRange):
    """A range of floats that infinity and NaN are not part of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail with the option's name."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """Return the bounds without a zero behind the point."""
        if self.max is None:
            return f"x{'>' if self.min_open else '>='}{self.min:g}"
        low = "" if self.min is None else f"{self.min:g}{'<' if self.min_open else '<='}"
        return f"{low}x{'<' if self.max_open else '<='}{self.max:g}"


class Silent(MemoError):
    """Ends the process with a code when the document already says everything."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def now() -> str:
    """Return the time, for the provenance of a file."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line(name: str) -> str:
    """Return the command that was typed, for the provenance of a file."""
    return one_line(" ".join([name, *sys.argv[1:]]))


def say(text: str) -> None:
    """Print on standard error, as ``show`` does. What cannot be written there, on a full disk, is left out."""
    try:
        click.echo(encodable(printable(text), sys.stderr.encoding), err=True)
    except BrokenPipeError:
        raise
    except OSError:  # the work and its exit code matter more
        abandon(ERR)


def say_usage(error: click.ClickException) -> None:
    """Print click's message about wrong usage on standard error, as ``show`` does."""
    written = io.StringIO()
    error.show(written)
    say(written.getvalue().removesuffix("\n"))


def show(text: str) -> None:
    """Print lines on standard output; characters from files that a terminal would obey are escaped."""
    click.echo(encodable(printable(text), sys.stdout.encoding))


def show_document(raw: bytes) -> None:
    """Print a JSON document on standard output, equal to ``raw`` and without characters that a terminal obeys."""
    click.echo(json_text(raw), nl=False)


def typed(*names: str) -> list[str]:
    """Return those of the command's parameters that were given, as a user types them."""
    context = click.get_current_context()
    return [
        parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def with_progress(label: str, work: Callable[[Progress], T], *, told: str = "") -> T:
    """Run ``work`` with a callback (done, all) that draws a bar on standard error when that is a terminal.

    Elsewhere nothing is printed, or, with ``told``, a line at times that says how many of these are done.
    """
    if not sys.stderr.isatty():
        return work(_told_at_times(label, told) if told else lambda done, total: None)
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def tell(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        return work(tell)


def _told_at_times(label: str, what: str) -> Progress:
    """Return a callback (done, all) that prints how far the work is, at most once in ``PROGRESS_S``."""
    begun = last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_S:
            last = now
            say(f"{label}: {done} of {total} {what}, {now - begun:.0f} s")

    return tell


class Failing(Protocol):
    """Says why a command failed and ends the process with an exit code."""

    def __call__(self, text: str, code: int, error: BaseException) -> NoReturn:
        """``error`` is what was raised."""


@while_read()
def run_commands(group: click.Group, name: str, fail: Failing) -> None:
    """Run a command line; every expected failure becomes its message and exit code."""
    try:
        group.main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        fail("", error.exit_code, error)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        sys.exit(SIGNALLED + signal.SIGINT)
    except MemoError as error:
        fail(str(error), error.exit_code, error)
    except BrokenPipeError:
        raise
    except OSError as error:
        failure = system_failure(error)
        fail(str(failure), failure.exit_code, error)
    except Exception as error:
        if short := shortage(error):
            fail(str(short), short.exit_code, error)
        if absent := missing_package(error):
            fail(str(absent), absent.exit_code, error)
        if os.environ.get("MEMO_TRACEBACK"):
            fail(traceback.format_exc().rstrip(), 1, error)
        fail(
            f"this is a bug: {one_line(repr(error))}\n  next: run again with MEMO_TRACEBACK=1 and report the traceback",
            1,
            error,
        )
