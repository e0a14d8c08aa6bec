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
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.util import cache_from_source, find_spec
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

from numpy.typing import NDArray

SYMBOL, PACKED = "native", "packed"
"""What a function is called inside its object code, and what calls it there with all arguments from one array: ctypes
would convert each of them in every call."""

NUMBER = "int64"
"""The type of the numbers that a function is called with and that it returns."""

LET_GO = "NRT_MemInfo_call_dtor"
"""What numba's code calls when an array's last owner lets go of it. Arrays made of addresses have no owner, and code
that makes other arrays is refused, so it is never reached."""


@dataclass(frozen=True)
class Source:
    """A plain function, for numba to compile with the functions of its module that it calls.

    ``arguments``: their types. ``int64`` is a number, ``int32[:, :]`` an array. ``int32*`` is an array without its
    shape, whose numbers the function takes one after the other; that is a little faster.
    """

    function: Callable[..., Any]
    arguments: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file of the function."""
        return Path(self.function.__code__.co_filename)

    @property
    def text(self) -> str:
        """What the code is made of: the file of the function, and the numbers that it has from elsewhere."""
        names = sorted(self.function.__globals__.items())
        numbers = (f"{name} = {value!r}" for name, value in names if isinstance(value, (int, float)))
        return "\n".join((self.function.__name__, *self.arguments, self.path.read_text(), *numbers))


class NotKept(Exception):
    """No file holds the code of a function, so that it has to be compiled, which takes seconds."""


class Native:
    """The native code of a function."""

    def __init__(self, source: Source, *, compiles: bool = True) -> None:
        """Load the code; where no file holds it, compile it and keep it, if ``compiles``.

        Raises:
            ImportError: where numba is not installed.
            NotKept: where the code would have to be compiled.
            OSError: where no folder for the code can be written.
        """
        if find_spec("numba") is None:
            raise ModuleNotFoundError("No module named 'numba'", name="numba")
        if not compiles and not any(any(folder.glob(_name(source, "*"))) for folder in _folders(source)):
            raise NotKept  # before llvmlite is imported
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._arguments = source.arguments
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
        """Holds the code in memory."""
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(_object_code(source, compiles=compiles)))
        self._engine.finalize_object()
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(self._engine.get_function_address(PACKED))

    def bound(self, *arguments: int | NDArray[Any]) -> Bound:
        """Return a call of the code with these arguments.

        Raises:
            TypeError: where an argument has another type, or an array is not contiguous.
        """
        if len(arguments) != len(self._arguments):
            raise TypeError(f"{len(arguments)} arguments are given, and {len(self._arguments)} are wanted")
        return Bound(self, self._call, arguments, [*chain.from_iterable(map(_passed, arguments, self._arguments))])


class Bound:
    """A call of native code with given arguments."""

    def __init__(
        self, native: Native, call: Callable[..., int], arguments: Sequence[int | NDArray[Any]], passed: Sequence[int]
    ) -> None:
        """``passed``: the arguments, with addresses in place of arrays."""
        self._holds = native, arguments  # the code and the arrays are in memory for as long as this is
        self._result, self._raised = ctypes.c_int64(), ctypes.c_void_p()
        every = (ctypes.addressof(self._result), ctypes.addressof(self._raised), *passed)
        self._packed = (ctypes.c_int64 * len(every))(*every)
        self._call, self._address = call, ctypes.addressof(self._packed)

    def __call__(self) -> int:
        """Run the code, and return its number.

        Raises:
            RuntimeError: where the function raised something; what, only numba's runtime knows.
        """
        status = self._call(self._address)
        if status:
            raise RuntimeError(f"native code ended with status {status}, and not with 0: its function raised something")
        return self._result.value


def _dimensions(argument: str) -> int:
    """Return how many numbers of its shape are passed with an array."""
    return argument.count(":")


def _dtype(argument: str) -> str:
    """Return the type of an array's numbers."""
    return argument.removesuffix("*").partition("[")[0]


def _passed(argument: int | NDArray[Any], wanted: str) -> tuple[int, ...]:
    """Return a number as it is, and of an array the address and what is passed of its shape."""
    if isinstance(argument, int):
        if wanted == NUMBER and -(2**63) <= argument < 2**63:
            return (argument,)
        given = f"the number {argument}"
    else:
        dimensions = _dimensions(wanted)
        fits = argument.flags.c_contiguous and dimensions in {0, argument.ndim} and wanted != NUMBER
        if fits and argument.dtype == _dtype(wanted):
            return (argument.ctypes.data, *argument.shape[:dimensions])
        given = f"an array of {argument.dtype} with the shape {argument.shape}"
    raise TypeError(f"{given} is given as an argument of type {wanted}")


def _target_machine() -> Any:
    """Return LLVM's description of this processor, for code that is as fast as numba's own."""
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(*_processor(), opt=3, jit=True)


