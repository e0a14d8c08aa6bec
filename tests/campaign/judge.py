"""Runs one command in this process under limits, and says what is wrong with how it ended.

Wrong are: an exit code that is not documented for the fault, the message of a bug, a message without its place, control
characters from a file on the terminal, a file half written, an input changed, a file touched elsewhere, code of a file
that ran, and more time or memory than a small question may take.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, MemoError
from memo_sim.contract.schemas import DOCUMENTS
from tests.campaign.mutations import PLANTED
from tests.cli.commands import Done, memo_exec, memo_sim

SECONDS = 5.0
"""What one question about tiny files may take of a processor. A busy machine is no failure."""
WAITS_S = 30.0
"""Limit of a whole command; one that takes longer probably waits for ever."""
MORE_BYTES = 3 * 2**30
"""What one question may add to the memory of the process."""
LONGEST_MESSAGE = 4000
DOCUMENTED = frozenset({0, 2, 3, 4, 5, 6})
"""Exit codes of ``docs/files.md`` that are allowed where no signal came and standard output stayed open."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LABEL = re.compile(r"  (where|got|wanted|next): ")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.remove": 1, "os.rename": 2, "os.mkdir": 1, "os.rmdir": 1, "os.truncate": 1, "os.chmod": 1}
_CHANGES |= {"os.link": 2, "os.symlink": 2, "os.chown": 1, "shutil.rmtree": 1}
_STARTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
)
_ANYWHERE = ("/dev/", "/proc/", str(Path(tempfile.gettempdir(), "torchinductor")))
"""Devices, and the folder of caches that torch makes when its fake tensors are used first."""


class TooSlow(BaseException):
    """Raised by the alarm. Not an Exception, so that no command takes it for one of its own."""


@dataclass
class Watch:
    """Collects what a command writes outside of its folder, and what it starts."""

    folder: Path | None = None
    seen: list[str] = field(default_factory=list)

    def hook(self, event: str, given: tuple[Any, ...]) -> None:
        """Look at an audit event of the interpreter."""
        if self.folder is None:
            return
        if event in _STARTS:
            self.seen.append(f"{event} {given!r:.200}")
        elif event == "open":
            path, mode, flags = given
            if isinstance(path, str | bytes | os.PathLike) and (
                (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & _WRITES)
            ):
                self._look(event, path)
        elif event in _CHANGES:
            for path in given[: _CHANGES[event]]:
                self._look(event, path)

    def _look(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        folder, self.folder = self.folder, None  # what is done here is not the command's doing
        try:
            text = os.fsdecode(path)
            whole = os.path.abspath(text)
            if not (whole + "/").startswith(f"{folder}/") and not text.startswith(_ANYWHERE):
                self.seen.append(f"{event} {text!r:.200}")
        finally:
            self.folder = folder


WATCH = Watch()
_hooked: list[bool] = []


@contextmanager
def limits(folder: Path, seconds: float = SECONDS) -> Iterator[Watch]:
    """Limit time and memory, and watch files and processes, inside the block."""
    if not _hooked:  # a hook stays for the rest of the process
        sys.addaudithook(WATCH.hook)
        _hooked.append(True)

    def ring(number: int, frame: object) -> None:
        raise TooSlow

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {kind: signal.signal(kind, ring) for kind in (signal.SIGALRM, signal.SIGPROF)}
    written = sys.dont_write_bytecode
    WATCH.seen, sys.dont_write_bytecode = [], True
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_REAL, max(seconds, WAITS_S))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    WATCH.folder = folder
    try:
        yield WATCH
    finally:
        WATCH.folder = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
        sys.dont_write_bytecode = written


def _read(name: str, path: str, *, cwd: Path) -> Done:
    """Read a document that no command reads, and write it again; end as a command would."""
    try:
        document = codec.read(cwd / path, DOCUMENTS[name])
        again = codec.encode(document)
        if codec.decode(again, DOCUMENTS[name], where=path) != document:
            return Done(1, "", "memo-sim: this is a bug: written and read again it is another document")
    except MemoError as error:
        text = f"memo-sim: {'this is a bug: ' if error.exit_code == 1 else ''}{error}\n"
        return Done(error.exit_code, "", text, error)
    return Done(0, again.decode(), "")


COMMANDS: dict[str, Callable[..., Done]] = {"memo-sim": memo_sim, "memo-exec": memo_exec, "read": _read}


@dataclass(frozen=True)
class Judged:
    """How a command ended, and everything that is wrong with it."""

    code: int | str
    """The exit code, or ``slow``, ``memory``."""
    complaints: list[str]
    stdout: str
    stderr: str


