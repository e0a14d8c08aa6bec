"""Reads and writes documents: canonical JSON, atomic writes, errors that name the file and the JSON path.

Canonical JSON has sorted keys, a two-space indent, each list of numbers on one line, the shortest float text that
reads back equal, and a newline at the end. Writing a document that was read therefore gives the same bytes. A ``.toml``
file is converted to JSON when it is read; no ``.toml`` file is ever written.
"""

from __future__ import annotations

import codecs
import hashlib
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memo_sim.contract.diagnosis import explain_invalid, explain_malformed, explain_schema
from memo_sim.contract.errors import BadInput, MemoError, UsageError
from memo_sim.contract.files import read_regular
from memo_sim.contract.migration import upgraded

T = TypeVar("T", bound=msgspec.Struct)

_NUMBER_LIST = re.compile(rb"\[\n[-+.0-9eE,\s]*\]")
"""A formatted list that holds only numbers. A JSON string never contains a raw newline, so no string can match."""


class _Head(msgspec.Struct):
    """Reads only the ``schema`` field of a document and skips the others."""

    schema: str | None = None


def encode(document: msgspec.Struct) -> bytes:
    """Return the canonical JSON of a document.

    Raises:
        MemoError: when the document could not be read back: it breaks its own schema, or holds a NaN or infinity.
    """
    try:
        # The decoder checks types and turns ints into floats; msgspec's constructors do neither.
        readable = msgspec.json.decode(msgspec.json.encode(document, order="sorted"), type=type(document))
    except msgspec.ValidationError as error:
        raise _unwritable(document, str(error)) from None
    if readable != document:
        raise _unwritable(document, "a number that is not finite, or a field of the wrong type")
    text = msgspec.json.format(msgspec.json.encode(readable, order="sorted"), indent=2)
    return _NUMBER_LIST.sub(lambda match: b"[" + b" ".join(match[0][1:-1].split()) + b"]", text) + b"\n"


def _unwritable(document: msgspec.Struct, got: str) -> MemoError:
    """Return the error for a document that only a bug can produce."""
    return MemoError(
        "a document cannot be written",
        where=str(document.__struct_config__.tag),
        got=got,
        wanted="a document that can be read back",
        hint="this is a bug; please report it",
    )


def sha256_of(document: msgspec.Struct) -> str:
    """Return the SHA-256 of a document's canonical JSON, in lower-case hexadecimal.

    Raises:
        MemoError: as ``encode`` does.
    """
    return hashlib.sha256(encode(document)).hexdigest()


def decode(raw: bytes, kind: type[T], *, where: str) -> T:
    """Return the document of type ``kind`` in the JSON text ``raw``, of its ``schema`` or an earlier version of it.

    Raises:
        BadInput: with the file (``where``), the JSON path, the value found, what is allowed, and the nearest known
            name.
    """
    schema = schema_of(raw, where=where)
    if schema != kind.__struct_config__.tag:
        later = upgraded(schema, decode_object(raw, where=where)) if schema else None
        if later is None or later["schema"] != kind.__struct_config__.tag:
            raise explain_schema(schema, [kind], where)
        raw = msgspec.json.encode(later)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise explain_invalid(str(error), raw, kind, where) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain_malformed(error, raw, where) from None


def schema_of(raw: bytes, *, where: str) -> str | None:
    """Return the ``schema`` of the JSON object in ``raw`` (such as ``memo.plan/3``), or None when it has none.

    Raises:
        BadInput: when ``raw`` is not a JSON object, or its ``schema`` is not text.
    """
    try:
        return msgspec.json.decode(raw, type=_Head).schema
    except msgspec.ValidationError as error:
        raise explain_invalid(str(error), raw, _Head, where) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain_malformed(error, raw, where) from None


@contextmanager
def of_file(path: str | Path) -> Iterator[None]:
    """Add the file name to a ``BadInput`` about a value that was decoded earlier and proves wrong when used."""
    try:
        yield
    except BadInput as error:
        where = f"{path}: {error.where or '$'}"
        raise BadInput(error.what, where=where, got=error.got, wanted=error.wanted, hint=error.hint) from None


def decode_object(raw: bytes, *, where: str) -> dict[str, Any]:
    """Return any JSON object as a dictionary (for file formats of other projects).

    Raises:
        BadInput: when ``raw`` is not a JSON object.
    """
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise explain_invalid(str(error), raw, dict, where) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain_malformed(error, raw, where) from None


