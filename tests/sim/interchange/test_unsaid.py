"""What the files of a job leave open is listed, with the option that names it."""

from __future__ import annotations

from memo_sim.interchange.framework import Source
from memo_sim.interchange.frameworks import find_framework
from memo_sim.interchange.unsaid import unsaid

CONFIG = '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}'
GIVEN = {"model": "llama3-8b", "seq_len": "64k", "devices": "8"}


def test_a_configuration_that_cannot_name_recompute_says_so() -> None:
    of = find_framework("deepspeed")
    source = (Source("ds.json", CONFIG),)
    found = unsaid(of.read(source, GIVEN), of.sayings)
    assert "recompute none: the files do not say (--set gradient_checkpointing=VALUE)" in found
    assert not any(text.startswith(("micro-batch", "dtype")) for text in found)
    told = unsaid(of.read(source, GIVEN | {"gradient_checkpointing": "true"}), of.sayings)
    assert not any("recompute" in text for text in told)
