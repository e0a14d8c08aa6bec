"""Case files: what is read and refused; expectations never reach a prediction."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import pytest

from memo_sim.contract.errors import BadInput, OutOfTolerance, UsageError
from memo_sim.validation.cases import COLUMNS, load_cases, row_schema
from memo_sim.validation.validate import check_error, question_of, validate
from tests.refusals import Expected, refused

ROW = {
    "case": "a",
    "source": "s",
    "system": "memo",
    "model": "gpt-7b",
    "cluster": "a800-1x8",
    "seq_tokens": "65536",
    "tp": "4",
    "cp": "2",
    "alpha": "0.5",
    "recompute": "tokenwise",
    "expected_status": "ok",
    "expected_mfu": "0.5",
}


def case_file(folder: Path, *rows: dict[str, str], columns: list[str] = COLUMNS) -> Path:
    """Write the rows with the names a0, a1 and so on."""
    path = folder / "cases.csv"
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, columns, restval="")
        writer.writeheader()
        writer.writerows({**row, "case": f"{row['case']}{n}"} for n, row in enumerate(rows))
    return path


def test_bundled_files_load_by_name() -> None:
    sizes = {name: len(load_cases(name)) for name in ("memo-table3", "memo-table4", "memo-table5")}
    assert sizes == {"memo-table3": 96, "memo-table4": 16, "memo-table5": 18}
    row = load_cases("memo-table5")[1]
    assert (row.question.alpha, row.question.integers["tp"], row.expected.mfu) == (0.125, 4, 0.5186)


def test_rows_of_july_2023_have_the_attention_kernel_of_their_repository() -> None:
    # InternLM/InternLM@fa7337b (6 July 2023) prints the first of these rows and builds flash-attn 1.0.5.
    # FlashAttention-2 is of 17 July 2023; the repository took it over in January 2024 (InternLM/InternEvo@87445e3).
    assert {row.question.words["attention"] for row in load_cases("internevo")} == {"flash1"}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("alpha", "1.5"),
        ("alpha", "nan"),
        ("seq_tokens", "-4"),
        ("tp", "two"),
        ("recompute", "sometimes"),
        ("expected_mfu", "high"),
        ("expected_mfu", "51.04"),
        ("expected_step_ms", "1e308"),
        ("expected_step_ms", "1e-300"),
        ("expected_status", "maybe"),
        ("model", ""),
        ("sp", "true"),
        ("schedule", "2f2b"),
        ("zero", "4"),
        ("zero", "-1"),
        ("layers", "1000000"),
        ("vocab", "9" * 20),
        ("hidden", "9" * 5000),
        ("heads", "1_6"),
        ("seq_tokens", str(2**30 + 1)),
        ("global_batch", str(2**20 + 1)),
    ],
)
def test_a_bad_cell_is_named_by_line_and_column(tmp_path: Path, column: str, value: str) -> None:
    path = case_file(tmp_path, ROW, {**ROW, column: value})
    with refused(BadInput, where=f"cases.csv:3, column {column}"):
        load_cases(str(path))


def test_two_rows_with_the_same_name_are_refused(tmp_path: Path) -> None:
    path = case_file(tmp_path, ROW, ROW, ROW)
    path.write_text(path.read_text().replace("a2,", "a0,"))
    with refused(BadInput, where="cases.csv:4, column case", got="'a0'", wanted="line 2"):
        load_cases(str(path))


def test_a_cell_at_its_bound_is_read(tmp_path: Path) -> None:
    largest = {"layers": "1024", "vocab": str(2**24), "seq_tokens": str(2**30), "zero": "3", "global_batch": "007"}
    question = load_cases(str(case_file(tmp_path, {**ROW, **largest})))[0].question
    assert question.seq_tokens == 2**30
    assert [question.integers[c] for c in ("layers", "vocab", "zero", "global_batch")] == [1024, 2**24, 3, 7]
    columns = row_schema()["properties"]
    assert columns["zero"]["description"] == "level of ZeRO (0 to 3)"
    assert columns["layers"]["description"].endswith("(1 to 1024)")


def test_ranks_of_zero_are_a_column_that_files_may_leave_out(tmp_path: Path) -> None:
    path = case_file(tmp_path, {**ROW, "zero_ranks": "8"}, ROW, columns=[*COLUMNS, "zero_ranks"])
    given, blank = (case.question.pins for case in load_cases(str(path)))
    assert given["zero_ranks"] == 8
    assert "zero_ranks" not in blank


def test_headers_and_ragged_rows_are_refused(tmp_path: Path) -> None:
    with refused(BadInput, where="cases.csv", got="alpha", wanted="memo-sim schema cases"):
        load_cases(str(case_file(tmp_path, columns=[c for c in COLUMNS if c != "alpha"])))
    path = case_file(tmp_path, ROW)
    path.write_text(path.read_text() + "x,y\n")
    with refused(BadInput, where="cases.csv:3", wanted="column"):
        load_cases(str(path))
    with refused(BadInput, where="cases.csv", got=None, wanted="row"):
        load_cases(str(case_file(tmp_path)))
    path.write_bytes(b"\xff\xfe")
    with refused(BadInput, where="cases.csv", wanted="UTF-8"):
        load_cases(str(path))


def test_an_unknown_name_is_a_usage_error_that_suggests(tmp_path: Path) -> None:
    with refused(UsageError, got="'memo-tabel5'", wanted="vtrain-multi", hint="'memo-table5'"):
        load_cases("memo-tabel5")


def test_predictions_do_not_see_labels_or_expectations(tmp_path: Path) -> None:
    rows = [r for r in load_cases("memo-table5") if r.question.seq_tokens == 196608][:3]
    rows += [r for r in load_cases("memo-table4") if r.question.words.get("memory_plan") == "no"][:1]
    blank = [msgspec.convert({}, type(r.expected)) for r in rows]
    hidden = [type(r)("x", "y", r.question, e) for r, e in zip(rows, blank, strict=True)]
    mine, theirs = validate(rows), validate(hidden)
    assert [c.predicted for c in mine.cases] == [c.predicted for c in theirs.cases]
    assert mine.cases[0].predicted.mfu is not None
    assert mine.cases[0].error.mfu is not None
    assert theirs.cases[0].error.mfu is None


def test_rows_without_a_memory_plan_use_an_eager_frameworks_allocations(tmp_path: Path) -> None:
    rows = ({**ROW, "memory_plan": word} for word in ("yes", "no"))
    planned, eager = (c.predicted for c in validate(load_cases(str(case_file(tmp_path, *rows)))).cases)
    assert (planned.status, eager.status) == ("ok", "ok")
    assert (planned.reserved_gib, planned.allocation_retries) == (None, None)
    assert planned.allocated_gib is not None
    assert eager.allocated_gib is not None
    assert eager.reserved_gib is not None
    assert eager.reserved_gib > eager.allocated_gib > planned.allocated_gib
    assert eager.allocation_retries is not None


def test_the_column_of_allocation_retries_may_be_left_out(tmp_path: Path) -> None:
    assert "expected_allocation_retries" not in COLUMNS
    (plain,) = load_cases(str(case_file(tmp_path, ROW)))
    assert plain.expected.allocation_retries is None
    columns = [*COLUMNS[:-1], "expected_allocation_retries", COLUMNS[-1]]
    (case,) = load_cases(str(case_file(tmp_path, {**ROW, "expected_allocation_retries": "6"}, columns=columns)))
    assert case.expected.allocation_retries == 6
    assert case.question == plain.question
    with refused(BadInput, where="cases.csv:2, column expected_allocation_retries", got="'often'"):
        load_cases(str(case_file(tmp_path, {**ROW, "expected_allocation_retries": "often"}, columns=columns)))


def test_a_row_that_ran_and_is_refused_is_priced_all_the_same(tmp_path: Path) -> None:
    """One GPU does not hold the states of a 7B model; the same row with another outcome has no price."""
    whole = ROW | {"cluster": "a800-1x1", "tp": "1", "cp": "1", "alpha": "", "recompute": "full", "memory_plan": "no"}
    cases = load_cases(str(case_file(tmp_path, whole, whole | {"expected_status": "gpu_oom", "expected_mfu": ""})))
    ran, refused_too = (report.predicted for report in validate(cases).cases)
    assert (ran.status, ran.beyond_memory) == ("gpu_oom", True)
    assert ran.mfu is not None
    assert 0.3 < ran.mfu < 0.6
    assert ran.allocated_gib is None
    assert (refused_too.status, refused_too.beyond_memory, refused_too.mfu) == ("gpu_oom", False, None)


def test_rows_that_cannot_be_evaluated_say_why_and_are_kept(tmp_path: Path) -> None:
    changes = [
        {"system": "calculon"},
        {"pp": "2"},
        {"attention": "plain"},  # with a ring: its partial results need a log-sum-exp to merge
        {"cluster": "z9-1x8"},
        {"model": "gpt-8b"},
        {"model": "gpt", "layers": "4"},
        {"tp": "16"},
        {"seq_tokens": "65537"},
        {"heads": "32", "ffn": "100"},
        {"pp": "2", "cp": "1", "schedule": "interleaved"},
        {"precision": "fp16", "cluster": "h100-1x8"},
        {"tp": "8", "cp": "1", "overlap": "yes"},
    ]
    path = case_file(tmp_path, *({**ROW, **c} for c in changes))
    report = validate(load_cases(str(path)))
    assert [c.predicted.status for c in report.cases] == ["invalid"] * len(changes)
    assert all(c.predicted.reason and c.predicted.mfu is None for c in report.cases)
    assert "no attention kernel for this dtype" in report.cases[-2].predicted.reason
    assert "collectives of tp8+sp cp1 dp1 do not overlap" in report.cases[-1].predicted.reason
    assert "ffn, heads given for the preset gpt-7b" in report.cases[-4].predicted.reason
    assert "virtual stages" in report.cases[-3].predicted.reason


def test_impossible_sizes_make_only_their_row_invalid(tmp_path: Path) -> None:
    sizes = {"layers": "4", "hidden": "1024", "heads": "32", "vocab": "32000"}
    row = {**ROW, "model": "llama", "seq_tokens": "8192", **sizes}
    wrong = {
        "kv_heads (5)": {"kv_heads": "5"},
        "kv_heads (64)": {"kv_heads": "64"},
        "hidden 64": {"hidden": "64", "heads": "128"},
        "hidden 4100": {"hidden": "4100"},
        "head_dim (3)": {"hidden": "96"},
        "$.ffn_hidden": {"hidden": str(2**24)},
    }
    path = case_file(tmp_path, *({**row, **change} for change in wrong.values()), {**row, "kv_heads": "8"})
    *invalid, good = (c.predicted for c in validate(load_cases(str(path))).cases)
    assert [p.status for p in invalid] == ["invalid"] * len(wrong)
    assert all(says in p.reason for says, p in zip(wrong, invalid, strict=True))
    assert good.status == "ok"


def test_plain_attention_says_that_its_memory_cannot_be_planned(tmp_path: Path) -> None:
    row = {**ROW, "attention": "plain", "tp": "8", "cp": "1", "alpha": "", "recompute": "", "seq_tokens": "4096"}
    rows = ({**row, "system": "megatron-lm", "memory_plan": word} for word in ("yes", "no"))
    path = case_file(tmp_path, {**row, "recompute": "full"}, *rows)
    planned, asked, eager = (c.predicted for c in validate(load_cases(str(path))).cases)
    assert (planned.status, asked.status, eager.status) == ("invalid", "invalid", "ok")
    for invalid in (planned, asked):
        assert "plain attention has no planned arena" in invalid.reason
        assert "memory_plan no" in invalid.reason


def test_precision_and_overlap_that_change_nothing_are_evaluated(tmp_path: Path) -> None:
    path = case_file(tmp_path, {**ROW, "precision": "bf16"}, {**ROW, "tp": "8", "cp": "1", "overlap": "no"})
    assert [c.predicted.status for c in validate(load_cases(str(path))).cases] == ["ok", "ok"]


def test_overlap_is_checked_against_the_simulated_layout(tmp_path: Path) -> None:
    path = case_file(tmp_path, {**ROW, "overlap": "no"})
    (ring,) = (c.predicted for c in validate(load_cases(str(path))).cases)
    assert ring.status == "invalid"
    assert "exchange of cp 2 always overlaps" in ring.reason


def test_a_row_decides_whether_exchanges_overlap_compute(tmp_path: Path) -> None:
    row = {**ROW, "system": "megatron-lm", "alpha": "", "recompute": "full", "global_batch": "16", "memory_plan": "yes"}
    row |= {"tp": "2", "cp": "1", "dp": "2", "pp": "2", "schedule": "1f1b", "seq_tokens": "4096"}
    path = case_file(tmp_path, *({**row, "overlap": word} for word in ("yes", "no")))
    beside, after = (c.predicted for c in validate(load_cases(str(path))).cases)
    assert beside.layout is not None
    assert (beside.layout.pp, beside.layout.overlap_p2p) == (2, True)
    assert beside.mfu is not None
    assert after.mfu is not None
    assert beside.mfu > after.mfu


def test_a_row_may_overlap_the_reductions_of_gradients_alone(tmp_path: Path) -> None:
    row = {**ROW, "system": "megatron-lm", "alpha": "", "recompute": "full", "global_batch": "16", "seq_tokens": "4096"}
    row |= {"tp": "2", "cp": "1", "dp": "4", "zero": "1", "memory_plan": "yes"}
    path = case_file(tmp_path, *({**row, "overlap": word} for word in ("no", "gradients", "yes")))
    found = [c.predicted.mfu for c in validate(load_cases(str(path))).cases]
    assert None not in found
    assert found == sorted(found, key=float)  # type: ignore[arg-type]
    assert len(set(found)) == len(found)


def test_stages_may_hold_several_chunks(tmp_path: Path) -> None:
    row = {**ROW, "alpha": "", "recompute": "full", "global_batch": "8", "tp": "2", "cp": "1", "pp": "4"}
    columns = [*COLUMNS[:-1], "virtual_stages", COLUMNS[-1]]
    rows = ({**row, "schedule": "1f1b"}, {**row, "schedule": "interleaved", "virtual_stages": "2"})
    plain, chunks = (c.predicted for c in validate(load_cases(str(case_file(tmp_path, *rows, columns=columns)))).cases)
    assert plain.mfu is not None
    assert chunks.mfu is not None
    assert chunks.mfu > 1.03 * plain.mfu


def test_a_row_may_have_uneven_heads(tmp_path: Path) -> None:
    row = {**ROW, "system": "deepspeed-ulysses", "alpha": "", "recompute": "full", "seq_tokens": "12288"}
    row |= {"model": "gpt", "layers": "4", "hidden": "1280", "heads": "10", "vocab": "50257"}
    row |= {"tp": "", "cp": "", "ulysses": "4", "global_batch": "2"}
    columns = [*COLUMNS[:-1], "uneven_heads", COLUMNS[-1]]
    path = case_file(tmp_path, *({**row, "uneven_heads": word} for word in ("", "no", "yes")), columns=columns)
    blank, no, yes = (c.predicted for c in validate(load_cases(str(path))).cases)
    assert [blank.status, no.status, yes.status] == ["invalid", "invalid", "ok"]
    assert "does not divide heads" in no.reason
    assert yes.layout is not None
    assert (yes.layout.ulysses, yes.layout.uneven_heads) == (4, True)


def test_a_row_gives_the_layers_of_its_stages(tmp_path: Path) -> None:
    row = {**ROW, "alpha": "", "recompute": "full", "global_batch": "8", "tp": "2", "cp": "1", "pp": "4"}
    columns = [*COLUMNS[:-1], "pp_layers", COLUMNS[-1]]
    rows = (row, {**row, "pp_layers": "5,9,9,9"}, {**row, "pp_layers": "8,8,8,7"})
    equal, given, wrong = validate(load_cases(str(case_file(tmp_path, *rows, columns=columns)))).cases
    assert given.predicted.layout is not None
    assert given.predicted.layout.pp_layers == (5, 9, 9, 9)
    assert equal.predicted.mfu is not None
    assert given.predicted.mfu is not None
    assert given.predicted.mfu < equal.predicted.mfu
    assert "4 numbers that sum to 31" in wrong.predicted.reason
    with refused(BadInput, where="column pp_layers", got="7;8"):
        load_cases(str(case_file(tmp_path, {**row, "pp_layers": "7;8"}, columns=columns)))


@pytest.mark.parametrize(
    ("mfu", "status", "most", "fields"),
    [
        ("0.5", "ok", 0.001, {"got": ("mfu", "1 row"), "wanted": "0.001"}),
        ("", "host_oom", 1.0, {"what": "status", "got": "1 row"}),
        ("", "", 1.0, {"got": None, "wanted": None}),
    ],
)
def test_an_error_that_is_too_large_is_named(
    tmp_path: Path, mfu: str, status: str, most: float, fields: dict[str, Expected]
) -> None:
    report = validate(load_cases(str(case_file(tmp_path, {**ROW, "expected_mfu": mfu, "expected_status": status}))))
    with refused(OutOfTolerance, **fields):
        check_error(report, most)


def test_columns_of_the_frameworks_loss_states_and_inputs_pin_their_knobs(tmp_path: Path) -> None:
    given = {"loss": "eager-fp32", "loss_chunk": "2048", "states": "pure-bf16", "offload_inputs": "yes"}
    given |= {"mlp_chunk": "4096", "mlp_rebuild": "twice"}
    row = {**ROW, "system": "fsdp", "tp": "", "cp": "", "alpha": "", "recompute": "full", "memory_plan": "no", **given}
    path = case_file(tmp_path, row, {**row, **dict.fromkeys(given, "")}, columns=[*COLUMNS, *given])
    decided, default = (question_of(case.question) for case in load_cases(str(path)))
    assert (decided.loss, decided.states) == ("eager-fp32", "pure-bf16")
    assert (decided.pins.loss_chunk_tokens, decided.pins.offload_inputs) == (2048, True)
    assert (decided.pins.mlp_chunk_tokens, decided.pins.mlp_rebuild) == (4096, "twice")
    assert (default.pins.mlp_chunk_tokens, default.pins.mlp_rebuild) == (None, None)
    assert (default.loss, default.states) == ("auto", "fp32")
    assert (default.pins.loss_chunk_tokens, default.pins.offload_inputs) == (None, None)


def test_a_row_says_which_layers_are_recomputed(tmp_path: Path) -> None:
    row = {**ROW, "system": "fsdp", "tp": "", "cp": "", "alpha": "", "recompute": "full", "memory_plan": "no"}
    rows = ({**row, "recompute_layers": layers} for layers in ("", "every-2"))
    columns = [*COLUMNS, "recompute_layers"]
    whole, some = load_cases(str(case_file(tmp_path, *rows, columns=columns)))
    assert question_of(whole.question).pins.recompute_layers is None
    assert question_of(some.question).pins.recompute_layers == "every-2"
    with refused(BadInput, where="column recompute_layers", got="'every-0'"):
        load_cases(str(case_file(tmp_path, {**row, "recompute_layers": "every-0"}, columns=columns)))


def test_a_row_says_whose_modules_and_which_buffers_it_has(tmp_path: Path) -> None:
    row = {**ROW, "system": "fsdp", "tp": "", "cp": "", "alpha": "", "recompute": "full", "memory_plan": "no"}
    cells = {"modules": ("", "huggingface"), "rounding_buffers": ("", "no"), "sharding": ("", "fsdp1")}
    rows = [{**row, **{name: values[n] for name, values in cells.items()}} for n in (0, 1)]
    left, given = load_cases(str(case_file(tmp_path, *rows, columns=[*COLUMNS, *cells])))
    asked = [question_of(case.question) for case in (left, given)]
    assert [question.modules for question in asked] == ["auto", "huggingface"]
    assert [question.pins.rounding_buffers for question in asked] == [None, False]
    # Other modules are another program to measure, and another sharding is another plan of the same.
    assert given.question.subject == left.question.subject.replace(", 1 x", ", modules huggingface, 1 x")


def test_a_framework_that_offloads_nothing_is_not_taken_to(tmp_path: Path) -> None:
    row = {**ROW, "offload_inputs": "no"}
    (case,) = load_cases(str(case_file(tmp_path, row, columns=[*COLUMNS, "offload_inputs"])))
    assert question_of(case.question).pins.offload_inputs is False


@pytest.mark.parametrize(
    ("column", "value"),
    [("loss", "fast"), ("states", "fp8"), ("offload_inputs", "maybe"), ("loss_chunk", "-1"), ("loss_chunk", "64k")],
)
def test_a_wrong_word_in_an_optional_column_is_refused(tmp_path: Path, column: str, value: str) -> None:
    path = case_file(tmp_path, {**ROW, column: value}, columns=[*COLUMNS, column])
    with refused(BadInput, where=f"column {column}", got=repr(value)):
        load_cases(str(path))
