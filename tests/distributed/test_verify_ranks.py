"""``memo-exec verify`` of plans with several ranks: those that it starts itself, and those of torchrun."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_exec.commands.verify import VerifyOptions, verify_plan
from memo_exec.kernels import KERNELS, Call, Kernel
from memo_exec.verification.local_ranks import play_on_ranks
from memo_exec.verification.reduction import reduced
from memo_exec.verification.verify import plays_of, verify
from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import MemoError
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.contract.verdict import Verdict
from memo_sim.program.ir.program import Program
from tests.distributed.team import Member, Team
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import decide, gpt, llama

LLAMA = llama(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn_hidden=14336, vocab=128256)
GPT = gpt(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn_hidden=16384, vocab=50257, max_positions=0)


def large(layout: Layout | None = None, **changes: Any) -> Decisions:
    """Return decisions for a model of 8B parameters at 128K tokens on GPUs."""
    layout = layout or Layout()
    fields: dict[str, Any] = {"seq_tokens": 2**17, "micro_batch": 1, "global_batch": 8 * layout.dp, "dtype": "bf16"}
    fields |= {"kernels": Kernels(attention="flash3")}
    return decide(changes.pop("model", LLAMA), layout=layout, **(fields | changes))


def skipped(name: str, call: Call) -> None:
    if call.instruction.name != name:
        KERNELS[call.instruction.op](call)


def fails(program: Program) -> Program:
    raise MemoError(f"a planted failure of {program.stage}")


def test_ranks_are_started_and_a_fault_on_them_is_found() -> None:
    decisions = large(Layout(tp=2), recompute="full", global_batch=1)
    here = reduced(decisions, layers=2, attention="torch-flash-cpu")
    kernels: dict[str, Kernel] = {"linear": partial(skipped, "rec/ffn_up")}
    right, keep = plays_of(here, seed=0, steps=1)
    wrong, _ = plays_of(here, seed=0, steps=1, kernels=kernels)
    by_play = play_on_ranks([right, keep, wrong])
    assert [len(ranks) for ranks in by_play] == [2, 2, 2]
    norms = [ranks[0].norms[0] for ranks in by_play]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[2] != pytest.approx(norms[1], rel=1e-3)


def test_a_failure_of_a_rank_is_the_commands() -> None:
    here = reduced(large(Layout(dp=2), global_batch=2), layers=1, attention="torch-flash-cpu")
    with pytest.raises(MemoError, match="a planted failure"):
        play_on_ranks(plays_of(here, seed=0, steps=1, change=fails))


def _verified(member: Member, path: Path) -> Verdict | None:
    del member
    return verify_plan(path, VerifyOptions(device="cpu", layers=2))


def test_ranks_of_torchrun_play_their_parts(team: Team, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", byte_decisions(layout=Layout(cp=2), recompute="full", swapped_tokens=0))
    first, second = team.play(_verified, 2, path, meets=False)
    assert second is None
    assert first.verified
    assert first.ranks == 2


POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "full swap": {"swapped_tokens": 2**17},
    "tokenwise": {"recompute": "tokenwise", "swapped_tokens": 2**15},
    "full": {"recompute": "full"},
    "full, inputs on the host": {"recompute": "full", "swapped_tokens": 2**17},
    "full, rounding buffers, early stop": {"recompute": "full", "rounding_buffers": True, "early_stop": True},
    "selective": {"recompute": "selective"},
    "norms": {"recompute": "norms"},
    "mlp": {"recompute": "mlp"},
    "operators": {"recompute": "operators"},
    "every-4": {"recompute": "full", "recompute_layers": "every-4"},
    "first-20": {"recompute": "full", "recompute_layers": "first-20"},
    "groups-8": {"recompute": "full", "recompute_layers": "groups-8"},
    "groups-5": {"recompute": "full", "recompute_layers": "groups-5"},
    "row blocks": {"recompute": "full", "mlp_chunk_tokens": 2**14},
    "row blocks twice": {"recompute": "full", "mlp_chunk_tokens": 3 * 2**13, "mlp_rebuild": "twice"},
    "attention in chunks": {"recompute": "full", "attention_chunk_tokens": 2**14},
    "loss in chunks": {"loss_chunk_tokens": 2**13, "loss": "fused"},
    "subsequences": {"layout": Layout(subsequences=8), "recompute": "tokenwise", "swapped_tokens": 2**17},
    "host states": {"states": "host", "recompute": "full"},
    "bf16 moments": {"states": "bf16"},
    "caching": {"recompute": "tokenwise", "swapped_tokens": 2**15, "memory_policy": "caching"},
    "two sequences": {"micro_batch": 2, "recompute": "selective"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 8, sp, dp 4": {"layout": Layout(tp=8, sequence_parallel=True, dp=4, zero=1), "mlp_chunk_tokens": 2**14},
    "tp 16, shared heads": {"layout": Layout(tp=16)},
    "chunked tp": {"layout": Layout(tp=2, sequence_parallel=True, tp_overlap="chunked")},
    "cp, zero 3": {"layout": Layout(cp=2, dp=2, zero=3), "recompute": "tokenwise", "swapped_tokens": 2**14},
    "cp by all-gather": {"layout": Layout(cp=4, cp_exchange="all_gather")},
    "rsa": {"layout": Layout(cp=2, cp_exchange="rsa")},
    "ulysses in chunks": {"layout": Layout(ulysses=4), "attention_chunk_tokens": 2**14},
    "uneven heads": {"model": llama(heads=6, kv_heads=3), "layout": Layout(ulysses=2, uneven_heads=True)},
    "metp": {"layout": Layout(metp=4), "recompute": "tokenwise", "swapped_tokens": 2**14},
    "1f1b": {"layout": Layout(pp=4, dp=2, zero=1), "recompute_layers": "first-2"},
    "interleaved": {"layout": Layout(pp=4, schedule="interleaved", virtual_stages=2)},
    "stages of shards": {"layout": Layout(pp=4, dp=2, zero=3), "recompute": "tokenwise", "swapped_tokens": 2**14},
    "zero-bubble": {"layout": Layout(pp=2, schedule="zero-bubble"), "recompute": "none"},
    "gpipe of subsequences": {
        "layout": Layout(pp=2, subsequences=8, schedule="gpipe", multiplexed=True),
        "recompute": "tokenwise",
        "swapped_tokens": 2**17,
        "offload_window": 1,
        "global_batch": 1,
    },
    "several sequences, multiplexed": {
        "layout": Layout(pp=2, subsequences=8, multiplexed=True),
        "micro_batch": 3,
        "global_batch": 3,
        "recompute": "tokenwise",
        "swapped_tokens": 3 * 2**17,
    },
    "subsequences, cp by all-gather": {"layout": Layout(cp=4, cp_exchange="all_gather", subsequences=8)},
    "subsequences in a ring": {
        "layout": Layout(cp=2, pp=2, subsequences=8),
        "recompute": "tokenwise",
        "swapped_tokens": 2**16,
        "offload_window": 1,
    },
    "several sequences in subsequences, cp by all-gather": {
        "layout": Layout(cp=4, cp_exchange="all_gather", subsequences=8),
        "micro_batch": 2,
    },
    "several sequences in subsequences in a ring": {
        "layout": Layout(cp=2, pp=2, subsequences=8),
        "micro_batch": 2,
        "recompute": "tokenwise",
        "swapped_tokens": 2**17,
        "offload_window": 1,
    },
    "several sequences of a window in subsequences in a ring": {
        "model": msgspec.structs.replace(LLAMA, window=4096),
        "layout": Layout(cp=2, subsequences=8),
        "micro_batch": 2,
    },
    "experts in subsequences": {
        "model": load_model("qwen3-30b-a3b"),
        "layout": Layout(pp=2, dp=2, ep=2, subsequences=8),
        "recompute": "tokenwise",
        "swapped_tokens": 2**17,
    },
    "unlike layers with experts in subsequences": {
        "model": load_model("deepseek-v3"),
        "layout": Layout(tp=2, sequence_parallel=True, pp=2, ep=2, expert_tp=1, subsequences=8, partition="length"),
        "global_batch": 2,
    },
    "zero 2, host states": {"layout": Layout(dp=8, zero=2), "states": "host"},
    "hsdp": {"model": GPT, "layout": Layout(dp=64, zero=3, zero_ranks=8), "recompute_layers": "every-2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_verified(policy: str) -> None:
    _check(verify(large(**POLICIES[policy]), steps=2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_verified(layout: str) -> None:
    options = {"recompute": "full"} | LAYOUTS[layout]
    _check(verify(large(**options), steps=2))


def _check(verdict: Verdict) -> None:
    """Assert that a plan is verified, and against both references."""
    assert verdict.verified, [each for against in verdict.against for each in against.compared if not each.fine]
    assert [against.skipped for against in verdict.against] == ["", ""]
