"""Simulator and planner: what a training step costs in time and memory, before it runs.

``docs/python.md`` describes the functions. The import itself loads nothing else; the first use of a name does.
"""

TYPE_CHECKING = False  # what type checkers take for typing's, which takes time to load

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "CannotRun",
    "ClustersResult",
    "CompareResult",
    "DoctorResult",
    "ExplainResult",
    "ExportResult",
    "GpusResult",
    "ImportResult",
    "Infeasible",
    "Knobs",
    "LongestResult",
    "MemoError",
    "MemoryResult",
    "OomResult",
    "Picture",
    "SweepResult",
    "UsageError",
    "ValidationResult",
    "WhatIfResult",
    "__version__",
    "compare",
    "doctor",
    "explain",
    "export",
    "gpus",
    "grid",
    "import_job",
    "load_plan",
    "load_sweep",
    "longest",
    "oom",
    "plan_memory",
    "simulate",
    "sweep",
    "validate",
    "what_if",
]

_ERRORS = ("BadInput", "CannotRun", "Infeasible", "MemoError", "UsageError")

if TYPE_CHECKING:
    from memo_sim.api import (
        ClustersResult,
        CompareResult,
        DoctorResult,
        ExplainResult,
        ExportResult,
        GpusResult,
        ImportResult,
        Knobs,
        LongestResult,
        MemoryResult,
        OomResult,
        Picture,
        SweepResult,
        ValidationResult,
        WhatIfResult,
        compare,
        doctor,
        explain,
        export,
        gpus,
        grid,
        import_job,
        load_plan,
        load_sweep,
        longest,
        oom,
        plan_memory,
        simulate,
        sweep,
        validate,
        what_if,
    )
    from memo_sim.contract.errors import BadInput, CannotRun, Infeasible, MemoError, UsageError


def __getattr__(name: str) -> object:
    """Load what a public name stands for when it is first used.

    Raises:
        CannotRun: when a package that it needs is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module("memo_sim.contract.errors" if name in _ERRORS else "memo_sim.api")
    except ModuleNotFoundError as error:
        from memo_sim.contract.errors import missing_package

        raise missing_package(error) or error from None
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