def judge(
    command: tuple[str, ...],
    folder: Path,
    *,
    codes: frozenset[int] = DOCUMENTED,
    written: tuple[str, ...] = (),
    places: tuple[str, ...] = (),
    seconds: float = SECONDS,
) -> Judged:
    """Run a command in ``folder`` and judge it.

    ``codes`` are the exit codes that may come; ``written`` the files and folders that it may change; ``places`` the
    words of which the place of a bad file has to hold one.
    """
    before = _files(folder)
    complaints = []
    try:
        with limits(folder, seconds) as watch:
            done = COMMANDS[command[0]](*command[1:], cwd=folder)
    except TooSlow:
        return Judged("slow", [f"takes more than {seconds:g} s"], "", "")
    except AssertionError as error:  # the runner of tests expects SystemExit alone
        return Judged("escaped", [f"an exception escaped: {error}"[:500]], "", "")
    if command[1:2] != ("sweep",):  # its processes have a folder and a socket of their own (multiprocessing)
        complaints += [f"outside of its folder: {seen}" for seen in watch.seen]
    if (folder / PLANTED).exists():
        complaints.append("a planted command ran")
    if done.returncode not in codes:
        complaints.append(f"exit code {done.returncode}, wanted {', '.join(map(str, sorted(codes)))}")
    complaints += _judge_text(command, done, places)
    complaints += _judge_files(before, _files(folder), folder, done, written)
    if "--json" in command and done.stdout:
        complaints += _judge_document(done.stdout)
    return Judged(done.returncode, complaints, done.stdout, done.stderr)


def _judge_text(command: tuple[str, ...], done: Done, places: tuple[str, ...]) -> Iterator[str]:
    for name, text in (("output", done.stdout), ("message", done.stderr)):
        if (command[0], name) == ("read", "output"):  # a document that no command prints
            continue
        if found := _CONTROL.search(text):
            yield f"a control character {found[0]!r} in the {name}"
    if "Traceback (most recent call last)" in done.stderr:
        yield "a traceback"
    if "this is a bug" in done.stderr:
        yield "the message of a bug"
    if done.returncode and not done.stderr.strip() and not done.stdout.strip():
        yield "no message"
    if done.returncode and isinstance(done.error, MemoError):
        yield from _judge_error(done.error, len(done.stderr), places)


def _judge_error(error: MemoError, length: int, places: tuple[str, ...]) -> Iterator[str]:
    """Yield what the message of an expected error lacks."""
    if length > LONGEST_MESSAGE:
        yield f"a message of {length} characters"
    if any(not _LABEL.match(line) for line in str(error).splitlines()[1:]):
        yield "a line of the message has no label"
    if isinstance(error, BadInput) and error.exit_code == 3:
        where = str(error.where)
        if error.where is None or not any(place in where for place in places or ("",)):
            yield f"the message does not name the file: {where[:100]}"


def _files(folder: Path) -> dict[str, bytes | str]:
    """Return the content of every file in a folder; of what is no file its kind."""
    found: dict[str, bytes | str] = {}
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(place, name)
            regular = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(folder))] = (
                path.read_bytes() if regular and os.access(path, os.R_OK) else "other"
            )
    return found


def _judge_files(
    before: dict[str, bytes | str], after: dict[str, bytes | str], folder: Path, done: Done, written: tuple[str, ...]
) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        if not _named(name, written):
            yield f"{'removed' if name not in after else 'changed' if name in before else 'made'}: {name}"
        elif name.endswith(".tmp") or ".unfinished" in name:
            yield f"left unfinished: {name}"
        elif isinstance(content := after.get(name), bytes):
            yield from (f"{name}: {complaint}" for complaint in _half_written(name, content))


def _named(name: str, written: tuple[str, ...]) -> bool:
    """Return whether a file is one that may be written, lies in such a folder, or is the folder of one."""
    return any(name == each or name.startswith(f"{each}/") or each.startswith(f"{name}/") for each in written)


def _half_written(name: str, content: bytes) -> Iterator[str]:
    """Yield what is wrong with a file that a command wrote: it is neither a document nor a picture nor lines."""
    if content.startswith(b"{"):
        lines = content.startswith(b'{"schema":"memo.sweep/')  # a document a line
        try:
            for part in content.splitlines() if lines else [content]:
                json.loads(part, parse_constant=_refuse_constant)
        except ValueError as error:
            yield f"half written: {error}"[:200]
        return
    if content.startswith(b"\x89PNG"):
        whole = content.endswith(b"IEND\xaeB`\x82")
    elif content.startswith(b"<?xml"):
        whole = content.rstrip().endswith(b"</svg>")
    elif content.startswith(b"%PDF"):
        whole = content.rstrip().endswith(b"%%EOF")
    elif content.startswith(b"\x80"):
        whole = content.endswith(b".")
    elif Path(name).suffix == ".safetensors":
        whole = int.from_bytes(content[:8], "little") < len(content)
    elif Path(name).suffix in (".distcp", ""):  # sums in run.json cover them; a lock may be empty
        whole = True
    else:
        whole = content.endswith(b"\n")
    if not whole:
        yield "half written"


def _judge_document(text: str) -> Iterator[str]:
    """Yield what is wrong with a document on standard output: every number in it is finite and no time is negative."""
    try:
        tree = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        yield f"the output is no document: {error}"[:200]
        return
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
            for key in ("step_s", "tgs", "peak_device_bytes", "mfu"):
                if isinstance(value.get(key), int | float) and value[key] < 0:
                    yield f"{key} below 0: {value[key]}"
        elif isinstance(value, list):
            waiting.extend(value)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} in a document")
