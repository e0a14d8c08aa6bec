"""Plays the MLP in row blocks and checks its gradients and its recompute.

Gradients equal autograd's, and those of keep up to the order of sums. Recompute gives forward's bits.
"""

from typing import Any

import pytest
import torch

from memo_exec.kernels import KERNELS
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.lower import lower
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds, replayed
from tests.exec_cpu.small import MODELS, decide, llama, one_step

IN_BLOCKS = ("ffn_up.", "ffn_down.", "norm2.")
"""Parameters of the MLP, whose gradients are sums over row blocks."""


def in_blocks(name: str, **changes: Any) -> Decisions:
    """Return a plan with three row blocks, of which the last is shorter."""
    fields: dict[str, Any] = {"seq_tokens": 320, "micro_batch": 1, "global_batch": 2}
    return decide(MODELS[name], **(fields | {"recompute": "full", "mlp_chunk_tokens": 128} | changes))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_autograd(name: str) -> None:
    assert_gradients_equal_autograds(in_blocks(name))


@pytest.mark.parametrize("name", ["gpt2", "gpt-bare", "llama", "llama-biased", "qwen3"])
def test_only_the_mlps_sums_are_taken_in_another_order(name: str) -> None:
    """The loss and all other gradients are bitwise those of keep, because a row block changes no row of a result."""
    kept, wanted = one_step(in_blocks(name, recompute="none", mlp_chunk_tokens=0))
    record, found = one_step(in_blocks(name))
    assert record.loss == kept.loss
    other = {key for key in wanted if not torch.equal(found[key], wanted[key])}
    assert other
    assert all(any(part in key for part in IN_BLOCKS) for key in other), other
    for key in other:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-5, atol=1e-6 * float(wanted[key].abs().max()))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_block_of_all_tokens_is_keep_bit_for_bit(name: str) -> None:
    _, wanted = one_step(in_blocks(name, recompute="none", mlp_chunk_tokens=0))
    _, found = one_step(in_blocks(name, mlp_chunk_tokens=320))
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("states", ["fp32", "host"])
def test_swapped_inputs_change_no_bit(states: str) -> None:
    _, wanted = one_step(in_blocks("llama", states=states))
    record, found = one_step(in_blocks("llama", states=states, swapped_tokens=320))
    assert record.moved.d2h > 0
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_block_is_rebuilt_bit_for_bit(dtype: str) -> None:
    again = replayed(in_blocks("qwen3", dtype=dtype, global_batch=1), ".b", KERNELS, ("out", "stats"))
    assert {f"rec/{op}.b{i}" for op in ("norm2", "ffn_up", "act") for i in range(3)} == again


def test_memory_is_the_programs_and_falls() -> None:
    peaks = []
    for chunk in (0, 128):
        decisions = decide(llama(), seq_tokens=1024, micro_batch=1, recompute="full", mlp_chunk_tokens=chunk)
        record, _ = one_step(decisions)
        program = lower(decisions)[0]
        curves = live_bytes(liveness(program, expand(program)), device=True)
        assert record.peak_device_bytes == peak(curves).bytes
        peaks.append(record.peak_device_bytes)
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("rebuild", ["layer", "twice"])
@pytest.mark.parametrize("name", ["gpt2", "llama-biased", "qwen3"])
def test_blocks_rebuilt_as_frameworks_do_change_no_gradient(name: str, rebuild: str) -> None:
    """Gradients equal autograd's, and bit for bit those of blocks that backward rebuilds alone."""
    again = in_blocks(name, mlp_rebuild=rebuild)
    assert_gradients_equal_autograds(again)
    _, wanted = one_step(in_blocks(name))
    _, found = one_step(again)
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def test_a_frameworks_blocks_hold_what_their_recompute_keeps() -> None:
    """Memory is the program's; what the layer's recompute keeps of all blocks comes on top."""
    peaks = {}
    for rebuild in ("block", "twice", "layer"):
        decisions = in_blocks("llama", seq_tokens=1024, global_batch=1, mlp_rebuild=rebuild)
        record, _ = one_step(decisions)
        program = lower(decisions)[0]
        assert record.peak_device_bytes == peak(live_bytes(liveness(program, expand(program)), device=True)).bytes
        peaks[rebuild] = record.peak_device_bytes
    assert peaks["block"] <= peaks["twice"] < peaks["layer"]
