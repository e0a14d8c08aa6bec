"""A limit of PyTorch's allocator goes to every framework by its environment, and comes back."""

from __future__ import annotations

import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import GIB
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.interchange.launch import Launch, launch_of
from memo_sim.interchange.memory_fraction import fraction_of, limit_gib, settings_of
from tests.sim.interchange.eager_jobs import JOBS

DEVICE_BYTES = 84_943_715_696.0
RESERVE_BYTES = int(2.23 * GIB)


@pytest.mark.parametrize("limit", [1 + 2, 32, 44, 64, 72])
def test_a_limit_is_a_fraction_without_the_reserve(limit: int) -> None:
    plan = Decisions(model=load_model("llama-tiny"), seq_tokens=4096, allocator_limit_gib=limit)
    fraction = fraction_of(plan, RESERVE_BYTES, DEVICE_BYTES)
    assert fraction is not None
    assert fraction == pytest.approx((limit - 2.23) * GIB / DEVICE_BYTES, abs=1e-6)
    assert limit_gib(fraction, RESERVE_BYTES, DEVICE_BYTES) == limit


def test_the_whole_device_is_no_limit() -> None:
    assert fraction_of(Decisions(model=load_model("llama-tiny"), seq_tokens=4096), RESERVE_BYTES, DEVICE_BYTES) is None
    assert limit_gib(0.99, RESERVE_BYTES, DEVICE_BYTES) == 0


@pytest.mark.parametrize("name", JOBS)
def test_every_framework_takes_it_from_its_script(name: str) -> None:
    files = FRAMEWORKS[name].files(JOBS[name]["sharded"], launch_of(8, 8, "torchrun", 0.5), ())
    assert "export PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.500000\n" in files["train.sh"]
    assert settings_of(list(files.items()))[0] == 0.5
    whole = FRAMEWORKS[name].files(JOBS[name]["sharded"], Launch(1, 8), ())
    assert settings_of(list(whole.items())) == (None, [], [])


def test_what_else_a_script_says_to_the_allocator_is_listed() -> None:
    text = (
        "# export PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.1\n"
        'export PYTORCH_ALLOC_CONF="expandable_segments:True,roundup_power2_divisions:[256:1,512:2],'
        'per_process_memory_fraction:0.75"\n'
    )
    fraction, read, ignored = settings_of([("train.sh", text)])
    assert fraction == 0.75
    assert [option.value for option in read] == ["per_process_memory_fraction:0.75"]
    assert [(option.key.split()[1], option.value) for option in ignored] == [
        ("expandable_segments", "True"),
        ("roundup_power2_divisions", "[256:1,512:2]"),
    ]
    assert settings_of([("train.py", "torch.cuda.set_per_process_memory_fraction(0.5, 0)")])[0] == 0.5


@pytest.mark.parametrize("value", ["0", "1.5", "1.2.3"])
def test_a_fraction_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(BadInput, match="per_process_memory_fraction"):
        settings_of([("train.sh", f"PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:{value} torchrun x.py")])
