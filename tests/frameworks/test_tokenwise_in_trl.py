"""TRL's SFTTrainer trains a model that ``memo_exec.tokenwise`` has wrapped: the tutorial's script, an exported one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.trl import TOKENWISE
from tests.documentation.blocks import ROOT, blocks_of
from tests.sim.interchange.eager_jobs import JOBS

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

TRL = FRAMEWORKS["trl"]
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


def printed(text: str, folder: Path, *words: str) -> list[str]:
    """Run a script in TRL's environment, which has memo from this checkout."""
    environments = os.environ.get("MEMO_FRAMEWORKS")
    if not environments:
        pytest.fail("MEMO_FRAMEWORKS names no folder: run tests/frameworks/make_venvs.sh DIR first")
    ran = subprocess.run(
        [str(Path(environments) / "huggingface/bin/python"), "-c", text, *words],
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


TINY = """
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

shape = LlamaConfig(vocab_size=8, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4)
LlamaForCausalLM(shape).save_pretrained("tiny")
words = Tokenizer(models.WordLevel({"<eos>": 0, "to": 1, "be": 2, "or": 3, "not": 4}, unk_token="<eos>"))
PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>").save_pretrained("tiny")
Dataset.from_dict({"input_ids": [[1, 2, 3, 4] * 64] * 8}).to_parquet("data/train.parquet")
"""
REPORTS = "\nprint(trl_model.memo_tokenwise.report())"


def test_the_exported_program_trains(tmp_path: Path) -> None:
    job, plan = JOBS["trl"]["sharded"], Decisions(model=load_model("llama3-8b"), seq_tokens=1024)
    plan = msgspec.structs.replace(plan, recompute="tokenwise", swapped_tokens=256)
    files = TRL.files(job, Launch(1, 1), ()) | TRL.beside(plan, job, Launch(1, 1), ())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    printed(TINY, tmp_path)
    program = files[TOKENWISE].replace(
        "    return trainer", "    global trl_model\n    trl_model = trainer.model\n    return trainer"
    )
    words = [
        *("--config", "sft.yaml", "--model_name_or_path", "tiny", "--dataset_name", "data"),
        *("--max_steps", "2", "--max_length", "256"),
        *("--bf16", "false", "--use_cpu", "true", "--gradient_accumulation_steps", "1", "--report_to", "none"),
        *("--attn_implementation", "sdpa"),
    ]
    found = printed(program + REPORTS, tmp_path, *words)
    assert [line.split()[0] for line in found[-4:]] == ["layer", "0-1", "2-3", "all"]
