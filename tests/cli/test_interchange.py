"""``memo-sim export``, ``import`` and ``what-if --from`` as a user calls them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from memo_sim.cli import cli
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import BadInput, Infeasible, MemoError, UsageError
from memo_sim.contract.interchange import Export, ImportedJob
from memo_sim.contract.plan import Plan
from tests.cli.commands import check_refused, memo_sim

ASK = ("llama-tiny", "--cluster", "a800-1x2", "--seq-len", "4k", "--global-batch", "2")


def run(*arguments: object, fails: type[MemoError] | None = None) -> str:
    """Return what a command prints, and check how it ends."""
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert isinstance(done.exception, fails) if fails else done.exception is None, (done.exception, done.output)
    return str(done.exception) if fails and not done.output else done.output


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of Megatron and one of memo."""
    folder = tmp_path_factory.mktemp("plans")
    run("what-if", *ASK, "--system", "megatron-core", "--tp", 2, "-o", folder / "core.json")
    run("what-if", *ASK, "--tp", 2, "--recompute", "tokenwise", "--alpha", 0.5, "-o", folder / "memo.json")
    return folder


@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge"])
def test_there_and_back(plans: Path, tmp_path: Path, framework: str) -> None:
    out = tmp_path / "out"
    assert "runs this plan as it is" in run("export", plans / "core.json", "--to", framework, "-o", out)
    assert "Every decision of the plan is kept" in (out / "lost.md").read_text()
    assert (out / "train.sh").stat().st_mode & 0o100
    start = out / ("train.sh" if framework == "megatron-lm" else "recipe.py")
    given = ["--set", "devices=2"]
    document = msgspec.json.decode(run("import", start, "--json", *given), type=ImportedJob)
    assert (document.seq_tokens, document.global_batch) == (4096, 2)
    if framework == "megatron-lm":
        back = tmp_path / "back.json"
        run("what-if", "--from", start, "--cluster", "a800-1x2", "-o", back)
        assert codec.read(back, Plan).program_sha256 == codec.read(plans / "core.json", Plan).program_sha256


@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge"])
def test_a_limit_of_the_allocator_goes_there_and_back(tmp_path: Path, framework: str) -> None:
    plan, out, back = tmp_path / "plan.json", tmp_path / "out", tmp_path / "back.json"
    limit = ("--tp", 2, "--allocator-limit-gib", 20)
    run("what-if", *ASK, "--system", "megatron-core", *limit, "-o", plan)
    assert "runs this plan as it is" in run("export", plan, "--to", framework, "-o", out)
    (fraction,) = map(float, re.findall(r"memory_fraction:([\d.]+)", (out / "train.sh").read_text()))
    assert 0.22 < fraction < 20 / 79.25, "the reserve is no part of what PyTorch's allocator holds"
    run("what-if", "--from", *_every(out), "--cluster", "a800-1x2", "-o", back)
    again = codec.read(back, Plan)
    assert again.decisions.allocator_limit_gib == 20
    assert again.program_sha256 == codec.read(plan, Plan).program_sha256


def _every(folder: Path) -> list[Path | str]:
    """Return the files of a folder, each after an option --from but the first."""
    first, *others = sorted(folder.iterdir())
    return [first, *(word for path in others for word in ("--from", path))]