def decode_foreign(raw: bytes, kind: type[T], *, what: str, where: str, hint: str) -> T:
    """Return another program's JSON as ``kind``; fields that it does not have are ignored.

    Raises:
        BadInput: with ``what`` and ``hint``, when it is no JSON, or none of this kind.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(what, where=where, got=str(error), hint=hint) from None


def read(path: str | Path, kind: type[T]) -> T:
    """Return the document of type ``kind`` in a JSON (or ``.toml``) file.

    Raises:
        BadInput: when the file cannot be read or does not hold such a document.
    """
    return decode(read_raw(path), kind, where=str(path))


def read_raw(path: str | Path) -> bytes:
    """Return the JSON text of a file; a ``.toml`` file is converted to JSON.

    Raises:
        BadInput: when the file does not exist or cannot be read, or when a ``.toml`` file is not valid TOML.
    """
    raw = read_regular(path).removeprefix(codecs.BOM_UTF8)
    if Path(path).suffix.lower() != ".toml":
        return raw
    import tomllib

    try:
        return msgspec.json.encode(tomllib.loads(raw.decode(), parse_float=_finite))
    except (ValueError, RecursionError) as error:  # tomllib's and the UTF-8 decoder's errors are ValueErrors
        raise BadInput(
            "not a TOML document", where=str(path), got=str(error), hint="check that the file is complete"
        ) from None


def _finite(text: str) -> float:
    """Return the number in ``text``; TOML allows nan and inf, our documents do not."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def check_writable(path: Path) -> None:
    """Check that a file can be written at ``path``, before minutes of work, by creating and removing a file beside it.

    Raises:
        UsageError: when the path is a folder, its folder does not exist, or it is not writable.
    """
    try:
        if path.is_dir():
            raise UsageError("a folder cannot be written as a file", where=str(path))
        if not (target := path.resolve()).parent.is_dir():
            raise UsageError("no such folder", where=str(path), hint="create it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError("this file cannot be written", where=str(path))
        if not path.exists() or path.is_file():
            descriptor, fresh = _begin(target)
            os.close(descriptor)
            fresh.unlink()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: what Python 3.11 raises for a loop of links
        raise _unwritten(path, error) from None


def check_distinct(written: Sequence[Path]) -> None:
    """Refuse two outputs that go to the same file.

    Raises:
        UsageError: naming the second output.
    """
    for number, path in enumerate(written):
        if any(_real(other) == _real(path) for other in written[:number]):
            raise UsageError("two outputs have the same path", where=str(path), hint="give each output its own file")


def check_not_read(written: Iterable[Path], read: Iterable[Path]) -> None:
    """Refuse to write over a file that the command reads: one of ``read``, or a file that one of these names.

    Raises:
        UsageError: when an existing file is both read and written.
    """
    listed = list(written)
    inputs = {_real(each) for path in read if listed and path.exists() for each in (path, *_named_in(path))}
    for path in listed:
        if _real(path) in inputs:
            raise UsageError(
                "an input of this command would be overwritten", where=str(path), hint="write to another file"
            )


class _Origin(msgspec.Struct, frozen=True):
    cluster: object = ""


class _Naming(msgspec.Struct, frozen=True):
    """The values of documents that may be paths: a cluster's profile, the cluster of a result and of a plan."""

    hardware: object = ""
    cluster: object = ""
    provenance: _Origin = _Origin()


def _named_in(path: Path, *, clusters_too: bool = True) -> list[Path]:
    """Return the existing files that a cluster, a result or a plan names; a profile lies beside its cluster's file."""
    try:
        head = msgspec.json.decode(read_raw(path), type=_Naming)
    except (MemoError, OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []  # reading the file says what is wrong with it
    found = [path.parent / head.hardware] if isinstance(head.hardware, str) and head.hardware else []
    named = [each for each in (head.cluster, head.provenance.cluster) if isinstance(each, str) and each]
    clusters = [cluster for cluster in map(Path, named) if clusters_too and cluster.is_file()]
    found += [each for cluster in clusters for each in (cluster, *_named_in(cluster, clusters_too=False))]
    return [each for each in found if each.is_file()]


def write(path: str | Path, document: msgspec.Struct) -> None:
    """Write a document's canonical JSON atomically: a reader sees either the old file or the whole new one.

    Raises:
        UsageError: when the file cannot be written; the old file stays.
        MemoError: as ``encode`` raises it, before any file is touched.
    """
    write_bytes(path, encode(document))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write ``content`` atomically; for a symbolic link, the target is replaced and the link stays.

    Raises:
        UsageError: when the file cannot be written; the old file stays.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # a device or a pipe has no old content to keep
            Path(path).write_bytes(content)
        else:
            _replace(_real(path), content)
    except (OSError, ValueError) as error:
        raise _unwritten(path, error) from None


def check_new_folder(folder: Path) -> None:
    """Check that ``folder`` can be made, or is there and empty, before minutes of work.

    Raises:
        UsageError: when it holds something, is no folder, or lies in none.
    """
    try:
        if folder.is_dir():
            if any(folder.iterdir()):
                raise UsageError(
                    "the folder is not empty", where=str(folder), hint="name a new one: nothing is replaced"
                )
        elif os.path.lexists(folder):
            raise UsageError("this is no folder", where=str(folder), hint="name a new one")
        elif not folder.absolute().parent.is_dir():
            raise UsageError("no such folder", where=str(folder.absolute().parent), hint="create it first")
        if not os.access(folder if folder.is_dir() else folder.absolute().parent, os.W_OK):
            raise UsageError("this folder cannot be written", where=str(folder))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unwritten(folder, error) from None


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder with ``files`` (names and contents), all of them or none; an empty folder is replaced.

    Files whose names end in .sh can be executed.

    Raises:
        UsageError: when it cannot be written, or holds something.
    """
    check_new_folder(folder)
    target = folder.absolute()
    fresh = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        fresh.mkdir()
        try:
            for name, content in files.items():
                path = fresh / name
                with path.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                if path.suffix == ".sh":
                    path.chmod(path.stat().st_mode | (path.stat().st_mode & 0o444) >> 2)
            os.rename(fresh, target)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    except (OSError, ValueError) as error:
        raise _unwritten(folder, error) from None


def _real(path: str | Path) -> Path:
    """Return the path without links; one in a loop of links stays, where ``Path.resolve`` of Python 3.11 raises."""
    return Path(os.path.realpath(path))


def _unwritten(path: str | Path, error: OSError | ValueError | RuntimeError) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError("the file cannot be written", where=str(path), got=reason)


def _begin(target: Path) -> tuple[int, Path]:
    """Return the descriptor of a new file beside ``target``, and its path."""
    fresh = target.with_name(f".{secrets.token_hex(8)}.tmp")
    return os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), fresh


def _replace(target: Path, content: bytes) -> None:
    """Write ``content`` to a new file beside ``target``, flush it to disk, and rename it."""
    descriptor, fresh = _begin(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(fresh, target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
