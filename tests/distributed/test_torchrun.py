"""Tests that ``torchrun -m memo_exec run PLAN`` trains as one process does, in arenas derived from the plan's."""

from pathlib import Path

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.training import label
from tests.exec_cpu.plans import byte_decisions
from tests.exec_cpu.small import gpt
from tests.exec_cpu.training.torchrun import losses_of

STEPS = 3


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(ulysses=2), Layout(cp=2, pp=2)], ids=label)
@pytest.mark.slow
def test_ranks_train_as_one_process_does(layout: Layout, tmp_path: Path) -> None:
    model = gpt(vocab=256, layers=4)
    one, several = (
        byte_decisions(model=model, seq_tokens=512, global_batch=4, layout=each) for each in (Layout(), layout)
    )
    wanted = losses_of(tmp_path / "one", one, steps=STEPS)
    assert losses_of(tmp_path / "several", several, steps=STEPS) == pytest.approx(wanted, rel=1e-5)
    assert len(wanted) == STEPS
