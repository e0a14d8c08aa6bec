"""Tests that a plan which this machine cannot run is refused before anything is allocated, with got and wanted."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.commands.verify import VerifyOptions, verify_plan
from memo_exec.distributed.world import Launch, launched
from memo_exec.machine import machine as machines
from memo_exec.machine import preflight
from memo_exec.machine.attention_kernels import attention_kernels, check_kernels
from memo_exec.machine.fp8_products import check_operands, check_recipe
from memo_exec.machine.machine import Machine
from memo_exec.machine.memory_budget import check_memory, needs_of
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import BadInput, CannotRun, UsageError
from memo_sim.contract.experts import Experts
from memo_sim.contract.knobs import FrameworkLibrary
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.layout.fp8 import played
from memo_sim.program.lower import lower
from tests import planted_faults
from tests.exec_cpu.plans import byte_decisions, plan_of, write_plan
from tests.exec_cpu.small import decide, gpt, llama
from tests.refusals import check_fields, refused
from tests.sim.program.verify import planted

GIB = 2**30
CPU = Machine("cpu", "a CPU", 1, 1, 8 * GIB, 8 * GIB, 8 * GIB, 8 * GIB)
GPU = Machine("cuda", "a GPU", 1, 1, 8 * GIB, 8 * GIB, 8 * GIB, 8 * GIB)


def refusal(decisions: Decisions, machine: Machine = CPU) -> CannotRun:
    (program,) = lower(decisions)
    with pytest.raises(CannotRun) as caught:
        preflight.check(decisions, program, machine)
    assert caught.value.exit_code == 6
    return caught.value


def test_a_plan_that_fits_passes_and_says_what_it_needs() -> None:
    decisions = byte_decisions()
    (program,) = lower(decisions)
    needs = preflight.check(decisions, program, CPU)
    assert needs.device_bytes > 0
    assert needs.host_bytes > 0


def test_a_kernel_of_another_device_is_refused_not_replaced() -> None:
    where = "$.decisions.kernels.attention"
    found = refusal(byte_decisions(kernels=Kernels(attention="flash2")))
    check_fields(found, CannotRun, where=where, got=("flash2", "cuda", "cpu"), wanted="torch-flash-cpu")
    check_fields(refusal(byte_decisions(), GPU), CannotRun, where=where, got="torch-flash-cpu")


@pytest.mark.parametrize("rowwise", get_args(FrameworkLibrary))
def test_row_wise_kernels_of_frameworks_are_refused(rowwise: Any) -> None:
    found = refusal(byte_decisions(kernels=Kernels(attention="torch-flash-cpu", rowwise=rowwise)))
    check_fields(found, CannotRun, where="$.decisions.kernels.rowwise", got=rowwise, wanted="torch", hint="--rowwise")
    assert found.exit_code == 6


def test_a_kernel_that_is_not_installed_is_refused() -> None:
    assert "flash-attn" in attention_kernels(GPU)["flash2"]
    found = refusal(byte_decisions(kernels=Kernels(attention="flash2")), GPU)
    check_fields(found, CannotRun, got=("flash2", "flash-attn", "not installed"), wanted="torch-flash")


def test_dtypes_the_device_does_not_compute_in() -> None:
    check_fields(refusal(byte_decisions(dtype="fp16")), CannotRun, where="$.decisions.dtype", got="fp16")


IN_FP8: dict[str, Any] = {"dtype": "bf16", "fp8": "tensor", "fp8_layouts": "tn", "recompute": "none"}


@pytest.mark.parametrize("changes", [{"fp8_layouts": "any"}])
def test_fp8_without_kernels_is_refused_on_every_machine(changes: dict[str, Any]) -> None:
    plan = plan_of(byte_decisions(swapped_tokens=0, **(IN_FP8 | changes)))
    ((name, value),) = changes.items()
    wanted = {"fp8_layouts": "tn"}[name]
    with refused(
        CannotRun, where=f"plan.json: $.decisions.{name}", got=str(value).lower(), wanted=wanted, hint="--fp8"
    ):
        preflight.checked_program(plan, where="plan.json")


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=4, ep=2, zero=3), Layout(cp=2, zero=2)])
def test_weights_in_fp8_alone_may_be_divided(layout: Layout) -> None:
    model = llama(vocab=256, experts=EXPERTS) if layout.ep > 1 else gpt(vocab=256)
    fields = IN_FP8 | {"swapped_tokens": 0, "fp8_params": True, "fp8_experts": layout.ep > 1, "global_batch": 4}
    decisions = byte_decisions(model=model, layout=layout, **fields)
    check_recipe(decisions, "plan.json")
    check_operands(lower(decisions)[0], decisions)


@pytest.mark.parametrize("name", ["kept", "rows are rebuilt in part", "rows are gathered"])
@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_weights_in_fp8_alone_have_scales_before_the_first_step(recipe: str, name: str) -> None:
    fields = IN_FP8 | {"swapped_tokens": 0, "fp8": recipe, "fp8_params": True, "fp8_experts": True}
    sizes = {"vocab": 256, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn_hidden": 512}
    decisions = byte_decisions(model=llama(experts=EXPERTS, **sizes), **(fields | FP8_PROGRAMS[name]))
    check_operands(lower(decisions)[0], decisions)


@pytest.mark.parametrize(
    ("recipe", "model", "changes", "got"),
    [
        ("delayed", "qwen3-moe-tiny", {"fp8_experts": True}, "experts"),
        ("mx", "qwen3-moe-tiny", {"fp8_experts": True}, "experts"),
        ("mx", "mla-tiny", {}, "latent attention"),
        ("delayed", "llama-tiny", {"fp8_params": True}, "weights alone"),
    ],
)
def test_other_recipes_have_products_of_dense_layers_alone(
    recipe: str, model: str, changes: dict[str, Any], got: str
) -> None:
    layouts = "any" if recipe == "mx" else "tn"
    decisions = decide(load_model(model), **(IN_FP8 | {"fp8": recipe, "fp8_layouts": layouts} | changes))
    with refused(CannotRun, what=got, where="plan.json: $.decisions.fp8", got=recipe, wanted="tensor, block"):
        check_recipe(decisions, "plan.json")
    assert not played(decisions)
    assert played(msgspec.structs.replace(decisions, fp8="block", fp8_layouts="tn"))


def test_experts_in_fp8_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    decisions = decide(load_model("qwen3-moe-tiny"), **(IN_FP8 | {"fp8_experts": True}))
    with refused(CannotRun, where="$.decisions.fp8_experts", got="triton is not installed", hint="--fp8-experts"):
        check_kernels(decisions, lower(decisions)[0], GPU)


def test_mxfp8_with_layouts_of_hopper_is_refused() -> None:
    plan = plan_of(byte_decisions(swapped_tokens=0, **(IN_FP8 | {"fp8": "mx"})))
    with refused(CannotRun, where="plan.json: $.decisions.fp8_layouts", got="tn", wanted="any", hint="Blackwell"):
        preflight.checked_program(plan, where="plan.json")


def test_a_cpu_runs_no_products_in_fp8(tmp_path: Path) -> None:
    found = refusal(byte_decisions(swapped_tokens=0, **IN_FP8))
    check_fields(found, CannotRun, where="$.decisions.fp8", got="a CPU", wanted="H100", hint="--fp8")
    path = write_plan(tmp_path / "plan.json", byte_decisions(swapped_tokens=0, **IN_FP8))
    with refused(CannotRun, what="verify", where="$.decisions.fp8", got="tensor", wanted="none"):
        verify_plan(path, VerifyOptions())


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_gpus_other_than_hopper_run_no_products_in_fp8(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    found = refusal(byte_decisions(swapped_tokens=0, **IN_FP8), GPU)
    check_fields(found, CannotRun, got=".".join(map(str, capability)), wanted="H100")


IN_MX = IN_FP8 | {"fp8": "mx", "fp8_layouts": "any"}


def test_gpus_before_blackwell_run_no_products_in_mxfp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    found = refusal(byte_decisions(swapped_tokens=0, **IN_MX), GPU)
    check_fields(found, CannotRun, got="9.0, and kernels of MXFP8 need 10.0", wanted="Blackwell")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    monkeypatch.setattr("torch.version.cuda", "12.6")
    found = refusal(byte_decisions(swapped_tokens=0, **IN_MX), GPU)
    check_fields(found, CannotRun, got="12.6", wanted="12.8", hint="without --fp8")


EXPERTS = Experts(count=4, per_token=2, hidden=256, shared=256)
FP8_PROGRAMS: dict[str, dict[str, Any]] = {
    "kept": {},
    "all rows are swapped": {"swapped_tokens": 256},
    "half of the rows are swapped": {"swapped_tokens": 128},
    "rows are rebuilt in part": {"recompute": "tokenwise", "swapped_tokens": 128},
    "whole tokens on tensor-parallel ranks": {"layout": Layout(tp=2)},
    "rows are gathered": {"layout": Layout(tp=2, sequence_parallel=True)},
    "gathered rows are rebuilt in part": {
        "layout": Layout(tp=2, sequence_parallel=True),
        "recompute": "tokenwise",
        "seq_tokens": 512,
        "swapped_tokens": 256,
    },
    "zero 3": {"layout": Layout(dp=2, zero=3)},
}


@pytest.mark.parametrize("name", FP8_PROGRAMS)
@pytest.mark.parametrize("recipe", ["tensor", "delayed", "block", "mx"])
def test_every_operand_in_fp8_has_scales(recipe: str, name: str) -> None:
    layouts = "any" if recipe == "mx" else "tn"
    fields = IN_FP8 | {"swapped_tokens": 0, "fp8": recipe, "fp8_layouts": layouts} | FP8_PROGRAMS[name]
    model = gpt(vocab=256, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn_hidden=512)
    decisions = byte_decisions(model=model, **fields)
    check_operands(lower(decisions)[0], decisions)


@pytest.mark.parametrize("q_rank", [128, 0])
@pytest.mark.parametrize("name", FP8_PROGRAMS)
@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_every_operand_of_latents_in_fp8_has_scales(recipe: str, name: str, q_rank: int) -> None:
    fields = IN_FP8 | {"swapped_tokens": 0, "fp8": recipe} | FP8_PROGRAMS[name]
    latent = LatentAttention(q_rank=q_rank, kv_rank=128, nope_dim=64, rope_dim=64, value_dim=64)
    model = llama(vocab=256, hidden=256, heads=4, kv_heads=4, head_dim=128, ffn_hidden=512, latent=latent)
    decisions = byte_decisions(model=model, **fields)
    check_operands(lower(decisions)[0], decisions)


EXPERT_PROGRAMS: dict[str, dict[str, Any]] = {
    "experts": {},
    "rows are rebuilt in part": {"recompute": "tokenwise", "swapped_tokens": 128},
    "ranks divide experts": {"layout": Layout(dp=2, ep=2), "global_batch": 2},
    "experts are cut": {"layout": Layout(tp=2, sequence_parallel=True)},
    "gathered for one use": {"layout": Layout(dp=4, ep=2, zero=3), "global_batch": 4},
}


@pytest.mark.parametrize("name", EXPERT_PROGRAMS)
@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_every_operand_of_experts_in_fp8_has_scales(recipe: str, name: str) -> None:
    fields = IN_FP8 | {"swapped_tokens": 0, "fp8": recipe, "fp8_experts": True} | EXPERT_PROGRAMS[name]
    sizes = {"vocab": 256, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn_hidden": 512}
    decisions = byte_decisions(model=llama(experts=EXPERTS, **sizes), **fields)
    check_operands(lower(decisions)[0], decisions)


def test_parts_of_experts_rows_in_blocks_are_whole_blocks() -> None:
    sizes = {"vocab": 256, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn_hidden": 512}
    halves = {"recompute": "tokenwise", "swapped_tokens": 128, "layout": Layout(dp=2, ep=2), "global_batch": 2}
    fields = IN_FP8 | {"fp8": "block", "fp8_experts": True} | halves
    decisions = byte_decisions(model=llama(experts=EXPERTS, **sizes), **fields)
    with refused(CannotRun, where="$.decisions.fp8", got="320 tokens", hint="--expert-capacity"):
        check_operands(lower(decisions)[0], decisions)


@pytest.mark.parametrize("op", ["fp8.quantize", "fp8.transpose"])
def test_an_operand_in_fp8_that_nothing_made_is_refused(op: str) -> None:
    fields = IN_FP8 | {"swapped_tokens": 0, "layout": Layout(tp=2, sequence_parallel=True)}
    decisions = byte_decisions(**fields)
    (made,) = lower(decisions)
    (number, *_) = planted.places(made, lambda each: each.op == op)
    with refused(CannotRun, where="$.decisions.fp8", got="not quantised", wanted="every operand quantised"):
        check_operands(planted.without(made, number, lambda each: each.op == op), decisions)


@pytest.mark.parametrize(("recipe", "layouts"), [("block", "tn"), ("mx", "any")])
def test_rows_that_were_quantised_in_blocks_are_read_as_a_whole(recipe: str, layouts: str) -> None:
    """A part of their copy is no matrix with scales behind it, neither by columns nor by rows."""
    model = gpt(vocab=256, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn_hidden=512)
    fields = IN_FP8 | {"swapped_tokens": 0, "fp8": recipe, "fp8_layouts": layouts}
    decisions = byte_decisions(model=model, **fields)
    (made,) = lower(decisions)
    site = planted_faults.middle(planted_faults.sites(made, lambda each: each.op == "linear"))
    assert site is not None
    half = planted_faults.with_operand(site.instruction, "x", tokens=128)
    with refused(CannotRun, where="$.decisions.fp8", got="cut where it was quantised together"):
        check_operands(planted_faults.instead(made, site, half), decisions)


def test_sizes_of_products_in_fp8_are_multiples_of_16() -> None:
    decisions = byte_decisions(model=gpt(vocab=256, ffn_hidden=200), swapped_tokens=0, **IN_FP8)
    with refused(CannotRun, where="$.decisions.fp8", got="200", wanted="16"):
        check_operands(lower(decisions)[0], decisions)


def test_sizes_of_products_with_scales_of_blocks_are_multiples_of_128() -> None:
    decisions = byte_decisions(
        model=gpt(vocab=256, hidden=128, head_dim=32, ffn_hidden=320), swapped_tokens=0, **IN_FP8
    )
    check_operands(lower(decisions)[0], decisions)
    blocks = msgspec.structs.replace(decisions, fp8="block")
    with refused(CannotRun, where="$.decisions.fp8", got="320", wanted="128", hint="--fp8 tensor"):
        check_operands(lower(blocks)[0], blocks)


def test_blocks_need_the_cuda_whose_cublas_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.version.cuda", "12.8")
    found = refusal(byte_decisions(swapped_tokens=0, **(IN_FP8 | {"fp8": "block"})), GPU)
    check_fields(found, CannotRun, where="$.decisions.fp8", got="12.8", wanted="12.9", hint="--fp8 tensor")


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2, sequence_parallel=True)])
def test_several_ranks_are_refused(layout: Layout) -> None:
    hint = "torchrun --nproc_per_node 2 -m memo_exec run PLAN"
    with refused(CannotRun, where="$.decisions.layout", got="1", wanted="2", hint=hint):
        preflight.check_ranks(byte_decisions(layout=layout, swapped_tokens=0), Launch())


def test_more_ranks_than_the_layout_has() -> None:
    with refused(CannotRun, got="WORLD_SIZE 2", wanted="1", hint="memo-sim what-if --cluster a800-1x1 "):
        preflight.check_ranks(byte_decisions(), Launch(0, 2, 0, 2))
    cluster, _ = load_cluster("a800-1x1")
    assert cluster.devices == 1


def test_ranks_of_a_host_share_its_memory() -> None:
    decisions = byte_decisions()
    needed = needs_of(lower(decisions)[0], CPU)
    free = needed.device_bytes + needed.host_bytes + needed.reserve_bytes
    check_memory(needed, replace(CPU, host_available_bytes=free))
    with refused(CannotRun, got="2 ranks"):
        check_memory(needed, replace(CPU, host_available_bytes=free, sharing=2))


def test_too_little_memory() -> None:
    found = refusal(byte_decisions(), replace(CPU, host_available_bytes=2**20))
    check_fields(found, CannotRun, what="memory", got="1.00 MiB", wanted=("device", "host"))


def on_gpu(**changes: Any) -> CannotRun:
    decisions = byte_decisions(kernels=Kernels(attention="torch-flash"), dtype="bf16")
    (program,) = lower(decisions)
    with pytest.raises(CannotRun) as caught:
        check_memory(needs_of(program, GPU), replace(GPU, **changes))
    return caught.value


def test_too_little_device_or_host_memory_beside_a_gpu() -> None:
    check_fields(on_gpu(device_free_bytes=2**20), CannotRun, got="1.00 MiB", hint="--device-memory-gib")
    check_fields(on_gpu(host_available_bytes=2**10), CannotRun, got="1.00 KiB", hint=("--host-memory-gib", "--alpha"))


def test_the_cpus_store_needs_no_less_than_the_programs_peak() -> None:
    (program,) = lower(byte_decisions())
    assert needs_of(program, CPU).device_bytes >= needs_of(program, GPU).device_bytes


def test_an_edited_plan_is_refused(tmp_path: Path) -> None:
    plan = plan_of(byte_decisions())
    codec.write(tmp_path / "plan.json", msgspec.structs.replace(plan, decisions=byte_decisions(seq_tokens=512)))
    with refused(BadInput, where="plan.json: $.program_sha256", hint="memo-sim what-if"):
        run(tmp_path / "plan.json", RunOptions(steps=1))


def test_a_layout_nothing_lowers_is_a_bad_plan() -> None:
    plan = plan_of(byte_decisions())
    with refused(BadInput, where="plan.json: layout.tp", got=("2", "metp 2"), wanted="1", hint="memo-sim what-if"):
        preflight.checked_program(
            msgspec.structs.replace(plan, decisions=byte_decisions(layout=Layout(metp=2, tp=2))), where="plan.json"
        )


def test_stages_of_several_parts_have_a_program_each() -> None:
    layout = Layout(pp=2, schedule="interleaved", virtual_stages=2)
    plan = plan_of(byte_decisions(model=gpt(vocab=256, layers=4), layout=layout))
    programs = [preflight.checked_program(plan, where="plan.json", rank=rank) for rank in range(2)]
    assert [program.stage for program in programs] == ["stage0", "stage1"]


def test_a_step_of_too_many_micro_batches_is_refused_at_once() -> None:
    plan = msgspec.structs.replace(plan_of(byte_decisions()), decisions=byte_decisions(global_batch=2**20))
    with refused(CannotRun, where="plan.json: global_batch", got="1048576", wanted="2000000 instructions"):
        preflight.checked_program(plan, where="plan.json")


def test_world_size_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with refused(UsageError, what="WORLD_SIZE", got="'abc'", wanted="torchrun"):
        launched()


def test_nothing_is_allocated_for_a_plan_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*arguments: object, **options: object) -> None:
        raise AssertionError("the interpreter was made")

    monkeypatch.setattr("memo_exec.commands.run.Interpreter", too_late)
    with pytest.raises(CannotRun):
        run(write_plan(tmp_path / "plan.json", byte_decisions(dtype="fp16")), RunOptions(steps=1))


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 1_024_000, 819_200),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/memory.max": "500000\n",
                "sys/fs/cgroup/pod/memory.current": "400000\n",
                "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 100000\n",
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
            },
            500_000,
            200_000,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n4:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
                "sys/fs/cgroup/memory/memory.stat": "cache 5\ntotal_inactive_file 0\n",
            },
            300_000,
            200_000,
        ),
    ],
    ids=["no container", "version 2, limit on a parent", "version 1, own group not visible"],
)
def test_the_containers_limit_counts(tmp_path: Path, files: dict[str, str], total: int, available: int) -> None:
    root = system(tmp_path, files)
    assert machines.host_memory_bytes(root) == total
    assert machines.host_available_bytes(root) == available


def test_this_machine_is_described() -> None:
    here = machines.this_machine()
    assert here.name
    assert 0 < here.host_available_bytes <= here.host_memory_bytes
    assert "torch" in machines.versions()
