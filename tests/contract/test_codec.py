"""Canonical bytes, round trips, and atomic writes."""

import hashlib
import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.errors import MemoError, UsageError
from memo_sim.contract.hardware import Curve, Hardware
from memo_sim.contract.plan import Plan
from tests.refusals import refused

GOLDEN_PLAN = Path(__file__).parent / "golden_plan.json"


def test_golden_plan_is_byte_identical(samples: dict[str, msgspec.Struct]) -> None:
    assert codec.encode(samples["plan"]) == GOLDEN_PLAN.read_bytes()
    assert codec.read(GOLDEN_PLAN, Plan) == samples["plan"]


def test_documents_read_back_equal_and_write_the_same_bytes(sample: msgspec.Struct, tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    codec.write(path, sample)
    again = codec.read(path, type(sample))
    assert again == sample
    assert codec.encode(again) == path.read_bytes() == codec.encode(sample)


def test_hash_is_of_the_canonical_bytes(samples: dict[str, msgspec.Struct]) -> None:
    plan = samples["plan"]
    assert codec.sha256_of(plan) == hashlib.sha256(GOLDEN_PLAN.read_bytes()).hexdigest()
    assert codec.sha256_of(samples["model"]) != codec.sha256_of(plan)


def test_equal_documents_are_equal_bytes(samples: dict[str, msgspec.Struct]) -> None:
    """Documents that compare equal give equal files: an int in a float's field, keys in another order."""
    hardware = samples["hardware"]
    assert isinstance(hardware, Hardware)
    quantity = hardware.device_memory_bytes
    same = msgspec.structs.replace(
        hardware,
        device_memory_bytes=msgspec.structs.replace(quantity, value=int(quantity.value)),
        sources=dict(reversed(hardware.sources.items())),
    )
    assert same == hardware
    assert codec.encode(same) == codec.encode(hardware)


def test_an_unwritable_path_is_refused_before_the_work(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also with all permissions: /proc takes no files, and no folder takes a name of 300 letters."""
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    loop = tmp_path_factory.mktemp("links") / "loop.json"
    loop.symlink_to(loop)
    for path in (kept, tmp_path / "new.json", Path(os.devnull)):
        codec.check_writable(path)
    for path in (tmp_path, tmp_path / "none" / "new.json", tmp_path / ("x" * 300), Path("/proc/new.json"), loop):
        with pytest.raises(UsageError):
            codec.check_writable(path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept.json", "old")]


def test_a_loop_of_links_is_compared_with_other_files(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    codec.check_distinct([loop, tmp_path / "other.json"])
    codec.check_not_read([loop], [tmp_path / "read.json"])
    with pytest.raises(UsageError):
        codec.check_distinct([loop, loop])


def test_lists_of_numbers_stand_on_one_line(samples: dict[str, msgspec.Struct]) -> None:
    text = codec.encode(samples["hardware"]).decode()
    assert "[4096.0, 4096.0, 4096.0, 220000000000000.0]" in text
    assert max(line.count("[") for line in text.splitlines()) == 1


def test_text_that_looks_like_a_list_is_left_alone(samples: dict[str, msgspec.Struct]) -> None:
    model = msgspec.structs.replace(samples["model"], source="see [\n1,   2\n] and [3,  4]")
    assert codec.decode(codec.encode(model), type(model), where="here") == model


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_json_cannot_carry_are_a_bug(samples: dict[str, msgspec.Struct], number: float, tmp_path: Path) -> None:
    comparison = samples["comparison"]
    assert isinstance(comparison, Comparison)
    broken = msgspec.structs.replace(comparison, losses=[1.0, number])
    with refused(MemoError, where="memo.comparison/1", got="$.losses[1]") as error:
        codec.write(tmp_path / "out.json", broken)
    assert error.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_number_lost_to_null_is_noticed(samples: dict[str, msgspec.Struct]) -> None:
    plan = samples["plan"]
    assert isinstance(plan, Plan)
    broken = msgspec.structs.replace(plan.prediction, mfu=float("nan"))
    with refused(MemoError, where="memo.plan/3"):
        codec.encode(msgspec.structs.replace(plan, prediction=broken))


def test_documents_against_their_own_schema_are_a_bug(samples: dict[str, msgspec.Struct]) -> None:
    with refused(MemoError, where="memo.model/1", got="$.layers"):
        codec.encode(msgspec.structs.replace(samples["model"], layers=0, layer_pattern=()))


def test_toml_reads_like_the_same_document_in_json(samples: dict[str, msgspec.Struct], tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(
        'schema = "memo.model/1" # comments are the point\nname = "sample"\nfamily = "llama"\nlayers = 4\n'
        "hidden = 128\nheads = 4\nkv_heads = 2\nhead_dim = 32\nffn_hidden = 384\nvocab = 256\ntied_embeddings = false\n"
        'activation = "silu"\nsource = "a test"\n[rope_scaling]\nkind = "llama3"\nfactor = 8\n'
        "[[layer_pattern]]\ntimes = 3\nshape.ffn_hidden = 384\n[[layer_pattern]]\nshape.ffn_hidden = 128\n"
    )
    assert codec.read(path, type(samples["model"])) == samples["model"]


def test_a_byte_order_mark_is_skipped(samples: dict[str, msgspec.Struct], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xef\xbb\xbf" + codec.encode(samples["plan"]))
    assert codec.read(path, Plan) == samples["plan"]


def test_write_replaces_the_whole_file_and_leaves_nothing_else(sample: msgspec.Struct, tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    path.write_text("old " * 100_000)
    codec.write(path, sample)
    assert path.read_bytes() == codec.encode(sample)
    assert list(tmp_path.iterdir()) == [path]


def test_written_files_have_ordinary_permissions(sample: msgspec.Struct, tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        codec.write(tmp_path / "document.json", sample)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "document.json").stat().st_mode) == 0o644


def test_a_link_keeps_pointing(sample: msgspec.Struct, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "target" / "document.json")
    for _ in range(2):
        codec.write(link, sample)
        assert link.is_symlink()
        assert (tmp_path / "target" / "document.json").read_bytes() == codec.encode(sample)


def test_a_device_is_written_to_not_replaced() -> None:
    codec.write_bytes("/dev/null", b"anything")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("interrupted_by", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted_by: BaseException
) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(b"old")

    def fail(descriptor: int) -> None:
        raise interrupted_by

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((UsageError, KeyboardInterrupt)):
        codec.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("fsync", os.fstat(fd).st_size)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(("replace", Path(a).parent)), replace(a, b)))
    codec.write_bytes(tmp_path / "file", b"12345")
    assert calls == [("fsync", 5), ("replace", tmp_path)]


@pytest.mark.parametrize("name", ["", "no/such/folder/document.json", "file/document.json", "a\0b", "x" * 300])
def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    with refused(UsageError, where=f"{tmp_path}/{name}") as error:
        codec.write_bytes(f"{tmp_path}/{name}", b"content")
    assert error.value.got  # what the system said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_curve_of_many_points_is_quick_to_write() -> None:
    class Document(msgspec.Struct, tag_field="schema", tag="memo.test/1"):
        curve: Curve

    points = [float(i) for i in range(1, 100_001)]
    document = Document(curve=Curve(x=points, y=points, source="a test"))
    assert codec.encode(document).count(b"\n") < 20


def test_a_file_that_an_input_names_is_not_overwritten(tmp_path: Path) -> None:
    profile, cluster, plan = (tmp_path / name for name in ("profile.json", "cluster.toml", "plan.json"))
    profile.write_text("{}")
    cluster.write_text('schema = "memo.cluster/1"\nhardware = "profile.json"\n')
    plan.write_text(json.dumps({"schema": "memo.plan/3", "provenance": {"cluster": str(cluster)}}))
    for read, written in ((cluster, profile), (plan, cluster), (plan, profile), (plan, plan)):
        with refused(UsageError, what="an input of this command would be overwritten", where=str(written)):
            codec.check_not_read([written], [read])
    codec.check_not_read([tmp_path / "new.json"], [plan, tmp_path / "missing.json"])
    codec.check_not_read([plan], [profile])
