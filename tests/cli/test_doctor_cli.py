"""``memo-sim doctor`` as scripts use it: what was measured is always shown, files are checked first."""

from __future__ import annotations

from pathlib import Path

from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.hardware import Hardware
from tests.cli.commands import check_refused, memo_sim
from tests.sim.observed.recorded import one_step

NCCL_TESTS = """\
#  Rank  0 Group  0 Pid 1 on host device  0 [0x07] GPU
#  Rank  1 Group  0 Pid 1 on host device  1 [0x07] GPU
# Collective test starting: all_reduce_perf
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
     1048576   262144     float     sum      -1    35.39   29.63   29.63      0    36.00   29.1   29.1      0
   134217728 33554432     float     sum      -1    535.4   250.7   250.7      0    535.0   250.8   250.8      0
"""


def test_what_was_measured_is_shown_and_written(tmp_path: Path) -> None:
    (tmp_path / "nccl.txt").write_text(NCCL_TESTS)
    asked = ("doctor", "--nccl-tests", "nccl.txt", "--cluster", "a800-1x8")
    shown = memo_sim(*asked, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == "measured; -o PROFILE writes a profile with:\nall_reduce of 2 ranks: 2 sizes\n"
    written = memo_sim(*asked, "-o", "here.json", cwd=tmp_path)
    assert written.stdout.endswith("with:\nall_reduce of 2 ranks: 2 sizes\n")
    found = codec.read(tmp_path / "here.json", Hardware)
    assert max(t.bus_bytes_per_s.y[-1] for t in found.collectives if t.ranks == 2) == 250.7e9
    no_profile = memo_sim("doctor", "--nccl-tests", "nccl.txt", cwd=tmp_path)
    check_refused(no_profile, 2, {"what": "without a trace", "wanted": "--cluster NAME"})
    clash = memo_sim(*asked, "-o", "nccl.txt", cwd=tmp_path)
    check_refused(clash, 2, {"what": "would be overwritten"})


def test_a_trace_of_a_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank0.json").write_bytes(one_step().raw())
    done = memo_sim("doctor", "--trace", "ranks", "-o", "ranks/rank0.json", cwd=tmp_path)
    check_refused(done, 2, {"what": "would be overwritten", "where": "rank0.json"})
    assert (tmp_path / "ranks" / "rank0.json").read_bytes() == one_step().raw()


def test_the_jobs_own_script_is_priced_with_the_measured_rates(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 512 --num-attention-heads 8"
        " --seq-length 2048 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 32000"
        " --max-position-embeddings 2048\n"
    )
    trace = tmp_path / "trace.json"
    trace.write_bytes(one_step().raw())
    done = memo_sim("doctor", "--trace", trace, "--config", script)
    assert done.returncode == 0, done.stderr
    assert "With the measured rates:" in done.stdout
    assert "The job, as memo predicts it" in done.stdout
    check_refused(memo_sim("doctor", "--trace", trace, "--config", script, "--json"), 2, {"wanted": "without --config"})


def test_the_best_plan_is_exported_for_the_jobs_own_framework(tmp_path: Path) -> None:
    script, trace, found = tmp_path / "train.sh", tmp_path / "trace.json", tmp_path / "best"
    script.write_text(
        "torchrun --nproc-per-node $GPUS pretrain_gpt.py --num-layers 2 --hidden-size 512 --num-attention-heads 8"
        " --seq-length 2048 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 32000"
        " --max-position-embeddings 2048 --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1\n"
    )
    trace.write_bytes(one_step().raw())
    asked = ("doctor", "--trace", trace, "--config", script, "--set", "GPUS=8")
    done = memo_sim(*asked, "--framework", "megatron-lm", "--export", found, "-o", tmp_path / "mine.json")
    assert done.returncode == 0, done.stderr
    assert "Megatron-LM runs it with" in done.stdout
    assert {path.name for path in found.iterdir()} == {"train.sh", "lost.md", "plan.json", "memo_model.json"}
    check_refused(memo_sim(*asked, "--export", found), 2, {"what": "not empty"})
    check_refused(memo_sim(*asked, "--export", tmp_path / "x", "--no-search"), 2, {"what": "found by a search"})
    check_refused(memo_sim("doctor", "--trace", trace, "--set", "GPUS=8"), 2, {"wanted": "--config FILE"})


def test_a_cluster_of_several_nodes_is_written_with_its_profile(tmp_path: Path) -> None:
    ranks = "\n".join(
        f"#  Rank {8 * host + i:2d} Group  0 Pid   1{i} on   node{host} device {i:2d} [0000:07:00] H100"
        for host in range(2)
        for i in range(8)
    )
    (tmp_path / "gather.txt").write_text(
        NCCL_TESTS[NCCL_TESTS.index("# Coll") :]
        .replace("all_reduce", "all_gather")
        .replace("# Collective", f"{ranks}\n# Collective")
        .replace("29.63   29.63", "29.63   27.78")
        .replace("250.7   250.7", "250.7   235.0")
    )
    asked = ("doctor", "--nccl-tests", "gather.txt", "--cluster", "h100-2x8")
    done = memo_sim(*asked, "-o", "mine.json", "--cluster-output", "cluster.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all_gather of 16 ranks on 2 nodes: 2 sizes" in done.stdout
    cluster, hardware = load_cluster(str(tmp_path / "cluster.json"))
    assert (cluster.hardware, hardware.name) == ("mine.json", "h100-sxm5-80gb")
    assert cluster.network is not None
    assert cluster.network.size_efficiency is not None
    assert cluster.network.size_efficiency.source == "nccl-tests-all_gather-16"
    check_refused(memo_sim(*asked, "--cluster-output", "x.json", cwd=tmp_path), 2, {"wanted": "-o PROFILE"})


def test_a_trace_and_a_profile_are_of_one_kind_of_device(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_bytes(
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5}]}'
    )
    done = memo_sim("doctor", "--trace", trace, "--cluster", "h100-1x8")
    check_refused(done, 2, {"what": "different kinds of device", "hint": "calibrate"})
