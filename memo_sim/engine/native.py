"""Native code of a function that numba compiles once: kept in a file, and loaded by llvmlite without numba.

Importing numba takes 0.4 s and 110 MiB, llvmlite 0.04 s and 46 MiB. So numba is imported only where no file holds code
of the same source, for this processor, by the same versions of Python, numba and llvmlite. The file lies beside the
bytecode of the source, or in the user's cache where that folder cannot be written. Its first bytes are a hash of all
this and of the code, so that no other code and no damaged code is ever run.

The code knows no Python objects. It is called with numbers and with addresses of arrays, and returns a number.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

SYMBOL = "native"
"""What a function is called inside its object code."""

NUMBER = "int64"
"""The type of the numbers that a function is called with and that it returns."""


@dataclass(frozen=True)
class Source:
    """A function of a module that imports nothing of memo; its arguments: ``int64``, or ``float64*`` for an array."""

    module: str
    name: str
    arguments: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Return the path of the module."""
        found = find_spec(self.module)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"No module named {self.module!r}", name=self.module)
        return Path(found.origin)

    @property
    def signature(self) -> str:
        """Return the signature for numba."""
        types = (f"CPointer({each[:-1]})" if each.endswith("*") else each for each in self.arguments)
        return f"{NUMBER}({', '.join(types)})"


class Native:
    """The native code of a function."""

    def __init__(self, source: Source) -> None:
        """Load the code, and compile it before where no file holds it.

        Raises:
            ImportError: where numba is not installed.
            OSError: where no folder for the code can be written.
        """
        if find_spec("numba") is None:
            raise ModuleNotFoundError("No module named 'numba'", name="numba")
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._arguments = source.arguments
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
        """Holds the code in memory."""
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(_object_code(source)))
        self._engine.finalize_object()
        types = [ctypes.c_void_p if each.endswith("*") else ctypes.c_int64 for each in source.arguments]
        made = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *types)
        self._call = made(self._engine.get_function_address(SYMBOL))

    def bound(self, *arguments: int | NDArray[Any]) -> Bound:
        """Return a call of the code with these arguments.

        Raises:
            TypeError: where an argument has another type, or an array is not contiguous.
        """
        if len(arguments) != len(self._arguments):
            raise TypeError(f"{len(arguments)} arguments are given, and {len(self._arguments)} are wanted")
        return Bound(self, self._call, arguments, [*map(_passed, arguments, self._arguments)])


class Bound:
    """A call of native code with given arguments."""

    def __init__(
        self, native: Native, call: Callable[..., int], arguments: Sequence[int | NDArray[Any]], passed: Sequence[int]
    ) -> None:
        """``passed``: the arguments, with addresses in place of arrays."""
        self._holds = native, arguments  # the code and the arrays are in memory for as long as this is
        self._result = ctypes.c_int64()
        self._call, self._passed = call, (ctypes.addressof(self._result), None, *passed)

    def __call__(self) -> int:
        """Run the code, and return its number."""
        status = self._call(*self._passed)
        if status:
            raise RuntimeError(f"native code ended with status {status}; it raises nothing, so only 0 is possible")
        return self._result.value


def _passed(argument: int | NDArray[Any], wanted: str) -> int:
    """Return a number as it is, and the address of an array."""
    if isinstance(argument, int):
        if wanted == NUMBER:
            return argument
    elif f"{argument.dtype}*" == wanted and argument.flags.c_contiguous:
        return argument.ctypes.data
    given = "a number" if isinstance(argument, int) else f"an array of {argument.dtype}"
    raise TypeError(f"{given} is given as an argument of type {wanted}")


def _target_machine() -> Any:
    """Return LLVM's description of this processor, for code that is as fast as numba's own."""
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(*_processor(), opt=3, jit=True)


def _processor() -> tuple[str, str]:
    """Return the names of this processor and of its features."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _object_code(source: Source) -> bytes:
    """Return the object code of a function: from its file, else compiled and then kept there."""
    import llvmlite.binding as llvm

    machine = "\n".join((llvm.get_default_triple(), *_processor()))
    versions = (sys.version, *(f"{each} {version(each)}" for each in ("numba", "llvmlite")))
    texts = source.path.read_text(), Path(__file__).read_text()
    key = "\n".join((machine, *versions, source.name, source.signature, *texts)).encode()
    name = f"{source.path.stem}.{sys.implementation.cache_tag}-{sha256(machine.encode()).hexdigest()[:16]}.o"
    folders = Path(cache_from_source(str(source.path))).parent, _user_folder()
    for folder in folders:
        found = _kept(folder / name, key)
        if found is not None:
            return found
    fresh = _fresh_file(folders)
    try:
        code = _compiled(source)
        fresh.write_bytes(sha256(key + code).digest() + code)
        fresh.chmod(0o644)
        fresh.replace(fresh.parent / name)  # at once, beside processes that read or write the same file
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return code


def _fresh_file(folders: Sequence[Path]) -> Path:
    """Return a new file in the first folder that can be written.

    Raises:
        OSError: where none can be.
    """
    from tempfile import mkstemp

    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, path = mkstemp(dir=folder, prefix=".", suffix=".o")
        except OSError as error:
            refused = error
            continue
        os.close(handle)
        return Path(path)
    raise refused


def _user_folder() -> Path:
    """Return the user's folder for files that can be made again, by the rules of XDG: a relative path is ignored."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path("~/.cache").expanduser()) / "memo"


def _kept(path: Path, key: bytes) -> bytes | None:
    """Return the code in a file, if it is whole and was made of this key."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    head, code = content[: sha256().digest_size], content[sha256().digest_size :]
    return code if sha256(key + code).digest() == head else None


def _compiled(source: Source) -> bytes:
    """Return the object code of a function, compiled by numba."""
    import llvmlite.binding as llvm
    import numba

    function = getattr(import_module(source.module), source.name)
    # Without wrappers only the function itself remains, and what it calls.
    options: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    (text,) = numba.njit(source.signature, **options)(function).inspect_llvm().values()
    module = llvm.parse_assembly(text)
    outside = [each.name for each in module.functions if each.is_declaration and not each.name.startswith("llvm.")]
    if outside:
        raise RuntimeError(f"{source.name} calls functions that only numba's runtime has: {', '.join(outside)}")
    (itself,) = (each for each in module.functions if not each.is_declaration and each.linkage == llvm.Linkage.external)
    itself.name = SYMBOL
    code: bytes = _target_machine().emit_object(module)
    return code
