"""Exit codes of errors, and the form of their messages."""

import pickle

import pytest

from memo_sim.contract import errors


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [("MemoError", 1), ("UsageError", 2), ("BadInput", 3), ("Infeasible", 4), ("OutOfTolerance", 5), ("CannotRun", 6)],
)
def test_exit_codes(name: str, exit_code: int) -> None:
    error = getattr(errors, name)("what")
    assert isinstance(error, errors.MemoError)
    assert error.exit_code == exit_code


def test_message_has_one_line_for_each_part() -> None:
    error = errors.BadInput("a wrong value", where="plan.json: $.decisions", got=-1, wanted="int >= 1", hint="use 1")
    assert str(error) == "a wrong value\n  where: plan.json: $.decisions\n  got: -1\n  wanted: int >= 1\n  next: use 1"
    assert str(errors.BadInput("a wrong value", got=0)) == "a wrong value\n  got: 0"


def test_message_survives_another_process() -> None:
    error = errors.Infeasible("nothing fits", got="80 GiB")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (errors.Infeasible, str(error))


def test_nearest_name() -> None:
    assert errors.did_you_mean("alpah", ["alpha", "beta"]) == "did you mean 'alpha'?"
    assert errors.did_you_mean("gamma-ray", ["alpha", "beta"]) is None


def test_an_absent_optional_package_is_no_bug() -> None:
    absent = errors.missing_package(ModuleNotFoundError("No module named 'simpy'", name="simpy"))
    assert absent is not None
    assert absent.exit_code == 6
    assert absent.got == "simpy"
    assert "pip install '.[sim]'" in str(absent.hint)
    assert errors.missing_package(ModuleNotFoundError("No module named 'x'", name="x")) is None
    assert errors.missing_package(ValueError("simpy")) is None


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (MemoryError(), "refused memory"),
        (MemoryError("std::bad_alloc"), "refused memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "refused memory"),
        (ImportError("_common.so: failed to map segment from shared object"), "refused memory"),
        (RuntimeError("can't start new thread"), "refused a thread"),
    ],
)
def test_a_shortage_is_no_bug(error: Exception, what: str) -> None:
    found = errors.shortage(error)
    assert found is not None
    assert found.exit_code == 6
    assert what in str(found)
    assert "ulimit -v" in str(found)


def test_another_error_is_no_shortage() -> None:
    assert errors.shortage(RuntimeError("a shape of 3")) is None
