"""Runs a plan from the command line as a user does, with torchrun when it has several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from memo_sim.contract.plan import Decisions
from tests.exec_cpu.plans import write_plan

LIMIT_S = 300.0


def losses_of(folder: Path, decisions: Decisions, *, steps: int) -> list[float]:
    """Return the losses that ``memo-exec run`` reports for a plan with planned memory.

    Raises:
        AssertionError: when the run fails; the message is its standard error.
    """
    devices = decisions.layout.devices
    folder.mkdir()
    plan = write_plan(folder / "plan.json", decisions)
    command = [sys.executable, "-m", "memo_exec", "run", str(plan), "--steps", str(steps), "--json"]
    if devices > 1:
        ranks = ["--standalone", "--nproc_per_node", str(devices)]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, *command[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout)["losses"]
    return losses
