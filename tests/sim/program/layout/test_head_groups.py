"""Head groups: attention runs in the fewest groups without integer overflow in a kernel; fewer groups are refused."""

import dataclasses

import msgspec
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import MemoryPolicy
from memo_sim.contract.plan import Kernels
from memo_sim.planning.attention_kernels import head_groups
from memo_sim.program.arena.library_workspaces import MOST_BYTES
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from memo_sim.program.operators.head_groups import INT32_ELEMENTS, fewest_head_groups, indexed_elements
from memo_sim.program.operators.workspaces import ATTENTION_KERNELS, attention_workspace_bytes
from tests.exec_cpu.small import decide, gpt, llama
from tests.refusals import refused

K = 1024


def attention(kernel: str, tokens: int, *, heads: int = 32, kv_heads: int = 32, head_dim: int = 128) -> Attention:
    return Attention(1, tokens, tokens, "causal", heads, kv_heads, head_dim, True, kernel, "bf16")


@pytest.mark.parametrize("kernel", ["flash2", "torch-flash", "flash4", "torch-cudnn", "te-fused"])
@pytest.mark.parametrize(
    ("tokens", "groups"),
    [(64 * K, 1), (256 * K, 1), (512 * K, 1), (512 * K + 128, 2), (1024 * K, 2), (2048 * K, 4), (4096 * K, 8)],
)
def test_groups_by_length(kernel: str, tokens: int, groups: int) -> None:
    work = attention(kernel, tokens)
    assert fewest_head_groups(work) == groups
    assert indexed_elements(work, groups) <= INT32_ELEMENTS
    assert groups == 1 or indexed_elements(work, groups // 2) > INT32_ELEMENTS


def test_the_published_bound_rounds_up() -> None:
    """TabPFN#1184: batch x heads x round_up(tokens, 128) x max(head_dim, 32); 32 heads of 128 fail above 524,288.

    The bound is 2**31.
    """
    assert fewest_head_groups(attention("torch-flash", 512 * K - 127)) == 1
    assert fewest_head_groups(attention("torch-flash", 512 * K + 1)) == 2
    assert fewest_head_groups(attention("flash2", 2048 * K, head_dim=16)) == 1
    assert fewest_head_groups(attention("flash2", 2048 * K + 1, head_dim=16)) == 2


@pytest.mark.parametrize("kernel", ["flash2", "flash4"])
def test_groups_divide_the_key_value_heads(kernel: str) -> None:
    work = attention(kernel, 512 * K, heads=48, kv_heads=6)
    assert fewest_head_groups(work) == 2
    assert fewest_head_groups(dataclasses.replace(work, q_tokens=1024 * K, k_tokens=1024 * K)) == 3
    with refused(Infeasible, what="head_groups", got="4", wanted="6"):
        attention_workspace_bytes(work, 4)


def test_flash3_has_a_limit_of_one_head() -> None:
    assert fewest_head_groups(attention("flash3", 8192 * K)) == 1
    assert fewest_head_groups(attention("flash3", 16384 * K - 128)) == 1
    with refused(Infeasible, what="flash3", got=("2147483649", "at most 2147483648"), wanted="shorter sequence"):
        fewest_head_groups(attention("flash3", 16384 * K))


def test_the_cpu_kernel_has_no_limit() -> None:
    assert fewest_head_groups(attention("torch-flash-cpu", 2**24)) == 1


def test_grouped_queries_bound_the_length() -> None:
    assert fewest_head_groups(attention("flash2", 4096 * K, kv_heads=8)) == 8
    with refused(Infeasible, what="flash2", got="at most 2147483648"):
        fewest_head_groups(attention("flash2", 8192 * K, kv_heads=8))


def test_a_plan_with_too_few_groups_is_refused_with_the_bound() -> None:
    changes = {"dtype": "bf16", "seq_tokens": 1024 * K, "micro_batch": 1}
    model = llama(heads=32, kv_heads=8, head_dim=128)
    with refused(Infeasible, got="4294967296 elements, at most 2147483648", wanted="head_groups 2"):
        lower(decide(model, **changes, kernels=Kernels(attention="flash2")))
    assert lower(decide(model, **changes, kernels=Kernels(attention="flash2", head_groups=2)))


def test_the_micro_batch_multiplies_the_elements() -> None:
    decisions = decide(gpt(heads=32, kv_heads=32, head_dim=128, max_positions=0), seq_tokens=512 * K, micro_batch=4)
    decisions = msgspec.structs.replace(decisions, memory_policy="caching")
    assert head_groups(shape_of(decisions), decisions, "flash2") == 4


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
@pytest.mark.parametrize("kv_heads", [8, 32])
def test_groups_divide_the_workspace(kernel: str, kv_heads: int) -> None:
    work = attention(kernel, 256 * K, kv_heads=kv_heads)
    whole = attention_workspace_bytes(work, 1)
    assert whole > 0
    # torch's flash attention also copies output and gradient of some heads, but not of all.
    copies = 2 * 256 * K * 32 // 8 * 128 * 2 if kernel == "torch-flash" else 0
    assert attention_workspace_bytes(work, 8) == pytest.approx(whole / 8 + copies, rel=1e-6)


def test_wide_accumulators_are_those_of_the_libraries() -> None:
    """The libraries need 17.2 GB of fp32 dq at 1M tokens, 32 heads of 128, and a quarter each for dk, dv of 8 heads."""
    tokens, plain = 1024 * K, 2**34
    for kernel, groups in (("flash3", 1), ("flash4", 2)):
        found = attention_workspace_bytes(attention(kernel, tokens), groups) * groups
        assert found == pytest.approx(plain * (1 + 3 / 128), rel=1e-3)
        found = attention_workspace_bytes(attention(kernel, tokens, kv_heads=8), groups) * groups
        assert found == pytest.approx(plain * (1.5 + 3 / 128), rel=1e-3)


@pytest.mark.parametrize(("kernel", "parts"), [("flash2", 5), ("torch-flash", 5), ("flash3", 1), ("torch-cudnn", 1)])
def test_deterministic_flash_attn_2_has_one_dq_for_each_split(kernel: str, parts: int) -> None:
    """On 148 multiprocessors 32 heads give five splits of dq, and 8 heads (four groups) give 19."""
    work = Attention(1, 8192, 8192, "causal", 32, 8, 128, True, kernel, "bf16")
    one = 4 * 8192 * 32 * 128
    for groups, more in ((1, parts), (4, 19 if parts > 1 else 1)):
        plain = attention_workspace_bytes(work, groups)
        assert attention_workspace_bytes(work, groups, deterministic=True) - plain == (more - 1) * one // groups


@pytest.mark.parametrize(
    ("tokens", "policy", "groups"),
    [(32, "planned", 1), (128, "planned", 4), (256, "planned", 8), (1024, "planned", 8), (128, "caching", 1)],
)
def test_workspaces_beside_the_arena_stay_small(tokens: int, policy: MemoryPolicy, groups: int) -> None:
    """flash-attn 2 at 128K: one group needs 2 GiB of fp32 dq and 2 GiB of expanded dk and dv; eight need an eighth."""
    model = llama(heads=32, kv_heads=8, head_dim=128)
    decisions = decide(model, dtype="bf16", seq_tokens=tokens * K, micro_batch=1, memory_policy=policy)
    found = head_groups(shape_of(decisions), decisions, "flash2")
    assert found == groups
    work = attention("flash2", tokens * K, kv_heads=8)
    fits = attention_workspace_bytes(work, found) <= MOST_BYTES
    assert fits is (policy == "planned" and tokens <= 256)
    if found > 1:
        assert attention_workspace_bytes(work, found // 2) > MOST_BYTES
    assert head_groups(shape_of(decisions), msgspec.structs.replace(decisions, replay_allocator=True), "flash2") <= 2