def _processor() -> tuple[str, str]:
    """Return the names of this processor and of its features."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _object_code(source: Source, *, compiles: bool) -> bytes:
    """Return the object code of a function: from its file, else compiled and then kept there.

    Raises:
        NotKept: where it is in no file, and is not to be compiled.
        OSError: where it has to be compiled, and no folder can be written.
    """
    import llvmlite.binding as llvm

    machine = "\n".join((llvm.get_default_triple(), *_processor()))
    versions = (sys.version, *(f"{each} {version(each)}" for each in ("numba", "llvmlite")))
    key = "\n".join((machine, *versions, source.text, Path(__file__).read_text())).encode()
    name = _name(source, sha256(machine.encode()).hexdigest()[:16])
    for folder in _folders(source):
        found = _kept(folder / name, key)
        if found is not None:
            return found
    if not compiles:
        raise NotKept
    fresh = _fresh_file(source)
    try:
        code = _compiled(source)
        fresh.write_bytes(sha256(key + code).digest() + code)
        fresh.chmod(0o644)
        fresh.replace(fresh.parent / name)  # at once, beside processes that read or write the same file
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return code


def _name(source: Source, machine: str) -> str:
    """Return the name of a file of a function's code for one kind of machine."""
    return f"{source.path.stem}.{sys.implementation.cache_tag}-{machine}.o"


def _folders(source: Source) -> Iterator[Path]:
    """Yield the folders for the code of a function: its bytecode's, and the user's own by the rules of XDG."""
    yield Path(cache_from_source(str(source.path))).parent
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    yield (chosen if chosen.is_absolute() else Path("~/.cache").expanduser()) / "memo"


def _fresh_file(source: Source) -> Path:
    """Return a new file in the first folder that can be written.

    Raises:
        OSError: where none can be.
    """
    from tempfile import mkstemp

    for folder in _folders(source):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, path = mkstemp(dir=folder, prefix=".", suffix=".o")
        except OSError as error:
            refused = error
            continue
        os.close(handle)
        return Path(path)
    raise refused


def _kept(path: Path, key: bytes) -> bytes | None:
    """Return the code in a file, if it is whole, was made of this key, and only this user or root can have written."""
    try:
        with path.open("rb") as file:
            status, content = os.fstat(file.fileno()), file.read()
    except OSError:
        return None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in {0, os.getuid()}:
        return None
    head, code = content[: sha256().digest_size], content[sha256().digest_size :]
    return code if sha256(key + code).digest() == head else None


def _compiled(source: Source) -> bytes:
    """Return the object code of a function, compiled by numba.

    Raises:
        RuntimeError: where the function needs numba's runtime, because it makes arrays, for instance.
    """
    import llvmlite.binding as llvm
    import numba

    function, options = source.function, dict[str, Any](error_model="numpy")
    known = dict(function.__globals__)
    for name, value in function.__globals__.items():
        if isinstance(value, FunctionType) and value.__code__.co_filename == function.__code__.co_filename:
            known[name] = numba.njit(FunctionType(value.__code__, known, name), **options)
    entry: dict[str, Any] = {"numba": numba, "function": known[function.__name__]}
    exec(_entry(source.arguments), entry)
    # Without wrappers only the function itself remains, and what it calls.
    options.update(no_cpython_wrapper=True, no_cfunc_wrapper=True)
    (text,) = numba.njit(_signature(source.arguments), **options)(entry["entry"]).inspect_llvm().values()
    module = llvm.parse_assembly(text)
    (itself,) = (each for each in module.functions if not each.is_declaration and each.linkage == llvm.Linkage.external)
    itself.name = SYMBOL
    named = (*module.functions, *module.global_variables)
    outside = {each.name for each in named if each.is_declaration and not each.name.startswith("llvm.")}
    if outside - {LET_GO}:
        raise RuntimeError(f"{function.__name__} uses parts of numba's runtime: {', '.join(sorted(outside))}")
    if outside:
        trap = "call void @llvm.trap()\n unreachable"
        module.link_in(llvm.parse_assembly(f"declare void @llvm.trap()\ndefine void @{LET_GO}(ptr %0) {{\n {trap}\n}}"))
    module.link_in(llvm.parse_assembly(_packed([str(each.type) for each in itself.arguments])))
    code: bytes = _target_machine().emit_object(module)
    return code


def _packed(types: Sequence[str]) -> str:
    """Return a function in LLVM's language that calls the native one with numbers and addresses from an array."""
    loads = (
        f" %at{number} = getelementptr i64, ptr %packed, i64 {number}\n %value{number} = load {type_}, ptr %at{number}"
        for number, type_ in enumerate(types)
    )
    given = ", ".join(f"{type_} %value{number}" for number, type_ in enumerate(types))
    body = "\n".join((*loads, f" %status = call i32 @{SYMBOL}({given})", " ret i32 %status"))
    return f"declare i32 @{SYMBOL}({', '.join(types)})\ndefine i32 @{PACKED}(ptr %packed) {{\n{body}\n}}"


def _entry(arguments: Sequence[str]) -> str:
    """Return a function that calls ``function`` with arrays made of addresses and shapes, as Python's text."""
    names, made = list[str](), list[str]()
    for number, each in enumerate(arguments):
        shape = [f"a{number}_{axis}" for axis in range(_dimensions(each))]
        names += [f"a{number}", *shape]
        made.append(f"numba.carray(a{number}, ({', '.join(shape)},))" if shape else f"a{number}")
    return f"def entry({', '.join(names)}): return function({', '.join(made)})"


def _signature(arguments: Sequence[str]) -> str:
    """Return numba's signature of the entry."""
    types = (
        type_
        for each in arguments
        for type_ in (each if each == NUMBER else f"CPointer({_dtype(each)})", *_dimensions(each) * [NUMBER])
    )
    return f"{NUMBER}({', '.join(types)})"
