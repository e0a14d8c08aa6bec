"""What an export says to do next can be typed."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

import msgspec

from memo_sim.answers.export_plan import search_command
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions


def test_names_of_files_are_quoted_in_the_next_command() -> None:
    model = msgspec.structs.replace(load_model("gpt-tiny"), name="my model; rm x")
    cluster = msgspec.structs.replace(load_cluster("a800-1x2")[0], name="two nodes")
    framework: Any = SimpleNamespace(system="megatron-core")
    words = shlex.split(search_command(Decisions(model=model, seq_tokens=1024), framework, cluster))
    assert words[:5] == ["memo-sim", "what-if", "my model; rm x", "--cluster", "two nodes"]
