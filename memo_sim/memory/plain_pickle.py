"""Reads a pickle as data: plain containers, text, numbers, bytes; nothing in the file can name code or run it."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

from memo_sim.contract.errors import BadInput

_PROTO = 0x80
_HIGHEST = 5


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class, function and reference outside of the file; a pickle can call nothing else."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Refuse whatever the pickle wants imported."""
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse references to objects outside of the file."""
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def is_pickle(raw: bytes) -> bool:
    """Tell whether ``raw`` begins like a binary pickle (protocol 2 to 5)."""
    return len(raw) > 1 and raw[0] == _PROTO and 2 <= raw[1] <= _HIGHEST


def load_plain(raw: bytes, where: str) -> Any:
    """Return the object in a pickle made of dict, list, tuple, set, str, int, float, bool, None and bytes alone.

    Raises:
        BadInput: when it holds anything else, is cut short, or is no pickle.
    """
    try:
        return _PlainUnpickler(io.BytesIO(raw)).load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise BadInput(
            "not a pickle of plain data",
            where=where,
            got=str(error) or type(error).__name__,
            wanted="dictionaries, lists, text and numbers, as torch.cuda.memory._dump_snapshot writes",
        ) from None