def test_what_is_lost_is_priced(plans: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = run("export", plans / "memo.json", "--to", "megatron-lm", "-o", out, "--json", "--launcher", "slurm")
    document = msgspec.json.decode(text, type=Export)
    lost = {decision.path: decision for decision in document.lost}
    assert lost["decisions.memory_policy"].instead == "eager"
    assert lost["decisions.swapped_tokens"].instead == "0"
    assert all(decision.why for decision in document.lost)
    assert document.plan.step_s
    assert document.there.step_s
    page = (out / "lost.md").read_text()
    assert "| `--alpha` | 0.5 | 0 |" in page
    assert "| computed with |" in page
    assert lost["decisions.memory_policy"].option == "--memory-policy"
    assert "#SBATCH --gpus-per-node=2" in (out / "train.sh").read_text()


def test_a_plan_that_does_not_fit_says_so_first(plans: Path, tmp_path: Path) -> None:
    plan = codec.read(plans / "memo.json", Plan)
    decisions = msgspec.structs.replace(
        plan.decisions, seq_tokens=2**24, swapped_tokens=2**24, global_batch=1, micro_batch=1, loss_chunk_tokens=0
    )
    long = msgspec.structs.replace(plan, decisions=decisions)
    codec.write(tmp_path / "long.json", long)
    shown = run("export", tmp_path / "long.json", "--to", "megatron-lm", "-o", tmp_path / "out", fails=Infeasible)
    assert shown.startswith("IT DOES NOT FIT.")
    assert "**IT DOES NOT FIT.**" in (tmp_path / "out/lost.md").read_text().splitlines()[2]


def printed_commands(text: str) -> list[list[str]]:
    """Return the words of each command of memo-sim in a text, up to the end of its sentence."""
    found = re.findall(r"memo-sim (?:what-if|import|export|explain|list|run) [^\n()]*", text)
    return [shlex.split(command.rstrip(". "))[1:] for command in found]


def check_runs(command: list[str]) -> None:
    """Parse a command as the shell would give it, and find the files that it names."""
    name, *words = command
    parser = cli.commands[name]
    parsed = parser.make_context(name, words)
    load_model(parsed.params["model"])
    load_cluster(parsed.params["cluster"])


@pytest.mark.parametrize("named", ["preset", "file"])
def test_the_command_that_export_names_runs(plans: Path, tmp_path: Path, named: str) -> None:
    plan, cluster = codec.read(plans / "memo.json", Plan), tmp_path / "my cluster.json"
    asked: list[str | Path | int] = []
    model = plan.decisions.model
    if named == "file":
        model = msgspec.structs.replace(model, name="of mine", vocab=1024)
        codec.write(
            cluster, msgspec.structs.replace(load_cluster("a800-1x2")[0], name="mine", hardware="a800-sxm4-80gb")
        )
        asked = ["--cluster", cluster]
    decisions = msgspec.structs.replace(
        plan.decisions, model=model, seq_tokens=2**24, swapped_tokens=2**24, global_batch=1, micro_batch=1
    )
    decisions = msgspec.structs.replace(decisions, loss_chunk_tokens=0)
    codec.write(tmp_path / "long.json", msgspec.structs.replace(plan, decisions=decisions))
    done = memo_sim("export", tmp_path / "long.json", "--to", "megatron-lm", "-o", tmp_path / "new folder", *asked)
    assert done.returncode == 4
    (command,) = printed_commands(done.stderr)
    check_runs(command)


def test_nothing_is_replaced(plans: Path, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("mine")
    said = run("export", plans / "core.json", "--to", "megatron-lm", "-o", tmp_path, fails=UsageError)
    assert "not empty" in said
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]
    said = run("export", plans / "core.json", "--to", "megatron-lm", "-o", tmp_path / "a/b", fails=UsageError)
    assert "no such folder" in said


def test_a_job_is_priced_and_compared(plans: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("export", plans / "core.json", "--to", "megatron-lm", "-o", out)
    shown = run("import", out / "train.sh", "--cluster", "a800-1x2")
    for part in (
        "tp 2",
        "Ignored:",
        "The job, as memo predicts it:",
        "Best of the same in Megatron-LM:",
        "Best of any",
    ):
        assert part in shown
    shown = json.loads(run("import", out / "train.sh", "--cluster", "a800-1x4", "--no-search", "--json"))
    assert shown["better"] == []
    assert any("uses 2 of the 4 devices" in text for text in shown["assumed"])


@pytest.mark.slow
def test_other_stages_are_searched_for_a_large_job_too(tmp_path: Path) -> None:
    plan, out, cluster = tmp_path / "plan.json", tmp_path / "out", ("--cluster", "h100-8x8")
    asked = ("--seq-len", "8k", "--global-batch", "64", "--system", "megatron-core", "--tp", "4", "--cp", "1")
    run("what-if", "llama3-70b", *cluster, *asked, "--pp", "8", "-o", plan)
    run("export", plan, "--to", "megatron-lm", "-o", out)
    shown = json.loads(run("import", out / "train.sh", *cluster, "--json"))
    assert shown["job"]["layout"]["pp"] == 8
    assert len(shown["better"]) == 2
    assert all(answer["best"]["layout"]["pp"] < 8 for answer in shown["better"])
    assert all(answer["best"]["step_s"] < 0.9 * shown["job"]["step_s"] for answer in shown["better"])


def test_a_job_in_a_dtype_without_rates_is_priced_in_another(plans: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("export", plans / "core.json", "--to", "megatron-lm", "-o", out)
    script = out / "half.sh"
    script.write_text((out / "train.sh").read_text().replace("--bf16", "--fp16"))
    shown = run("import", script, "--cluster", "h100-1x2")
    assert "priced with dtype bf16" in shown
    assert "Best of the same in Megatron-LM:" in shown


def test_wrong_input_is_named(plans: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun pretrain_gpt.py --num-layers $LAYERS --hidden-size 64 --seq-length 64\n")
    assert "--set LAYERS=" in run("import", script, fails=BadInput)
    script.write_text("echo hello\n")
    assert "no framework's file" in run("import", script, fails=BadInput)
    assert "NAME=value" in run("import", script, "--set", "x", fails=UsageError)
    assert "one of them" in run(
        "what-if", "--from", script, "--plan", plans / "core.json", "--cluster", "a800-1x2", fails=UsageError
    )


def test_a_job_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 512 --num-attention-heads 8"
        " --seq-length 99999999999 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 32000"
        " --max-position-embeddings 2048\n"
    )
    check_refused(memo_sim("import", script, "--json"), 3, {"where": str(script), "what": "beyond all bounds"})


def test_an_exported_folder_is_imported_whole(plans: Path, tmp_path: Path) -> None:
    """The pages that export writes beside a job are no part of it."""
    folder = tmp_path / "out"
    run("export", plans / "core.json", "--to", "megatron-lm", "-o", folder)
    found = codec.decode(run("import", *sorted(folder.iterdir()), "--json").encode(), ImportedJob, where="stdout")
    assert found.files == [str(folder / "train.sh")]
    assert found.model.name == "train"


def test_a_plan_of_a_profile_file_says_what_to_give(tmp_path: Path) -> None:
    profile, plan = tmp_path / "mine.json", tmp_path / "plan.json"
    run("datasheet", "tflops=300,memory=48,pcie=4x16,name=my-own-gpu", "-o", profile)
    asked = ("--cluster", profile, "--tp", "1", "--cp", "1", "--recompute", "none", "--micro-batch", "1")
    run("what-if", "llama-tiny", "--seq-len", "4k", *asked, "-o", plan)
    said = run("export", plan, "--to", "trl", "-o", tmp_path / "out", fails=UsageError)
    assert "such as memo-exec calibrate wrote" in said
    assert "plan.json" in said


def test_a_job_is_priced_with_what_its_reader_assumed(plans: Path, tmp_path: Path) -> None:
    run("export", plans / "core.json", "--to", "megatron-lm", "-o", tmp_path / "out")
    shown = run("what-if", "--from", tmp_path / "out/train.sh", "--cluster", "a800-1x8")
    assert "the job" in shown
    assert "the files do not say (--set use_precision_aware_optimizer=VALUE)" in shown
