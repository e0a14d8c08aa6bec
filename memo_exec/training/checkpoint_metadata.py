"""Reads the metadata of a stored checkpoint without unpickling it.

torch.distributed.checkpoint keeps its metadata in a pickle, ``.metadata``, and a pickle can run any command when Python
reads it. Here it is read as plain data in which only the library's own names may be mentioned. Every field is then
checked, and the library's objects are made from the checked fields. Nothing that the file names is imported or called.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata as library
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.contract.errors import BadInput
from memo_sim.contract.plain_pickle import Mentioned, load_plain

FILE = ".metadata"

MOST_BYTES = 2**30
"""The largest metadata that is read: a chunk takes some 200 bytes, so this is five million of them."""

_LIBRARY = "torch.distributed.checkpoint.metadata"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DTYPES = {str(dtype): dtype for dtype in TORCH_DTYPES.values()}
_NAMES = frozenset(
    {f"{_LIBRARY}.{name}" for name in (*library.__all__, "_MEM_FORMAT_ENCODING")}
    | {_INFO, "torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"}
    | set(_DTYPES)
)
_SHARD = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")

T = TypeVar("T")


class CheckedReader(FileSystemReader):
    """The library's reader of files, with metadata that was read as plain data.

    Raises:
        BadInput: when it is made, as ``read_metadata`` does.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._metadata = read_metadata(directory)

    def read_metadata(self, *args: Any, **kwargs: Any) -> library.Metadata:
        """Return the metadata of the checkpoint."""
        del args, kwargs
        return self._metadata


def read_metadata(directory: Path) -> library.Metadata:
    """Return the metadata in ``directory``. Stored tensors are named by files of that directory only.

    Raises:
        BadInput: when the file is a link, too large, not a pickle of metadata, or names a file outside.
    """
    path = directory / FILE
    raw = _regular(path)
    whole = _Fields(
        load_plain(raw, str(path), names=_NAMES, wanted="the metadata of torch.distributed.checkpoint"), path
    ).of(f"{_LIBRARY}.Metadata")
    tensors = whole.mapping("state_dict_metadata")
    places = whole.mapping("storage_data")
    return library.Metadata(
        state_dict_metadata={whole.text(name): _tensor(_Fields(value, path)) for name, value in tensors.items()},
        storage_data={_index(_Fields(key, path)): _place(_Fields(value, path)) for key, value in places.items()},
        storage_meta=library.StorageMeta(),
    )


def _regular(path: Path) -> bytes:
    """Return the content of a file that is neither a link nor a device, and not too large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
                got = f"{found.st_size:,} bytes" if stat.S_ISREG(found.st_mode) else "no regular file"
                raise BadInput("the checkpoint cannot be read", where=str(path), got=got)
            return file.read()
    except OSError as error:
        raise BadInput("the checkpoint cannot be read", where=str(path), got=error.strerror) from None


class _Fields:
    """The fields of one object in the pickle. Each method returns a value of the type it names, or refuses the file."""

    def __init__(self, value: Any, path: Path) -> None:
        self.value, self.path = value, path

    def of(self, name: str) -> _Fields:
        """Return the state of the object, which has to be a ``name``."""
        made = self.value
        if not isinstance(made, Mentioned) or made.name != name or not isinstance(made.state, dict):
            raise self.refused(f"{_shown(made)} in place of a {name.rpartition('.')[2]}")
        return _Fields(made.state, self.path)

    def at(self, key: str) -> Any:
        """Return a field as it stands."""
        return self.value.get(key)

    def mapping(self, key: str) -> dict[Any, Any]:
        """Return a field that is a dictionary."""
        return self._typed(self.at(key), dict, key)

    def text(self, value: Any) -> str:
        """Return ``value``, which has to be text."""
        return self._typed(value, str, "a name")

    def count(self, key: str) -> int:
        """Return a field that is a whole number from 0 to 2^62."""
        value = self._typed(self.at(key), int, key)
        if isinstance(value, bool) or not 0 <= value < 2**62:
            raise self.refused(f"{key} of {value}")
        return value

    def size(self, key: str) -> torch.Size:
        """Return a field that is a ``torch.Size``."""
        value = self.at(key)
        inner = value.args[0] if isinstance(value, Mentioned) and value.name == "torch.Size" and value.args else None
        fits = isinstance(inner, tuple | list) and all(type(n) is int and 0 <= n < 2**62 for n in inner)
        if inner is None or not fits:
            raise self.refused(f"{key} of {_shown(value)}")
        return torch.Size(inner)

    def items(self, key: str) -> list[Any]:
        """Return a field that is a list."""
        return self._typed(self.at(key), list, key)

    def refused(self, got: str) -> BadInput:
        """Return the error for a file with ``got`` in it."""
        return BadInput(
            "the checkpoint's metadata is broken", where=str(self.path), got=got, wanted="what torch has written"
        )

    def _typed(self, value: Any, kind: type[T], what: str) -> T:
        if not isinstance(value, kind):
            raise self.refused(f"{what} that is {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Mentioned) else f"a {type(value).__name__}"


def _tensor(entry: _Fields) -> library.TensorStorageMetadata:
    fields = entry.of(f"{_LIBRARY}.TensorStorageMetadata")
    properties = fields.at("properties")
    kept = properties.state if isinstance(properties, Mentioned) else None
    dtype = kept[0] if isinstance(kept, tuple) and kept else None
    if not isinstance(dtype, Mentioned) or dtype.name not in _DTYPES:
        raise fields.refused(f"a tensor of {_shown(dtype)}")
    chunks = [_Fields(chunk, entry.path).of(f"{_LIBRARY}.ChunkStorageMetadata") for chunk in fields.items("chunks")]
    return library.TensorStorageMetadata(
        properties=library.TensorProperties(dtype=_DTYPES[dtype.name]),
        size=fields.size("size"),
        chunks=[library.ChunkStorageMetadata(chunk.size("offsets"), chunk.size("sizes")) for chunk in chunks],
    )


def _index(entry: _Fields) -> library.MetadataIndex:
    fields = entry.of(f"{_LIBRARY}.MetadataIndex")
    return library.MetadataIndex(fields.text(fields.at("fqn")), fields.size("offset"))


def _place(entry: _Fields) -> _StorageInfo:
    """Return where a chunk is stored: in a shard of the same directory, inside that file."""
    fields = entry.of(_INFO)
    name, offset, length = fields.text(fields.at("relative_path")), fields.count("offset"), fields.count("length")
    if not _SHARD.fullmatch(name) or fields.at("transform_descriptors") is not None:
        raise fields.refused(f"a tensor stored in {name!r}")
    shard = entry.path.parent / name
    try:
        found = shard.lstat()
    except OSError as error:
        raise BadInput("the checkpoint cannot be read", where=str(shard), got=error.strerror) from None
    if not stat.S_ISREG(found.st_mode) or offset + length > found.st_size:
        raise BadInput(
            "the checkpoint cannot be read",
            where=str(shard),
            got=f"{found.st_size:,} bytes" if stat.S_ISREG(found.st_mode) else "no regular file",
            wanted=f"at least {offset + length:,} bytes",
        )
    return _StorageInfo(name, offset, length)
