"""TRL's SFTTrainer trains a model that ``memo_exec.tokenwise`` has wrapped: the script of the tutorial."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.documentation.blocks import ROOT, blocks_of

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

TUTORIAL = ROOT / "docs/tutorials/long_context_trl.md"
WRAP = "memo_exec.tokenwise(model, alpha=0.5)\n"
LOSSES = "\nprint([entry['loss'] for entry in trainer.state.log_history if 'loss' in entry])"


def script() -> str:
    """Return the tutorial's script, which also prints its losses."""
    (block,) = [block for block in blocks_of(TUTORIAL) if "SFTTrainer" in block.commands[0].line]
    text = TUTORIAL.read_text()[block.start : block.end]
    text = text.replace("SFTTrainer(model", "import torch; torch.manual_seed(0)\ntrainer = SFTTrainer(model", 1)
    text = text.replace(").train()", "); trainer.train()", 1).replace("max_steps=4,", "max_steps=4, logging_steps=1,")
    return "import torch\ntorch.manual_seed(0)\n" + text + LOSSES


def printed(text: str, folder: Path) -> list[str]:
    """Run a script in TRL's environment, which has memo from this checkout."""
    environments = os.environ.get("MEMO_FRAMEWORKS")
    if not environments:
        pytest.fail("MEMO_FRAMEWORKS names no folder: run tests/frameworks/make_venvs.sh DIR first")
    ran = subprocess.run(
        [str(Path(environments) / "huggingface/bin/python"), "-c", text],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout.splitlines()


def test_losses_are_those_without_memo(tmp_path: Path) -> None:
    with_memo = printed(script(), tmp_path)
    without = printed(script().replace(WRAP, "").replace("print(model.memo_tokenwise.report())", ""), tmp_path)
    assert with_memo[-1] == without[-1]
    assert [line.split()[0] for line in with_memo[-5:-1]] == ["layer", "0-1", "2-3", "all"]
