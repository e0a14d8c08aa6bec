"""Reading a file gives either a document or one clear ``BadInput``, whatever the file contains."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import BadInput
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Plan
from memo_sim.contract.schemas import DOCUMENTS
from tests.refusals import check_fields, refused


def refusal(raw: bytes, kind: type[msgspec.Struct]) -> BadInput:
    with pytest.raises(BadInput) as error:
        codec.decode(raw, kind, where="file.json")
    assert error.value.exit_code == 3
    assert error.value.where is not None
    assert error.value.where.startswith("file.json")
    assert error.value.what
    return error.value


def changed(document: msgspec.Struct, path: str, value: Any) -> bytes:
    """Return the document's JSON with the value at a dotted path replaced, or removed for ``...``."""
    tree = json.loads(codec.encode(document))
    *parents, last = path.split(".")
    place = tree
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if value is ...:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("change", "where", "told"),
    [
        (("plan", "decisions.dtpye", 1), "$.decisions.dtpye", ('"dtpye"', "one of model, layout", "'dtype'")),
        (("plan", "colour", 1), "$.colour", ('"colour"', "one of decisions, program_sha256", None)),
        (("plan", "decisions.model.layers", -2), "$.decisions.model.layers", ("-2", "int >= 1", None)),
        (("plan", "decisions.model.layers", 10**30), "$.decisions.model.layers", (str(10**30), "int <= 1024", None)),
        (("model", "vocab", 10**17), "$.vocab", (str(10**17), "int <= 16777216", None)),
        (("plan", "decisions.layout.tp", "2"), "$.decisions.layout.tp", ('"2"', "int", None)),
        (("plan", "decisions.layout.tp", 2.5), "$.decisions.layout.tp", ("2.5", "int", None)),
        (("plan", "decisions.layout.tp", True), "$.decisions.layout.tp", ("true", "int", None)),
        (("plan", "decisions.model", [1]), "$.decisions.model", ("an array of 1", "object", None)),
        (("plan", "decisions.model", ...), "$.decisions.model", (None, "a value", None)),
        (
            ("plan", "decisions.recompute", "token-wise"),
            "$.decisions.recompute",
            ('"token-wise"', "full", "'tokenwise'"),
        ),
        (("plan", "prediction.stalls.0.seconds", -1.0), "$.prediction.stalls[0].seconds", ("-1.0", "float >= 0", None)),
        (("plan", "prediction.peak_by_class.state", -5), "$.prediction.peak_by_class.state", ("-5", "int >= 0", None)),
        (
            ("plan", "decisions.model.schema", "memo.model/2"),
            "$.decisions.model.schema",
            ('"memo.model/2"', "memo.model/1", "'memo.model/1'"),
        ),
        (("result", "plans.0.alpha", 1.5), "$.plans[0].alpha", ("1.5", "float <= 1.0", None)),
        (("result", "plans.0.layuot", {}), "$.plans[0].layuot", ('"layuot"', "one of status", "'layout'")),
        (("hardware", "peak_flops.bf17", {}), "$.peak_flops", ('"bf17"', "one of fp32, bf16, fp16", "'bf16'")),
        (("hardware", "gemm.0.rows.0", [1, 2, 3]), "$.gemm[0].rows[0]", ("an array of 3", "length >= 4", None)),
        (("hardware", "gemm.0.rows", []), "$.gemm[0].rows", ("an array of 0", "length >= 1", None)),
        (("hardware", "device_memory_bytes.value", -1), "$.device_memory_bytes.value", ("-1", "float >= 0.0", None)),
        (("hardware", "reserve_bytes.nccl.value", "x"), "$.reserve_bytes.nccl.value", ('"x"', "float", None)),
        (("hardware", "sources.bench.kind", "guess"), "$.sources.bench.kind", ('"guess"', "measured, datasheet", None)),
        (("cluster", "host_memory_bytes.value", None), "$.host_memory_bytes.value", ("null", "float", None)),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_the_message_names_place_value_and_allowed_values(
    samples: dict[str, msgspec.Struct],
    change: tuple[str, str, Any],
    where: str,
    told: tuple[str | None, str, str | None],
) -> None:
    document, path, value = change
    got, wanted, hint = told
    error = refusal(changed(samples[document], path, value), DOCUMENTS[document])
    assert error.where == f"file.json: {where}"
    assert error.got == got
    assert wanted in str(error.wanted)
    assert error.hint == (None if hint is None else f"did you mean {hint}?")


@pytest.mark.parametrize(
    ("change", "where", "named"),
    [
        (("plan", "decisions.swapped_tokens", 6144), "$.decisions", ("swapped_tokens", "6144", "4096")),
        (("plan", "decisions.swapped_tokens", 100), "$.decisions", ("swapped_tokens", "100", "128", "4096")),
        (("plan", "decisions.model.kv_heads", 3), "$.decisions.model", ("heads (4)", "kv_heads (3)")),
        (("model", "activation", "gelu"), "$", ("activation", "llama", "silu", "gelu")),
        (("model", "head_dim", 33), "$", ("head_dim", "33")),
        (("model", "rope_scaling.low_freq_factor", 4.0), "$.rope_scaling", ("high_freq_factor", "low_freq_factor")),
        (("trace", "spans.end_s", [0.5, 0.25]), "$.spans", ("m0/l0/fwd/attn", "0.5", "0.25")),
        (("trace", "spans.ids", ["one"]), "$.spans", ("column", "length")),
        (("hardware", "memory_bound_bytes_per_s.x", [2.0]), "$.memory_bound_bytes_per_s", ("x (2)", "y (1)")),
        (("hardware", "d2h.alone.x", [2.0, 2.0]), "$.d2h.alone", ("x", "increase")),
        (("hardware", "sources.bench", ...), "$", ("sources", "bench")),
        (("hardware", "peak_flops", {}), "$", ("peak_flops", "bf16", "fp32")),
        (("hardware", "h2d.duplex.value", 0), "$", ("h2d.duplex", "0")),
        (("hardware", "compute_slowdown.copy.value", 0.5), "$", ("compute_slowdown.copy", "1")),
        (("cluster", "network", None), "$", ("2 nodes", "network")),
        (("cluster", "network.nic_bytes_per_s.value", 0), "$.network", ("nic_bytes_per_s", "0")),
        (("cluster", "sources.sheet", ...), "$", ("sources", "sheet")),
    ],
)
def test_documents_that_make_no_sense_are_refused(
    samples: dict[str, msgspec.Struct], change: tuple[str, str, Any], where: str, named: tuple[str, ...]
) -> None:
    document, path, value = change
    raw = changed(samples[document], path, value)
    if (document, path) == ("hardware", "memory_bound_bytes_per_s.x"):
        raw = changed(samples[document], path, [1.0, 2.0])
    error = refusal(raw, DOCUMENTS[document])
    assert error.where == f"file.json: {where}"
    check_fields(error, BadInput, what=named)


def test_another_kind_of_document_is_named(samples: dict[str, msgspec.Struct]) -> None:
    error = refusal(codec.encode(samples["hardware"]), Plan)
    assert (error.got, error.wanted) == ('"memo.hardware/1"', "memo.plan/3")
    newer = refusal(changed(samples["plan"], "schema", "memo.plan/9"), Plan)
    assert (newer.got, newer.wanted) == ('"memo.plan/9"', "memo.plan/3")


@pytest.mark.parametrize(
    ("kind", "wanted", "hint"),
    [
        ("hardware", "plan", "memo-sim what-if MODEL --cluster FILE"),
        ("plan", "trace", "memo-exec run FILE"),
        ("trace", "plan", "memo-exec compare PLAN FILE"),
    ],
)
def test_a_document_of_another_kind_names_the_command_for_it(
    samples: dict[str, msgspec.Struct], kind: str, wanted: str, hint: str
) -> None:
    error = refusal(codec.encode(samples[kind]), type(samples[wanted]))
    assert hint in str(error.hint)


@pytest.mark.parametrize("schema", [..., None])
def test_a_document_without_a_schema_is_refused(sample: msgspec.Struct, schema: object) -> None:
    error = refusal(changed(sample, "schema", schema), type(sample))
    assert error.where == "file.json: $.schema"
    assert error.wanted == sample.__struct_config__.tag


@pytest.mark.parametrize(
    ("raw", "where", "got", "wanted"),
    [
        (b"", "", None, "JSON"),
        (b" \n\t", "", None, "JSON"),
        (b"[]", ": $", "an array of 0", "object"),
        (b"null", ": $", "null", "object"),
        (b"3", ": $", "3", "object"),
        (b'{"schema": 3}', ": $.schema", "3", "str | null"),
        (b"plan: yes", ": line 1, column 1", '"plan"', None),
        (b'{\n  "schema": "memo.plan/3",\n  "decisions": NaN\n}', ": line 3, column 16", '"NaN"', None),
        (b'{"schema": "memo.plan/3"} trailing', ": line 1, column 28", '"railing"', None),
        (b'{"schema": "memo.plan/3", "program_sha256": "\xff"}', "", "UTF-8", None),
        (b"\xff\xfe{\x00}\x00", ": line 1, column 1", "character", None),
        (b"PK\x03\x04\x00\x00", ": line 1, column 1", '"PK"', None),
        (b'{"schema": "memo.plan/3", "decisions": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "", "nested", None),
        (b"[" * 100_000, ": $", "array", "object"),
        (b'{"a":' * 100_000, "", "nested", None),
        (
            b'{"schema": "memo.plan/3", "decisions": {"seq_tokens": ' + b"9" * 5000 + b"}}",
            *(": $.decisions.seq_tokens", None, None),
        ),
        (
            b'{"schema": "memo.plan/3", "prediction": {"status": "ok", "step_s": 1e999}}',
            *(": $.prediction.step_s", None, None),
        ),
        (b'{"schema": "memo.plan/3", "x` - at `$.y": 1}', ": $.y.x", '"x"', "one of"),
        (b'{"schema": "memo.plan/3", "x\\ny": 1}', ": $.x\\ny", '"x\\ny"', "program_sha256"),
    ],
)
def test_files_that_hold_something_else(raw: bytes, where: str, got: str | None, wanted: str | None) -> None:
    error = refusal(raw, Plan)
    assert error.where == f"file.json{where}"
    check_fields(error, BadInput, got=got, wanted=wanted)
    assert len(str(error)) < 1000
    assert len(str(error).splitlines()) <= 5


def test_the_message_shows_the_wrong_value() -> None:
    assert "NaN" in str(refusal(b'{"schema": NaN}', Plan))


def test_every_truncation_is_noticed(samples: dict[str, msgspec.Struct]) -> None:
    raw = codec.encode(samples["plan"])
    for length in range(len(raw) - 2):
        refusal(raw[:length], Plan)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for path, got, wanted in [
        (tmp_path / "missing.json", None, None),
        (tmp_path / "folder.json", None, "file"),
        (Path("a\0b.json"), "null byte", None),
        (tmp_path / ("x" * 300), "too long", None),
    ]:
        where = repr(str(path)) if "\0" in str(path) else str(path)
        with refused(BadInput, where=where, got=got, wanted=wanted):
            codec.read(path, Plan)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.touch(mode=0)
    with refused(BadInput, where=str(path), got="Permission denied"):
        codec.read(path, Plan)


@pytest.mark.parametrize(
    "text",
    [
        *[b"= 1", b'schema = "memo.cluster/1', b"x = nan", b"x = -inf", b"x = 1e999", b"\xff", b"x = 1\nx = 2"],
        *[b"x = " + b"[" * 100_000, b"x = " + b"9" * 5000, b"", b"x = 2020-01-01", b'"\\ud800" = 1'],
    ],
)
def test_invalid_toml_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(text)
    with refused(BadInput, where=str(path)):
        load_cluster(str(path))


@settings(deadline=None)
@given(raw=st.binary(max_size=200), kind=st.sampled_from(sorted(DOCUMENTS)))
def test_garbage_never_escapes(raw: bytes, kind: str) -> None:
    refusal(raw, DOCUMENTS[kind])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(data=st.data())
def test_mutated_documents_never_escape(samples: dict[str, msgspec.Struct], data: st.DataObject) -> None:
    """A value anywhere in a valid document is replaced, removed or renamed, or the text is cut off."""
    name = data.draw(st.sampled_from(sorted(samples)))
    tree = json.loads(codec.encode(samples[name]))
    place: Any = tree
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    if isinstance(place, dict) and data.draw(st.booleans()):
        place[data.draw(st.text(max_size=10))] = place.pop(key)
    else:
        place[key] = data.draw(JSON)
    raw = bytearray(json.dumps(tree, ensure_ascii=data.draw(st.booleans())).encode(errors="surrogatepass"))
    for _ in range(data.draw(st.integers(0, 2))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        document = codec.decode(bytes(raw), DOCUMENTS[name], where="file.json")
    except BadInput as error:
        assert str(error).startswith(error.what)  # noqa: PT017
        assert "file.json" in str(error)  # noqa: PT017
    else:
        assert codec.decode(codec.encode(document), DOCUMENTS[name], where="file.json") == document


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(fields=st.dictionaries(st.sampled_from(["model_type", "schema", "n_embd", "x"]), JSON))
def test_model_files_never_escape(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(BadInput):
        load_model(str(path))


def test_errors_do_not_depend_on_the_order_of_keys(samples: dict[str, msgspec.Struct]) -> None:
    """Canonical files have ``schema`` near their end; a wrong schema is still reported first."""
    tree = json.loads(codec.encode(samples["hardware"]))
    backwards = json.dumps(dict(reversed(tree.items()))).encode()
    assert str(refusal(backwards, Model)) == str(refusal(codec.encode(samples["hardware"]), Model))
    assert codec.decode(backwards, Hardware, where="file.json") == samples["hardware"]


@pytest.mark.parametrize(
    ("name", "old", "new", "what"),
    [
        ("hardware", '"kernel": "flash2"', '"kernel": "$x$"', "is no kernel"),
        ("hardware", '"value": 312000000000000.0', '"value": 1e-310', "peak_flops.bf16 must be more than 0"),
        ("trace", '"micro_batches": 1', '"micro_batches": 0', ""),
        ("trace", '"micro_batches_played": 1', '"micro_batches_played": 2', "more than micro_batches"),
    ],
)
def test_numbers_and_names_that_later_steps_rely_on(
    samples: dict[str, msgspec.Struct], name: str, old: str, new: str, what: str
) -> None:
    """Each ended in a document that could not be written, or in an error that named no file."""
    raw = codec.encode(samples[name]).decode()
    assert old in raw
    assert what in str(refusal(raw.replace(old, new, 1).encode(), DOCUMENTS[name]))
