"""A user's code, as mypy checks it in strict mode: right calls pass, and wrong ones are errors (``type: ignore``)."""

from __future__ import annotations

import os
from pathlib import Path

import memo_sim as memo


def plan_a_job(folder: Path) -> float:
    answer: memo.WhatIfResult = memo.what_if(
        "llama3-8b", cluster="h100-1x8", seq_len="1m", tp=8, recompute="tokenwise", mlp_chunk="16k", uneven_heads=False
    )
    if answer.best is None or answer.best.step_s is None:
        raise SystemExit("\n".join(answer.why))
    answer.save(folder / "plan.json")
    answer.plot(folder / "plan.png")
    rows: list[dict[str, str | int | float | bool | None]] = answer.table()
    again = memo.simulate(memo.load_plan(folder / "plan.json"), cluster="a800-1x8", device_memory_gib=79.5)
    return answer.best.step_s + len(rows) + len(again.plans)


def longest(path: os.PathLike[str]) -> int:
    knobs: memo.Knobs = {"tp": 2, "cp": None, "subsequences": "auto"}
    found = memo.longest(path, cluster="a800-1x8", step=65536, max_step_s=60.0, **knobs)
    return found.seq_tokens


def memory(path: str) -> int:
    try:
        return memo.plan_memory(path, solver="greedy", time_limit=1).document.peak_bytes
    except memo.BadInput as error:
        return error.exit_code


def many(files: list[Path]) -> list[str]:
    questions = memo.grid(model=["gpt-7b", "gpt-13b"], cluster="a800-1x8", seq_len=["64k", 131072], tp=8)
    answers = memo.sweep(questions, "sweep.jsonl", jobs=2, progress=print)
    memo.SweepResult([*answers.front, *memo.load_sweep(*files).lines]).save("sweep.csv")
    return memo.compare(files[0], memo.simulate(files[1]), cluster="h100-1x8").verdict


def wrong() -> None:
    memo.what_if("llama3-8b", seq_length="1m")  # type: ignore[call-arg]
    memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m", tpp=8)  # type: ignore[call-arg]
    memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m", tp="8")  # type: ignore[arg-type]
    memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m", recompute="nothing")  # type: ignore[arg-type]
    memo.plan_memory("plan.json", solver="best")  # type: ignore[arg-type]
    print(memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m").bests)  # type: ignore[attr-defined]
